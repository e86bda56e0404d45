"""Where ranks compute: each on a separate GPU, or all on the CPU."""

from __future__ import annotations

import enum

from dlo_lib.base.errors import UserError
from dlo_lib.base.text import tr


class Devices(enum.Enum):
    """What the notebook asks for."""

    ANY = "any"
    """A GPU for each rank if there are enough, or the CPU."""
    GPU = "gpu"
    CPU = "cpu"


def gpu_each(wanted: Devices, gpus: int, ranks: int, nccl: bool, where: str) -> bool:
    """Whether each of ``ranks`` ranks of a machine gets a separate GPU, with NCCL between them.

    Args:
        gpus: those that PyTorch sees there.
        nccl: PyTorch has NCCL there.
        where: the machine, as in "on this machine".

    Raises:
        UserError: GPUs are wanted, and there are not enough.
    """
    if wanted is not Devices.GPU:
        return wanted is Devices.ANY and gpus >= ranks and nccl
    if gpus < ranks:
        said = (
            "PyTorch sees {gpus} GPUs {where} for {ranks} ranks, and each needs one: use fewer ranks, or "
            "--cpu for ranks on the CPU"
            if gpus
            else "PyTorch sees no GPU {where}: check its build, or use --cpu for ranks on the CPU"
        )
        raise UserError(tr(said, gpus=gpus, where=where, ranks=ranks))
    if not nccl:
        raise UserError(tr("PyTorch has no NCCL {where}, which connects GPUs: use --cpu", where=where))
    return True


def note_on_gpus(wanted: Devices, gpus: int, ranks: int) -> str:
    """Return a sentence if there are GPUs, but fewer than ranks; else ""."""
    if wanted is not Devices.ANY or not 0 < gpus < ranks:
        return ""
    return tr(
        "PyTorch sees {gpus} GPUs for {ranks} ranks, so all ranks compute on the CPU: %%ranks {gpus} uses "
        "the GPUs.",
        gpus=gpus,
        ranks=ranks,
    )
