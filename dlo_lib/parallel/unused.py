"""Which parameters no rank has used: a rank cannot know by itself, so it costs one small all-reduce."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist

from dlo_lib.parallel.unit import Layout, Slot, Unit


def unused_everywhere(units: Iterable[Unit], absent: Sequence[Slot], layout: Layout) -> set[Slot]:
    """Those of ``absent``, without gradient on this rank, that had none on any other; called by every rank."""
    slots = [slot for unit in units for slot in unit.trained]
    missing = set(absent)
    used = torch.tensor([slot not in missing for slot in slots], dtype=torch.int32, device=layout.device)
    for ranks in (layout.group, layout.replicas):
        if ranks is not None:
            dist.all_reduce(used, dist.ReduceOp.MAX, group=ranks)
    if not absent:
        return set()  # spares an accelerator the wait for the host to read
    return {slot for slot, flag in zip(slots, used.tolist()) if not flag}
