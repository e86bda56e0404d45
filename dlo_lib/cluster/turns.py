"""One submission of some elements of a job: it is started, and asked how its elements are, at SLURM or on this machine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from dlo_lib.cluster import local, records, slurm
from dlo_lib.cluster.records import Record, Turn
from dlo_lib.cluster.script import STOPPED
from dlo_lib.cluster.site import Scheduler
from dlo_lib.cluster.states import ElementStatus, State
from dlo_lib.text import tr


def start(folder: Path, elements: tuple[int, ...], after: Path | None = None) -> None:
    """Submit these elements of the job in ``folder``, which is held, to begin when the job in ``after`` has completed."""
    record = records.read(folder)
    records.clear(folder, elements)
    if record.scheduler is Scheduler.LOCAL:
        turn = local.start(folder, elements, after)
    else:
        some = [f"--array={','.join(map(str, elements))}"] if len(elements) < len(record.settings) else []
        if after is not None:
            some += [f"--dependency=afterok:{records.read(after).turns[-1].number}", "--kill-on-invalid-dep=yes"]
        turn = Turn(slurm.submit(folder / records.SCRIPT, *some), elements)
    records.add_turn(folder, turn)


def statuses(folder: Path, record: Record, turn: Turn) -> dict[int, ElementStatus]:
    """How the elements of a turn are, now."""
    if record.scheduler is Scheduler.LOCAL:
        return local.statuses(folder, turn)
    return {element: _told(status) for element, status in _of_slurm(folder, turn).items()}


def _told(status: ElementStatus) -> ElementStatus:
    """A run that was told of the limit and stopped in time has not completed either."""
    if status.state is State.FAILED and status.exit_code == STOPPED:
        return replace(status, state=State.TIMEOUT, reason=tr("stopped before the limit, with a checkpoint"))
    return status


def _of_slurm(folder: Path, turn: Turn) -> dict[int, ElementStatus]:
    """From the queue while it knows, else from how the script ended, else from the accounting."""
    found = slurm.queue(turn.number)
    if any(one.state is State.PENDING for one in found.values()):
        starts = slurm.expected_starts(turn.number)
        found |= {key: replace(one, start=starts.get(key, "")) for key, one in found.items() if one.state is State.PENDING}
    missing = [element for element in turn.elements if element not in found]
    ended = {element: code for element in missing if (code := records.exit_code(folder, element)) is not None}
    known = slurm.history(turn.number) if len(ended) < len(missing) else {}
    for element in missing:
        if element in ended:
            state = State.COMPLETED if ended[element] == 0 else State.FAILED
            found[element] = ElementStatus(element, state, exit_code=ended[element])
        else:
            unknown = ElementStatus(element, State.LOST, tr("SLURM no longer knows of it"))
            found[element] = known.get(element, unknown)
    codes = {element: records.exit_code(folder, element) for element in turn.elements}
    return {
        element: replace(found[element], exit_code=codes[element]) if found[element].state.over else found[element]
        for element in turn.elements
    }
