"""A process group in one process, whose other ranks do not exist: its collectives return at once, unchanged.

With it, code of one rank of any number of ranks runs on tensors without data.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch.distributed as dist


@contextlib.contextmanager
def fake_ranks(world_size: int, rank: int = 0) -> Iterator[dist.ProcessGroup]:
    """Be the rank ``rank`` of ``world_size`` in the context, where there is no process group yet."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        assert dist.group.WORLD is not None
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()
