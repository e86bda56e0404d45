"""``torch.compile`` block by block: what computes is compiled, what gathers, frees and reduces stays between the graphs.

A model compiled as a whole would take FSDP's hooks into its graph, or break there; compiled by blocks each graph begins after the hook that
has made its parameters whole, and ends before the one that frees them. Blocks of one type share one graph, so the time to compile is that
of a single block, however deep the model is ("regional compilation" in PyTorch's recipes).

Cost: no communication; seconds of compiling at the first forward and the first backward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from dlo_lib.errors import UserError
from dlo_lib.parallel.units import BlockTypes, outermost_blocks


def compile_blocks(module: nn.Module, blocks: BlockTypes | None = None, **options: Any) -> int:
    """Compile the forward of each block of ``module``, in place, before or after ``FSDP`` has wrapped it; how many there are.

    Args:
        blocks: types of blocks, whose outermost instances are meant; None for the members of the outermost ``nn.ModuleList``s and
            ``ModuleDict``s, which are also FSDP's units.
        options: for ``torch.compile``.

    Raises:
        UserError: there is no such block.
    """
    found = outermost_blocks(module, blocks)
    compiled = [inner for inner in module.modules() if id(inner) in found]
    if not compiled:
        raise UserError("the module has no blocks: name their type, or compile it as a whole with torch.compile")
    for block in compiled:
        # Its forward and not the module: module hooks run around the graph and not within.
        block.forward = torch.compile(block.forward, **options)  # type: ignore[method-assign]
    return len(compiled)
