"""Joining the process group, which waits for every rank: seen by wrapping ``init_process_group`` where people call it.

A program may leave its process group and join another. torch then counts its groups from 0 again, so what is known by their names (members,
places in the order) is forgotten, and the names get a suffix. When the ranks have other numbers in the new group than in the job, rows
no longer say who is who, and the explainer falls silent rather than guess.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Protocol
from unittest.mock import patch

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from dlo_lib.comm.tap import Tap


class Joiner(Protocol):
    """Who is told of a rank's joining."""

    def joining(self, world_size: int) -> AbstractContextManager[None]: ...

    def fall_silent(self) -> None: ...


@contextmanager
def watched_joins(joiner: Joiner, tap: Tap, world_size: int) -> Iterator[None]:
    """Within this context, tell ``joiner`` of every ``init_process_group``; ``tap.rank`` and ``world_size`` are those of the job."""
    original = c10d.init_process_group
    times = itertools.count()

    @functools.wraps(original)
    def init_process_group(*arguments: Any, **keywords: Any) -> None:
        if keywords.get("world_size", -1) in (-1, world_size) and keywords.get("rank", -1) in (-1, tap.rank):
            with joiner.joining(world_size):
                original(*arguments, **keywords)
        else:
            original(*arguments, **keywords)
        if (dist.get_rank(), dist.get_world_size()) != (tap.rank, world_size):
            joiner.fall_silent()
        elif again := next(times):
            tap.begin_era(again)

    with ExitStack() as stack:
        for module in (dist, c10d):
            stack.enter_context(patch.object(module, "init_process_group", init_process_group))
        yield
