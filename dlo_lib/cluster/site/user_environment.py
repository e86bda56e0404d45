"""Options that sbatch reads from the environment of the user, such as ``SBATCH_ACCOUNT``.

sbatch prefers a variable to the same option in the head of a script. A job whose cost was shown for one
account would use another one. So a variable whose option the script sets does not reach sbatch. The others
apply, and the line with the cost shows them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

_SET_IN_SCRIPT = re.compile(r"^#SBATCH --([a-z][a-z-]*)", re.MULTILINE)
_GPUS = ("GRES", "GPUS", "GPUS_PER_NODE", "GPUS_PER_SOCKET", "GPUS_PER_TASK", "TRES_PER_TASK")
_MEMORY = ("MEM_PER_CPU", "MEM_PER_GPU", "MEM_PER_NODE")
_REQUEUE = ("REQUEUE", "NO_REQUEUE")
_SPECIAL = {
    "constraint": ("CONSTRAINT", "CLUSTER_CONSTRAINT"),
    "core-spec": ("CORE_SPEC", "THREAD_SPEC"),
    "cpus-per-task": ("CPUS_PER_TASK", "CPUS_PER_GPU", "TRES_PER_TASK"),
    "exclusive": ("EXCLUSIVE",),
    "gpus-per-node": _GPUS,
    "gres": _GPUS,
    "hint": ("HINT", "THREADS_PER_CORE"),
    "mem": _MEMORY,
    "mem-per-cpu": _MEMORY,
    "mem-per-gpu": _MEMORY,
    "output": ("OUTPUT", "ERROR"),
    "oversubscribe": ("EXCLUSIVE",),
    "bb": ("BURST_BUFFER",),
    "cpu-freq": ("CPU_FREQ_REQ",),
    "no-requeue": _REQUEUE,
    "requeue": _REQUEUE,
    "switches": ("REQ_SWITCH", "WAIT4SWITCH"),
    "thread-spec": ("CORE_SPEC", "THREAD_SPEC"),
    "threads-per-core": ("THREADS_PER_CORE", "HINT"),
    "time": ("TIMELIMIT",),
}
"""Options of a script, and the variables (without ``SBATCH_``) that set the same thing under another name."""

_NEVER = ("ARRAY_INX", "CLUSTERS", "ERROR", "INPUT", "WAIT")
"""Variables that no job of ``submit`` can honour: its elements and its output are files of its folder, a
submission returns at once, and the cluster is that of all commands of SLURM (``SLURM_CLUSTERS``)."""

_NO_OPTION = ("SBATCH_DEBUG",)


def for_script(environment: Mapping[str, str], script: str) -> dict[str, str]:
    """Return ``environment`` without the variables of sbatch whose options ``script`` sets."""
    left_out = {f"SBATCH_{name}" for name in _NEVER}
    for option in _SET_IN_SCRIPT.findall(script):
        plain = option.replace("-", "_").upper()
        left_out |= {f"SBATCH_{name}" for name in _SPECIAL.get(option, (plain,))}
    return {name: value for name, value in environment.items() if name not in left_out}


def honoured(environment: Mapping[str, str], script: str) -> list[str]:
    """Return the variables that add options to those of ``script``, such as ``SBATCH_QOS=long``, in order."""
    found = sorted(name for name in for_script(environment, script) if name.startswith("SBATCH_"))
    return [f"{name}={environment[name]}" for name in found if name not in _NO_OPTION]
