"""The output of one rank, from the common output of all ranks.

``srun --label`` begins each line with the number of the task, and ``torchrun --tee`` with the number of the
rank on its node. With both, the task is the launcher of a node; all launchers start as many ranks.
"""

from __future__ import annotations

import re

from dlo_lib.errors import require_count

_TASK, _LOCAL = r" *(?P<task>\d+): ", r"\[\w*?(?P<local>\d+)\]:"


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
