"""Communication: a tracer of collectives, an explainer of deadlocks, collectives written out, compression.

The tracer records every communication call of a process: calls of ``torch.distributed``, of functional
collectives, of PyTorch's DDP, FSDP2 and DTensor, and of this library, on gloo and NCCL. Trace one rank::

    from dlo_lib.comm.tracing.recorder import trace_collectives

    with trace_collectives() as trace:
        step()

or all ranks of a machine on one clock, which also shows the ranks that are late::

    trace = run_ranks(step, 4, trace=True).trace
    print(trace.summary())            # for each operation: calls, bytes, time, exposed and hidden time, waits
    trace.plot()                      # a timeline; start= and end= (seconds) select a part of it

==========================================  ==============================================================
``trace.count("all_reduce", rank=0)``       number of calls of an operation on a rank; None selects all
``trace.bytes(kind, rank)``                 bytes of the full tensors
``trace.ring_bytes(kind, rank)``            bytes that ring algorithms send for them, per rank
``trace.max_unsharded("all_gather", rank)``  bytes of the largest full tensor of a single call
``trace.max_in_flight(kind, rank)``         largest number of bytes in flight at one moment
``trace.hidden(kind, rank)``                share of the communication that overlaps with computation
``trace.order(rank)``                       order in which calls were issued and waited for
``trace.calls(rank, kind)``                 the calls, in the form in which ``Run.calls`` returns them
``trace.never_waited()``                    asynchronous calls that the program never waited for
==========================================  ==============================================================

Each ``Event`` holds its ``Call`` (operation, group and members, peer, tag, dtype, shape, bytes, reduction,
asynchronous or not, the user's line of code) and its moments. The tracer does not see calls on a backend
object, the key-value store, symmetric memory and other processes. For ``isend`` and ``irecv`` it knows only
an upper bound of the end. It does not know when a parameter is freed: measure memory instead. An operator of
a newer PyTorch that it does not know is passed on, named in a warning, and traced as a call of the kind
``UNKNOWN``. If the waits of PyTorch are unknown, questions to the trace raise ``NotTraced``.

The explainer needs no call. It watches the ranks that ``run_ranks`` starts, and under torchrun and srun it
watches ``dlo_lib.train`` and programs within ``dlo_lib.launch.explained()``. Each rank writes a row in shared
memory. When the rows show that no progress is possible, or that calls which meet do not agree, all ranks are
stopped and the message says which rank waits in which call for which other ranks. A rank that computes for a
long time raises no alarm. ``run_ranks(..., explain=Explain.STACKS)``, ``--explain`` or ``DLO_EXPLAIN=stacks``
adds the Python stack of every rank; ``off`` is for measurements. ``python -m benchmarks trace`` measures the
cost of both.

In reading order:

- ``collectives``: collectives written out as messages
- ``calls``: the record of one call, which all share
- ``tracing``: records the calls
- ``deadlock``: explains them; it imports ``tracing``
- ``compression``: approximate sums of fewer bytes
- ``fake_ranks``: a process group in one process

This file imports nothing, because the process that watches the ranks of a node works without torch.
"""
