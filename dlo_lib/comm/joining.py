"""Joining the process group, which waits for every rank, and leaving it: seen by wrapping torch's functions where people call them.

A program may leave its process group and join another. torch then counts its groups from 0 again, so what is known by their names (members,
places in the order) is forgotten, and the names get a suffix. When the ranks have other numbers in the new group than in the job, rows
no longer say who is who, and the explainer falls silent rather than guess.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol
from unittest.mock import patch

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from dlo_lib.comm.tap import Tap


class Joiner(Protocol):
    """Who is told of a rank's joining."""

    def joining(self) -> AbstractContextManager[None]: ...

    def fall_silent(self) -> None: ...


@contextmanager
def watched_joins(joiner: Joiner, tap: Tap, world_size: int) -> Iterator[None]:
    """Within this context, tell ``joiner`` of every ``init_process_group``; ``tap.rank`` and ``world_size`` are those of the job."""
    original = c10d.init_process_group
    times = itertools.count()

    @functools.wraps(original)
    def init_process_group(*arguments: Any, **keywords: Any) -> None:
        if keywords.get("world_size", -1) in (-1, world_size) and keywords.get("rank", -1) in (-1, tap.rank):
            with joiner.joining():
                original(*arguments, **keywords)
        else:
            original(*arguments, **keywords)
        if (dist.get_rank(), dist.get_world_size()) != (tap.rank, world_size):
            joiner.fall_silent()
        elif again := next(times):
            tap.begin_era(again)

    with _in_place_of("init_process_group", init_process_group):
        yield


@contextmanager
def watched_leave(before: Callable[[], None]) -> Iterator[None]:
    """Within this context, call ``before`` when this process is about to leave its process group, with its connections still open."""
    original = c10d.destroy_process_group

    @functools.wraps(original)
    def destroy_process_group(group: dist.ProcessGroup | None = None) -> None:
        if group is None or group is dist.group.WORLD:
            before()
        original(group)

    with _in_place_of("destroy_process_group", destroy_process_group):
        yield


@contextmanager
def _in_place_of(name: str, function: Callable[..., None]) -> Iterator[None]:
    with patch.object(dist, name, function), patch.object(c10d, name, function):
        yield
