"""Match the calls of the ranks: the k-th collective of each member of a group, and each send with its
receive.

This module decides, computes and records; it has no sockets. It records each call as ``comm.calls.Call``,
also a message that is never received, and the first numbers that it sends. It finds a deadlock from the calls
that ranks have issued and those that they wait for (``comm.deadlock.stuck_ranks``), without a clock, as soon
as it occurs. Messages come from ``comm.deadlock.explanation``.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dlo_lib.base.text import tr
from dlo_lib.comm.calls import Call, Kind
from dlo_lib.comm.deadlock import explanation
from dlo_lib.comm.deadlock.board import Activity
from dlo_lib.comm.deadlock.stuck_ranks import (
    CallMatcher,
    Mismatch,
    RankView,
    collective_mismatch,
    message_mismatch,
    stuck_ranks,
)
from dlo_lib.comm.deadlock.vocabulary import NameFile, ranks_in_words, what, where
from dlo_lib.grading.checks.codec import NotPlain
from dlo_lib.grading.checks.contract import Nudge, Wrong
from dlo_lib.grading.checks.runs import KEPT_NUMBERS
from dlo_lib.grading.switch.arithmetic import allowed, outputs
from dlo_lib.grading.switch.request import CallRequest

MAX_CALLS = 20_000  # of one rank
MAX_HELD = 3 << 27  # bytes of all ranks in calls that are not matched yet; the judge may take 1 GiB
KEPT_BYTES = 16 << 20  # of all calls of a rank


@dataclass(frozen=True)
class Delivery:
    """The result of a completed call.

    Args:
        rank: the global rank that made the call.
        seq: the number of the call.
        tensors: the tensors that the rank receives.
        source: the global rank that sent a message, otherwise -1.
    """

    rank: int
    seq: int
    tensors: Sequence[Tensor]
    source: int = -1


class Exchange:
    """The calls of ``world`` ranks. ``name_file`` formats a file name of the student's code for messages."""

    def __init__(self, world: int, name_file: NameFile, nudge: Nudge | None = None) -> None:
        self.views = {rank: RankView(rank, Activity.COMPUTING) for rank in range(world)}
        self.nudged = False
        self._nudge, self._name_file = nudge, name_file
        self._calls: list[list[Call]] = [[] for _ in range(world)]
        self._sent: list[list[Tensor]] = [[] for _ in range(world)]
        self._kept_bytes = [0] * world
        self._by_seq: list[dict[int, Call]] = [{} for _ in range(world)]
        self._unwaited: list[list[Call]] = [[] for _ in range(world)]
        self._open: list[dict[int, tuple[CallRequest, Call]]] = [{} for _ in range(world)]
        self._issued = [0] * world
        self._of_kind: list[Counter[Kind]] = [Counter() for _ in range(world)]
        self._sequences: dict[tuple, int] = {}
        self._members: dict[str, tuple[int, ...]] = {}
        self._queues: dict[str, dict[int, deque[CallRequest]]] = {}
        self._sends: dict[tuple[str, int, int], deque[CallRequest]] = defaultdict(
            deque,
        )  # by group, receiver, tag
        self._receives: dict[tuple[str, int, int], deque[CallRequest]] = defaultdict(deque)
        self._meetings = CallMatcher()
        self._mismatch: Mismatch | None = None
        self._held = 0
        self._marked: tuple[int, int] | None = None  # rank and seq of the call whose result the nudge alters

    # -- messages of ranks

    def issued(self, rank: int) -> int:
        """Return the number of calls that ``rank`` has made."""
        return self._issued[rank]

    def issue(self, request: CallRequest) -> list[Delivery]:
        """Record a call and return the deliveries that it completes.

        Raises:
            Wrong: it does not agree with the calls of other ranks.
            NotPlain: the rank exceeds the limit of calls or bytes.
        """
        self._register(request)
        deliveries: list[Delivery] = []
        if self._mismatch is not None:
            return deliveries
        if request.kind.point_to_point:
            deliveries = self._match_message(request)
        else:
            queues = self._queues.setdefault(request.group, {member: deque() for member in request.members})
            queues[request.rank].append(request)
            while all(queues.values()):
                deliveries += self._complete_collective(
                    [queues[member].popleft() for member in request.members],
                )
        return deliveries

    def wait(self, rank: int, seq: int, helpers: bool) -> None:
        """Record that ``rank`` waits for its call ``seq``.

        ``helpers``: another thread of the rank may make calls in the meantime.
        """
        if seq in self._open[rank]:
            view = self.views[rank]
            view.state, view.waits_for, view.since, view.other_threads = (
                Activity.WAITING,
                self._open[rank][seq][1],
                time.monotonic_ns(),
                helpers,
            )

    def leave(self, rank: int, calls: Sequence[int]) -> None:
        """Record that ``rank`` has not waited for these calls."""
        self._unwaited[rank] = [self._by_seq[rank][seq] for seq in calls if seq in self._by_seq[rank]]

    def end(self, rank: int, raised: bool) -> None:
        """Record that ``rank`` makes no more calls."""
        view = self.views[rank]
        view.state, view.waits_for = (Activity.RAISED if raised else Activity.FINISHED), None
        view.other_threads = False  # the switch takes no more calls

    def unfinished_bytes(self, rank: int) -> int:
        """Return the bytes that ``rank`` has sent in calls that are not complete: the switch holds them."""
        return sum(request.held for request, _ in self._open[rank].values())

    # -- state

    def open_calls(self, rank: int) -> tuple[Call, ...]:
        """Return the calls of ``rank`` that are not complete."""
        return tuple(call for _, call in self._open[rank].values())

    def calls(self, rank: int) -> tuple[Call, ...]:
        """Return the calls of ``rank`` in the order of issue, also those that are not complete."""
        return tuple(self._calls[rank])

    def sent(self, rank: int) -> tuple[Tensor, ...]:
        """Return the first numbers that ``rank`` sent in each of its calls, as a vector; empty where it sent
        nothing.
        """
        return tuple(self._sent[rank])

    def unwaited(self, rank: int) -> tuple[str, ...]:
        """Return a description of each asynchronous call for which ``rank`` has not waited."""
        return tuple(f"{what(call)} ({where(call, self._name_file)})" for call in self._unwaited[rank])

    @property
    def failed(self) -> bool:
        """True if a rank has raised an exception."""
        return any(view.state is Activity.RAISED for view in self.views.values())

    def stuck(self) -> dict[int, set[int]]:
        """Return the ranks that can never continue, each with the ranks that it waits for."""
        return stuck_ranks(self.views)

    @property
    def disagrees(self) -> bool:
        """True if the matched calls of ranks do not agree; no call completes any more."""
        return self._mismatch is not None

    def mismatch(self) -> Wrong:
        """Return the verdict on calls that do not agree."""
        assert self._mismatch is not None
        calls = dict(sorted(self._mismatch.calls.items()))
        message = next(iter(calls.values())).kind.point_to_point
        found = (message_mismatch if message else collective_mismatch)(calls)
        said = explanation.mismatch(found or self._mismatch, self._name_file)
        if not message and (skipped := self._skipped(calls)):
            said = f"{skipped}\n\n{said}"
        return Wrong(said, tr("the ranks' calls do not agree"))

    def _skipped(self, calls: Mapping[int, Call]) -> str:
        """Return which ranks skipped a call, if some ranks call from a cell and the others from the check: a
        check makes calls after the student's code. Otherwise return ""."""
        own = [rank for rank, call in calls.items() if is_cell(self._name_file(call.site.file))]
        past = [rank for rank in calls if rank not in own]
        if not own or not past:
            return ""
        call = calls[own[0]]
        return tr(
            "SKIPPED CALL: on {others} your code calls {what} ({where}); on {who} it ends without this call.",
            others=ranks_in_words(own), what=what(call), where=where(call, self._name_file),
            who=ranks_in_words(past),
        )  # fmt: skip

    def deadlock(self, stuck: dict[int, set[int]]) -> Wrong:
        """Return the verdict on ``stuck`` ranks."""
        now = time.monotonic_ns()
        for view in self.views.values():
            view.since = now  # waiting times differ between runs: leave them out
        return Wrong(
            explanation.deadlock(self.views, stuck, self._name_file), tr("the ranks wait for each other")
        )

    def busy(self) -> list[int]:
        """Return the ranks that neither wait nor have ended."""
        return [rank for rank, view in self.views.items() if view.waits_for is None and not view.ended]

    def table(self) -> str:
        """Return a table of what each rank does now."""
        return explanation.table(self.views, self._name_file)

    def place(self, rank: int) -> str:
        """Return a short description of what ``rank`` does now."""
        view = self.views[rank]
        if view.waits_for is not None:
            return tr(
                "rank {rank} waits in {what} ({where})",
                rank=rank,
                what=what(view.waits_for),
                where=where(view.waits_for, self._name_file),
            )
        if view.ended:
            return tr("rank {rank} has finished", rank=rank)
        if view.last is not None:
            return tr(
                "rank {rank} computes, last call {what} ({where})",
                rank=rank,
                what=what(view.last),
                where=where(view.last, self._name_file),
            )
        return tr("rank {rank} has made no call", rank=rank)

    # -- matching

    def _register(self, request: CallRequest) -> None:
        rank = request.rank
        self._issued[rank] += 1
        self._held += request.held
        if self._issued[rank] > MAX_CALLS or self._held > MAX_HELD:
            raise NotPlain(
                f"endless communication: more than {MAX_CALLS} calls or {MAX_HELD >> 20} MiB unreceived"
            )
        if self._members.setdefault(request.group, request.members) != request.members:
            raise Wrong(
                tr(
                    "rank {rank} uses a group of {mine} where other ranks have one of {theirs}: new_group "
                    "must be called by every rank of the world, in the same order",
                    rank=rank, mine=list(request.members), theirs=list(self._members[request.group]),
                ),
                tr("the ranks made different groups"),
            )  # fmt: skip
        draft = request.call(0, 0)
        channel = (rank, request.kind if request.kind.point_to_point else None, *draft.channel(rank))
        sequence = self._sequences[channel] = self._sequences.get(channel, 0) + 1
        call = request.call(self._issued[rank], sequence)
        if request.seq in self._open[rank]:
            raise NotPlain("a call number used twice")
        self._open[rank][request.seq] = (request, call)
        self._by_seq[rank][request.seq] = call
        self._calls[rank].append(call)
        first = _first_numbers(request.sent if self._kept_bytes[rank] < KEPT_BYTES else ())
        self._sent[rank].append(first)
        self._kept_bytes[rank] += first.nbytes
        if self._nudge is not None and self._nudge.hits(
            rank, request.kind, self._of_kind[rank][request.kind]
        ):
            self._marked = rank, request.seq
        self._of_kind[rank][request.kind] += 1
        self.views[rank].note(call)
        self._mismatch = self._meetings.add(rank, call) or self._mismatch

    def _complete_collective(self, requests: list[CallRequest]) -> list[Delivery]:
        first = requests[0]
        for tensor in first.sent:
            if first.reduction and not allowed(first.reduction, tensor.dtype):
                raise self._mismatch_error(
                    requests,
                    tr("{op} is not defined for {dtype}", op=first.reduction, dtype=tensor.dtype),
                )
        root = first.members.index(first.peer) if first.peer >= 0 else -1
        try:
            received = outputs(first.kind, [request.sent for request in requests], root, first.reduction)
        except (RuntimeError, ValueError, IndexError):
            raise self._mismatch_error(requests, tr("the ranks pass tensors of different sizes")) from None
        return [self._deliver(request, tensors) for request, tensors in zip(requests, received)]

    def _match_message(self, request: CallRequest) -> list[Delivery]:
        to = request.peer if request.kind is Kind.SEND else request.rank
        key = (request.group, to, request.tag)
        sends, receives = self._sends[key], self._receives[key]
        # Waiting messages do not match each other, so only the new one can complete a pair.
        sending = request.kind is Kind.SEND
        for waiting in receives if sending else sends:
            send, receive = (request, waiting) if sending else (waiting, request)
            if receive.kind is Kind.RECV_ANY or receive.peer == send.rank:
                (receives if sending else sends).remove(waiting)
                return [self._deliver(send, []), self._deliver(receive, send.sent, send.rank)]
        (sends if sending else receives).append(request)
        return []

    def _deliver(self, request: CallRequest, tensors: Sequence[Tensor], source: int = -1) -> Delivery:
        if len(tensors) != len(request.expected) or not all(
            map(lambda shape, tensor: shape.fits(tensor), request.expected, tensors)
        ):
            expected = ", ".join(f"{shape.dtype}{list(shape.sizes)}" for shape in request.expected[:4])
            came = ", ".join(
                f"{tensor.dtype}{list(tensor.shape)}".removeprefix("torch.") for tensor in tensors[:4]
            )
            raise self._mismatch_error(
                [request],
                tr("it expects {expected}, and receives {came}", expected=expected, came=came),
            )
        rank, view = request.rank, self.views[request.rank]
        _, call = self._open[rank].pop(request.seq)
        self._held -= request.held
        if view.waits_for is call:
            view.state, view.waits_for = Activity.COMPUTING, None
        if self._nudge is not None and self._marked == (rank, request.seq):
            tensors, self.nudged = self._nudge.applied(tensors)
        return Delivery(rank, request.seq, tensors, source)

    def _mismatch_error(self, requests: list[CallRequest], text: str) -> Wrong:
        request = requests[0]
        call = self._open[request.rank][request.seq][1]
        who = tr(
            "rank {rank}, {what} ({where})",
            rank=request.rank,
            what=what(call),
            where=where(call, self._name_file),
        )
        return Wrong(f"{who}: {text}", tr("the ranks' calls do not agree"))


def _first_numbers(tensors: Sequence[Tensor]) -> Tensor:
    kept: list[Tensor] = []
    left = KEPT_NUMBERS
    for tensor in tensors:
        kept.append(tensor.reshape(-1)[:left].clone())
        left -= kept[-1].numel()
        if left == 0:
            break
    if len({tensor.dtype for tensor in kept}) > 1:
        kept = [tensor.double() for tensor in kept]
    return kept[0] if len(kept) == 1 else torch.cat(kept) if kept else torch.empty(0)


def is_cell(name: str) -> bool:
    """Return True for the name of a cell of a notebook, such as ``Cell In[3]`` and ``cell `mean` ``."""
    return name.lower().lstrip("<").startswith("cell ")
