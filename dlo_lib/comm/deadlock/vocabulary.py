"""The words of explanations: how a call, a rank, a group and a line of user code are named."""

from __future__ import annotations

import linecache
from collections.abc import Callable, Iterable, Mapping

from dlo_lib.base.text import tr
from dlo_lib.comm.calls import Call, Kind

NameFile = Callable[[str], str]
"""Maps a file name to the name to show; a notebook's cell has a generated file name."""
_NAMED_BY_FUNCTION = {
    "all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list", "send_object_list",
    "recv_object_list",
    "full_tensor", "clip_grad_norm_",
}  # fmt: skip
"""Functions of torch whose calls a user does not recognise by their operation alone."""


def what(call: Call) -> str:
    """Return the operation with its peer and tensor: ``broadcast from rank 0 of float32[4]``."""
    if call.kind is Kind.JOIN:
        return call.kind.value
    if call.kind is Kind.NEW_GROUP:
        return f"new_group({list(call.shape)})"
    name = call.kind.value
    if call.by_reducer:
        name = f"DDP's gradient {name}"
    elif call.site.api in _NAMED_BY_FUNCTION:
        name = f"{call.site.api}'s {name}"
    arrows = {
        Kind.SEND: "to",
        Kind.REDUCE: "to",
        Kind.GATHER: "to",
        Kind.RECV: "from",
        Kind.BROADCAST: "from",
        Kind.SCATTER: "from",
    }
    towards = f" {arrows[call.kind]} rank {call.peer}" if call.kind in arrows else ""
    of = "" if call.kind in (Kind.BARRIER, Kind.MONITORED_BARRIER) else f" of {tensor(call)}"
    how = f", {call.reduction}" if call.reduction not in ("", "SUM") else ""
    return name + towards + of + how


def tensor(call: Call) -> str:
    """Return dtype and shape: ``float32[4]``."""
    return f"{call.dtype}{list(call.shape)}"


def splits(call: Call) -> str:
    """Return the split sizes of an all-to-all; "" for other operations."""
    if call.kind is not Kind.ALL_TO_ALL:
        return ""
    return tr(
        ", sends {sent}, receives {received}", sent=list(call.send_splits), received=list(call.receive_splits)
    )


def place(call: Call | None, names: Mapping[str, str]) -> str:
    """Return the position of a call in the order of its group, or the number and the tag of a message."""
    if call is None or call.kind is Kind.JOIN:
        return ""
    if call.kind.point_to_point:
        return tr("message {number}, tag {tag}", number=call.sequence, tag=call.tag)
    return tr("{number} on {group}", number=call.sequence, group=names[call.group])


def where(call: Call | None, name_file: NameFile) -> str:
    """Return file, line and source text of a call; "" if they are not known."""
    if call is None or not call.site.line:
        return ""
    return _line(call.site.file, call.site.line, name_file)


def called_from(call: Call | None, name_file: NameFile) -> str:
    """Return "called from" and the user's line that called the function of this call; "" without one."""
    if call is None or call.site.caller is None:
        return ""
    return tr("called from {where}", where=_line(*call.site.caller, name_file))


def _line(file: str, number: int, name_file: NameFile) -> str:
    source = linecache.getline(file, number).strip()
    return f"{name_file(file)}, line {number}" + (f": {source}" if source else "")


def group_names(calls: Iterable[Call | None]) -> dict[str, str]:
    """Return the names that users know groups by: ``world``, ``group {0, 1}``.

    Groups with the same members are numbered.
    """
    members: dict[str, tuple[int, ...]] = {}
    for call in calls:
        if call is not None:
            members.setdefault(call.group, call.members)
    names = {
        group: "world"
        if group.partition("/")[0] == "0"
        else "new_group"
        if group.startswith("new_group")
        else f"group {_set(ranks)}"
        for group, ranks in members.items()
    }
    for name in set(names.values()):
        alike = sorted(
            (group for group in names if names[group] == name), key=lambda group: (len(group), group)
        )
        if len(alike) > 1:
            names |= {group: f"{name} no. {number}" for number, group in enumerate(alike, 1)}
    return names


def _set(ranks: tuple[int, ...]) -> str:
    return "{" + ", ".join(map(str, ranks)) + "}"


def ranks_in_words(ranks: Iterable[int]) -> str:
    """Return ``rank 1`` or ``ranks 0 and 2``; more than 8 ranks are abbreviated."""
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


def never_waited(call: Call) -> str:
    """Return the warning for an asynchronous operation that the program never waited for."""
    return tr(
        "{file}, line {line}: {what} was started but never waited for: "
        "call wait() on the work that it returned",
        file=call.site.file, line=call.site.line, what=what(call),
    )  # fmt: skip
