"""`dlo`, the command line. Bad input gives one line on stderr and exit status 2.

The commands:

- ``app``: all commands, a few lines each
- ``course``: release, kit, collect, feedback, export, similar, receipt
- ``roster``: the students of a course
- ``make``: a course, a classroom for a trial, and ``labs/``
- ``deadlines``: due dates
- ``submission``: a student submits a lab
- ``hand_in``: the process that calls nbgrader for this
- ``grade``: grades a class
- ``grade_slurm``: the same on a cluster
- ``leaderboard``: what the judge measured of a class
- ``plan``: the best plan of a model on a number of GPUs
- ``parity``: the trainer of another project against one process
- ``generate``: text by a trained run
- ``jobs``: the submitted jobs
- ``jobs_table``: their table
- ``jupyter``: starts JupyterLab
- ``hub_server``: starts a server on a JupyterHub

The doctor:

- ``doctor``: checks the installation
- ``diagnosis``: one line of its report
- ``doctor_packages``: the releases of packages
- ``doctor_cluster``: the site, account and folder of jobs
- ``doctor_hub``: the rights of a class on a JupyterHub
- ``doctor_hub_files``: its files
- ``doctor_hub_work``: the work of students
- ``doctor_hub_lists``: the Assignment List
- ``doctor_hub_terminal``: the terminal of a course
- ``doctor_hub_student``: as a student
- ``hub_probe``: what nbgrader finds
- ``machine``: the lines of the doctor in lab 00

Shared functions:

- ``workspace``: the student's copy of the labs
- ``private``: closes what notebooks keep of a student's work
- ``reports``: prints progress and reports
- ``out``: the file of ``--out``

The commands import ``cluster``, ``data``, ``grading``, ``hardware``, ``hub``, ``inference``, ``labkit``,
``launch``, ``models``, ``parallel``, ``planner``, ``profiling`` and ``train`` when they run, because
`dlo --help` must not import torch or nbgrader.
"""

from __future__ import annotations

import sys

from dlo_lib.base.errors import EXIT_BAD_INPUT

OTHER_SYSTEMS = (
    "open the course in its container (Docker Desktop, VS Code, Codespaces) or use WSL2; "
    'docs/install.md, "On macOS and Windows"'
)


def main() -> None:
    """Entry point of the `dlo` command."""
    if sys.platform != "linux":
        print(f"dlo: the labs run on Linux, and this is {sys.platform}: {OTHER_SYSTEMS}", file=sys.stderr)
        sys.exit(EXIT_BAD_INPUT)
    from dlo_lib.base.torch_version import exit_if_torch_too_old

    exit_if_torch_too_old("dlo")
    from dlo_lib.base.garbage import collect_rarely
    from dlo_lib.base.usage import leave_with
    from dlo_lib.cli.app import app

    collect_rarely()  # a command imports torch or nbgrader when it runs
    leave_with(app, "dlo")
