"""What a cluster is, what it allows, and what a job requests of it.

- ``description``: a site, read from a file of ``sites/``
- ``request``: the resources of a job, checked against the site
- ``limits``: the limits of a QOS
- ``cost``: what a job may cost
- ``pytorch``: whether PyTorch supports a site's GPU

Values of SLURM:

- ``sbatch_options``: options of sbatch that are added
- ``srun_options``: options of srun that are added
- ``user_environment``: options in the user's environment
- ``job_variables``: environment variables of a job
- ``duration``: durations in SLURM's formats
- ``quoting``: values in a script

Imports ``hardware``.
"""

from dlo_lib.cluster.site.description import Site, site, sites

__all__ = ["Site", "site", "sites"]
