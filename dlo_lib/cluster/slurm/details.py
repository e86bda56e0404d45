"""A job of any user as the controller describes it, for programs that enter it while it runs."""

from __future__ import annotations

import re
from dataclasses import dataclass

from dlo_lib.cluster.slurm.answers import field


@dataclass(frozen=True)
class JobDetails:
    """What the controller knows of a job, or of an element of an array.

    Attributes:
        element: in its array; None if it is none.
        state: in SLURM's words.
        nodes: in SLURM's short form.
        gpus_per_node: the least number on a node.
    """

    element: int | None
    user: str
    user_id: int
    state: str
    reason: str
    nodes: str
    gpus_per_node: int
    tasks_per_node: int


def details_of(line: str) -> JobDetails:
    """Return what a line of ``scontrol --oneliner --details show job`` says."""
    owner = re.search(r" UserId=([^ (]*)\((\d+)\) GroupId=", line)
    gpus = [
        sum(map(int, re.findall(r"\bgpu(?::[^:(,]+)?:(\d+)", on_node)))
        for on_node in re.findall(r" Nodes=\S+ CPU_IDs=\S* Mem=\S* GRES=(\S*)", line)
    ]
    nodes, tasks = (int(re.sub(r"\D.*", "", field(line, name)) or 0) for name in ("NumNodes", "NumTasks"))
    element = field(line, "ArrayTaskId")
    return JobDetails(
        int(element) if element.isdigit() else None,
        owner[1] if owner else "",
        int(owner[2]) if owner else -1,
        field(line, "JobState"),
        field(line, "Reason"),
        field(line, "NodeList"),
        min(gpus, default=0),
        max(1, tasks // max(1, nodes)),
    )
