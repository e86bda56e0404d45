"""What a rank did in a step, in words, from the calls that passed; and the name of what is wrong with it.

Units are told apart by the bytes of their messages. Each block makes a small all-reduce while it computes, in forward and in backward: so
the order of calls shows what was gathered before which block computed.
"""

from __future__ import annotations

from collections.abc import Sequence

from dlo_lib.comm.calls import Call, Kind

WORDS = {Kind.ALL_GATHER: "gather", Kind.REDUCE_SCATTER: "reduce"}
SMALL = 4  # bytes of a computing block's all-reduce


def described(calls: Sequence[Call], sizes: Sequence[int]) -> list[str]:
    """The calls in words; ``sizes``: bytes of the packed root and blocks."""
    names = {size: _unit(number) for number, size in enumerate(sizes)}
    found, computed, blocks = [], 0, len(sizes) - 1
    for call in calls:
        if call.kind is Kind.ALL_REDUCE and call.payload_bytes == SMALL:
            found.append(f"compute {_unit(computed + 1 if computed < blocks else 2 * blocks - computed)}")
            computed += 1
        else:
            word = WORDS.get(call.kind, call.kind.value)
            found.append(f"{word} {names.get(call.payload_bytes, f'{call.payload_bytes} bytes')}")
    return found


def expected_order(blocks: int) -> list[str]:
    """A step in which the root is whole all the time and one block beside it."""
    forward = [f"{word} {_unit(number)}" for number in range(1, blocks + 1) for word in ("gather", "compute")]
    backward = [f"{word} {_unit(number)}" for number in range(blocks, 0, -1) for word in ("gather", "compute", "reduce")]
    return ["gather root", *forward, *backward, "reduce root"]


def explain(got: Sequence[str], want: Sequence[str], blocks: int) -> str:
    """What is wrong with ``got``, by its name."""
    units = [_unit(number) for number in range(blocks + 1)]
    strange = [step for step in got if step.split()[0] not in ("gather", "compute", "reduce")]
    first = next((index for index, pair in enumerate(zip(got, want)) if pair[0] != pair[1]), min(len(got), len(want)))
    after, found = _place(want, first - 1), _place(got, first)
    where = f"After '{after}' comes '{found}' instead of '{_place(want, first)}'."
    for unit in units:
        times, most = got.count(f"gather {unit}"), want.count(f"gather {unit}")
        if times > most:
            return f"gathered twice: {unit} was gathered {times} times in a step, {most} is enough. {where}"
    if strange:
        return f"a gradient or parameter was communicated un-sharded: '{strange[0]}'. {where}"
    if any("bytes" in step for step in got):
        return f"messages that are no packed unit: '{next(step for step in got if 'bytes' in step)}'. {where}"
    if _before(got, f"gather {units[-1]}", f"compute {units[1]}"):
        return f"gathers everything at once: the last block is gathered before the first computes. {where}"
    kept = [unit for unit in units[1:] if got.count(f"gather {unit}") == 1]
    if kept:
        return f"never freed: {kept[0]} was gathered once, so it stayed whole from forward to backward. {where}"
    if missing := [step for step in want if step not in got]:
        return f"'{missing[0]}' never came. {where}"
    if found.startswith("gather") and _place(want, first).startswith("reduce"):
        return f"three units are whole: the next block is gathered before the one behind it is reduced and freed. {where}"
    return f"the order is another one. {where}"


def _unit(number: int) -> str:
    return f"block {number}" if number else "root"


def _place(steps: Sequence[str], index: int) -> str:
    return steps[index] if 0 <= index < len(steps) else "nothing"


def _before(steps: Sequence[str], first: str, second: str) -> bool:
    return first in steps and second in steps and steps.index(first) < steps.index(second)
