"""What only the submitting machine knows: its site, SLURM, the user's accounts and PyTorch, and its disks."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from dlo_lib.base.errors import UserError, unknown_name
from dlo_lib.base.text import tr
from dlo_lib.cluster.run import records
from dlo_lib.cluster.site.description import Scheduler, Site, site_names
from dlo_lib.cluster.site.description import site as find_site
from dlo_lib.cluster.site.request import Allocation
from dlo_lib.cluster.site.srun_options import starts_image
from dlo_lib.cluster.slurm import commands


def wanted_site(wanted: str | Path | None) -> Site:
    """Return the site of a call: the one named, that of ``$DLO_SITE``, or this machine without SLURM.

    Raises:
        UserError: there is no such site, or SLURM is here and no site is named.
    """
    chosen = wanted or os.environ.get("DLO_SITE")
    if chosen:
        return find_site(chosen)
    if not commands.is_available():
        return find_site("local")
    raise UserError(
        tr(
            "which site? Set site= or DLO_SITE to one of {names}, or to a TOML file",
            names=", ".join(site_names()),
        )
    )


def checked(allocation: Allocation) -> Allocation:
    """Check what only this machine knows: whether it has SLURM, the user's accounts, and its PyTorch.

    Raises:
        UserError: the site would refuse the job, or could not run it.
    """
    where = allocation.site
    if where.scheduler is Scheduler.LOCAL and commands.is_available():
        print(tr("this machine has SLURM: do not run long jobs on a login node, set site= instead"))
        return _here(allocation)
    if not commands.is_available():
        here = _here(allocation)
        print(
            tr(
                "no SLURM here: this machine runs the job while this process lives, "
                "one job after another ({ranks} of {of} ranks)",
                ranks=here.ranks,
                of=allocation.ranks,
            )
        )
        return here
    from dlo_lib.cluster.site.pytorch import check_pytorch

    # The software of the site, or an image, has its own PyTorch.
    own = allocation.gpus_per_node and not (where.has_software or starts_image(allocation.srun))
    for said in (check_pytorch(where) if own else "", folder_warning(where)):
        if said:
            print(said)
    mine = _accounts() if allocation.account else ()
    if mine and allocation.account not in mine:
        said = tr(
            'account "{account}" is not one of yours: use {mine}',
            account=allocation.account,
            mine=tr(" or ").join(mine),
        )
        raise UserError(said)
    known = commands.partitions() if allocation.partition else ()
    for name in allocation.partition.split(","):
        if known and name not in known:
            raise unknown_name("partition", name, known)
    return allocation


def _accounts() -> tuple[str, ...]:
    """Return the accounts of the user; empty if they are not known, because then SLURM decides."""
    try:
        return commands.accounts()
    except commands.NoAnswer:
        return ()


def folder_warning(where: Site) -> str:
    """Return a warning if jobs are recorded where the site has little room, such as most home folders."""
    roomy = [Path(os.path.expandvars(folder)) for folder in (where.work, where.scratch) if folder]
    folder = records.jobs_dir().resolve()
    if not any(place.is_dir() for place in roomy) or any(
        folder.is_relative_to(place.resolve()) for place in roomy if place.is_dir()
    ):
        return ""
    advice = "jobs write their files to {folder}, where {site} may have little room: set DLO_HOME={work}/dlo"
    return tr(advice, folder=folder, site=where.name, work=where.work)


def _here(allocation: Allocation) -> Allocation:
    """Return the same resources on this machine, with no more ranks than it runs."""
    machine = find_site("local")
    ranks = min(allocation.ranks, machine.gpus_per_node)
    if not allocation.gpus_per_node:
        return replace(allocation, site=machine, nodes=1, cpu_ranks_per_node=ranks)
    return replace(allocation, site=machine, nodes=1, gpus_per_node=ranks)
