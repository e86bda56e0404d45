"""The output of a job: of an element, of one of its ranks, its first error, and as it appears.

``srun --label`` begins each line with the number of the task, and ``torchrun --tee`` with the number of the
rank on its node. With both, the task is the launcher of a node; all launchers start as many ranks.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from dlo_lib.errors import require_count

_TASK, _LOCAL = r" *(?P<task>\d+): ", r"\[\w*?(?P<local>\d+)\]:"
_RANK = r"\[rank\d+\]: "  # PyTorch begins the lines of a traceback with it
_LABEL = re.compile(rf"(?:{_TASK})?(?:{_RANK}|(?:{_LOCAL})?(?:{_RANK})?)")
_OF_A_LAUNCHER = ("torch.distributed.elastic.", "Signal")


def of_rank(text: str, rank: int, per_node: int = 0, tasks: bool = True) -> str:
    """Return the lines of ``rank`` without their labels; all lines if they have no labels and it is rank 0.

    Args:
        text: the output of a job.
        rank: the number of the rank among all ranks.
        per_node: ranks that each launcher starts; 0 if srun starts the ranks.
        tasks: whether srun labels the lines.
    """
    require_count("rank", rank, 0)
    pattern = re.compile((_TASK if tasks else "") + (_LOCAL if per_node else ""))
    if not tasks and not per_node:
        return text if rank == 0 else ""
    found = []
    for line in text.splitlines(keepends=True):
        label = pattern.match(line)
        if label is None:
            continue
        names = label.groupdict()
        node_or_rank = int(names.get("task") or 0)
        if rank == (node_or_rank * per_node + int(names["local"]) if per_node else node_or_rank):
            found.append(line[label.end() :])
    return "".join(found)


def first_error(text: str) -> str:
    """Return the first traceback in the output of several ranks that is not a consequence of another failure,
    without labels; "" if there is none.

    Programs that do not record their failures (``dlo_lib.rank_failures``) leave only this.
    """
    from dlo_lib.launch.failure import reports_broken_communication  # imports torch

    tracebacks: dict[str, list[str]] = {}  # by label, because the lines of ranks alternate
    for line in text.splitlines():
        found = _LABEL.match(line)
        label = found[0] if found else ""
        rest = line[len(label) :]
        if rest.startswith("Traceback (most recent call last):"):
            tracebacks[label] = [rest]
        elif label in tracebacks:
            tracebacks[label].append(rest)
            if rest and not rest.startswith(" "):  # the line of the exception is the last one
                whole = "\n".join(tracebacks.pop(label))
                if not rest.startswith(_OF_A_LAUNCHER) and not reports_broken_communication(rest):
                    return whole
    return ""


def appearing(file: Path, over: Callable[[], bool], pace: Callable[[], float]) -> Iterator[str]:
    """Yield the content of ``file`` in pieces as it appears, until ``over`` returns True.

    Args:
        pace: returns the seconds between two calls of ``over``, which may query the scheduler.
    """
    read = 0
    ended = False
    while True:
        if file.exists() and file.stat().st_size > read:
            with file.open("rb") as log:
                log.seek(read)
                data = log.read()
            read += len(data)
            yield data.decode(errors="replace")
        elif ended:
            return
        else:
            ended = over()
            if not ended:
                time.sleep(min(1.0, pace()))
