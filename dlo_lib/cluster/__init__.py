"""Jobs for a cluster from a notebook: sites as data, scripts from a template, ``submit()`` and its handle.

In the order of a submission:

- ``site``: what a cluster is, what it allows, and what a job requests of it
- ``script``: the job script
- ``code``: the code that a job runs
- ``job``: ``submit()`` and the handle
- ``slurm``: the commands of SLURM, and what their answers say
- ``run``: a submitted job, from its record on disk to its end
- ``view``: views of a job in a notebook

The docstring of each room names what it imports.
"""

from dlo_lib.cluster.job.handle import Job, job, jobs
from dlo_lib.cluster.job.submit import submit
from dlo_lib.cluster.run.waiting import JobFailed
from dlo_lib.cluster.script.template import Launcher
from dlo_lib.cluster.site.description import Site, site, sites
from dlo_lib.cluster.slurm.states import State

__all__ = ["Job", "JobFailed", "Launcher", "Site", "State", "job", "jobs", "site", "sites", "submit"]
