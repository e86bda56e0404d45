"""Communication: the collective tracer, the dead-lock explainer, and collectives written out.

The tracer records every communication call of a process, whoever makes it: ``torch.distributed``, functional collectives, PyTorch's DDP,
FSDP2 and DTensor, and this library, on gloo and NCCL. One rank::

    from dlo_lib.comm.trace import trace_collectives

    with trace_collectives() as trace:
        step()

or all ranks of a machine on one clock, after which it is also known who came late::

    trace = run_ranks(step, 4, trace=True).trace
    print(trace.summary())            # per operation: calls, bytes, time, what was exposed, what was hidden, waits for late ranks
    trace.plot()                      # computing, waiting, and what travelled meanwhile; start= and end= (seconds) choose a part

==============================================  ==============================================================================
``trace.count("all_reduce", rank=0)``           calls of a kind, of a rank, of all (None)
``trace.bytes(kind, rank)``, ``ring_bytes``     the full tensors; what a ring algorithm sends of them per rank
``trace.max_unsharded("all_gather", rank)``     the largest full tensor of a single call
``trace.max_in_flight(kind, rank)``             the most bytes on their way at the same moment
``trace.hidden(kind, rank)``                    the share of the communication beside which the process went on
``trace.order(rank)``                           issued, began to wait, had waited: what was fetched ahead, with no stopwatch
``trace.calls(rank, kind)``                     the calls themselves, as ``Run.calls`` gives them to the checks of a lab
``trace.never_waited()``                        asynchronous calls whose result was used, if at all, too early
==============================================  ==============================================================================

Each ``Event`` has its ``Call`` (kind, group and members, peer, tag, dtype, shape, bytes, reduction, asynchronous or not, the person's own
line) and its moments. Not seen are calls on a backend object itself, the key-value store, symmetric memory and other processes. When
``isend`` and ``irecv`` were over is known at the latest only. When a parameter was freed again is not known at all: measure memory.
Where torch's internals are not as the tracer knows them, the program runs on with a warning, and questions raise ``NotTraced``.

The explainer needs no call: it watches whatever ``run_ranks`` starts, and ``dlo_lib.train`` and programs within ``launch.explained`` under
torchrun and srun. Each rank keeps a row in shared memory; when the rows show that no progress is possible, or that calls which meet do not
agree, all ranks are stopped and the message says who waits where for whom. A rank that computes for long raises no alarm.
``run_ranks(..., explain=Explain.STACKS)``, ``--explain`` or ``DLO_EXPLAIN=stacks`` adds every rank's Python stack; ``off`` is for
measuring. What both cost: ``python -m benchmarks trace``.

Nothing is imported here: the process that watches the ranks of a node does without torch.
"""
