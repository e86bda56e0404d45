"""The part of `dlo doctor` for jobs: the site, its partition, the account, and the folder of the jobs."""

from __future__ import annotations

import os
from pathlib import Path

from dlo_lib.base.errors import UserError
from dlo_lib.base.text import tr
from dlo_lib.cli.diagnosis import Diagnosis
from dlo_lib.cluster.job import login_node
from dlo_lib.cluster.run.records import jobs_dir
from dlo_lib.cluster.site.description import Scheduler, Site, site_names
from dlo_lib.cluster.site.description import site as find_site
from dlo_lib.cluster.site.request import account_of
from dlo_lib.cluster.slurm import commands

_OF_ONE_NODE = ("/tmp", "/var/tmp", "/dev/shm", "/run")


def examine_cluster() -> list[Diagnosis]:
    """Check what a submission needs; nothing if this machine has no SLURM and the user names no site."""
    try:
        return _findings()
    except commands.NoAnswer as error:
        return [Diagnosis("site", False, str(error), tr("check $SLURM_CONF, or try again later"))]


def _findings() -> list[Diagnosis]:
    named = os.environ.get("DLO_SITE", "")
    here = commands.is_available()
    if not named and not here:
        return []
    if not named:
        known = ", ".join(site_names())
        cure = tr("set DLO_SITE in ~/.bashrc to one of {known}, or to a TOML file", known=known)
        return [Diagnosis("site", False, tr("DLO_SITE is not set"), cure), _home(None)]
    try:
        site = find_site(named)
    except UserError as error:
        return [Diagnosis("site", False, str(error), tr("correct DLO_SITE or the file"))]
    found = [Diagnosis("site", True, f"{site.name}: {site.title}")]
    if site.scheduler is Scheduler.SLURM and here:
        found += [_partition(site), _account(site)]
    elif site.scheduler is Scheduler.SLURM:
        text = tr("{site} has SLURM, this machine does not: jobs run here, one after another", site=site.name)
        found[0] = Diagnosis("site", False, text, tr("log in to the cluster to submit jobs"))
    return [*found, _home(site)]


def _partition(site: Site) -> Diagnosis:
    known = commands.partitions()
    if not known:
        return Diagnosis("partition", False, tr("sinfo does not answer"), tr("try again later"))
    if site.partition and site.partition not in known:
        text = tr("the cluster has no partition {name}", name=site.partition)
        cure = tr("set partition in the file of the site to one of {known}", known=", ".join(known))
        return Diagnosis("partition", False, text, cure)
    return Diagnosis("partition", True, site.partition or tr("the default one of the cluster"))


def _account(site: Site) -> Diagnosis:
    try:
        account = account_of(site)
    except UserError as error:
        return Diagnosis("account", False, str(error), tr("set DLO_ACCOUNT to the name of the project"))
    try:
        mine = commands.accounts()
    except commands.NoAnswer as error:
        return Diagnosis("account", False, str(error), tr("try again later"))
    if not mine:
        return Diagnosis("account", True, tr("{name}; there is no accounting", name=account or tr("none")))
    if account and account not in mine:
        text = tr('"{account}" is not one of yours', account=account)
        cure = tr("set DLO_ACCOUNT to one of {mine}", mine=", ".join(mine))
        return Diagnosis("account", False, text, cure)
    return Diagnosis("account", True, account or tr("your default one, of {mine}", mine=", ".join(mine)))


def _home(site: Site | None) -> Diagnosis:
    """Check the folder of the jobs: whether it is set, has space, and may be seen by the compute nodes."""
    try:
        folder = jobs_dir().resolve()
    except UserError as error:
        return Diagnosis("jobs", False, str(error), tr("set DLO_HOME to a folder that you can write to"))
    if site is not None and (warning := login_node.folder_warning(site)):
        text, _, cure = warning.rpartition(": ")
        return Diagnosis("jobs", False, text, cure)
    if commands.is_available() and any(folder.is_relative_to(Path(place)) for place in _OF_ONE_NODE):
        text = tr("jobs write their files to {folder}, which other nodes do not see", folder=folder)
        return Diagnosis("jobs", False, text, tr("set DLO_HOME to a folder on a shared file system"))
    return Diagnosis("jobs", True, tr("their files are in {folder}", folder=folder))
