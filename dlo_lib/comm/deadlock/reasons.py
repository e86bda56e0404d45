"""Why ranks are stuck: one sentence with the cause and the advice, for the first rank that shows it."""

from __future__ import annotations

from collections.abc import Mapping

from dlo_lib.comm.calls import Call, Kind
from dlo_lib.comm.deadlock.board import Activity
from dlo_lib.comm.deadlock.stuck_ranks import RankView
from dlo_lib.comm.deadlock.vocabulary import ranks_in_words, what
from dlo_lib.text import tr


def why(views: Mapping[int, RankView], stuck: Mapping[int, set[int]], names: Mapping[str, str]) -> str:
    """Return the cause, for the first stuck rank that shows one; "" if none does."""
    for rank, lacking in stuck.items():
        call = views[rank].waits_for
        assert call is not None  # a stuck rank waits
        ended = {other for other in lacking if views[other].ended}
        if call.kind in (Kind.SEND, Kind.RECV):
            reason = _why_message(rank, call, views, stuck)
        elif call.kind is Kind.RECV_ANY:
            reason = tr(
                "Rank {rank} waits for a message from any rank, and no rank will send one with tag {tag}.",
                rank=rank,
                tag=call.tag,
            )
        elif call.kind is Kind.JOIN:
            reason = _why_join(lacking, views)
        elif call.kind is Kind.NEW_GROUP:
            reason = tr(
                "new_group must be called by every rank of the world, including those outside the group: "
                "{who} did not call it.",
                who=ranks_in_words(lacking),
            )
        elif ended:
            reason = _why_ended(call, ended, views, names)
        else:
            reason = _why_crossed(rank, call, min(lacking), views, names)
        if reason:
            return reason
    return ""


def _why_join(lacking: set[int], views: Mapping[int, RankView]) -> str:
    have = [
        view.rank
        for view in views.values()
        if view.waits_for is not None and view.waits_for.kind is Kind.JOIN
    ]
    return tr(
        "init_process_group returns when every rank has called it: {have} called it, {lack} did not. Let "
        "every rank join before it runs code that may end it.",
        have=ranks_in_words(have), lack=ranks_in_words(lacking),
    )  # fmt: skip


def _why_message(rank: int, call: Call, views: Mapping[int, RankView], stuck: Mapping[int, set[int]]) -> str:
    peer = views[call.peer]
    answer = "recv" if call.kind is Kind.SEND else "send"
    if peer.ended:
        how = tr("has finished") if peer.state is Activity.FINISHED else tr("has ended")
        return tr(
            "Rank {rank} waits for a {answer} that rank {peer} will never make: it {how}.",
            rank=rank, answer=answer, peer=peer.rank, how=how,
        )  # fmt: skip
    theirs = peer.waits_for
    if theirs is None:
        return ""
    if theirs.kind is call.kind and (call.kind is Kind.SEND or theirs.peer != rank):
        chain = _chain(rank, views)
        if chain[-1] in chain[:-1] and all(views[other].waits_for.kind is call.kind for other in chain):  # type: ignore[union-attr]
            cycle = chain[chain.index(chain[-1]) :]
            return _why_ring(call.kind, " → ".join(map(str, cycle)))
    if theirs.kind is call.kind and theirs.peer == rank:
        return tr(
            "Ranks {a} and {b} both call {kind} first and wait for each other. Let one of them {answer} "
            "first, or use isend and irecv and wait afterwards.",
            a=min(rank, peer.rank), b=max(rank, peer.rank), kind=call.kind.value, answer=answer,
        )  # fmt: skip
    if (
        theirs.kind.point_to_point
        and theirs.kind is not call.kind
        and theirs.peer == rank
        and theirs.tag != call.tag
    ):
        return tr(
            "Rank {rank} uses tag {mine} and rank {peer} tag {theirs}: "
            "use the same tag for a message and its receive.",
            rank=rank, mine=call.tag, peer=peer.rank, theirs=theirs.tag,
        )  # fmt: skip
    return tr(
        "Rank {rank} waits for a {answer} by rank {peer}, which waits in {what}. "
        "Check the peer of this call.",
        rank=rank, answer=answer, peer=peer.rank, what=what(theirs),
    )  # fmt: skip


def _why_ring(kind: Kind, cycle: str) -> str:
    if kind is Kind.SEND:
        return tr(
            "Each of these ranks sends first, and none of them receives: {cycle}. "
            "Let each start its receive before it waits for its send: irecv and isend, or batch_isend_irecv.",
            cycle=cycle,
        )
    return tr(
        "Each of these ranks receives first, and none of them sends: {cycle}. "
        "Let each call isend before it receives, or batch_isend_irecv.",
        cycle=cycle,
    )


def _why_ended(call: Call, ended: set[int], views: Mapping[int, RankView], names: Mapping[str, str]) -> str:
    rank = min(ended)
    if views[rank].death is None and views[rank].state is Activity.FINISHED:
        calls = views[rank].issued.get((None, call.group), 0)
        times = tr("after 1 call on it") if calls == 1 else tr("after {calls} calls on it", calls=calls)
        return tr(
            "{kind} needs every rank of {group}, and {who} returned {times} while the others are at call "
            "{number}. A rank skipped a call, or left a loop early.",
            kind=call.kind.value, group=names[call.group], who=ranks_in_words(ended), times=times,
            number=call.sequence,
        )  # fmt: skip
    several = tr(
        "{kind} needs every rank of {group}, and {who} have ended.",
        kind=call.kind.value,
        group=names[call.group],
        who=ranks_in_words(ended),
    )
    one = tr(
        "{kind} needs every rank of {group}, and {who} has ended.",
        kind=call.kind.value,
        group=names[call.group],
        who=ranks_in_words(ended),
    )
    return one if len(ended) == 1 else several


def _why_crossed(
    rank: int, call: Call, other: int, views: Mapping[int, RankView], names: Mapping[str, str]
) -> str:
    theirs = views[other].waits_for
    if theirs is None:
        return ""
    if theirs.group != call.group and not theirs.kind.point_to_point:
        return tr(
            "Rank {rank} waits on {mine} and rank {other} on {theirs}: the ranks use the groups in different "
            "orders. Use them in the same order on every rank.",
            rank=rank, mine=names[call.group], other=other, theirs=names[theirs.group],
        )  # fmt: skip
    return tr(
        "Rank {rank} waits in {mine} and rank {other} waits in {theirs}: they wait for each other.",
        rank=rank, mine=what(call), other=other, theirs=what(theirs),
    )  # fmt: skip


def _chain(rank: int, views: Mapping[int, RankView]) -> list[int]:
    """Return the chain of ranks, each waiting for the next, from ``rank`` until a rank occurs twice."""
    chain = [rank]
    while chain[-1] in views and (call := views[chain[-1]].waits_for) is not None and call.peer >= 0:
        chain.append(call.peer)
        if chain[-1] in chain[:-1]:
            break
    return chain
