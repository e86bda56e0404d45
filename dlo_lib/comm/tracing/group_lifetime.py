"""Joining the process group, which waits for every rank, and leaving it, seen by wrapping torch's functions.

A program may leave its process group and join another one. torch then numbers its groups from 0 again.
Therefore the data kept by group name (members, positions in the order) no longer applies, and the names get a
suffix. If the ranks have other numbers in the new group than in the job, rows no longer identify ranks, and
the explainer stops recording.
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

from dlo_lib.comm.tracing.tap import Tap


class Joiner(Protocol):
    """Receives the events of joining a process group."""

    def joining(self) -> AbstractContextManager[None]:
        """Return a context that lasts while ``init_process_group`` runs."""

    def stop_recording(self) -> None:
        """The ranks of the new group have other numbers than those of the job."""


@contextmanager
def watched_joins(joiner: Joiner, tap: Tap, world_size: int) -> Iterator[None]:
    """Within this context, pass every ``init_process_group`` to ``joiner``.

    ``tap.rank`` and ``world_size`` are those of the job.
    """
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
            joiner.stop_recording()
        elif again := next(times):
            tap.begin_generation(again)

    with _in_place_of("init_process_group", init_process_group):
        yield


@contextmanager
def watched_leave(before: Callable[[], None]) -> Iterator[None]:
    """Within this context, call ``before`` just before this process leaves its process group.

    Its connections are still open then.
    """
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
