"""``submit()`` and the handle that it returns.

- ``submit``: one call is one job, or one array of jobs for a sweep
- ``preparation``: a checked call, ready to submit
- ``settings_check``: settings of a training, arguments of a function
- ``plan_check``: whether a parallel plan fits a model
- ``login_node``: what only the submitting machine knows
- ``announcement``: what a call prints before it submits
- ``handle``: the handle
- ``runner``: the process that runs jobs on this machine

Imports ``code``, ``comm``, ``data``, ``models``, ``parallel``, ``profiling``, ``run``, ``script``, ``site``,
``slurm``, ``train`` and ``view``.
"""
