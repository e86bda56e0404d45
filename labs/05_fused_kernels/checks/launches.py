"""Launch a student's kernel in the process of the check, and compare what it wrote.

A kernel arrives as text and is run by the course's interpreter, which counts the bytes and knows each
address. So neither a result nor a count comes from the student's process.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dlo_lib import tiles
from dlo_lib.grading.checks.contract import NotWritten, Wrong
from dlo_lib.labkit.compare import wrong_if

MOST_WORK = 2_000_000
CLOSE = {"rtol": 1e-4, "atol": 1e-5}
FIRST_ROW_ONLY = (
    "{name}: {written} of {whole} bytes are written, those of the first row. A mask tells which lanes are "
    "in *the row*: compare the place in the row with its length, not the offset in the tensor"
)
DONE_BY_ONE = (
    "one program writes {one} elements of {name}, and its part has {most}: the {programs} programs of the "
    "grid share the work, and each finds its part by tl.program_id"
)
APART = (
    "{got} bytes of {name} pass in sectors of 32 bytes, and {most} are needed: a GPU moves whole sectors, so "
    "the lanes of a tile should have elements that are neighbours in memory"
)
ADDED_TO_NOTHING = (
    "{name} holds NaN: tl.atomic_add adds to what the tensor holds, and nothing is set before the launch. "
    "Each program has its own row: write it with tl.store"
)
ROUNDED = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2}  # relative, twice the rounding of the result


@dataclass(frozen=True)
class Launched:
    """A launch: the arguments afterwards, its traffic, the text of the kernel, and how many elements of each
    result one program has."""

    args: Mapping[str, Any]
    traffic: tiles.Traffic
    text: str = ""
    share: Mapping[str, int] = field(default_factory=dict)

    def moved(self, *names: str) -> int:
        """Bytes read from and written to these arguments."""
        return sum(kind.get(name, 0) for kind in (self.traffic.read, self.traffic.written) for name in names)


def launched(
    student, t, text_of, grid: tuple[int, ...], args: Mapping[str, Any], share: Mapping[str, int]
) -> Launched:
    """Run the kernel whose text the scenario ``text_of`` returns; tensors of ``args`` change in place.

    ``share``: the elements of each result that one program writes.
    """
    text = student.run(text_of)
    t.that(type(text) is str, "the exercise needs a kernel: a function with the decorator @triton.jit")
    try:
        return Launched(args, tiles.run(text, grid, args, MOST_WORK), text, share)
    except tiles.NotWrittenError:
        raise NotWritten(
            "not written yet: the kernel raises NotImplementedError", "not written yet"
        ) from None
    except tiles.TileError as error:
        raise Wrong(str(error), error.words) from None


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A result that is not written yet: NaN."""
    return torch.full(shape, torch.nan, dtype=dtype)


def right(
    t,
    run: Launched,
    name: str,
    want: Tensor,
    what: str,
    mistakes: Mapping[str, Tensor] | None = None,
    overflow: str = "",
    atol: float = CLOSE["atol"],
) -> None:
    """The tensor ``name`` is written once, completely, and right.

    ``mistakes`` are messages with the value that each gives; ``overflow`` is the cause of infinities and NaN.
    """
    got = run.args[name]
    written, whole = run.traffic.written.get(name, 0), got.nbytes
    message = "{name}: 0 of {whole} bytes are written: the kernel stores nothing there"
    t.that(written > 0, message, name=name, whole=whole)
    first_only = got.dim() == 2 and len(got) > 1 and written == got[0].nbytes and bool(got[1:].isnan().all())
    t.that(not first_only, FIRST_ROW_ONLY, name=name, written=written, whole=whole)
    message = "{name}: {written} of {whole} bytes are written"
    t.that(written >= whole, message, name=name, written=written, whole=whole)
    message = "{name} is written more than once: {written} bytes, it has {whole}"
    t.that(written == whole, message, name=name, written=written, whole=whole)
    most, one = run.share[name], run.traffic.most_written.get(name, 0) // got.element_size()
    t.that(one <= most, DONE_BY_ONE, one=one, name=name, most=most, programs=run.traffic.programs)
    finite = bool(torch.isfinite(got[torch.isfinite(want)]).all())
    lanes = "{what} holds NaN: lanes outside of the mask of a tl.load have no defined value, give it other="
    t.that(finite or not run.traffic.undefined or not bool(got.isnan().any()), lanes, what=what)
    t.that(finite or "atomic_add" not in run.text, ADDED_TO_NOTHING, name=name)
    if overflow:
        t.that(finite, overflow)
    rtol = ROUNDED.get(got.dtype, CLOSE["rtol"])
    wrong_if(t, got, want, mistakes or {}, rtol=rtol, atol=atol)
    t.close(got, want, what, rtol=rtol, atol=max(atol, rtol / 10 if got.dtype in ROUNDED else 0))


def moves(t, run: Launched, name: str, most: int, why: str) -> None:
    """The launch moves at most ``most`` bytes of the argument ``name``, most of them in whole sectors."""
    got = run.moved(name)
    message = "{got} bytes of {name} are moved, {most} are enough: {why}"
    t.that(got <= most, message, got=got, name=name, most=most, why=why)
    got = run.traffic.sectors.get(name, 0)
    t.that(got <= 2 * most, APART, got=got, name=name, most=most)


def holds_small_tiles(t, run: Launched, most: int, why: str, together: int = 0) -> None:
    """No tile has more than ``most`` elements; the variables of a program hold ``together`` at most, if
    that is given."""
    got = run.traffic.largest_tile
    t.that(got <= most, "a tile has {got} elements, {most} are enough: {why}", got=got, most=most, why=why)
    got = run.traffic.most_held
    message = (
        "the tiles that one program keeps in its variables have {got} elements together, {most} are more "
        "than enough: {why}"
    )
    t.that(not together or got <= together, message, got=got, most=together, why=why)
