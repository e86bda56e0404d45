"""The words for a dead-lock or a mismatch: one sentence on top that says what is wrong, a table of the ranks, and what to try.

Takes what ``comm.deadlock`` found; decides nothing.
"""

from __future__ import annotations

import linecache
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

from dlo_lib.comm.board import State
from dlo_lib.comm.calls import Call, Kind
from dlo_lib.comm.deadlock import Mismatch, RankView
from dlo_lib.text import tr

NameFile = Callable[[str], str]
"""How a file is shown: a notebook's cell has a made-up file name."""


def deadlock(views: Mapping[int, RankView], stuck: Mapping[int, set[int]], name_file: NameFile = os.path.basename) -> str:
    """The message for ranks that wait for what can no longer happen."""
    names = _group_names(view.waits_for or view.last for view in views.values())
    one = tr("DEAD-LOCK: {who} waits for something that can no longer happen.", who=_ranks(stuck))
    several = tr("DEAD-LOCK: {who} wait for something that can no longer happen.", who=_ranks(stuck))
    head = one if len(stuck) == 1 else several
    return "\n\n".join([head + " " + _why(views, stuck, names), _rank_table(views, names, name_file)])


def mismatch(found: Mismatch, name_file: NameFile = os.path.basename) -> str:
    """The message for calls that meet and do not agree."""
    first = next(iter(found.calls.values()))
    if first.kind.point_to_point:
        head = _message_mismatch(found)
    else:
        group = _group_names(found.calls.values())[first.group]
        head = tr("MISMATCH in call {number} on {group}: {what}.", number=first.sequence, group=group, what=_differs(found))
    lines: dict[tuple, list[int]] = defaultdict(list)
    for rank, call in sorted(found.calls.items()):
        lines[_what(call) + _splits(call), _where(call, name_file)].append(rank)
    table = _columns([(_ranks(ranks), what, where) for (what, where), ranks in lines.items()])
    return "\n\n".join([head, table, _advice(found)])


def death(rank: int, how: str, views: Mapping[int, RankView], name_file: NameFile = os.path.basename) -> str:
    """The message for a rank whose process ended without a word; ``how`` says how."""
    names = _group_names(view.waits_for or view.last for view in views.values())
    return "\n\n".join([tr("RANK {rank} DIED: {how}.", rank=rank, how=how), _rank_table(views, names, name_file)])


def _why(views: Mapping[int, RankView], stuck: Mapping[int, set[int]], names: Mapping[str, str]) -> str:
    """The cause, told for the first stuck rank that shows one."""
    for rank, lacking in stuck.items():
        call = views[rank].waits_for
        assert call is not None  # a stuck rank waits
        ended = {other for other in lacking if views[other].ended}
        if call.kind in (Kind.SEND, Kind.RECV):
            reason = _why_message(rank, call, views, stuck)
        elif call.kind is Kind.RECV_ANY:
            reason = tr("Rank {rank} waits for a message from any rank, and no rank will send one with tag {tag}.", rank=rank, tag=call.tag)
        elif call.kind is Kind.NEW_GROUP:
            reason = tr(
                "new_group must be called by every rank of the world, also by those outside the group: {who} did not call it.",
                who=_ranks(lacking),
            )
        elif ended:
            reason = _why_ended(call, ended, views, names)
        else:
            reason = _why_crossed(rank, call, min(lacking), views, names)
        if reason:
            return reason
    return ""


def _why_message(rank: int, call: Call, views: Mapping[int, RankView], stuck: Mapping[int, set[int]]) -> str:
    peer = views[call.peer]
    answer = "recv" if call.kind is Kind.SEND else "send"
    if peer.ended:
        how = tr("has finished") if peer.state is State.FINISHED else tr("is gone")
        return tr(
            "Rank {rank} waits for a {answer} that rank {peer} will never make: it {how}.",
            rank=rank,
            answer=answer,
            peer=peer.rank,
            how=how,
        )
    theirs = peer.waits_for
    if theirs is None:
        return ""
    if theirs.kind is call.kind and call.kind is Kind.SEND:
        chain = _chain(rank, views)
        if chain[-1] in chain[:-1]:
            return tr(
                "Everyone sends first and nobody receives: {chain}. Let every other rank receive first, or use batch_isend_irecv.",
                chain=" → ".join(map(str, chain)),
            )
    if theirs.kind is call.kind and theirs.peer == rank:
        return tr(
            "Ranks {a} and {b} both call {kind} first and wait for each other. Let one of them {answer} first, or use isend and irecv and "
            "wait afterwards.",
            a=min(rank, peer.rank), b=max(rank, peer.rank), kind=call.kind.value, answer=answer,
        )  # fmt: skip
    if theirs.kind.point_to_point and theirs.kind is not call.kind and theirs.peer == rank and theirs.tag != call.tag:
        return tr(
            "Rank {rank} uses tag {mine} and rank {peer} tag {theirs}: a message is received only under the tag it was sent with.",
            rank=rank, mine=call.tag, peer=peer.rank, theirs=theirs.tag,
        )  # fmt: skip
    return tr(
        "Rank {rank} waits for a {answer} by rank {peer}, which itself waits in {what}. Is it the peer that was meant?",
        rank=rank, answer=answer, peer=peer.rank, what=_what(theirs),
    )  # fmt: skip


def _why_ended(call: Call, ended: set[int], views: Mapping[int, RankView], names: Mapping[str, str]) -> str:
    rank = min(ended)
    if views[rank].state is State.FINISHED:
        calls = views[rank].issued.get((None, call.group), 0)
        return tr(
            "{kind} needs every rank of {group}, and {who} returned after {calls} calls on it while the others are at call {number}. "
            "A rank skipped a call, or left a loop early.",
            kind=call.kind.value, group=names[call.group], who=_ranks(ended), calls=calls, number=call.sequence,
        )  # fmt: skip
    return tr("{kind} needs every rank of {group}, and {who} is gone.", kind=call.kind.value, group=names[call.group], who=_ranks(ended))


def _why_crossed(rank: int, call: Call, other: int, views: Mapping[int, RankView], names: Mapping[str, str]) -> str:
    theirs = views[other].waits_for
    if theirs is None:
        return ""
    if theirs.group != call.group and not theirs.kind.point_to_point:
        return tr(
            "Rank {rank} waits on {mine} and rank {other} on {theirs}: the ranks use the groups in different orders. Use them in the same "
            "order on every rank.",
            rank=rank, mine=names[call.group], other=other, theirs=names[theirs.group],
        )  # fmt: skip
    return tr(
        "Rank {rank} waits in {mine} and rank {other} in {theirs}, for each other.",
        rank=rank,
        mine=_what(call),
        other=other,
        theirs=_what(theirs),
    )


def _message_mismatch(found: Mismatch) -> str:
    (sender, sent), (receiver, received) = sorted(found.calls.items(), key=lambda item: item[1].kind is not Kind.SEND)
    return tr(
        "MISMATCH: message {number} from rank {sender} to rank {receiver} is sent as {sent} and received as {received}.",
        number=sent.sequence, sender=sender, receiver=receiver, sent=_tensor(sent), received=_tensor(received),
    )  # fmt: skip


def _differs(found: Mismatch) -> str:
    if found.pair is not None:
        sender, receiver = found.pair
        members = found.calls[sender].members
        return tr(
            "rank {sender} sends {sent} elements to rank {receiver}, which expects {expected} from it",
            sender=sender, receiver=receiver, sent=found.calls[sender].send_splits[members.index(receiver)],
            expected=found.calls[receiver].receive_splits[members.index(sender)],
        )  # fmt: skip
    return {
        "kind": tr("the ranks call different operations"),
        "dtype": tr("the ranks pass different types"),
        "root": tr("the ranks name different roots"),
        "size": tr("the ranks pass tensors of different sizes"),
        "reduction": tr("the ranks ask for different reductions"),
    }[found.what]


def _advice(found: Mismatch) -> str:
    if found.what == "kind":
        return tr(
            "Calls on one group meet in the order in which each rank makes them, not by name. Look for a branch on the rank, or for a call "
            "too many before this one."
        )
    return tr("The backend does not check this: it could have hung, crashed, or returned wrong numbers without an error.")


def _rank_table(views: Mapping[int, RankView], names: Mapping[str, str], name_file: NameFile) -> str:
    now = time.monotonic_ns()
    rows = [(tr("rank"), tr("what it does"), tr("call"), tr("where"), tr("since"))]
    for view in sorted(views.values(), key=lambda view: view.rank):
        since = f"{(now - view.since) / 1e9:.1f} s"
        call = view.waits_for
        if view.death is not None:
            rows.append((str(view.rank), tr("died: {how}", how=view.death), _place(view.last, names), _where(view.last, name_file), ""))
        elif view.state is State.WAITING and call is not None:
            rows.append((str(view.rank), tr("waits in {what}", what=_what(call)), _place(call, names), _where(call, name_file), since))
        else:
            last = tr("last: {what}", what=_what(view.last)) if view.last else tr("no call yet")
            rows.append((str(view.rank), _STATES[view.state](), last, _where(view.last, name_file), since))
    return _columns(rows)


_STATES: dict[State, Callable[[], str]] = {
    State.STARTING: lambda: tr("starts"),
    State.COMPUTING: lambda: tr("computes"),
    State.WAITING: lambda: tr("waits"),
    State.HELD: lambda: tr("is held before a call"),
    State.FINISHED: lambda: tr("has finished"),
    State.RAISED: lambda: tr("raised an error"),
}


def _what(call: Call) -> str:
    """``broadcast from rank 0 of float32[4]``."""
    if call.kind is Kind.NEW_GROUP:
        return f"new_group({list(call.shape)})"
    name = f"DDP's gradient {call.kind.value}" if call.by_reducer else call.kind.value
    arrows = {Kind.SEND: "to", Kind.REDUCE: "to", Kind.GATHER: "to", Kind.RECV: "from", Kind.BROADCAST: "from", Kind.SCATTER: "from"}
    towards = f" {arrows[call.kind]} rank {call.peer}" if call.kind in arrows else ""
    of = "" if call.kind is Kind.BARRIER else f" of {_tensor(call)}"
    how = f", {call.reduction}" if call.reduction not in ("", "SUM") else ""
    return name + towards + of + how


def _tensor(call: Call) -> str:
    return f"{call.dtype}{list(call.shape)}"


def _splits(call: Call) -> str:
    if call.kind is not Kind.ALL_TO_ALL:
        return ""
    return tr(", sends {sent}, receives {received}", sent=list(call.send_splits), received=list(call.receive_splits))


def _place(call: Call | None, names: Mapping[str, str]) -> str:
    if call is None:
        return ""
    if call.kind.point_to_point:
        return tr("message {number}, tag {tag}", number=call.sequence, tag=call.tag)
    return tr("{number} on {group}", number=call.sequence, group=names[call.group])


def _where(call: Call | None, name_file: NameFile) -> str:
    if call is None:
        return ""
    source = linecache.getline(call.site.file, call.site.line).strip()
    return f"{name_file(call.site.file)}, line {call.site.line}" + (f": {source}" if source else "")


def _group_names(calls: Iterable[Call | None]) -> dict[str, str]:
    """Names people know groups by: ``world``, ``group {0, 1}``; numbered where two groups have the same members."""
    members: dict[str, tuple[int, ...]] = {}
    for call in calls:
        if call is not None:
            members.setdefault(call.group, call.members)
    names = {
        group: "world" if group == "0" else "new_group" if group.startswith("new_group") else f"group {_set(ranks)}"
        for group, ranks in members.items()
    }
    for name in set(names.values()):
        alike = sorted((group for group in names if names[group] == name), key=lambda group: (len(group), group))
        if len(alike) > 1:
            names |= {group: f"{name} no. {number}" for number, group in enumerate(alike, 1)}
    return names


def _set(ranks: tuple[int, ...]) -> str:
    return "{" + ", ".join(map(str, ranks)) + "}"


def _ranks(ranks: Iterable[int]) -> str:
    """``rank 1``, ``ranks 0 and 2``; many are cut short."""
    numbers = sorted(ranks)
    if len(numbers) == 1:
        return tr("rank {one}", one=numbers[0])
    if len(numbers) > 8:
        return tr(
            "ranks {first}, {second}, ... {last} ({count} of them)",
            first=numbers[0],
            second=numbers[1],
            last=numbers[-1],
            count=len(numbers),
        )
    return tr("ranks {some} and {last}", some=", ".join(map(str, numbers[:-1])), last=numbers[-1])


def _chain(rank: int, views: Mapping[int, RankView]) -> list[int]:
    """Who waits for whom, from ``rank`` until somebody comes twice."""
    chain = [rank]
    while (call := views[chain[-1]].waits_for) is not None and call.peer >= 0:
        chain.append(call.peer)
        if chain[-1] in chain[:-1]:
            break
    return chain


def _columns(rows: Sequence[tuple[str, ...]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("  " + "  ".join(text.ljust(width) for text, width in zip(row, widths)).rstrip() for row in rows)
