"""Collective decisions of the ranks: whether to stop, and whether a rank has failed.

A signal or a full disk may affect only one rank. If this rank exited alone, the others would wait for it
forever. Every step therefore has a small all-reduce (the maximum of CONTINUE, SAVE, STOP,
FAILED). It starts with
the step and is read at its end, so it overlaps with the compute, and the decision takes effect on every rank
after the same step. It uses a separate gloo group on the CPU, so it does not wait for an accelerator.

Cost: 8 bytes per step, and one exchange of short messages at the start and at each checkpoint.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from dlo_lib.base.errors import UserError


class Decision(enum.IntEnum):
    """The vote of a rank; the largest vote decides."""

    CONTINUE = 0
    SAVE = 1
    STOP = 2
    FAILED = 3


class AgreedError(UserError):
    """An error that every rank raises, so that one rank can print it for all."""


class Control:
    """Collective decisions; a context, because it owns a process group.

    Without ``torch.distributed``, the decision is that of this process.
    """

    def __init__(self) -> None:
        self._group = dist.new_group(backend="gloo") if dist.is_initialized() else None

    def __enter__(self) -> Control:
        return self

    def __exit__(self, *error: object) -> None:
        if self._group is not None:
            dist.destroy_process_group(self._group)

    def ask(self, mine: Decision) -> Callable[[], Decision]:
        """Send the vote of this rank; return a function that waits for the largest vote of all ranks."""
        if self._group is None:
            return lambda: mine
        wish = torch.tensor(int(mine))
        work = dist.all_reduce(wish, op=dist.ReduceOp.MAX, group=self._group, async_op=True)

        def strongest() -> Decision:
            work.wait()
            return Decision(int(wish))

        return strongest

    def largest(self, mine: float) -> float:
        """Return the largest ``mine`` of all ranks; every rank calls it."""
        if self._group is None:
            return mine
        value = torch.tensor(mine, dtype=torch.float64)
        dist.all_reduce(value, op=dist.ReduceOp.MAX, group=self._group)
        return float(value)

    @contextmanager
    def together(self) -> Iterator[None]:
        """Wait for every rank at the end of the body, which must not communicate.

        Raises:
            AgreedError: on every rank, if the body raised a ``UserError`` on one; the message is that of the
                lowest such rank.
        """
        mine: UserError | None = None
        try:
            yield
        except UserError as error:
            mine = error
        messages: list[str | None] = [str(mine) if mine else None]
        if self._group is not None:
            messages = [None] * dist.get_world_size(self._group)
            dist.all_gather_object(messages, str(mine) if mine else None, group=self._group)
        for message in messages:
            if message is not None:
                raise AgreedError(message) from mine
