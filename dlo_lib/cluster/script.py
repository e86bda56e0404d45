"""The job script: resources, program and arguments in bash, from one template for all sites and launchers.

The options for SLURM are in the head, each with its reason. Below it the script starts the ranks: ``srun
python`` starts each rank (``dlo_lib.launch`` reads its number from SLURM's variables), ``srun torchrun``
starts one launcher per node. Without SLURM the same script starts the ranks itself.
"""

from __future__ import annotations

import enum
import shlex
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import jinja2

from dlo_lib.cluster import sbatch_options, software
from dlo_lib.cluster.duration import slurm_duration
from dlo_lib.cluster.request import Allocation
from dlo_lib.cluster.site import Scheduler, Site
from dlo_lib.cluster.work import OnRanks, Work
from dlo_lib.errors import UserError
from dlo_lib.stop import EXIT_STOPPED
from dlo_lib.text import tr

WARNING_S = 90
"""Seconds before the time limit at which a run is asked to stop: time for a step and the checkpoint."""


class Launcher(enum.Enum):
    """What starts the ranks of a node."""

    SRUN = "srun"
    TORCHRUN = "torchrun"


@dataclass(frozen=True)
class JobScript:
    """Everything that a script depends on.

    Attributes:
        elements: arguments of each element of a sweep; one entry without a sweep.
        at_once: number of elements that may run at the same time; None: all.
        requeue: when the time limit stops the job, it goes back into the queue.
        warning: seconds before the limit at which the run receives the signal.
        folder: the job's folder for output and exit statuses.
        python: the interpreter; None: the one of the environment that the script activates.
        head: lines at the top of the script.
        passes_arguments: whether the script passes its arguments to the program.
        module_path: folders of the copied code, which come first in the module path.
        out: value of the program's ``--out``, in bash.
    """

    name: str
    allocation: Allocation
    work: Work
    arguments: tuple[str, ...] = ()
    elements: tuple[tuple[str, ...], ...] = ((),)
    launcher: Launcher = Launcher.SRUN
    at_once: int | None = None
    requeue: bool = False
    warning: int = WARNING_S
    folder: Path | None = None
    python: str | None = None
    head: tuple[str, ...] = ()
    passes_arguments: bool = False
    module_path: tuple[str, ...] = ()
    out: str = ""

    @property
    def is_array(self) -> bool:
        """Whether the job is an array."""
        return len(self.elements) > 1

    @property
    def _has_warning_time(self) -> bool:
        """Whether there is time before the warning."""
        return self.allocation.time.total_seconds() > self.warning

    @property
    def _stops_early(self) -> bool:
        """Whether the program ends with a checkpoint when it is asked to."""
        return self.requeue or self.work.trains

    @property
    def _gets_signal(self) -> bool:
        """Whether the script receives a signal before the limit, which it passes to the ranks.

        torchrun would end its ranks.
        """
        slurm = self.allocation.site.scheduler is Scheduler.SLURM
        return slurm and self._stops_early and self._has_warning_time and not self._torchrun

    @property
    def _torchrun(self) -> bool:
        """Whether torchrun starts the ranks; without SLURM it does if there are several ranks."""
        local = self.allocation.site.scheduler is Scheduler.LOCAL
        return isinstance(self.work, OnRanks) and (
            self.allocation.ranks > 1 if local else self.launcher is Launcher.TORCHRUN
        )

    def text(self) -> str:
        """Return the script.

        Raises:
            UserError: options contradict each other.
        """
        if self.requeue and self.launcher is Launcher.TORCHRUN:
            raise UserError(
                tr("requeue does not work with torchrun, which ends its ranks at any signal: use srun")
            )
        if self.requeue and not self._has_warning_time:
            limit = slurm_duration(self.allocation.time)
            raise UserError(
                tr(
                    "the limit {limit} leaves no time before its warning ({warning} s): use a longer time=",
                    warning=self.warning,
                    limit=limit,
                )
            )
        site = self.allocation.site
        slurm = site.scheduler is Scheduler.SLURM
        launch = self._ranks(slurm) if isinstance(self.work, OnRanks) else self._once(slurm)
        return _template().render(
            head=self.head,
            options=self._options() if slurm else [],
            software=self._software(slurm),
            variables=self._variables(slurm),
            slurm=slurm,
            folder=None if self.folder is None else shlex.quote(str(self.folder)),
            arguments=shlex.join(self.arguments),
            elements=[shlex.join(element) for element in self.elements] if any(self.elements) else [],
            passes_arguments=self.passes_arguments,
            out=self.out,
            uses_rendezvous=slurm and self._torchrun,
            launch=launch,
            requeue=self.requeue,
            stops_early=self._stops_early,
            resumes=self.work.trains and "--resume" not in self.arguments,
            progress=self._progress(),
            gets_signal=self._gets_signal,
            stopped=EXIT_STOPPED,
        )

    def _options(self) -> list[tuple[str, str]]:
        """Return the options of the head, each with its reason."""
        want, site = self.allocation, self.allocation.site
        torchrun = self._torchrun
        tasks = want.ranks_per_node if isinstance(self.work, OnRanks) and not torchrun else 1
        cores = want.cores * want.ranks_per_node if torchrun else want.cores
        signal_reason = f"{self.warning} s before the limit the run writes a checkpoint and stops"
        starts = (
            "one launcher, which starts the ranks"
            if torchrun
            else ("one rank per GPU" if want.gpus_per_node else "ranks of a node")
            if isinstance(self.work, OnRanks)
            else "one process"
        )
        share = (
            "the cores of its GPUs"
            if torchrun
            else "the cores of one GPU: a rank loads data while it computes"
        )
        chosen = f"0-{len(self.elements) - 1}{f'%{self.at_once}' if self.at_once else ''}"
        rows = [
            (f"--job-name={self.name}", "the name in squeue"),
            (f"--account={want.account}", "the account whose hours are used"),
            (f"--partition={site.partition}", "the nodes to choose from"),
            (f"--constraint={site.constraint}", "only nodes with this GPU"),
            (f"--qos={want.qos}", "its limits of time and size"),
            (f"--reservation={want.reservation}", "nodes reserved for a course"),
            (f"--nodes={want.nodes}", "the same GPUs on fewer nodes communicate faster"),
            (f"--ntasks-per-node={tasks}", starts),
            (f"--gres={gres_of(site, want.gpus_per_node)}", "GPUs of a node"),
            (f"--cpus-per-task={cores}", share if want.gpus_per_node else "cores of a process"),
            (f"--hint={site.hint}", "physical cores: two ranks on one core slow each other down"),
            (f"--time={slurm_duration(want.time)}", "a short job starts earlier, because it fits into gaps"),
            (f"--array={chosen}", "one job for each element of the sweep"),
            (f"--signal=B:USR1@{self.warning}", signal_reason),
            ("--requeue", "the job may go back into the queue"),
            ("--open-mode=append", "SLURM starts a job again when a node fails; the output is kept"),
            (f"--output={self._output()}", "its output, including errors"),
        ]
        left_out = {
            "--array": not self.is_array,
            "--signal": not self._gets_signal,
            "--requeue": not self.requeue,
            "--gres": want.gpus_per_node == 0,
        }
        rows = [
            (option, why)
            for option, why in rows
            if not option.endswith("=") and not left_out.get(option.partition("=")[0])
        ]
        by_job = {option.removeprefix("--").partition("=")[0] for option, _ in rows}
        further = sbatch_options.merged(site.options, want.options, want.memory, by_job)
        return rows + [(option, "set by the site or the call") for option in sbatch_options.lines(further)]

    def _output(self) -> str:
        if self.folder is not None:
            path = self.folder / "logs" / ("%a.out" if self.is_array else "0.out")
            return f'"{path}"' if " " in str(path) else str(path)
        return f"{self.name}-%A_%a.out" if self.is_array else f"{self.name}-%j.out"

    def _progress(self) -> str:
        """Return the file in which the run records its progress, in bash."""
        if self.folder is not None:
            return '"$job/progress/$element"'
        return f'"${{SLURM_SUBMIT_DIR:-$PWD}}/{self.name}-${{SLURM_JOB_ID:-0}}.progress"'

    def _variables(self, slurm: bool) -> list[tuple[str, str, str]]:
        """Return the variables exported to the ranks: name, value, reason."""
        site, ranks = self.allocation.site, self.allocation.ranks
        rows = [("PYTHONUNBUFFERED", "1", "output of a rank appears at once")]
        if self.module_path:
            path = ":".join(map(shlex.quote, self.module_path))
            rows.append(("PYTHONPATH", f'{path}"${{PYTHONPATH:+:$PYTHONPATH}}"', "the code as submitted"))
        if slurm and isinstance(self.work, OnRanks):
            rows.append(
                (
                    "SRUN_CPUS_PER_TASK",
                    '"${SLURM_CPUS_PER_TASK:-1}"',
                    "srun does not take it from the job (SLURM 22.05)",
                )
            )
        if self._torchrun:
            share = (
                f"SLURM_CPUS_PER_TASK / {self._on_node}" if slurm else f"($(nproc) + {ranks - 1}) / {ranks}"
            )
            rows.append(
                ("OMP_NUM_THREADS", f'"${{OMP_NUM_THREADS:-$(({share}))}}"', "torchrun's default is 1")
            )
        if slurm and not site.network:
            rows.append(("HF_HUB_OFFLINE", "1", "compute nodes have no internet access"))
        if slurm and site.data not in ("", "$DSDIR"):
            rows.append(("DSDIR", f'"{site.data}"', "shared models and data sets"))
        if slurm and site.interface:
            rows.append(("GLOO_SOCKET_IFNAME", site.interface, "the network between the nodes"))
        return rows + [
            (name, shlex.quote(value), "set by the site") for name, value in site.environment.items() if slurm
        ]

    @property
    def _names_ranks(self) -> bool:
        """Whether each line of output has the number of its rank (``logs``)."""
        return self.folder is not None and self.allocation.ranks > 1

    @property
    def _label(self) -> str:
        return "--label " if self._names_ranks else ""

    @property
    def _tee(self) -> str:
        return "--tee=3 " if self._names_ranks else ""

    @property
    def _on_node(self) -> str:
        """The number of ranks of a node, in bash."""
        alone = self.allocation.ranks_per_node
        return "${SLURM_GPUS_ON_NODE:-1}" if self.allocation.gpus_per_node else str(alone)

    def _software(self, slurm: bool) -> list[str]:
        setup = self.allocation.setup
        if slurm:
            return software.lines(self.allocation.site, setup, course=self.python is None)
        return ["", *setup] if setup else []

    def _container(self, slurm: bool) -> str:
        want = self.allocation
        gpus, folder = want.gpus_per_node > 0, self.folder is not None
        return software.container(want.site, gpus, folder) if slurm else ""

    def _once(self, slurm: bool) -> str:
        assert not isinstance(self.work, OnRanks)
        return self._container(slurm) + shlex.join(self.work.command)

    def _ranks(self, slurm: bool) -> str:
        assert isinstance(self.work, OnRanks)
        own = self.python is None or (slurm and self.allocation.site.has_software)
        python = self._container(slurm) + ("python" if own else shlex.quote(str(self.python)))
        program, interpreter = shlex.join(self.work.program), ""
        if self.module_path and program.startswith("-m ") and not program.startswith("-m dlo_lib."):
            # Without -P the working directory comes first, and with it the code of today.
            if not self._torchrun:
                program = f"-P {program}"
            else:
                interpreter, program = "--no-python ", f"{python} -P {program}"
        if slurm and not self._torchrun:
            return f"srun --kill-on-bad-exit=1 {self._label}{python} {program}"
        if slurm:
            where = '--rdzv-id="$SLURM_JOB_ID" --rdzv-backend=c10d --rdzv-endpoint="$first_node:$port"'
            nodes = f'--nnodes="$SLURM_JOB_NUM_NODES" --nproc-per-node="{self._on_node}"'
            return (
                f"srun --kill-on-bad-exit=1 {self._label}{python} -m torch.distributed.run "
                f"{self._tee}{interpreter}\\\n  {nodes} \\\n"
                f"  {where} \\\n  {program}"
            )
        if not self._torchrun:
            return f"{python} {program}"
        return (
            f"{python} -m torch.distributed.run --standalone {self._tee}{interpreter}"
            f"--nproc-per-node={self.allocation.ranks} "
            f"{program}"
        )


def gres_of(site: Site, gpus: int) -> str:
    """Return the value of ``--gres`` for ``gpus`` GPUs of a node."""
    return f"gpu:{site.gpu_type}:{gpus}" if site.gpu_type else f"gpu:{gpus}"


@cache
def _template() -> jinja2.Template:
    loader = jinja2.FileSystemLoader(Path(__file__).parent / "templates")
    settings = {
        "trim_blocks": True,
        "lstrip_blocks": True,
        "keep_trailing_newline": True,
        "undefined": jinja2.StrictUndefined,
    }
    return jinja2.Environment(loader=loader, autoescape=False, **settings).get_template("job.sh.j2")  # type: ignore[arg-type]
