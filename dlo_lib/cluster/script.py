"""The job script: what an allocation, a program and its arguments look like in bash, by one template for every site and launcher.

What is said to SLURM stands in the head, each option with its reason, as somebody would write it who knows the site. Below it ranks are
started: ``srun python`` starts each (``dlo_lib.launch`` reads who it is from SLURM's variables), ``srun torchrun`` one launcher a node.
Without SLURM the same script starts the ranks itself.
"""

from __future__ import annotations

import enum
import shlex
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import jinja2

from dlo_lib.cluster.duration import slurm_duration
from dlo_lib.cluster.request import Allocation
from dlo_lib.cluster.site import Scheduler
from dlo_lib.cluster.work import OnRanks, Work
from dlo_lib.errors import UserError
from dlo_lib.text import tr

STOPPED = 75
"""What a script ends with when its run was told of the limit and stopped with a checkpoint: "try again" (sysexits.h)."""
WARNING_S = 90
"""How long before the time limit a run is asked to stop: time for the step and the checkpoint."""


class Launcher(enum.Enum):
    """Who starts the ranks of a node."""

    SRUN = "srun"
    TORCHRUN = "torchrun"


@dataclass(frozen=True)
class JobScript:
    """All that a script depends on.

    elements: the arguments of each element of a sweep, one without a sweep. at_once: elements that may run at the same time; None: all.
    requeue: stopped by the time limit, it goes back into the queue. warning: seconds before the limit at which it is told.
    folder: where the job leaves its output and how it ended. python: the interpreter; None: the one of the environment it activates.
    head: lines above all else. passes_arguments: those of the script itself are passed on. out: ``--out`` of the program, in bash.
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
    out: str = ""

    @property
    def is_array(self) -> bool:
        return len(self.elements) > 1

    @property
    def _in_time(self) -> bool:
        """Whether there is time before the warning."""
        return self.allocation.time.total_seconds() > self.warning

    @property
    def _is_told(self) -> bool:
        """Whether the script itself is told of the limit, and then says how the run ended; else at most the ranks are."""
        return self.requeue or (self.work.trains and self.folder is not None and self._in_time and not self._torchrun)

    @property
    def _torchrun(self) -> bool:
        """Whether torchrun starts the ranks; without SLURM it does wherever there are several."""
        local = self.allocation.site.scheduler is Scheduler.LOCAL
        return isinstance(self.work, OnRanks) and (self.allocation.ranks > 1 if local else self.launcher is Launcher.TORCHRUN)

    def text(self) -> str:
        """The script.

        Raises:
            UserError: what cannot be put together.
        """
        if self.requeue and self.launcher is Launcher.TORCHRUN:
            raise UserError(tr("requeue does not go with torchrun, which ends its ranks at any signal: use srun"))
        if self.requeue and not self._in_time:
            limit = slurm_duration(self.allocation.time)
            raise UserError(tr("the run would be told {warning} s before {limit}: use a longer time=", warning=self.warning, limit=limit))
        site = self.allocation.site
        slurm = site.scheduler is Scheduler.SLURM
        launch = shlex.join(self.work.command) if not isinstance(self.work, OnRanks) else self._ranks(slurm)
        return _template().render(
            head=self.head,
            options=self._options() if slurm else [],
            modules=site.modules if slurm else (),
            variables=self._variables(slurm),
            slurm=slurm,
            activates=self.python is None,
            folder=None if self.folder is None else shlex.quote(str(self.folder)),
            arguments=shlex.join(self.arguments),
            elements=[shlex.join(element) for element in self.elements] if any(self.elements) else [],
            passes_arguments=self.passes_arguments,
            out=self.out,
            meets=slurm and self._torchrun,
            launch=launch,
            requeue=self.requeue,
            is_told=self._is_told and slurm,
            stopped=STOPPED,
        )

    def _options(self) -> list[tuple[str, str]]:
        """The head's options, each with its reason."""
        want, site = self.allocation, self.allocation.site
        torchrun = self._torchrun
        tasks = want.ranks_per_node if isinstance(self.work, OnRanks) and not torchrun else 1
        cores = want.cores * want.ranks_per_node if torchrun else want.cores
        told = f"{self.warning} s before the limit {'this script' if self._is_told else 'each rank'} is told: a checkpoint, and stop"
        starts = (
            "one launcher, which starts the ranks" if torchrun else "one rank per GPU" if isinstance(self.work, OnRanks) else "one process"
        )
        share = "the cores of its GPUs" if torchrun else "the cores of one GPU: a rank reads data beside computing"
        chosen = f"0-{len(self.elements) - 1}{f'%{self.at_once}' if self.at_once else ''}"
        rows = [
            (f"--job-name={self.name}", "what squeue shows"),
            (f"--account={want.account}", "whose hours are used"),
            (f"--partition={site.partition}", "the nodes to choose from"),
            (f"--constraint={site.constraint}", "and of these, the ones with this card"),
            (f"--qos={want.qos}", "its limits of time and size"),
            (f"--reservation={want.reservation}", "nodes kept free for a course"),
            (f"--nodes={want.nodes}", "the same GPUs on fewer nodes talk faster"),
            (f"--ntasks-per-node={tasks}", starts),
            (f"--gres=gpu:{want.gpus_per_node}", "GPUs of a node"),
            (f"--cpus-per-task={cores}", share if want.gpus_per_node else "cores of the process"),
            (f"--hint={site.hint}", "physical cores: two ranks on one core slow each other down"),
            (f"--time={slurm_duration(want.time)}", "a short job begins earlier: it fits into gaps"),
            (f"--array={chosen}", "one job for each element of the sweep"),
            (f"--signal={'B:' if self._is_told else ''}USR1@{self.warning}", told),
            ("--requeue", "the same job may go back into the queue"),
            ("--open-mode=append", "and its output goes on where it stopped"),
            (f"--output={self._output()}", "what it prints, errors too"),
        ]
        left_out = {
            "--array": not self.is_array,
            "--signal": not (self.requeue or (self.work.trains and self._in_time)) or torchrun,
            "--requeue": not self.requeue,
            "--open-mode": not self.requeue,
            "--gres": want.gpus_per_node == 0,
        }
        return [(option, why) for option, why in rows if not option.endswith("=") and not left_out.get(option.partition("=")[0])]

    def _output(self) -> str:
        if self.folder is not None:
            path = self.folder / "logs" / ("%a.out" if self.is_array else "0.out")
            return f'"{path}"' if " " in str(path) else str(path)
        return f"{self.name}-%A_%a.out" if self.is_array else f"{self.name}-%j.out"

    def _variables(self, slurm: bool) -> list[tuple[str, str, str]]:
        """Exported to the ranks: name, value, reason."""
        site, ranks = self.allocation.site, self.allocation.ranks
        rows = [("PYTHONUNBUFFERED", "1", "what a rank prints is seen at once")]
        if slurm and isinstance(self.work, OnRanks):
            rows.append(("SRUN_CPUS_PER_TASK", '"${SLURM_CPUS_PER_TASK:-1}"', "srun no longer takes it from the job (SLURM 22.05)"))
        if self._torchrun:
            share = "SLURM_CPUS_PER_TASK / ${SLURM_GPUS_ON_NODE:-1}" if slurm else f"($(nproc) + {ranks - 1}) / {ranks}"
            rows.append(("OMP_NUM_THREADS", f'"${{OMP_NUM_THREADS:-$(({share}))}}"', "else torchrun gives a rank one"))
        if slurm and not site.network:
            rows.append(("HF_HUB_OFFLINE", "1", "compute nodes reach nothing outside: look for no newer files"))
        if slurm and site.data not in ("", "$DSDIR"):
            rows.append(("DSDIR", f'"{site.data}"', "where models and data sets lie for everybody"))
        if slurm and site.interface:
            rows.append(("GLOO_SOCKET_IFNAME", site.interface, "the network between the nodes"))
        return rows + [(name, shlex.quote(value), "the site's") for name, value in site.environment.items() if slurm]

    def _ranks(self, slurm: bool) -> str:
        assert isinstance(self.work, OnRanks)
        python = "python" if self.python is None else shlex.quote(self.python)
        program = shlex.join(self.work.program)
        if slurm and not self._torchrun:
            return f"srun --kill-on-bad-exit=1 {python} {program}"
        if slurm:
            where = '--rdzv-id="$SLURM_JOB_ID" --rdzv-backend=c10d --rdzv-endpoint="$first_node:$port"'
            nodes = '--nnodes="$SLURM_JOB_NUM_NODES" --nproc-per-node="${SLURM_GPUS_ON_NODE:-1}"'
            return f"srun --kill-on-bad-exit=1 {python} -m torch.distributed.run \\\n  {nodes} \\\n  {where} \\\n  {program}"
        if not self._torchrun:
            return f"{python} {program}"
        return f"{python} -m torch.distributed.run --standalone --nproc-per-node={self.allocation.ranks} {program}"


@cache
def _template() -> jinja2.Template:
    loader = jinja2.FileSystemLoader(Path(__file__).parent / "templates")
    settings = {"trim_blocks": True, "lstrip_blocks": True, "keep_trailing_newline": True, "undefined": jinja2.StrictUndefined}
    return jinja2.Environment(loader=loader, autoescape=False, **settings).get_template("job.sh.j2")  # type: ignore[arg-type]
