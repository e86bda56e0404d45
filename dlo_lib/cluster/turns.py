"""One submission of some elements of a job, at SLURM or on this machine: start it, and query its elements."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from dlo_lib.cluster import causes, dependency, endings, local, records, slurm
from dlo_lib.cluster.dependency import Dependency
from dlo_lib.cluster.records import Record, Turn
from dlo_lib.cluster.site import Scheduler
from dlo_lib.cluster.states import ElementStatus, State, stopped_early
from dlo_lib.errors import UserError
from dlo_lib.text import tr


def start(folder: Path, elements: tuple[int, ...], after: Dependency | None = None) -> None:
    """Submit these elements of the job in ``folder``, whose lock is held.

    They start when the job in ``after`` has ended as wanted.
    """
    record = records.read(folder)
    records.clear(folder, elements)
    if record.scheduler is Scheduler.LOCAL:
        turn = local.start(folder, elements, after)
    else:
        some = [f"--array={','.join(map(str, elements))}"] if len(elements) < len(record.settings) else []
        if after is not None:
            earlier = records.read(after.folder)
            _check_here(earlier)
            some += dependency.words(after.kind, earlier, current(after.folder, earlier))
        number = slurm.submit(folder / records.SCRIPT, *some)
        turn = Turn(number, elements, cluster=slurm.cluster_name())
    records.add_turn(folder, turn)


def current(folder: Path, record: Record) -> list[ElementStatus]:
    """Return the status of each element of a job, from the record if all have ended."""
    if record.over is not None:
        return list(record.over)
    found: dict[int, ElementStatus] = {}
    for turn in record.turns:  # later submissions replace elements of earlier ones
        found |= statuses(folder, record, turn)
    return [found[element] for element in sorted(found)]


def statuses(folder: Path, record: Record, turn: Turn) -> dict[int, ElementStatus]:
    """Return the current statuses of the elements of a turn."""
    found = _statuses(folder, record, turn)
    return {element: causes.with_cause(folder, status) for element, status in found.items()}


def _statuses(folder: Path, record: Record, turn: Turn) -> dict[int, ElementStatus]:
    if record.scheduler is Scheduler.LOCAL:
        return local.statuses(folder, turn)
    if elsewhere(turn):
        text = tr("it is a job of the cluster {cluster}: ask there", cluster=turn.cluster)
        return {element: ElementStatus(element, State.UNKNOWN, text) for element in turn.elements}
    found = _of_slurm(folder, turn, record.queue_name)
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
    return bool(turn.cluster) and turn.cluster != slurm.cluster_name()


def _of_slurm(folder: Path, turn: Turn, name: str) -> dict[int, ElementStatus]:
    """Return the statuses from the queue, else from the scripts' exit statuses, else from the accounting."""
    found = slurm.queue(turn.number, name)
    missing = [element for element in turn.elements if element not in found]
    ended = {element: code for element in missing if (code := records.exit_code(folder, element)) is not None}
    known = slurm.history(turn.number, name) if len(ended) < len(missing) else {}
    for element in missing:
        told = endings.of_forgotten(folder / "logs" / f"{element}.out", element, ended.get(element))
        if element in known:
            found[element] = known[element]
        elif told is not None:
            found[element] = told
        elif element in ended:
            state = State.COMPLETED if ended[element] == 0 else State.FAILED
            found[element] = ElementStatus(element, state, exit_code=ended[element])
        else:
            text = tr(
                "SLURM no longer knows it, and its script did not end: its node has failed, or it was killed"
            )
            found[element] = ElementStatus(element, State.LOST, text)
    codes = {element: records.exit_code(folder, element) for element in turn.elements}
    return {
        element: replace(found[element], exit_code=codes[element])
        if found[element].state.over
        else found[element]
        for element in turn.elements
    }
