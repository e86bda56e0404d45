"""A submitted job, from its record on disk to its end.

- ``records``: its state on disk
- ``submissions``: a submission whose answer may be lost
- ``turns``: starts some elements of a job, and queries them
- ``array_parts``: an array that is larger than SLURM allows
- ``dependency``: the job that another one waits for
- ``local``: this machine in place of SLURM
- ``changes``: cancel, requeue, resubmit
- ``waiting``: waits for the end
- ``pending``: why SLURM lets a job wait
- ``endings``: how an element ended that SLURM no longer knows
- ``causes``: why it failed
- ``rank_output``: its output

Imports ``launch``, ``site`` and ``slurm``.
"""
