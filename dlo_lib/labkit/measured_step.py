"""One step of a form on a rank: the most memory that its tensors take, and the bytes that it sends."""

from __future__ import annotations

from collections.abc import Callable

from dlo_lib.comm.calls import Kind
from dlo_lib.comm.tracing.trace import Trace


def peak_of_a_step(build: Callable[[], Callable[[], object]]) -> int:
    """Return the most bytes of tensors that this process holds at the same time during the second step.

    Weights, gradients, optimiser state, activations and the buffers of messages count, each storage once.
    The temporary memory inside an operator does not. The first step creates what a form keeps for all steps.

    Args:
        build: creates the model and the inputs, and returns the function that runs one step. What exists
            before counts only from its first use in an operator that returns it.
    """
    # here, because a cell of imports runs in every worker of the judge
    from dlo_lib.profiling import step_peak

    return step_peak(build)


def sent_in_last_step(trace: Trace, rank: int = 0) -> float:
    """Return the bytes that ``rank`` sends after its last barrier: with ring algorithms in collectives, and
    the payload of its messages.

    Raises:
        ValueError: the rank has made no barrier.
    """
    calls = trace.calls(rank)
    barriers = [place for place, call in enumerate(calls) if call.kind is Kind.BARRIER]
    if not barriers:
        raise ValueError(f"rank {rank} made no barrier before a step, so its last step is not known")
    return sum(call.ring_bytes for call in calls[barriers[-1] + 1 :])
