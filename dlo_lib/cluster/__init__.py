"""Jobs for a cluster from a notebook: sites as data, scripts from a template, ``submit()`` and its handle.

``site`` reads a cluster's description, ``request`` and ``script`` build the request, ``submit`` submits it.
``job`` is the handle and ``records`` its state on disk. ``slurm`` and ``local`` run jobs, ``live`` and
``dashboard`` show them. Imports ``train.metrics``, ``launch`` and ``hardware``.
"""

from dlo_lib.cluster.job import Job, job, jobs
from dlo_lib.cluster.script import Launcher
from dlo_lib.cluster.site import Site, site, sites
from dlo_lib.cluster.states import State
from dlo_lib.cluster.submit import submit
from dlo_lib.cluster.waiting import JobFailed

__all__ = ["Job", "JobFailed", "Launcher", "Site", "State", "job", "jobs", "site", "sites", "submit"]
