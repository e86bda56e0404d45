"""The constants of two software stacks, and one measured run that fixes the constant of another.

The constants were fitted to the ten runs of the table of Megatron-LM (arXiv:2104.04473), on 32 to 3,072 GPUs,
by ``benchmarks/planner_fit.py``, which also tests them on runs that they were not fitted to.
"""

from __future__ import annotations

from dataclasses import replace

from dlo_lib.base.errors import UserError
from dlo_lib.hardware import GpuNodes, gpu, link
from dlo_lib.planner.cost import COMPUTED, step_cost
from dlo_lib.planner.plans import Plans
from dlo_lib.planner.sizes import ModelSizes
from dlo_lib.planner.stack import Stack

MEGATRON = Stack(
    matmul=0.775,
    depth=200.0,
    memory=0.846,
    links=0.70,
    sends=0.174,
    spread=0.06,
    flash=None,
    grad_bytes=2,
    overlap=0.0,
    balanced=False,
)
"""Megatron-LM of 2021 (PyTorch 1.8). Attention writes its scores, and the reduction of gradients hides behind
nothing. ``spread``: leave-one-out."""
LIBRARY = replace(
    MEGATRON,
    flash=0.6,
    grad_bytes=4,
    overlap=0.8,
    balanced=True,
    hides_tensor=True,
    scatter_gather=False,
    spread=0.3,
)
"""This library on PyTorch 2: flash attention, balanced stages, reductions behind the backward, whole
activations between stages. Its constants are those of ``MEGATRON`` on A100, so that its error on another card
is large: 20 % of the time of Llama 3.2 1B on an H100. One measured run fixes it (``Stack.anchored``)."""
H100_TOKENS = 34_497
"""Measured tokens/s of Llama 3.2 1B on one H100: eager bf16, 2 sequences of 2,048 tokens. With fused kernels,
it was 29,689, which the formulas do not predict: they count the bytes that fused kernels save."""


def library_stack(nodes: GpuNodes) -> Stack:
    """Return the stack of this library on these GPUs: anchored by our run on an H100 where they are Hopper's,
    otherwise that of A100, with a wide interval."""
    if not nodes.gpu.name.startswith(("h100", "h200")):
        return LIBRARY
    plans = Plans.of(micro_batch=2)
    one = GpuNodes(gpu("h100-80"), 1, link("ndr"), 1)
    return anchored_by(LIBRARY, ModelSizes.of("llama-3.2-1b"), plans, 2048, one, 2 * 2048 / H100_TOKENS)


def anchored_by(
    stack: Stack,
    sizes: ModelSizes,
    plans: Plans,
    seq: int,
    nodes: GpuNodes,
    seconds: float,
    dtype: str = "bf16",
) -> Stack:
    """Return ``stack`` with the slowdown for which the first of ``plans`` takes ``seconds`` a step.

    Raises:
        UserError: its communication and its optimiser alone are predicted to take longer.
    """
    for _ in range(4):  # the bubble, which consists of computation and messages, changes too
        cost = step_cost(sizes, plans, seq, nodes, stack, dtype)
        busy = float(sum(cost.parts[name][0] for name in COMPUTED))
        rest = float(cost.seconds[0]) - busy
        if seconds <= rest:
            raise UserError(
                f"the run took {seconds:.3g} s a step, its communication alone {rest:.3g} s as predicted: "
                "check --site and the plan of the run"
            )
        stack = stack.anchored(busy, seconds - rest)
    return stack
