"""The control group of a user of the Hub: the kernel's limits on memory, processor time and processes of all
that the user runs.

Reference: Documentation/admin-guide/cgroup-v1 and cgroup-v2.rst of the Linux kernel.
"""

from __future__ import annotations

from pathlib import Path

from dlo_lib.grading.sandbox.cgroups import ROOT

PERIOD_US = 100_000
PARENT = "dlo-hub"


def user_group(name: str, memory: int, processors: float, processes: int, root: Path = ROOT) -> list[Path]:
    """Create the control group of a user, or update its limits.

    Args:
        memory: in bytes; 0 is no limit.
        processors: 0 is no limit.

    Returns:
        the files into which a process writes its number to enter the group; none if this machine has no
        control groups that this process can write.
    """
    unified = (root / "cgroup.controllers").is_file()
    quota = int(processors * PERIOD_US)
    limits: dict[str, dict[str, str]]
    if unified:
        limits = {"": {"pids.max": str(processes)}}
        limits[""] |= {"memory.max": str(memory)} if memory else {}
        limits[""] |= {"cpu.max": f"{quota} {PERIOD_US}"} if quota else {}
    else:
        limits = {"pids": {"pids.max": str(processes)}}
        limits["memory"] = {"memory.limit_in_bytes": str(memory)} if memory else {}
        limits["cpu"] = {"cpu.cfs_quota_us": str(quota)} if quota else {}
    entries = []
    try:
        for controller, values in limits.items():
            parent = root / controller / PARENT
            parent.mkdir(exist_ok=True)
            if unified:
                for folder in (root, parent):
                    (folder / "cgroup.subtree_control").write_text("+memory +cpu +pids")
            group = parent / name
            group.mkdir(exist_ok=True)
            for file, value in values.items():
                (group / file).write_text(value)
            entries.append(group / "cgroup.procs")
    except OSError:
        return []
    return entries
