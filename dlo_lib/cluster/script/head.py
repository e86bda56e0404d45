"""The options of sbatch in the head of a job script, each with its reason."""

from __future__ import annotations

from collections.abc import Collection

from dlo_lib.cluster.site import sbatch_options
from dlo_lib.cluster.site.description import Site
from dlo_lib.cluster.site.duration import slurm_duration
from dlo_lib.cluster.site.quoting import directive
from dlo_lib.cluster.site.request import Allocation


def head_options(
    want: Allocation,
    name: str,
    output: str,
    *,
    on_ranks: bool,
    torchrun: bool,
    array: str = "",
    signal: int | None = None,
    requeue: bool = False,
    tag: str = "",
) -> list[tuple[str, str]]:
    """Return the options as words for ``#SBATCH``, each with its reason.

    Args:
        want: the resources of the job.
        name: of the job.
        output: the file of its output.
        on_ranks: whether the program runs on every rank; otherwise one process starts it.
        torchrun: whether one launcher of a node starts the ranks.
        array: the elements of a sweep, in SLURM's form.
        signal: seconds before the time limit at which the script receives a signal; None: no signal.
        requeue: whether the job may go back into the queue.
        tag: ends the job's comment, by which it is found in the queue.

    Raises:
        UserError: options contradict each other, or the head of a script cannot hold a value.
    """
    gpus = want.gpus_per_node
    cores = want.cores * want.ranks_per_node if torchrun else want.cores
    nodes = "the same ranks on fewer nodes communicate faster" if on_ranks else "of one process"
    warned = f"{signal} s before the limit the run writes a checkpoint and stops"
    gpus_of_node = (gpu_option(want.site), gpus_of(want.site, gpus) if gpus else "", "GPUs of a node")
    rows: list[tuple[str, str | bool, str]] = [
        ("job-name", name, "the name in squeue"),
        ("account", want.account, "the account whose hours are used"),
        ("partition", want.partition or want.site.partition, "the nodes to choose from"),
        ("constraint", want.site.constraint, "only nodes with this GPU"),
        ("qos", want.qos, "its limits of time and size"),
        ("reservation", want.reservation, "nodes reserved for a course"),
        ("nodes", str(want.nodes), nodes),
        (
            "ntasks-per-node",
            str(want.ranks_per_node if on_ranks and not torchrun else 1),
            _who_starts(gpus, on_ranks, torchrun),
        ),
        gpus_of_node,
        ("cpus-per-task", str(cores), _whose_cores(gpus, torchrun)),
        ("hint", want.site.hint, "physical cores: two ranks on one core slow each other down"),
        ("time", slurm_duration(want.time), "a short job starts earlier, because it fits into gaps"),
        ("array", array, "one job for each element of the sweep"),
        ("signal", "" if signal is None else f"B:USR1@{signal}", warned),
        ("requeue", requeue, "the job may go back into the queue"),
        ("open-mode", "append", "a job that SLURM starts again keeps its output"),
        ("output", output, "its output, including errors"),
    ]
    rows = [row for row in rows if row[0] and row[1] and row[0] not in want.dropped]
    rows += _further(want, tag, {name for name, _, _ in rows})
    return [(directive(name, value), why) for name, value, why in rows]


def gpu_option(site: Site) -> str:
    """Return the option that requests the GPUs of a node; "" on nodes whose GPUs SLURM does not know."""
    return "" if site.gpu_option == "none" else site.gpu_option


def gpus_of(site: Site, gpus: int) -> str:
    """Return the value of that option for ``gpus`` GPUs of a node: ``gpu:a100:4``, or ``a100:4``."""
    typed = f"{site.gpu_type}:{gpus}" if site.gpu_type else str(gpus)
    return f"gpu:{typed}" if site.gpu_option == "gres" else typed


def _further(want: Allocation, tag: str, by_job: Collection[str]) -> list[tuple[str, str | bool, str]]:
    """Return the options of the site and of the call, besides those set ``by_job``, and the comment."""
    further = sbatch_options.merged(want.site.options, want.options, want.memory, by_job)
    comment = str(further.pop("comment", ""))
    rows = [(name, value, "set by the site or the call") for name, value in further.items()]
    if tag and "comment" not in want.dropped:
        return [*rows, ("comment", f"{comment} {tag}".strip(), "by which the job is found")]
    return [*rows, *[("comment", comment, "set by the site or the call")] * bool(comment)]


def _who_starts(gpus: int, on_ranks: bool, torchrun: bool) -> str:
    if torchrun:
        return "one launcher, which starts the ranks"
    if not on_ranks:
        return "one process"
    return "one rank per GPU" if gpus else "ranks of a node"


def _whose_cores(gpus: int, torchrun: bool) -> str:
    if not gpus:
        return "cores of a process"
    return (
        "the cores of its GPUs" if torchrun else "the cores of one GPU: a rank loads data while it computes"
    )
