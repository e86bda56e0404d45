"""Applies ``torch.compile`` to each block of a model. The computation is compiled; all-gathers, resharding
and reductions run between the graphs.

If a model is compiled as a whole, the hooks of FSDP become part of the graph or break it. If its blocks are
compiled, each graph begins after the hook that unshards the parameters and ends before the hook that frees
them. Blocks of one type share a graph, so the compile time is that of one block for any number of layers
(PyTorch's documentation calls this regional compilation).

Cost: no communication; seconds of compilation in the first forward and the first backward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from dlo_lib.base.errors import UserError
from dlo_lib.parallel.fsdp.wrap import BlockTypes, outermost_blocks


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
