"""What a variable keeps in a loop: Triton compiles its body once, so it has one kind in all passes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dlo_lib.tiles.faults import TileError
from dlo_lib.tiles.memory import Pointer
from dlo_lib.tiles.values import describe


@dataclass(frozen=True)
class VariableKind:
    """The kind of a value.

    Attributes:
        words: the kind for a message.
        dtype: of a tile its dtype, of a pointer its buffer, None for a number.
        shape: of a tile or of the addresses of a pointer.
        inner: of a tuple the kinds of its values, otherwise None.
    """

    words: str
    dtype: Any = None
    shape: tuple[int, ...] = ()
    inner: tuple[VariableKind, ...] | None = None

    def keeps(self, after: VariableKind) -> bool:
        """Return True if a variable of this kind may become one of the other."""
        if self.inner is None or after.inner is None:
            weak = self.dtype is None and not after.shape  # a number that becomes a tile without dimensions
            same = weak or (self.dtype, self.shape) == (after.dtype, after.shape)
            return same and self.inner is after.inner
        pairs = zip(self.inner, after.inner)
        return len(self.inner) == len(after.inner) and all(one.keeps(other) for one, other in pairs)


def kind_of(value: Any) -> VariableKind:
    """Return the kind of a value."""
    if isinstance(value, Pointer):
        return VariableKind(describe(value), value.buffer, tuple(value.offsets.shape))
    if isinstance(value, tuple):
        return VariableKind(describe(value), inner=tuple(kind_of(each) for each in value))
    return VariableKind(describe(value), getattr(value, "dtype", None), tuple(getattr(value, "shape", ())))


def require_same_kind(name: str, before: VariableKind, value: Any, line: int) -> None:
    """Require that the variable ``name`` of a loop keeps its kind.

    Raises:
        TileError: it does not.
    """
    after = kind_of(value)
    if before.keeps(after):
        return
    if before.inner is not None and after.inner is not None:
        message = (
            "{name} is a tuple, and the loop gives it a tuple of another form: a variable of a loop keeps "
            "its form, because a program has registers for a few tiles and not for a growing list"
        )
        raise TileError(message, line=line, name=name)
    message = (
        "{name} is {before} before the loop and {after} after its first pass: a variable of a loop "
        "keeps its dtype and its shape, so create it with those of its results"
    )
    raise TileError(message, line=line, name=name, before=before.words, after=after.words)
