"""Jobs for a cluster from a notebook: sites as data, scripts from a template, ``submit()`` and what it returns."""

from dlo_lib.cluster.job import Job, JobFailed, job, jobs
from dlo_lib.cluster.script import Launcher
from dlo_lib.cluster.site import Site, site, sites
from dlo_lib.cluster.states import State
from dlo_lib.cluster.submit import submit

__all__ = ["Job", "JobFailed", "Launcher", "Site", "State", "job", "jobs", "site", "sites", "submit"]
