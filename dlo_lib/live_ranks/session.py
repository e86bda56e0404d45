"""The ranks of a notebook: start them, send them requests, and make them usable again after a failure.

A request (a cell, a variable to fetch) is supervised like a call of ``run_ranks``, and explained in the same
words: the first failure is named, a deadlock is found within the second. Then, instead of ending the ranks:

    1. every rank that still works is interrupted. One that waits in a call is released by breaking its
       connections (``connections``). One that does not react within seconds is killed, for example if its
       connections ended while gloo began a call, which gloo then never ends.
    2. if a call was cut, or not all ranks made the same calls, the ranks leave their process group and join a
       new one. A rank whose process has ended is replaced by a new one, without variables.

The variables of all other ranks stay. A process group that a variable holds, as DistributedDataParallel does,
is broken after 2; the names of these variables are reported.
"""

from __future__ import annotations

import json
import select
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dlo_lib.base.text import tr
from dlo_lib.comm.deadlock.board import Activity
from dlo_lib.comm.deadlock.detail import Explain
from dlo_lib.comm.deadlock.stuck_ranks import all_matched
from dlo_lib.comm.deadlock.watcher import POLL_S, Watcher
from dlo_lib.launch.client import Launch
from dlo_lib.launch.failure import Ending, RankFailure, RankState, ranks_in_words
from dlo_lib.launch.frames import display_name
from dlo_lib.launch.supervisor import Supervisor
from dlo_lib.live_ranks.devices import Devices
from dlo_lib.live_ranks.local_ranks import LocalRanks
from dlo_lib.live_ranks.messages import ASSIGN, BREAK, INTERRUPT, OUTPUT, RUN, SIGNAL, send_request
from dlo_lib.live_ranks.transcript import Transcript

if TYPE_CHECKING:
    from dlo_lib.live_ranks.job_ranks import JobRanks
    from dlo_lib.live_ranks.slurm_job import RunningJob

_JOIN_TIMEOUT_S = 60.0
_AGAIN_S = 0.5  # between two interrupts of a rank
_BREAK_AFTER_S = 1.0  # for a rank that seems to compute, which may wait in a call that is not recorded
_KILL_AFTER_S = 5.0
_IN_BACKEND = (Activity.WAITING, Activity.BROKEN)  # waits in C++
_CUT_BY_SIGNAL = (Activity.HELD, Activity.LEFT)  # waits in Python
_NOTHING = b"\x80\x04}\x94."  # a pickled empty dict


@dataclass(frozen=True)
class Reply:
    """The answers to a request, in the order of the ranks that were asked, or how it failed."""

    answers: tuple[bytes | bytearray, ...]
    failure: RankFailure | None
    interrupted: bool
    notes: tuple[str, ...]
    """What has become of the ranks, in sentences."""


class _Request(Supervisor):
    """One request to the ranks ``asked``."""

    def __init__(
        self,
        launch: Launch,
        watcher: Watcher | None,
        transcripts: Sequence[Transcript],
        asked: Collection[int],
        progress: Callable[[], None],
        timeout: float | None = None,
        with_stacks: bool = False,
    ) -> None:
        super().__init__(launch, watcher, transcripts, timeout, with_stacks)
        self._transcripts = transcripts
        self._progress = progress
        for state in self.states:
            if state.rank not in asked:
                state.ending = Ending.RETURNED
        self.listen()

    def on_message(self, rank: int, kind: bytes, message: bytearray) -> None:
        """Handle an output, too."""
        if kind == OUTPUT:
            self._transcripts[rank].receive(message)
        else:
            super().on_message(rank, kind, message)

    def wait(self, until: float | None, at_most: float | None = None) -> bool:
        """Handle the next events, and show the progress."""
        self._progress()
        return super().wait(until, at_most)

    def running(self) -> list[RankState]:
        """Return the ranks that have not answered."""
        return [state for state in self.states if state.ending is Ending.RUNNING]


class Session:
    """Ranks that wait for requests. ``close`` ends them; they also end with this process.

    Args:
        world_size: the number of ranks.
        devices: where they compute.
        job: a job of SLURM in which they are; None: they are on this machine.

    Raises:
        UserError: there is no GPU for each rank, and ``devices`` asks for one.
        RankFailure: the ranks did not start.
    """

    def __init__(
        self, world_size: int, devices: Devices = Devices.ANY, job: RunningJob | None = None
    ) -> None:
        self.world_size = world_size
        self._explain = Explain.from_environment()
        explain = self._explain is not Explain.OFF
        self._launch: LocalRanks | JobRanks
        if job is None:
            self._launch = LocalRanks(world_size, devices, explain)
        else:
            from dlo_lib.live_ranks.job_ranks import JobRanks

            self._launch = JobRanks(job, world_size, devices, explain)
        try:
            self._watch()
            self._await_members()
        except BaseException:
            self.close()
            raise
        self._usable = True

    @property
    def usable(self) -> bool:
        """Whether requests can be sent: not after a failure while the ranks were made usable again."""
        return self._usable

    def close(self) -> None:
        """End the ranks."""
        self._usable = False
        self._launch.close()

    def transcripts(self) -> list[Transcript]:
        """Return a new transcript for each rank."""
        return [Transcript(files.output) for files in self._launch.files]

    def request(
        self,
        kind: bytes,
        content: bytes,
        ranks: Sequence[int],
        transcripts: Sequence[Transcript] | None = None,
        progress: Callable[[], None] = lambda: None,
    ) -> Reply:
        """Send a request to ``ranks`` and wait for their answers.

        Args:
            transcripts: receive the output of all ranks.
            progress: called again and again while the ranks work.

        Raises:
            RankFailure: the ranks are lost, and ``usable`` is False.
        """
        self._usable = False
        transcripts = self.transcripts() if transcripts is None else transcripts
        notes = self._replace_the_dead(transcripts)
        for transcript, files in zip(transcripts, self._launch.files):
            transcript.follow(files.output)
        supervisor = _Request(
            self._launch,
            self._watcher,
            transcripts,
            set(range(self.world_size)) if kind == RUN else ranks,
            progress,
            with_stacks=self._explain is Explain.STACKS,
        )
        failure, interrupted = None, False
        try:
            for rank, files in enumerate(self._launch.files):
                if rank in ranks:
                    send_request(files.channel, kind, content)
                elif kind == RUN:
                    # It has finished what it did before, also for an explanation of a deadlock.
                    send_request(files.channel, ASSIGN, _NOTHING)
            failure = supervisor.wait_for_outcome()
        except KeyboardInterrupt:
            interrupted = True
        renews = ""
        try:
            if failure is not None or interrupted:
                renews = self._recover(supervisor)
            elif kind == RUN and not all(supervisor.states[rank].result for rank in ranks):
                renews = tr("The cell left its process group")
        finally:
            supervisor.close()
        if renews:
            notes += self._renew(supervisor.ended, renews)
        self._usable = True
        answers = tuple(supervisor.states[rank].result for rank in ranks)
        return Reply(answers, failure, interrupted, tuple(notes))

    def _watch(self) -> None:
        board = self._launch.board
        self._watcher = Watcher(board, display_name) if self._explain is not Explain.OFF else None

    def _await_members(self) -> list[RankState]:
        request = _Request(
            self._launch,
            None,
            self.transcripts(),
            range(self.world_size),
            lambda: None,
            timeout=_JOIN_TIMEOUT_S,
        )
        try:
            failure = request.wait_for_outcome()
        finally:
            request.close()
        if failure is not None:
            raise failure
        return request.states

    def _replace_the_dead(self, transcripts: Sequence[Transcript]) -> list[str]:
        """Replace the ranks whose processes have ended since the last request.

        A channel hangs up before the server reports the end of its rank.
        """
        request = _Request(self._launch, self._watcher, transcripts, (), lambda: None)
        try:
            began = time.monotonic()
            while True:
                seen, gone = len(request.ended), self._hung_up() - request.ended
                request.wait(None, POLL_S if gone else 0)  # each look reads the end of one rank
                if len(request.ended) > seen:
                    continue
                if not gone:
                    break
                if time.monotonic() - began > _KILL_AFTER_S:
                    for rank in gone:
                        self._launch.kill(rank)
        finally:
            request.close()
        return self._renew(request.ended, tr("A rank has ended")) if request.ended else []

    def _hung_up(self) -> set[int]:
        """Return the ranks whose processes have closed their channels, as a process does that ends."""
        looks = select.poll()
        places = {files.channel.fileno(): rank for rank, files in enumerate(self._launch.files)}
        for place in places:
            looks.register(place, 0)
        return {places[place] for place, event in looks.poll(0) if event & select.POLLHUP}

    def _recover(self, request: _Request) -> str:
        """Stop the ranks that still work; return why they need a new process group, or ""."""
        cut = self._stop_running(request)
        lost = [state.rank for state in request.states if state.is_consequence]
        views = self._watcher.views if self._watcher is not None else None
        if self._watcher is not None:
            self._watcher.table()  # reads the last calls
        if request.ended:
            return tr("A rank has ended")
        if cut or lost:
            return tr("A call was cut, and its tensors may hold a part of its result")
        return "" if views is not None and all_matched(views) else tr("Not all ranks made the same calls")

    def _stop_running(self, request: _Request) -> bool:
        """Interrupt the ranks that have not answered; return whether a call of a rank was cut."""
        began, last, cut = time.monotonic(), 0.0, False
        ways = {state.rank: self._way_to_stop(state.rank) for state in request.running()}
        while running := request.running():
            now = time.monotonic()
            if now - began > _KILL_AFTER_S:
                for state in running:
                    self._launch.kill(state.rank)
                request.wait(now + _KILL_AFTER_S, POLL_S)
                continue
            if now - last >= _AGAIN_S:
                last = now
                for state in running:
                    how = ways[state.rank]
                    ways[state.rank] = (
                        SIGNAL + BREAK if BREAK in how or now - began > _BREAK_AFTER_S else SIGNAL
                    )
                    cut |= BREAK in how or self._state(state.rank) in _CUT_BY_SIGNAL
                    send_request(self._launch.files[state.rank].channel, INTERRUPT, how)
            request.wait(now + _AGAIN_S, POLL_S)
        return cut

    def _way_to_stop(self, rank: int) -> bytes:
        """Return the first way. An exception beside the error of a broken call would be one too many."""
        return BREAK if self._state(rank) in _IN_BACKEND else SIGNAL

    def _state(self, rank: int) -> Activity:
        return Activity.WAITING if self._watcher is None else self._watcher.views[rank].state

    def _renew(self, dead: Collection[int], reason: str) -> list[str]:
        """Let all ranks join a new process group; return what has become of them."""
        self._launch.join_again(dead)
        self._watch()
        states = self._await_members()
        stale = dict.fromkeys(name for state in states for name in json.loads(state.result))
        notes = []
        if dead:
            who = ranks_in_words(sorted(dead))
            notes.append(tr("The variables of {who} are lost, because the process has ended.", who=who))
        notes.append(tr("{reason}: the ranks have a new process group.", reason=reason))
        if stale:
            notes.append(tr("{names} still use the old one: create them again.", names=", ".join(stale)))
        return notes
