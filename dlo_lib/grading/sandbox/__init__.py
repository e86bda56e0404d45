"""Processes that run a student's code, and their isolation from the rest of the machine.

The room holds the isolation of the host (bubblewrap, Apptainer), namespaces, the system-call filter and the
limits; the zygote that forks workers; the worker, which runs in the student's process; and the judge's
handles on the zygote and on workers. No check is decided here. Imports ``checks`` and ``switch``. ``host``
and ``zygote`` import torch only when they start work.
"""
