"""Where ranks compute: each on a GPU of its own, or all on the CPU."""

from __future__ import annotations

import enum

from dlo_lib.errors import UserError
from dlo_lib.text import tr


class Devices(enum.Enum):
    """What the notebook asks for."""

    ANY = "any"
    """A GPU for each rank if there are enough, or the CPU."""
    GPU = "gpu"
    CPU = "cpu"


def gpu_each(wanted: Devices, gpus: int, ranks: int, nccl: bool, where: str) -> bool:
    """Whether each of ``ranks`` ranks of a machine gets a GPU of its own, with NCCL between them.

    Args:
        gpus: those that PyTorch sees there.
        nccl: PyTorch has NCCL there.
        where: the machine, in words.

    Raises:
        UserError: GPUs are wanted, and there are not enough.
    """
    enough = gpus >= ranks and nccl
    if wanted is not Devices.GPU:
        return enough and wanted is Devices.ANY
    if gpus < ranks:
        fewer = (
            tr("%%ranks {gpus} uses them, and --cpu lets all ranks compute on the CPU", gpus=gpus)
            if gpus
            else tr("without --gpus the ranks compute on the CPU")
        )
        said = "{where}: PyTorch sees {gpus} GPUs for {ranks} ranks, and each rank needs one: {fewer}"
        raise UserError(tr(said, where=where, gpus=gpus, ranks=ranks, fewer=fewer))
    if not nccl:
        raise UserError(
            tr("{where}: this PyTorch has no NCCL, which connects GPUs: install a CUDA build", where=where)
        )
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
