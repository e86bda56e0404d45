"""What passed between the ranks: the mistakes that right sums do not show."""

from __future__ import annotations

from dlo_lib.grading.contract import Kind, Run


def sent(run: Run, rank: int) -> int:
    """Bytes."""
    return run.bytes(rank, Kind.SEND)


def messages_only(t, run: Run) -> None:
    """The step is made of messages: the collectives of torch.distributed are what it replaces."""
    for rank in range(run.world):
        others = sorted({call.kind.value for call in run.calls(rank) if not call.kind.point_to_point})
        t.that(not others, "rank {rank} calls {names}: use exchange, send and recv only", rank=rank, names=", ".join(others))


def nobody_gathers(t, run: Run) -> None:
    """No rank receives from all others while they receive from it alone."""
    sources = [{call.peer for call in run.calls(rank, Kind.RECV)} for rank in range(run.world)]
    for rank, found in enumerate(sources):
        star = run.world > 2 and len(found) == run.world - 1 and all(other <= {rank} for other in sources if other is not found)
        t.that(not star, "everything is gathered on rank {rank}: in a ring no rank is special, each talks to its two neighbours", rank=rank)
