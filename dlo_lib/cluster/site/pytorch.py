"""Whether this environment's PyTorch, which the job uses too, supports a site's GPU."""

from __future__ import annotations

import re

import torch

from dlo_lib.base.errors import UserError
from dlo_lib.base.text import tr
from dlo_lib.cluster.site.description import Site


def check_pytorch(
    site: Site, version: str = torch.__version__, architectures: tuple[str, ...] | None = None
) -> str:
    """Return a warning to show, or "".

    Args:
        site: the site that runs the job.
        version: the version of PyTorch that the job uses.
        architectures: those that it was built for, such as ``sm_80``, empty for a build without CUDA; None
            asks torch.

    Raises:
        UserError: the version is older than the site's GPU needs, or was not built for it.
    """
    if site.min_torch and _numbers(version) < _numbers(site.min_torch):
        raise UserError(
            tr(
                "PyTorch {version} is too old for {site}, which needs {least} or later: "
                "install a newer one in the environment of the job",
                version=version,
                site=site.name,
                least=site.min_torch,
            )
        )
    if architectures is None:
        # Absent without CUDA; unlike get_arch_list it needs no GPU.
        flags = getattr(torch._C, "_cuda_getArchFlags", lambda: None)()
        architectures = tuple((flags or "").split())
    if not site.arch:
        return ""
    if not architectures:
        return tr(
            "PyTorch {version} is a CPU build: the GPUs of {site} will not be used",
            version=version,
            site=site.name,
        )
    if not any(_runs(built, site.arch) for built in architectures):
        raise UserError(
            tr(
                "PyTorch {version} was built for {built}, not for {arch}, the GPU of {site}: "
                "install a build that has it (V100: CUDA 12.6)",
                version=version,
                built=", ".join(architectures),
                arch=site.arch,
                site=site.name,
            )
        )
    return ""


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version.split("+")[0])[:3])


def _runs(built: str, card: str) -> bool:
    """Machine code runs on later minor versions of its architecture, PTX (``compute_``) on all later ones."""
    kind, _, have = built.partition("_")
    have_number, card_number = (int(re.sub(r"\D", "", text)) for text in (have, card))
    if kind == "compute":
        return have_number <= card_number
    return have_number // 10 == card_number // 10 and have_number <= card_number
