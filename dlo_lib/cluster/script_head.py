"""The options of sbatch in the head of a job script, each with its reason."""

from __future__ import annotations

from collections.abc import Sequence

from dlo_lib.cluster import sbatch_options
from dlo_lib.cluster.duration import slurm_duration
from dlo_lib.cluster.request import Allocation
from dlo_lib.cluster.site import Site


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
) -> list[tuple[str, str]]:
    """Return the options, each with its reason.

    Args:
        name: of the job.
        output: the file of its output.
        on_ranks: whether the program runs on every rank; otherwise one process starts it.
        torchrun: whether one launcher of a node starts the ranks.
        array: the elements of a sweep, in SLURM's form.
        signal: seconds before the time limit at which the script receives a signal; None: no signal.
        requeue: whether the job may go back into the queue.

    Raises:
        UserError: options contradict each other.
    """
    site, gpus = want.site, want.gpus_per_node
    cores = want.cores * want.ranks_per_node if torchrun else want.cores
    rows = [
        (f"--job-name={name}", "the name in squeue"),
        (f"--account={want.account}", "the account whose hours are used"),
        (f"--partition={site.partition}", "the nodes to choose from"),
        (f"--constraint={site.constraint}", "only nodes with this GPU"),
        (f"--qos={want.qos}", "its limits of time and size"),
        (f"--reservation={want.reservation}", "nodes reserved for a course"),
        (f"--nodes={want.nodes}", "the same GPUs on fewer nodes communicate faster"),
        (f"--ntasks-per-node={want.ranks_per_node if on_ranks and not torchrun else 1}",
         _who_starts(gpus, on_ranks, torchrun)),
        (f"--gres={gres_of(site, gpus)}" if gpus else "--gres=", "GPUs of a node"),
        (f"--cpus-per-task={cores}", _whose_cores(gpus, torchrun)),
        (f"--hint={site.hint}", "physical cores: two ranks on one core slow each other down"),
        (f"--time={slurm_duration(want.time)}", "a short job starts earlier, because it fits into gaps"),
        (f"--array={array}", "one job for each element of the sweep"),
        ("--signal=" if signal is None else f"--signal=B:USR1@{signal}",
         f"{signal} s before the limit the run writes a checkpoint and stops"),
        *[("--requeue", "the job may go back into the queue")] * requeue,
        ("--open-mode=append", "SLURM starts a job again when a node fails; the output is kept"),
        (f"--output={output}", "its output, including errors"),
    ]  # fmt: skip
    rows = [(option, why) for option, why in rows if not option.endswith("=")]
    return [*rows, *_further(want, [option for option, _ in rows])]


def gres_of(site: Site, gpus: int) -> str:
    """Return the value of ``--gres`` for ``gpus`` GPUs of a node."""
    return f"gpu:{site.gpu_type}:{gpus}" if site.gpu_type else f"gpu:{gpus}"


def _further(want: Allocation, chosen: Sequence[str]) -> list[tuple[str, str]]:
    """Return the options of the site and of the call, besides those ``chosen`` by the job."""
    by_job = {option.removeprefix("--").partition("=")[0] for option in chosen}
    further = sbatch_options.merged(want.site.options, want.options, want.memory, by_job)
    return [(option, "set by the site or the call") for option in sbatch_options.lines(further)]


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
