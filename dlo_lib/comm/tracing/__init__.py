"""The collective tracer: every communication call of this process, and when it was issued and waited for.

How calls are seen:

- ``tap``: the kernel in torch's dispatcher that sees every call
- ``operators``: the operators ``c10d::*`` and their arguments
- ``reductions``: the reduction of a call
- ``unknown``: operators that a later release of torch added
- ``waits``: the waiting functions of torch, wrapped
- ``completion``: when the backend finishes a call
- ``call_sites``: the line that makes a call
- ``identity_map``: a map keyed by identity
- ``group_lifetime``: joining and leaving the process group
- ``listeners``: what shares the tap

What is recorded of them:

- ``events``: one call and its moments
- ``recorder``: fills a trace
- ``matching``: which calls of different ranks belong together
- ``trace``: the trace and its questions; it can be read without torch
- ``timeline``: a trace as a figure
- ``perfetto``: a trace as a file for Perfetto

Imports ``comm.calls``; ``comm.deadlock`` imports this room.
"""
