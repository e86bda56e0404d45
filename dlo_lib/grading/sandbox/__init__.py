"""Processes that run a student's code, and their isolation from the rest of the machine.

The judge's side:

- ``host``: the handle on all processes of a lab
- ``remote_worker``: the handle on one worker
- ``channel``: plain values over a socket
- ``hidden_memory``: memory that no figure of a process shows

From the zygote to a worker:

- ``zygote``: imports torch once, and forks the workers
- ``start``: prepares a worker in the fork
- ``worker``: the loop in the student's process
- ``asking``: the stand-ins for the functions of a check
- ``rehearsal``: runs its steps once before the fork
- ``compiled``: files that are compiled beforehand
- ``without_compiler``: ``torch.compile`` without a compiler

The isolation, from the machine to a call:

- ``isolation``: bubblewrap or Apptainer
- ``lockdown``: the namespaces of a worker
- ``seccomp``: the filter of system calls
- ``cgroups``: the limits of control groups
- ``limits``: the limits of a process
- ``processor_share``: the share of the processors
- ``blocked_imports``: the modules that a lab teaches

No check is decided here. Imports ``checks``, ``switch`` and ``launch``. ``host`` and ``zygote`` import torch
only when they start work.
"""
