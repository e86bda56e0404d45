"""Changes of a submitted job: cancel, requeue, resubmit. Nothing is called done before SLURM confirms it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

from dlo_lib.base.errors import UserError
from dlo_lib.base.text import tr
from dlo_lib.cluster.run import local, records, submissions, turns
from dlo_lib.cluster.run.records import Record, Turn
from dlo_lib.cluster.site.description import Scheduler, sites
from dlo_lib.cluster.site.duration import parse_duration, short_duration, slurm_duration
from dlo_lib.cluster.site.limits import qos_of
from dlo_lib.cluster.site.sbatch_options import check_memory
from dlo_lib.cluster.slurm import commands
from dlo_lib.cluster.slurm.states import ElementStatus, State


def cancel(folder: Path, record: Record, elements: Sequence[int]) -> list[int]:
    """Cancel elements of a job that have not ended; return those that are cancelled now.

    Raises:
        NoAnswer: SLURM does not confirm it.
        UserError: the job runs on another cluster.
    """
    cancelled: list[int] = []
    for turn in record.turns:
        mine = tuple(element for element in turn.elements if element in elements)
        if not mine or turn.given_up:
            continue
        if record.scheduler is Scheduler.LOCAL:
            local.cancel(folder, turn, mine)
            cancelled += mine
            continue
        check_here(record, turn)
        if turn.is_unknown:
            turn = _without_number(folder, turn)
            if turn.given_up:
                cancelled += mine
                continue
        several = len(record.settings) > 1
        indices = [element - turn.first for element in mine] if several else None
        ended = commands.cancel(turn.number, indices, submissions.mark_of(folder, record))
        cancelled += [index + turn.first for index in ended]
    return cancelled


def _without_number(folder: Path, turn: Turn) -> Turn:
    """Return a turn that got no answer with its number, or given up if the queue does not have it."""
    number = submissions.number_of(folder, turn)
    if number:
        found = replace(turn, number=number)
    else:
        why = tr("it was cancelled before SLURM had it: if SLURM starts it later, it ends at once")
        found = submissions.give_up(folder, turn, State.CANCELLED, why)
    with records.locked(folder):
        records.replace_turn(folder, found)
    return found


def check_here(record: Record, turn: Turn) -> None:
    """Check that a turn is a job of the cluster of this machine.

    Raises:
        UserError: it is not.
    """
    if turns.elsewhere(turn):
        text = "{job} runs on the cluster {cluster}: use the commands there"
        raise UserError(tr(text, job=record.queue_name, cluster=turn.cluster))


def requeue(folder: Path, record: Record, element: int) -> None:
    """Put an element back into SLURM's queue, in any state; its number does not change.

    Raises:
        NoAnswer: SLURM may have done it.
        UserError: SLURM refuses or no longer knows the element, or the job runs on another cluster.
    """
    said = {"element": element, "job": record.queue_name}
    mine = [turn for turn in record.turns if element in turn.elements and not turn.given_up]
    if not mine:
        raise UserError(tr("SLURM never had element {element} of {job}: resubmit() submits it", **said))
    turn = mine[-1]
    check_here(record, turn)
    if turn.is_unknown:
        text = "SLURM may have element {element} of {job}, and its number is not known yet: look at its state"
        raise commands.NoAnswer(tr(text, **said))
    mark, index = submissions.mark_of(folder, record), element - turn.first
    if index not in (commands.queue(turn.number, mark) or commands.controller(turn.number, mark)):
        text = "SLURM no longer knows element {element} of {job}: resubmit() runs it again"
        raise UserError(tr(text, **said))
    try:
        commands.requeue(turn.number, index if len(record.settings) > 1 else None)
        records.clear(folder, (element,))
    except commands.NoAnswer as error:
        _ask_again(folder)  # it may have been done
        text = "SLURM may have requeued element {element} of {job} ({why}): look at its state"
        raise commands.NoAnswer(tr(text, element=element, job=record.queue_name, why=error)) from error
    _ask_again(folder)


def _ask_again(folder: Path) -> None:
    """Let the states of a job count as not known. After the requeue, or a query in between would record the
    old state again.
    """
    with records.locked(folder):
        records.write(folder, replace(records.read(folder), over=None))


def resubmit(
    folder: Path,
    record: Record,
    statuses: Sequence[ElementStatus],
    time: str | timedelta | None = None,
    memory: str = "",
) -> None:
    """Submit elements again that ended without completing.

    Args:
        statuses: of all elements.
        time: limit of this submission; None: that of the script.
        memory: of a node; "": that of the script.

    Raises:
        NoAnswer: SLURM does not answer; nothing was submitted.
        UserError: all have completed, none has ended, the limits are not valid, or SLURM refuses it.
    """
    words = _limits(folder, record, time, memory)
    again = tuple(
        status.element for status in statuses if status.state.over and status.state is not State.COMPLETED
    )
    lost = [turn for turn in record.turns if turn.is_unknown]
    if not again and not lost:
        over = all(status.state.over for status in statuses)
        unknown = next((status for status in statuses if status.state is State.UNKNOWN), None)
        if unknown is not None:
            text = "the state of {job} is unknown ({why}); nothing is resubmitted: try again later"
            raise commands.NoAnswer(tr(text, job=record.queue_name, why=unknown.reason))
        what = tr("has completed") if over else tr("is not over: cancel() it first")
        raise UserError(tr("{job} {what}; nothing is resubmitted", job=record.queue_name, what=what))
    with records.locked(folder):
        if _identities(records.read(folder)) != _identities(record):
            return  # another process has just resubmitted it
        for turn in lost:
            found = submissions.found_or_given_up(folder, turn)
            records.replace_turn(folder, found)
            again += turn.elements if found.given_up else ()
        if again:
            turns.start(folder, tuple(sorted(set(again))), words=words, before=statuses)


def _identities(record: Record) -> list[tuple[str, int]]:
    return [(turn.token, 0 if turn.token else turn.number) for turn in record.turns]


def _limits(folder: Path, record: Record, time: str | timedelta | None, memory: str) -> list[str]:
    """Return the options of sbatch for other limits than those of the script."""
    if record.scheduler is Scheduler.LOCAL and (time is not None or memory):
        raise UserError(tr("this machine has no limits of time and memory: resubmit() without them"))
    words = []
    if time is not None:
        length = parse_duration(time)
        script = (folder / records.SCRIPT).read_text(encoding="utf-8")
        chosen = re.search(r"^#SBATCH --qos=[\"']?([^\s\"']+)", script, re.MULTILINE)
        known = sites().get(record.site)
        qos = None if known is None else qos_of(known, chosen[1] if chosen is not None else "")
        if qos is not None and length > qos.time:
            text = "{time} is more than {qos} allows ({most}): use a shorter time, or submit() with qos="
            limit, most = short_duration(length), short_duration(qos.time)
            raise UserError(tr(text, time=limit, qos=qos.name, most=most))
        words.append(f"--time={slurm_duration(length)}")
    if memory:
        words.append(f"--mem={check_memory('memory', memory)}")
    return words
