"""Applies ``torch.compile`` to each block of a model. The computation is compiled; all-gathers, resharding
and reductions run between the graphs.

If a model is compiled as a whole, the hooks of FSDP become part of the graph or break it. If its blocks are
compiled, each graph begins after the hook that unshards the parameters and ends before the hook that frees
them. Blocks of one type share a graph, so the compile time is that of one block for any number of layers
(PyTorch's documentation calls this regional compilation).

``compile_llama`` and ``compile_loss`` say what ``train --compile`` compiles; ``profiling.measure`` measures
the memory of the same graphs.

Cost: no communication; seconds of compilation in the first forward and the first backward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from dlo_lib.base.errors import UserError
from dlo_lib.models.llama import Attention, Block
from dlo_lib.models.moe import MoELayer
from dlo_lib.optim.step import summed_cross_entropy
from dlo_lib.parallel.fsdp.wrap import BlockTypes, outermost_blocks
from dlo_lib.parallel.plan import ParallelPlan

Backend = str | Callable[..., Any]
"""A backend of ``torch.compile``, or its name."""


def compile_blocks(module: nn.Module, blocks: BlockTypes | None = None, **options: Any) -> int:
    """Compile the forward of each block of ``module`` in place, before or after ``FSDP`` wraps it.

    Args:
        blocks: the types whose outermost instances are compiled; None for the members of the outermost
            ``nn.ModuleList``s and ``nn.ModuleDict``s, which are also the units of FSDP.
        options: keyword arguments of ``torch.compile``.

    Returns the number of compiled blocks.

    Raises:
        UserError: there is no such block.
    """
    found = outermost_blocks(module, blocks)
    compiled = [inner for inner in module.modules() if id(inner) in found]
    if not compiled:
        raise UserError(
            "the module has no blocks: name their type, or compile it as a whole with torch.compile"
        )
    for block in compiled:
        # Compile the forward instead of the module, so that module hooks run outside of the graph.
        block.forward = torch.compile(block.forward, **options)  # type: ignore[method-assign]
    return len(compiled)


def compile_llama(spread: nn.Module, plan: ParallelPlan, backend: Backend) -> int:
    """Compile the blocks of this rank's Llama in place, at their next forward.

    What communicates, or adds to a gradient itself, runs in Python between graphs: attention over the ranks
    of ``cp``, mixtures of experts, and the linear layers of a pipeline.

    Args:
        spread: the result of ``parallelize``.
        plan: its plan.

    Returns the number of compiled blocks.
    """
    for module in spread.modules():
        if plan.cp > 1 and isinstance(module, Attention):
            module.attend = torch.compiler.disable(module.attend)
        elif isinstance(module, MoELayer) or (isinstance(module, nn.Linear) and "forward" in vars(module)):
            module.forward = torch.compiler.disable(module.forward)  # type: ignore[method-assign]
    return compile_blocks(spread, Block, backend=backend, dynamic=False)


def compile_loss(options: Mapping[str, Any], backend: Backend) -> dict[str, Any]:
    """Return ``options``, the arguments of ``train_step`` that choose the loss, with a compiled loss of the
    logits. A loss that the model computes is one kernel already."""
    if options.get("loss_in_model"):
        return dict(options)
    loss = options.get("sum_of_losses", summed_cross_entropy)
    return {**options, "sum_of_losses": torch.compile(loss, backend=backend, dynamic=False)}
