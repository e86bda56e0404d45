"""The message for a deadlock or a mismatch: one sentence with the cause, a table of the ranks, and advice.

It formats what ``comm.deadlock.stuck_ranks`` found, and decides nothing.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from dlo_lib.base.text import WIDTH, columns, shortened, tr
from dlo_lib.comm.calls import Call, Kind
from dlo_lib.comm.deadlock.board import Activity
from dlo_lib.comm.deadlock.reasons import why
from dlo_lib.comm.deadlock.stuck_ranks import Mismatch, RankView
from dlo_lib.comm.deadlock.vocabulary import (
    NameFile,
    called_from,
    group_names,
    place,
    ranks_in_words,
    splits,
    tensor,
    what,
    where,
)


def deadlock(
    views: Mapping[int, RankView], stuck: Mapping[int, set[int]], name_file: NameFile = os.path.basename
) -> str:
    """Return the message for ranks that wait for something that can no longer happen.

    ``stuck`` gives for each stuck rank the partners that it lacks.
    """
    names = group_names(view.waits_for or view.last for view in views.values())
    one = tr("DEADLOCK: {who} waits for something that can no longer happen.", who=ranks_in_words(stuck))
    several = tr("DEADLOCK: {who} wait for something that can no longer happen.", who=ranks_in_words(stuck))
    head = one if len(stuck) == 1 else several
    return "\n\n".join([head + " " + why(views, stuck, names), _rank_table(views, names, name_file)])


def mismatch(found: Mismatch, name_file: NameFile = os.path.basename) -> str:
    """Return the message for calls that meet and do not agree."""
    first = next(iter(found.calls.values()))
    if first.kind.point_to_point:
        head = _message_mismatch(found)
    elif found.what == "size" and first.kind is Kind.NEW_GROUP:
        head = tr("MISMATCH: the ranks create different groups at the same time.")
    else:
        group = group_names(found.calls.values())[first.group]
        head = tr(
            "MISMATCH in call {number} on {group}: {what}.",
            number=first.sequence,
            group=group,
            what=_differs(found),
        )
    lines: dict[tuple, list[int]] = defaultdict(list)
    for rank, call in sorted(found.calls.items()):
        lines[what(call) + splits(call), _places(call, name_file)].append(rank)
    rows = [(ranks_in_words(ranks), what) for (what, _), ranks in lines.items()]
    table = _with_places(rows, [places for _, places in lines])
    return "\n\n".join([head, table, _advice(found)])


def table(views: Mapping[int, RankView], name_file: NameFile = os.path.basename) -> str:
    """Return a table with one line for each rank: what it does now."""
    names = group_names(view.waits_for or view.last for view in views.values())
    return _rank_table(views, names, name_file)


def _message_mismatch(found: Mismatch) -> str:
    (sender, sent), (receiver, received) = sorted(
        found.calls.items(), key=lambda item: item[1].kind is not Kind.SEND
    )
    return tr(
        "MISMATCH: message {number} from rank {sender} to rank {receiver} is sent as {sent} and received as "
        "{received}.",
        number=sent.sequence, sender=sender, receiver=receiver, sent=tensor(sent), received=tensor(received),
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
        "dtype": tr("the ranks pass different dtypes"),
        "root": tr("the ranks name different roots"),
        "size": tr("the ranks pass tensors of different sizes"),
        "reduction": tr("the ranks ask for different reductions"),
    }[found.what]


def _advice(found: Mismatch) -> str:
    if all(call.kind is Kind.NEW_GROUP for call in found.calls.values()):
        return tr(
            "Every rank must call new_group for the same groups in the same order, also for the groups of "
            "which it is not a member. Otherwise ranks connect to the wrong partners, and get wrong numbers."
        )
    if found.what == "kind":
        return tr(
            "Calls on one group meet in the order in which each rank makes them, not by name. Look for a "
            "branch on the rank, or for an extra call before this one."
        )
    return tr(
        "The backend does not check this: it may hang, crash, or return wrong numbers without an error."
    )


def _rank_table(views: Mapping[int, RankView], names: Mapping[str, str], name_file: NameFile) -> str:
    now = time.monotonic_ns()
    rows = [(tr("rank"), tr("what it does"), tr("call"), tr("since"))]
    places: list[tuple[str, ...]] = [()]
    for view in sorted(views.values(), key=lambda view: view.rank):
        since = f"{(now - view.since) / 1e9:.1f} s" if view.since else ""  # 0 for a rank that has not started
        call, at = view.waits_for, view.last
        if view.death is not None:
            rows.append((str(view.rank), tr("has died"), place(view.last, names), ""))
        elif view.in_call and call is not None:
            at = call
            does = (
                tr("waits in {what}", what=what(call))
                if view.state is Activity.WAITING
                else tr("lost its connection in {what}", what=what(call))
            )
            rows.append((str(view.rank), does, place(call, names), since))
        else:
            last = tr("last: {what}", what=what(view.last)) if view.last else tr("no call yet")
            rows.append((str(view.rank), _STATES[view.state](), last, since))
        places.append(_places(at, name_file))
    return _with_places(rows, places)


def _places(call: Call | None, name_file: NameFile) -> tuple[str, ...]:
    """Return the line of a call and the line that called its function, because the call may be a helper's."""
    return where(call, name_file), called_from(call, name_file)


def _with_places(rows: Sequence[tuple[str, ...]], places: Sequence[tuple[str, ...]]) -> str:
    """Return a table with the places of each row's call in the program on lines below the row.

    Where the rows are too wide for a page, the third column stands on a line below the row too, so that no
    column is lost.
    """
    below = [""] * len(rows)
    if len(rows[0]) > 2 and max(map(len, columns(rows).splitlines())) + 2 > WIDTH:
        below = ["", *(row[2] for row in rows[1:])]
        rows = [(*row[:2], *row[3:]) for row in rows]
    first = max(len(row[0]) for row in rows)
    lines: list[str] = []
    for line, more, here in zip(columns(rows).splitlines(), below, places, strict=True):
        lines += [f"  {line}", *(f"{'':{first + 4}}{text}" for text in (more, *here) if text)]
    return "\n".join(shortened(line) for line in lines)


_STATES: dict[Activity, Callable[[], str]] = {
    Activity.STARTING: lambda: tr("has not started, or is not on this machine"),
    Activity.COMPUTING: lambda: tr("computes"),
    Activity.WAITING: lambda: tr("waits"),
    Activity.HELD: lambda: tr("is stopped before a call"),
    Activity.FINISHED: lambda: tr("has finished"),
    Activity.RAISED: lambda: tr("raised an error"),
    Activity.BROKEN: lambda: tr("lost its connection"),
    Activity.LEFT: lambda: tr("has left the process group"),
}
