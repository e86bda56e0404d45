"""Jobs for a cluster from a notebook: sites as data, scripts from a template, ``submit()`` and its handle.

A submission, in the order of its steps:

- ``submit``: one call is one job, or one array of jobs for a sweep
- ``site``: a cluster's description; it decides what a job must request
- ``request``: the resources of a job, checked against the site
- ``work``: what a job runs
- ``preparation``: a checked call, ready to submit
- ``announcement``: what a call prints before it submits
- ``submissions``: a submission whose answer may be lost
- ``turns``: starts some elements of a job, and queries them

Checks before a job waits:

- ``limits``: the limits of a QOS
- ``settings_check``: settings of a training, arguments of a function
- ``plan_check``: whether a parallel plan fits a model
- ``pytorch``: whether PyTorch supports a site's GPU
- ``cost``: what a job may cost
- ``login_node``: what only the submitting machine knows
- ``user_environment``: options in the user's environment
- ``sbatch_options``: options of sbatch that are added
- ``srun_options``: options of srun that are added
- ``job_variables``: environment variables of a job
- ``duration``: durations in SLURM's formats

The job script:

- ``script``: the whole script, from one template
- ``script_head``: its options of sbatch
- ``software``: modules, environments and containers
- ``launch_command``: the command that starts the program
- ``quoting``: values in a script
- ``slurm_scripts``: writes the scripts of ``slurm/``

The code that a job runs:

- ``function_job``: a function as a job
- ``function_rank``: one rank of it
- ``code_copy``: the copy of the user's code
- ``imports``: the modules that a program imports
- ``path_changes``: the folders that it adds to ``sys.path``
- ``module_redirect``: keeps a job's Python to the copy
- ``library``: the library that a job was submitted with
- ``digest``: the hash of a call

The commands of SLURM, and a machine in their place:

- ``slurm``: all commands; only this module calls them
- ``slurm_command``: one command, and whether its answer is one
- ``slurm_jobs``: what an answer says about a job
- ``slurm_accounting``: how jobs ended, and what they used
- ``slurm_details``: a job as the controller describes it
- ``snapshot``: one query that several processes share
- ``local``: this machine in place of SLURM
- ``runner``: the process that runs jobs on it

After the submission:

- ``job``: the handle
- ``records``: its state on disk
- ``states``: the states of a job
- ``changes``: cancel, requeue, resubmit
- ``dependency``: the job that another one waits for
- ``array_parts``: an array that is larger than SLURM allows
- ``waiting``: waits for the end
- ``endings``: how an element ended that SLURM no longer knows
- ``causes``: why it failed
- ``pending``: why SLURM lets it wait
- ``rank_output``: its output

Views of a job:

- ``views``: what the views read
- ``dashboard``: metrics in one figure
- ``curve_styles``: the colours of a sweep
- ``live``: a table and the loss so far

Imports ``train``, ``profiling``, ``parallel``, ``models``, ``data``, ``launch``, ``comm`` and ``hardware``.
"""

from dlo_lib.cluster.job import Job, job, jobs
from dlo_lib.cluster.script import Launcher
from dlo_lib.cluster.site import Site, site, sites
from dlo_lib.cluster.states import State
from dlo_lib.cluster.submit import submit
from dlo_lib.cluster.waiting import JobFailed

__all__ = ["Job", "JobFailed", "Launcher", "Site", "State", "job", "jobs", "site", "sites", "submit"]
