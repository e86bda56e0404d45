"""Why ranks are stuck: one sentence with the cause and the advice, for the first rank that shows it."""

from __future__ import annotations

from collections.abc import Mapping

from dlo_lib.base.text import tr
from dlo_lib.comm.calls import Call, Kind
from dlo_lib.comm.deadlock.board import Activity
from dlo_lib.comm.deadlock.stuck_ranks import RankView
from dlo_lib.comm.deadlock.vocabulary import ranks_in_words, what


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
    if reason := _why_wrong_peer(rank, call, views):
        return reason
    if peer.ended:
        how = {
            Activity.FINISHED: tr("has finished"),
            Activity.LEFT: tr("has called destroy_process_group"),
        }.get(peer.state, tr("has ended"))
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


def _why_wrong_peer(rank: int, call: Call, views: Mapping[int, RankView]) -> str:
    """Return the reason if a message and a receive without partners seem to be meant for each other."""
    answer = Kind.RECV if call.kind is Kind.SEND else Kind.SEND
    meant = [
        other.rank
        for other in views.values()
        if other.rank != call.peer and rank in _partners_without(answer, other, views)
    ]
    instead = _partners_without(answer, views[call.peer], views) - {rank}
    if call.kind is Kind.SEND and meant:
        return tr(
            "Rank {rank} sends to rank {peer}, which does not receive it, and {who} waits for a message from "
            "rank {rank}: check the destination of the send.",
            rank=rank, peer=call.peer, who=ranks_in_words(meant),
        )  # fmt: skip
    if call.kind is Kind.SEND and instead:
        return tr(
            "Rank {rank} sends to rank {peer}, which receives from {who} instead: check the destination of "
            "the send and the source of the receive.",
            rank=rank, peer=call.peer, who=ranks_in_words(instead),
        )  # fmt: skip
    if meant:
        return tr(
            "Rank {rank} receives from rank {peer}, which sends it nothing, and {who} sends to rank {rank}: "
            "check the source of the receive.",
            rank=rank, peer=call.peer, who=ranks_in_words(meant),
        )  # fmt: skip
    if instead:
        return tr(
            "Rank {rank} receives from rank {peer}, which sends to {who} instead: check the source of the "
            "receive and the destination of the send.",
            rank=rank, peer=call.peer, who=ranks_in_words(instead),
        )  # fmt: skip
    return ""


def _partners_without(kind: Kind, view: RankView, views: Mapping[int, RankView]) -> set[int]:
    """Return the ranks with which ``view`` has issued a send or a receive (``kind``) that they do not answer.

    The answer may have another tag: the pair of ranks is right then.
    """
    answer = Kind.RECV if kind is Kind.SEND else Kind.SEND
    found = set()
    for place in view.issued:
        if place[0] is not kind or None in place[1:]:
            continue
        _, _, source, destination, _ = place
        other = destination if kind is Kind.SEND else source
        if other in views and _messages(view, kind, source, destination) > _messages(
            views[other], answer, source, destination
        ):
            found.add(other)
    return found


def _messages(view: RankView, kind: Kind, source: int, destination: int) -> int:
    """Return how many sends or receives from ``source`` to ``destination`` a rank has issued, of any tag."""
    return sum(
        count
        for place, count in view.issued.items()
        if place[0] is kind and None not in place[1:] and place[2:4] == (source, destination)
    )


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
    did = {
        Activity.FINISHED: tr("returned"),
        Activity.LEFT: tr("called destroy_process_group"),
    }.get(views[rank].state)
    if views[rank].death is None and did is not None:
        calls = views[rank].issued.get((None, call.group), 0)
        times = tr("after 1 call on it") if calls == 1 else tr("after {calls} calls on it", calls=calls)
        return tr(
            "{kind} needs every rank of {group}, and {who} {did} {times} while the others are at call "
            "{number}. A rank skipped a call, or left a loop early.",
            kind=call.kind.value, group=names[call.group], who=ranks_in_words(ended), did=did, times=times,
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
