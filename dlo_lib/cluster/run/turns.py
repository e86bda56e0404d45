"""One submission of some elements of a job, at SLURM or on this machine: start it, and query its elements."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from dlo_lib.base.errors import UserError
from dlo_lib.base.text import tr
from dlo_lib.cluster.run import array_parts, causes, dependency, endings, local, records, submissions
from dlo_lib.cluster.run.array_parts import ArrayPart
from dlo_lib.cluster.run.dependency import Dependency
from dlo_lib.cluster.run.records import Record, Turn
from dlo_lib.cluster.site.description import Scheduler
from dlo_lib.cluster.slurm import commands
from dlo_lib.cluster.slurm.states import ElementStatus, State, stopped_early

_SUBMISSION_S = 120.0
"""Seconds that the submission of one part may take: twice the time in which SLURM has to answer."""


def start(
    folder: Path,
    elements: tuple[int, ...],
    after: Dependency | None = None,
    words: Sequence[str] = (),
    before: Sequence[ElementStatus] = (),
) -> None:
    """Submit these elements of the job in ``folder``, whose lock is held.

    They start when the job in ``after`` has ended as wanted.

    Args:
        words: further options of sbatch.
        before: the statuses of the elements, which they keep if SLURM refuses the submission.

    Raises:
        NoAnswer: SLURM does not answer; nothing was submitted.
        UserError: SLURM refuses it; nothing was submitted.
    """
    record = records.read(folder)
    if record.scheduler is Scheduler.LOCAL:
        records.clear(folder, elements)
        records.add_turn(folder, local.start(folder, elements, after))
        return
    further = [*words, *(_dependency(after) if after is not None else [])]
    if len(record.settings) == 1:
        submissions.start(folder, elements, further, before)
        return
    _start_array(folder, elements, further, before)


def _start_array(
    folder: Path, elements: tuple[int, ...], words: Sequence[str], before: Sequence[ElementStatus]
) -> None:
    """Submit elements of an array, in parts if SLURM does not allow as many.

    The parts share the number of elements that may run at the same time. Of more parts than that number,
    each waits for an earlier one.

    Raises:
        NoAnswer: SLURM does not answer; nothing was submitted.
        UserError: SLURM refuses the first part; nothing was submitted.
    """
    limit = array_parts.limit_of((folder / records.SCRIPT).read_text(encoding="utf-8"))
    parts = array_parts.parts_of(elements, array_parts.most_elements())
    shares = [None] * len(parts) if limit is None else array_parts.shares(limit, parts)
    for number, part in enumerate(parts):
        try:
            chosen = array_parts.words(folder, part, shares[number])
            waits = list(words)
            if limit is not None and number >= limit:
                waits = dependency.also_after(_number_of(folder, parts[number - limit]), words)
            submissions.start(folder, part.elements, [*chosen, *waits], before, part.first)
        except UserError as error:
            if number == 0:
                raise
            known = {element for turn in records.read(folder).turns for element in turn.elements}
            for left in parts[number:]:
                if not known.issuperset(left.elements):
                    submissions.decline(folder, left.elements, before, left.first)
            text = (
                "SLURM accepts {done} of {all} elements ({why}): resubmit() later submits those that it "
                "refuses"
            )
            done = sum(len(part.elements) for part in parts[:number])
            print(tr(text, done=done, all=len(elements), why=error))
            return


def _number_of(folder: Path, part: ArrayPart) -> int:
    """Return the number of the newest submission of a part.

    Raises:
        NoAnswer: SLURM has not told it.
    """
    number = [turn.number for turn in records.read(folder).turns if turn.elements == part.elements][-1]
    if not number:
        raise commands.NoAnswer(tr("the number of an earlier part is not known"))
    return number


def _dependency(after: Dependency) -> list[str]:
    earlier = submissions.settled(after.folder, records.read(after.folder))
    _check_here(earlier)
    known = current(after.folder, earlier)
    unknown = next((status for status in known if status.state is State.UNKNOWN), None)
    if unknown is not None:
        text = "the state of {job}, for which the new job waits, is unknown ({why}): submit it again later"
        raise commands.NoAnswer(tr(text, job=earlier.queue_name, why=unknown.reason))
    return dependency.words(after.kind, earlier, known)


def current(folder: Path, record: Record) -> list[ElementStatus]:
    """Return the status of each element of a job, from the record if all have ended."""
    if record.over is not None:
        return list(record.over)
    found: dict[int, ElementStatus] = {}
    for turn in record.turns:  # later submissions replace elements of earlier ones
        found |= statuses(folder, record, turn)
    for element in range(len(record.settings)):
        if element not in found:
            found[element] = _not_submitted(record, element)
    return [found[element] for element in sorted(found)]


def _not_submitted(record: Record, element: int) -> ElementStatus:
    """Return the status of an element without a submission: a process submits it now, or has ended before."""
    begun = max([datetime.fromisoformat(record.submitted).timestamp(), *(turn.at for turn in record.turns)])
    if time.time() - begun < _SUBMISSION_S:
        return ElementStatus(element, State.UNKNOWN, tr("it is being submitted"), is_final=False)
    why = tr("it was not submitted, because the process that did so has ended: resubmit() submits it")
    return ElementStatus(element, State.LOST, why, is_final=False)


def statuses(folder: Path, record: Record, turn: Turn) -> dict[int, ElementStatus]:
    """Return the current statuses of the elements of a turn; UNKNOWN where SLURM does not answer."""
    try:
        found = _statuses(folder, record, turn)
    except commands.NoAnswer as error:
        found = _unknown(turn, str(error))
    return {element: causes.with_cause(folder, status) for element, status in found.items()}


def _unknown(turn: Turn, why: str) -> dict[int, ElementStatus]:
    return {element: ElementStatus(element, State.UNKNOWN, why, is_final=False) for element in turn.elements}


def _statuses(folder: Path, record: Record, turn: Turn) -> dict[int, ElementStatus]:
    if record.scheduler is Scheduler.LOCAL:
        return local.statuses(folder, turn)
    if turn.given_up:
        return {status.element: status for status in turn.before}
    if elsewhere(turn):
        return _unknown(turn, tr("it is a job of the cluster {cluster}: ask there", cluster=turn.cluster))
    if turn.is_unknown:
        return _unknown(turn, tr("SLURM may have accepted it: a later look finds it"))
    found = _of_slurm(folder, turn, submissions.mark_of(folder, record))
    return {
        element: stopped_early(status, records.progress_of(folder, element))
        for element, status in found.items()
    }


def _check_here(earlier: Record) -> None:
    """Check that a job can wait for an earlier one: SLURM's numbers are those of one cluster."""
    there = next((turn.cluster for turn in earlier.turns if elsewhere(turn)), None)
    if earlier.over is None and there is not None:
        text = "{job} runs on the cluster {cluster}, and jobs of this one cannot wait for it: wait() there"
        raise UserError(tr(text, job=earlier.queue_name, cluster=there))


def elsewhere(turn: Turn) -> bool:
    """Return whether a turn was submitted to another cluster than the one of this machine."""
    return bool(turn.cluster) and turn.cluster != commands.cluster_name()


def _of_slurm(folder: Path, turn: Turn, mark: commands.JobMark) -> dict[int, ElementStatus]:
    """Return the statuses from the queue and the controller; of the elements that SLURM no longer knows from
    the scripts' exit statuses, the accounting and the output.
    """
    by_index = commands.queue(turn.number, mark) or commands.controller(turn.number, mark)
    found = array_parts.by_element(turn.first, by_index)
    missing = [element for element in turn.elements if element not in found]
    if missing:
        found |= endings.of_forgotten(folder, turn, mark, missing)
    codes = {element: records.exit_code(folder, element) for element in turn.elements}
    return {
        element: replace(found[element], exit_code=codes[element])
        if found[element].state.over
        else found[element]
        for element in turn.elements
    }
