"""The student's work in a notebook: names of its namespace, called through the same codec as in grading.

Arguments and results are copied as plain data, so that what passes here also passes in grading. Ranks are
processes of ``run_ranks``, and communicate through the same switch. The judge's counterpart is
``attempt.RemoteStudent``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import torch.distributed as dist

from dlo_lib.base.text import tr
from dlo_lib.grading.checks.asked import Asked, CallRefused
from dlo_lib.grading.checks.codec import NotPlain, pack, round_trip, unpack
from dlo_lib.grading.checks.contract import Late, Nudge, Run, Scenario, Wrong
from dlo_lib.grading.checks.faults import Fault, fault_from, fault_of
from dlo_lib.grading.checks.stand_in import answer_to, stand_in
from dlo_lib.grading.notebook.time_limit import TooLong, time_limit
from dlo_lib.grading.switch.link import Link
from dlo_lib.grading.switch.local import LocalSwitch, connected_link
from dlo_lib.grading.switch.scenario import (
    DirectNames,
    as_wrong,
    call_scenario,
    code_of,
    finished_run,
    has_claims,
    has_marks,
    names_used,
    run_scenario,
)
from dlo_lib.launch import RankFailure, run_ranks

STACK_OF_RANK = re.compile(r"^rank (\d+) was here:\n((?:.+\n?)+)", re.MULTILINE)
INNERMOST_FUNCTION = re.compile(r", line \d+, in (\w+)\n(?: {4}.*\n)*NotImplementedError")
LINE_IN_CELL = re.compile(r'(?:(Cell In\[\d+\])|"<cell ([\w-]+)>"), line (\d+)')


class LocalStudent:
    """``student`` in a notebook.

    ``seconds`` limits each run on ranks and each plain call. ``used`` collects the names that a check uses.
    ``instead``: names whose values are not the student's.
    """

    def __init__(
        self,
        namespace: Mapping[str, Any],
        seconds: float = 10.0,
        used: dict[str, None] | None = None,
        instead: Collection[str] = (),
    ) -> None:
        self._instead = frozenset(instead)
        self._namespace = namespace
        self._seconds = seconds
        self._used = used if used is not None else {}

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)

        def call(*args: Any, **kwargs: Any) -> Any:
            function = self.get_object(name)
            (sent_args, sent_kwargs), asked = _sent([args, kwargs])
            return self._limited(lambda: function(*sent_args, **sent_kwargs), asked)

        return call

    def is_own(self, name: str) -> bool:
        """Return False if the check runs with another value for ``name``."""
        return name not in self._instead

    def run(self, scenario: Scenario, **inputs: Any) -> Any:
        """Return the result of ``scenario`` in this process."""
        student = DirectNames({name: self.get_object(name) for name in names_used(scenario)})
        sent, asked = _sent(inputs)
        return self._limited(
            lambda: call_scenario(scenario, student, sent), asked, claims=has_claims(scenario)
        )

    def fresh(self, scenario: Scenario, **inputs: Any) -> Any:
        """Return the result of ``scenario`` in a new process, which gets copies of the names that it uses.

        Raises:
            NotPlain: an input is not plain data.
        """
        objects = {name: self.get_object(name) for name in names_used(scenario)}
        asked: list[Asked] = []
        sent = pack(inputs, asked)
        failure: RankFailure | None = None
        with LocalSwitch(1, asked=[asked]) as switch:
            try:
                (answer,) = run_ranks(_alone, 1, scenario, objects, sent, switch.path, timeout=self._seconds)
            except RankFailure as error:
                failure = error
        if switch.verdict is not None:
            raise switch.verdict
        if failure is not None:
            raise _as_wrong_answer(failure) from failure
        found = unpack(answer, claims=has_claims(scenario))
        if "fault" in found:
            raise as_wrong(fault_from(found["fault"]))
        return found["value"]

    def _limited(self, call: Callable[[], Any], asked: Sequence[Asked] = (), claims: bool = False) -> Any:
        """Return the result of ``call``, the student's code, as plain data.

        Raises:
            Wrong: it raised an exception, did not end in time, or returned something else; or one of
                ``asked``, the functions of the check, refused a call.
        """
        try:
            return self._result(call, claims)
        except CallRefused:
            pass  # a function of the check says why
        finally:
            for each in asked:
                each.raise_refusal()
        raise Wrong(tr("your code raised CallRefused"), tr("your code raised an exception"))

    def _result(self, call: Callable[[], Any], claims: bool) -> Any:
        try:
            with time_limit(self._seconds):
                result = call()
        except TooLong as late:
            raise Late(late.message(self._seconds), tr("your code did not end in time")) from None
        except (Exception, SystemExit) as error:
            raise as_wrong(fault_of(error)) from error
        return _round_trip_result(result, claims)

    def get(self, name: str) -> Any:
        """Return the value of a name, as plain data."""
        return _round_trip_result(self.get_object(name))

    def get_object(self, name: str) -> Any:
        """Return the object ``name`` of the namespace.

        Raises:
            NotWritten: the name is not defined.
        """
        self._used[name] = None
        if name not in self._namespace:
            raise as_wrong(Fault("Missing", name))
        return self._namespace[name]

    def ranks(
        self, scenario: Scenario, inputs_per_rank: Sequence[Mapping[str, Any]], nudge: Nudge | None = None
    ) -> Run:
        """Run ``scenario`` on ``len(inputs_per_rank)`` ranks, which communicate through a switch in this
        process.
        """
        objects = {name: self.get_object(name) for name in names_used(scenario)}
        asked: list[list[Asked]] = [[] for _ in inputs_per_rank]
        inputs = [pack(dict(inputs), of_rank) for inputs, of_rank in zip(inputs_per_rank, asked)]
        failure: RankFailure | None = None
        answers: Sequence[bytes] = ()
        with LocalSwitch(len(inputs), nudge, asked) as switch:
            try:
                answers = run_ranks(
                    _on_rank,
                    len(inputs),
                    scenario.name,
                    code_of(scenario),
                    objects,
                    inputs,
                    switch.path,
                    has_marks(scenario),
                    timeout=self._seconds,
                )
            except RankFailure as error:
                failure = error
        if switch.verdict is not None:
            raise switch.verdict
        if failure is not None:
            lost = switch.service.at_first_loss if switch.service is not None else None
            if failure.rank is None and lost is not None:
                raise _late_ranks(failure, *lost, self._seconds) from failure
            raise _as_wrong_answer(failure) from failure
        assert switch.service is not None  # every rank has returned, so all were connected
        results = [unpack(answer, claims=has_claims(scenario)) for answer in answers]
        return finished_run(results, switch.service, scenario, nudge, self.ranks, inputs_per_rank)


def _on_rank(
    name: str, code: bytes, objects: Mapping[str, Any], inputs: Sequence[bytes], path: str, measured: bool
) -> bytes:
    rank, world = dist.get_rank(), dist.get_world_size()
    with connected_link(path, rank, measured) as link:
        given = _received(inputs[rank], link)
        return pack(run_scenario(name, code, DirectNames(objects), rank, world, given, link))


def _received(inputs: bytes, link: Link) -> Any:
    """Return the inputs of a rank; the functions of the check in them ask through ``link``."""
    return unpack(inputs, lambda index, name: stand_in(name, partial(link.ask, index)))


def _alone(scenario: Scenario, objects: Mapping[str, Any], inputs: bytes, path: str) -> bytes:
    """Run a scenario in a new process; return its packed value or fault."""
    try:
        with connected_link(path, 0, measured=False) as link:
            return pack({"value": call_scenario(scenario, DirectNames(objects), _received(inputs, link))})
    except NotPlain as error:
        return pack({"fault": asdict(Fault("NotPlain", str(error)))})
    except (Exception, SystemExit) as error:  # noqa: BLE001  the caller raises it
        return pack({"fault": asdict(fault_of(error))})


def _sent(value: Any) -> tuple[Any, list[Asked]]:
    """Return a copy of what is passed to the student's code, and the functions of the check in it."""
    asked: list[Asked] = []
    frame = pack(value, asked)
    return unpack(frame, lambda index, name: stand_in(name, partial(_ask, asked[index]))), asked


def _ask(asked: Asked, call: bytes) -> Mapping[str, Any]:
    answer: Mapping[str, Any] = unpack(answer_to(asked, unpack(call)))
    return answer


def _round_trip_result(result: Any, claims: bool = False) -> Any:
    try:
        return round_trip(result, claims)
    except NotPlain as error:
        raise as_wrong(Fault("NotPlain", str(error))) from error


def _late_ranks(failure: RankFailure, busy: Sequence[int], table: str, seconds: float) -> Wrong:
    """Return the time-out of ranks as a wrong answer: the lines of the ranks that computed at the end, and
    what each rank did. The other ranks only wait for these."""
    stacks = {int(rank): stack for rank, stack in STACK_OF_RANK.findall(str(failure))}
    said = []
    for rank in busy:
        if places := LINE_IN_CELL.findall(stacks.get(rank, "")):
            numbered, named, line = places[-1]
            cell = numbered or tr("cell `{cell}`", cell=named)
            text = tr("rank {rank} was still in line {line} of {cell}", rank=rank, line=line, cell=cell)
            said.append(tr("{text} after {seconds:g} s", text=text, seconds=seconds))
    if not said:
        return _as_wrong_answer(failure)
    return Late("\n\n".join(["; ".join(said), table]), tr("your code did not end in time"))


def _as_wrong_answer(failure: RankFailure) -> Wrong:
    """Return the failure as a wrong answer: rank, error, and the innermost line of the student's cells."""
    first, _, rest = str(failure).partition("\n")
    if first.rstrip(": ").endswith(" raised NotImplementedError"):
        inner = INNERMOST_FUNCTION.search(rest)
        return as_wrong(Fault("NotImplementedError", "", function=inner[1] if inner else ""))
    # Below a traceback are only names of ranks; below the stack of a dead rank are the stacks of other ranks.
    raised = failure.rank is not None and first.startswith(f"rank {failure.rank} raised")
    places = LINE_IN_CELL.findall(rest if raised else rest.strip().split("\n\n")[0])
    if places:
        numbered, named, line = places[-1]
        first += f" ({numbered or f'cell `{named}`'}, line {line})"
    if first.startswith("timeout: "):
        return Late(first, tr("your code did not end in time"))
    return Wrong(first, tr("your code raised an exception on a rank"))
