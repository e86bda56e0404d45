"""The references of the checks (a built model, a measured training step) and the sizes that they draw."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from dlo_lib.grading.checks.twins import twin
from dlo_lib.hardware import Gpu, gpu
from dlo_lib.models import Llama, LlamaConfig
from dlo_lib.models.llama import Block, rotation
from dlo_lib.optim import Phase
from dlo_lib.profiling import MemoryReport, OptimizerStep, Part, measure_memory
from dlo_lib.profiling.older_releases import flash_attention

IGNORED = -100


def drawn(t, **fixed) -> LlamaConfig:
    """A small configuration with the proportions of a Llama; ``head_dim``: hidden / num_heads by default."""
    num_kv_heads, group, head_dim = t.integer(2, 3), t.integer(2, 4), 32 * t.integer(1, 2)
    num_heads = num_kv_heads * group
    sizes = {
        "vocab_size": 1000 * t.integer(9, 15),
        "hidden": num_heads * head_dim,
        "intermediate": 64 * t.integer(14, 24),
        "num_layers": t.integer(2, 3),
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "tied_embeddings": bool(t.integer(0, 1)),
    }
    return LlamaConfig(**{**sizes, **fixed})


@twin
def counted(config: LlamaConfig) -> dict[str, int]:
    """Parameters by part of a model that was built."""
    kinds = {"embed_tokens": "embedding", "self_attn": "attention", "mlp": "mlp", "lm_head": "head"}
    parts = dict.fromkeys(("embedding", "attention", "mlp", "norms", "head"), 0)
    for name, parameter in Llama(
        config, device="meta"
    ).named_parameters():  # a tied one comes once, as the embedding
        kind = next((kind for module, kind in kinds.items() if module in name), "norms")
        parts[kind] += parameter.numel()
    return parts


@twin
def measured(
    config: LlamaConfig,
    batch: int = 1,
    seq: int = 64,
    step: str = "fused",
    parallel: str = "none",
    **settings,
) -> MemoryReport:
    """A training step of ``config``, measured."""
    return measure_memory(config, batch, seq, fused=OptimizerStep(step), parallel=parallel, **settings)


def before_loss(config: LlamaConfig, batch: int, seq: int, checkpointing: bool = False) -> int:
    """The bytes of the activations when forward has ended."""
    # the cheapest step: it does not matter here
    report = measured(config, batch, seq, checkpointing=checkpointing, optimizer="sgd")
    first = next(index for index, event in enumerate(report.events) if event.phase is Phase.LOSS)
    return int(report.timeline[Part.ACTIVATIONS][first - 1])


def when_largest(report: MemoryReport, part: Part, phase: Phase) -> int:
    """The sum of all parts at the moment within ``phase`` when ``part`` holds most."""
    inside = [index for index, event in enumerate(report.events) if event.phase is phase]
    held = report.timeline[part][inside]
    return int(report.total[inside][held == held.max()].max())


STATE = {
    "weights": Part.WEIGHTS,
    "optimizer": Part.OPTIMIZER_STATE,
    "gradients": Part.GRADIENTS,
    "temporaries": Part.STEP_TEMPORARIES,
}


def in_the_step(config: LlamaConfig, optimizer: str, step: str) -> dict[str, int]:
    """What each part holds at most during the optimiser's step."""
    report = measured(config, step=step, optimizer=optimizer)
    inside = [index for index, event in enumerate(report.events) if event.phase is Phase.OPTIMIZER]
    before = inside[0] - 1
    return {name: int(report.timeline[part][[before, *inside]].max()) for name, part in STATE.items()}


@twin
def kept_by_a_block(config: LlamaConfig, batch: int, seq: int) -> int:
    """The bytes that autograd saves in a block for these sequences: what twice as many add. Weights and
    rotary positions add nothing."""

    def saved(sequences: int) -> int:
        storages: dict[int, torch.UntypedStorage] = {}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            storages[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
            return tensor

        with FakeTensorMode(allow_fallback_kernels=False):
            block, x = Block(config), torch.empty(sequences, seq, config.hidden, requires_grad=True)
            cos, sin = rotation(config, seq, x)
            hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
            with hooks, flash_attention(), torch.autocast("cpu", torch.bfloat16):
                block(x, cos, sin)
        return sum(storage.nbytes() for storage in storages.values())

    return saved(2 * batch) - saved(batch)


@twin
def gradient_of_all(
    weight: torch.Tensor, inputs: list[torch.Tensor], targets: list[torch.Tensor]
) -> torch.Tensor:
    """The gradient of the mean loss over all valid tokens of all ranks, in one process."""
    alone = weight.clone().requires_grad_()
    loss = F.cross_entropy(
        (torch.cat(inputs) @ alone).flatten(0, 1), torch.cat(targets).flatten(), ignore_index=IGNORED
    )
    return torch.autograd.grad(loss, alone)[0]


def block_case(t) -> tuple[LlamaConfig, int, int]:
    return drawn(t, vocab_size=512, tied_embeddings=True), t.integer(1, 3), 32 * t.integer(2, 5)


def peak_case(t, **fixed) -> tuple[LlamaConfig, int, int]:
    return drawn(t, **{"num_layers": 1, **fixed}), t.integer(1, 2), 64 * t.integer(2, 4)


def card(usable: float, memory: float) -> Gpu:
    return replace(gpu("a100-80"), name="a-gpu", usable_bytes=int(usable), memory_bytes=int(memory))


def sharing(t, config: LlamaConfig, seq: int, largest: int, **settings) -> tuple[Gpu, float]:
    """A GPU on which ``largest`` sequences fit and one more does not, by measurement."""
    peaks = [measured(config, batch, seq, **settings).peak_bytes for batch in (largest, largest + 1)]
    usable = sum(peaks) / 2
    return card(usable, usable), usable
