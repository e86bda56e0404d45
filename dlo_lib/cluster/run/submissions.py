"""A submission whose answer may be lost: the job is found again, or it never runs.

SLURM may have accepted a job although ``sbatch`` was killed, timed out, or failed. So the record has the
submission before ``sbatch`` is called, under a token that is the argument of the script. Until the number is
known, each look searches for it:

1. in ``turns/<token>/number``, a link whose target is the number. The job makes it when it starts. It lasts
   longer than the queue's memory, and needs no accounting;
2. in the queue, where the command of the job ends with the token;
3. in the accounting, before the submission is given up: the job may have ended without having begun, and the
   queue forgets it after some minutes.

The link can be made once. If a submission is *given up*, its target is ``given-up``: a job that SLURM starts
later finds the link and ends at once. So giving up is always safe, and nothing runs twice.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from dlo_lib.base.errors import UserError
from dlo_lib.base.files import write_text
from dlo_lib.base.text import tr
from dlo_lib.cluster.run import records
from dlo_lib.cluster.run.records import Record, Turn
from dlo_lib.cluster.slurm import commands
from dlo_lib.cluster.slurm.commands import JobMark
from dlo_lib.cluster.slurm.states import ElementStatus, State

TURNS, _LINK, _GIVEN_UP, FIRST = "turns", "number", "given-up", "first"
ACCEPTED_S = 300.0
"""Seconds after which a submission that got no answer and is not in the queue is given up."""


def mark_of(folder: Path, record: Record) -> JobMark:
    """Return what tells the job in ``folder`` from others with its number."""
    return JobMark(record.queue_name, str(folder / records.SCRIPT), f"dlo-{folder.name}")


def start(
    folder: Path,
    elements: tuple[int, ...],
    words: Sequence[str],
    before: Sequence[ElementStatus] = (),
    first: int = 0,
) -> None:
    """Submit elements of the job in ``folder``, whose lock is held. The number is 0 if it is not known.

    Args:
        words: further options of sbatch.
        before: the statuses of the elements, which they keep if SLURM refuses the submission.
        first: the element of SLURM's index 0.

    Raises:
        NoAnswer: SLURM does not answer; nothing was submitted.
        UserError: SLURM refuses it; nothing was submitted.
    """
    known = records.read(folder)
    if any(turn.is_unknown and not set(elements).isdisjoint(turn.elements) for turn in known.turns):
        text = "SLURM may have {job}, whose number is not known yet: nothing is submitted, look at its state"
        raise commands.NoAnswer(tr(text, job=known.queue_name))
    turn = _new_turn(commands.cluster_name(), elements, before, first)
    _link(folder, turn).parent.mkdir(parents=True)
    if first:
        write_text(_link(folder, turn).with_name(FIRST), f"{first}\n")
    record = records.add_turn(folder, turn)
    records.clear(folder, elements)
    try:
        number, cluster = commands.submit(folder / records.SCRIPT, *words, arguments=[turn.token])
    except commands.Unsure as error:
        _look_once(folder, record, turn, error)
    except UserError:
        records.replace_turn(folder, give_up(folder, turn))
        raise
    else:
        records.replace_turn(folder, replace(turn, number=number, cluster=cluster or turn.cluster))
    commands.changed()


def _new_turn(cluster: str, elements: tuple[int, ...], before: Sequence[ElementStatus], first: int) -> Turn:
    kept = tuple(status for status in before if status.element in elements)
    token = secrets.token_hex(4)
    return Turn(0, elements, cluster=cluster, token=token, at=time.time(), before=kept, first=first)


def decline(folder: Path, elements: tuple[int, ...], before: Sequence[ElementStatus], first: int) -> None:
    """Record elements that were not submitted, because SLURM has refused a part of the job before them."""
    cluster = records.read(folder).turns[-1].cluster
    records.add_turn(folder, give_up(folder, _new_turn(cluster, elements, before, first)))


def _look_once(folder: Path, record: Record, turn: Turn, error: commands.Unsure) -> None:
    """Search for a submission that got no answer, and tell the user if it is not found.

    Raises:
        UserError: sbatch has ended with an error, and SLURM does not have the job.
    """
    try:
        found = replace(turn, number=number_of(folder, turn))
    except commands.NoAnswer:
        found = turn
    else:
        if error.has_ended and not found.number:
            found = give_up(folder, turn)
    if found != turn:
        records.replace_turn(folder, found)
    if found.given_up:
        raise UserError(tr("SLURM refuses the job: {why}", why=error)) from error
    if found.number:
        return
    text = (
        "SLURM may have accepted {job} ({why}). Its state is unknown until a look finds it: "
        "dlo jobs show {digest}. The same call later submits it only if SLURM does not have it."
    )
    digest = record.digest[: records.SHORT]
    print(tr(text, job=record.queue_name, why=error, digest=digest))


def number_of(folder: Path, turn: Turn) -> int:
    """Return the number of a submission that got no answer; 0 if it is not found.

    Raises:
        NoAnswer: the queue does not answer.
    """
    said = _said(folder, turn)
    if said.isdigit():
        return int(said)
    commands.changed()
    ends = f"|{folder / records.SCRIPT} {turn.token}"
    return next((row.number for row in commands.my_rows(fresh=True) if row.called.endswith(ends)), 0)


def number_of_script(folder: Path) -> int:
    """Return the number of the newest job in the queue with the script of ``folder``; 0 if there is none.

    Raises:
        NoAnswer: the queue does not answer.
    """
    ends = f"|{folder / records.SCRIPT}"
    rows = commands.my_rows(fresh=True)
    return max((row.number for row in rows if f"|{row.called}".endswith(ends)), default=0)


def found_or_given_up(folder: Path, turn: Turn) -> Turn:
    """Return the turn of a submission that got no answer with its number, or given up if SLURM lacks it.

    Raises:
        NoAnswer: the queue does not answer.
    """
    number = number_of(folder, turn)
    number = number or commands.number_of_command(f"/{records.SCRIPT} {turn.token}", turn.at)
    return replace(turn, number=number) if number else give_up(folder, turn)


def give_up(folder: Path, turn: Turn, state: State = State.LOST, why: str = "") -> Turn:
    """Return the turn of a submission that got no answer, after its job can no longer run; or its number, if
    its job has started.

    Args:
        state, why: of its elements, if they had no state before.
    """
    link = _link(folder, turn)
    try:
        link.parent.mkdir(parents=True, exist_ok=True)
        os.symlink(_GIVEN_UP, link)
    except FileExistsError:
        said = _said(folder, turn)
        if said.isdigit():
            return replace(turn, number=int(said))
    had = {status.element: status for status in turn.before}
    why = why or tr("it never began, and SLURM does not have it: resubmit() submits it")
    statuses = [had.get(element, ElementStatus(element, state, why)) for element in turn.elements]
    return replace(turn, given_up=True, before=tuple(statuses))


def settled(folder: Path, record: Record) -> Record:
    """Return the record with what has become known about its submissions; the record is not written."""
    if not any(turn.is_unknown for turn in record.turns):
        return record
    try:
        return replace(record, turns=tuple(_settled(folder, turn) for turn in record.turns))
    except commands.NoAnswer:
        return record


def _settled(folder: Path, turn: Turn) -> Turn:
    if not turn.is_unknown:
        return turn
    if _said(folder, turn) == _GIVEN_UP:
        return give_up(folder, turn)
    if turn.cluster != commands.cluster_name():
        return turn
    if time.time() - turn.at > ACCEPTED_S:
        return found_or_given_up(folder, turn)
    return replace(turn, number=number_of(folder, turn))


def has_begun(folder: Path, turn: Turn, element: int) -> bool | None:
    """Whether the script of an element has begun in this turn; None if the turn is of an older version."""
    return os.path.lexists(_link(folder, turn).with_name(str(element))) if turn.token else None


def _said(folder: Path, turn: Turn) -> str:
    """Return the number that the job has written, ``given-up``, or "" while it has not begun."""
    try:
        return os.readlink(_link(folder, turn))
    except OSError:
        return ""


def _link(folder: Path, turn: Turn) -> Path:
    return folder / TURNS / turn.token / _LINK
