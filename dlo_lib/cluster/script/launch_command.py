"""The command of a job script that starts its program: once, or on every rank by ``srun`` or ``torchrun``."""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from dlo_lib.cluster.script import software
from dlo_lib.cluster.script.work import OnRanks, Work
from dlo_lib.cluster.site import srun_options
from dlo_lib.cluster.site.description import Scheduler
from dlo_lib.cluster.site.request import Allocation


@dataclass(frozen=True)
class LaunchCommand:
    """What the command depends on.

    Attributes:
        torchrun: whether torchrun starts the ranks.
        python: the interpreter; None: the one of the environment that the script activates.
        module_path: folders of the copied code.
        in_folder: whether the job has a folder, so that its output is read by rank.
    """

    work: Work
    allocation: Allocation
    torchrun: bool = False
    python: str | None = None
    module_path: tuple[str, ...] = ()
    in_folder: bool = False

    def text(self) -> str:
        """Return the command in bash."""
        if not isinstance(self.work, OnRanks):
            step = f"srun --nodes=1 --ntasks=1 {self._srun}" if self._srun else ""
            return step + self._container + shlex.join(self.work.command)
        own = self.python is None or (self._slurm and self._has_own_python)
        alone = "python" if own else shlex.quote(str(self.python))
        python = self._container + alone
        program, interpreter = shlex.join(self.work.program), ""
        if self.module_path and program.startswith("-m "):
            # Without -P the working directory comes first, and with it the code of today.
            if not self.torchrun:
                program = f"-P {program}"
            else:
                interpreter, program = "--no-python ", f"{alone} -P {program}"
        srun = f"srun --kill-on-bad-exit=1 {self._label}{self._srun}" if self._slurm else ""
        if not self.torchrun:
            return f"{srun}{python} {program}"
        torchrun = f"{srun}{python} -m torch.distributed.run "
        if not self._slurm:
            ranks = f"--nproc-per-node={self.allocation.ranks}"
            return f"{torchrun}--standalone {self._tee}{interpreter}{ranks} {program}"
        where = '--rdzv-id="$SLURM_JOB_ID" --rdzv-backend=c10d --rdzv-endpoint="$first_node:$port"'
        nodes = f'--nnodes="$SLURM_JOB_NUM_NODES" --nproc-per-node="{self.ranks_on_node}"'
        return f"{torchrun}{self._tee}{interpreter}\\\n  {nodes} \\\n  {where} \\\n  {program}"

    @property
    def ranks_on_node(self) -> str:
        """The number of ranks of a node, in bash."""
        alone = self.allocation.ranks_per_node
        return "${SLURM_GPUS_ON_NODE:-1}" if self.allocation.requests_gpus else str(alone)

    @property
    def _has_own_python(self) -> bool:
        """Whether the software of the job has another Python than the one that submits."""
        want = self.allocation
        return want.site.has_software or srun_options.starts_image(want.srun)

    @property
    def _srun(self) -> str:
        return srun_options.words(self.allocation.srun, self.in_folder) if self._slurm else ""

    @property
    def _slurm(self) -> bool:
        return self.allocation.site.scheduler is Scheduler.SLURM

    @property
    def _names_ranks(self) -> bool:
        """Whether each line of output has the number of its rank (``logs``)."""
        return self.in_folder and self.allocation.ranks > 1

    @property
    def _label(self) -> str:
        return "--label " if self._names_ranks else ""

    @property
    def _tee(self) -> str:
        return "--tee=3 " if self._names_ranks else ""

    @property
    def _container(self) -> str:
        if not self._slurm:
            return ""
        want = self.allocation
        return software.container(want.site, want.gpus_per_node > 0, self.in_folder)
