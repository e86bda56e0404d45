"""What the ranks decide together: whether to stop, and whether something failed on one of them.

A signal or a full disk may reach one rank only; if that rank left on its own, the others would wait for it for ever. So every step
carries one tiny all-reduce (the largest of GO_ON, STOP, FAILED), sent when the step begins and read when it has ended: the decision
travels behind the step's compute, and takes effect on every rank after the same step. It has a gloo group of its own, on CPU, so that no
decision waits for an accelerator.

Cost: 8 bytes a step; one exchange of short texts at start and at each checkpoint.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from dlo_lib.errors import UserError


class Verdict(enum.IntEnum):
    """What a rank wants, the stronger wish being the larger number."""

    GO_ON = 0
    STOP = 1
    FAILED = 2


class AgreedError(UserError):
    """An error that every rank raises alike, so that one rank may say it for all."""


class Control:
    """The ranks' agreement; a context, since it owns a process group. In one process without ``torch.distributed`` it agrees with
    itself.
    """

    def __init__(self) -> None:
        self._group = dist.new_group(backend="gloo") if dist.is_initialized() else None

    def __enter__(self) -> Control:
        return self

    def __exit__(self, *error: object) -> None:
        if self._group is not None:
            dist.destroy_process_group(self._group)

    def ask(self, mine: Verdict) -> Callable[[], Verdict]:
        """Send this rank's wish; the call that is returned waits for the strongest wish of all ranks."""
        if self._group is None:
            return lambda: mine
        wish = torch.tensor(int(mine))
        work = dist.all_reduce(wish, op=dist.ReduceOp.MAX, group=self._group, async_op=True)

        def strongest() -> Verdict:
            work.wait()
            return Verdict(int(wish))

        return strongest

    @contextmanager
    def together(self) -> Iterator[None]:
        """Wait for every rank at the end of the body, which must not communicate.

        Raises:
            AgreedError: on every rank, when the body raised a ``UserError`` on one; the message is that of the lowest such rank.
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
