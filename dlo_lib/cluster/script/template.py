"""The job script: resources, program and arguments in bash, from one template for all sites and launchers.

The options for SLURM are in the head, each with its reason. Below it the script starts the ranks: ``srun
python`` starts each rank (``dlo_lib.launch`` reads its number from SLURM's variables), ``srun torchrun``
starts one launcher per node. Without SLURM the same script starts the ranks itself.
"""

from __future__ import annotations

import enum
import shlex
import signal
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import jinja2

from dlo_lib.base.errors import UserError, require_count
from dlo_lib.base.interpreter import LIBRARY
from dlo_lib.base.progress import DECIDES
from dlo_lib.base.stop import EXIT_STOPPED
from dlo_lib.base.text import tr
from dlo_lib.cluster.script import software
from dlo_lib.cluster.script.head import head_options
from dlo_lib.cluster.script.launch_command import LaunchCommand
from dlo_lib.cluster.script.work import OnRanks, Work
from dlo_lib.cluster.site.description import Scheduler
from dlo_lib.cluster.site.duration import slurm_duration
from dlo_lib.cluster.site.quoting import expanded, output_pattern
from dlo_lib.cluster.site.request import Allocation

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
        library: the folder of the copied library; "": there is none.
        out: value of the program's ``--out``, in bash.
        default_out: the same, unless the arguments that the script passes have another one.
        tag: ends the job's comment in SLURM, by which it is found; "": no comment.
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
    library: str = ""
    out: str = ""
    tag: str = ""
    default_out: str = ""

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
        wanted = slurm and "signal" not in self.allocation.dropped
        return wanted and self._stops_early and self._has_warning_time and not self._torchrun

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
        if self.at_once is not None:
            require_count("at_once", self.at_once)
        site = self.allocation.site
        slurm = site.scheduler is Scheduler.SLURM
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
            in_array=self.is_array,
            out=self.out,
            default_out=self.default_out,
            ended_by_signal=128 + signal.SIGUSR1,
            uses_rendezvous=slurm and self._torchrun,
            launch=self._launch.text(),
            requeue=self.requeue,
            stops_early=self._stops_early,
            resumes=self.work.trains and "--resume" not in self.arguments,
            progress=self._progress(),
            gets_signal=self._gets_signal,
            stopped=EXIT_STOPPED,
        )

    def _options(self) -> list[tuple[str, str]]:
        """Return the options of the head, each with its reason."""
        last = len(self.elements) - 1
        return head_options(
            self.allocation,
            self.name,
            self._output(),
            on_ranks=isinstance(self.work, OnRanks),
            torchrun=self._torchrun,
            array=f"0-{last}{f'%{self.at_once}' if self.at_once else ''}" if self.is_array else "",
            signal=self.warning if self._gets_signal else None,
            requeue=self.requeue,
            tag=self.tag,
        )

    def _output(self) -> str:
        file = "%a.out" if self.is_array else "0.out"
        if self.folder is not None:
            return output_pattern(self.folder / "logs", file)
        return f"{self.name}-%A_%a.out" if self.is_array else f"{self.name}-%j.out"

    def _progress(self) -> str:
        """Return the file in which the run records its progress, in bash."""
        if self.folder is not None:
            return '"$job/progress/$element"'
        return expanded(f"${{SLURM_SUBMIT_DIR:-$PWD}}/{self.name}-${{SLURM_JOB_ID:-0}}.progress")

    def _variables(self, slurm: bool) -> list[tuple[str, str, str]]:
        """Return the variables exported to the ranks: name, value, reason."""
        site, ranks = self.allocation.site, self.allocation.ranks
        want = self.allocation
        of_site = site.environment if slurm else {}
        given = {
            **{name: (value, "set by the site") for name, value in of_site.items()},
            **{name: (value, "set by the call") for name, value in want.env.items()},
        }
        rows = [("PYTHONUNBUFFERED", "1", "output of a rank appears at once")]
        if self._stops_early and isinstance(self.work, OnRanks):
            rows.append((DECIDES, "1", "ranks that stop have status 0, without alarms; this script has 75"))
        if slurm:
            rows += [
                ("SLURM_EXPORT_ENV", "ALL", "srun passes these variables on, also with --export=NONE"),
                ("SRUN_EXPORT_ENV", "ALL", "the same, if the shell that submits sets it"),
            ]
        if slurm and isinstance(self.work, OnRanks) and "cpus-per-task" not in want.dropped:
            rows.append(
                (
                    "SRUN_CPUS_PER_TASK",
                    '"${SLURM_CPUS_PER_TASK:-1}"',
                    "srun does not take it from the job (SLURM 22.05)",
                )
            )
        if self._torchrun:
            cores = "SLURM_CPUS_PER_TASK"
            if "cpus-per-task" in want.dropped:
                cores = "${SLURM_CPUS_ON_NODE:-1}"
            share = (
                f"{cores} / {self._launch.ranks_on_node}" if slurm else f"($(nproc) + {ranks - 1}) / {ranks}"
            )
            rows.append(
                ("OMP_NUM_THREADS", f'"${{OMP_NUM_THREADS:-$(({share}))}}"', "torchrun's default is 1")
            )
        if slurm and not site.network:
            rows.append(("HF_HUB_OFFLINE", "1", "compute nodes have no internet access"))
        if slurm and site.data not in ("", "$DSDIR"):
            rows.append(("DSDIR", expanded(site.data), "shared models and data sets"))
        if slurm and site.interface:
            rows.append(("GLOO_SOCKET_IFNAME", shlex.quote(site.interface), "the network between the nodes"))
        rows = [row for row in rows if row[0] not in given]
        rows = [(name, shlex.quote(value), why) for name, (value, why) in given.items()] + rows
        if self.library:
            rows.append((LIBRARY, shlex.quote(self.library), "the library as submitted"))
        if self.module_path:  # last, because a variable of the site or the call comes after the copied code
            path = ":".join(map(shlex.quote, self.module_path))
            rows.append(("PYTHONPATH", f'{path}"${{PYTHONPATH:+:$PYTHONPATH}}"', "the code as submitted"))
        return rows

    def _software(self, slurm: bool) -> list[str]:
        setup = self.allocation.setup
        if slurm:
            return software.lines(self.allocation.site, setup, course=self.python is None)
        return ["", *setup] if setup else []

    @property
    def _launch(self) -> LaunchCommand:
        in_folder = self.folder is not None
        return LaunchCommand(
            self.work, self.allocation, self._torchrun, self.python, self.module_path, in_folder
        )


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
