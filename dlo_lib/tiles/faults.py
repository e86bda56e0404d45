"""The error of a kernel: one line with the cause, the line of the kernel and the program."""

from __future__ import annotations

from typing import Any

from dlo_lib.base.errors import UserError
from dlo_lib.base.text import tr, without_values


class TileError(UserError):
    """A kernel is wrong, or uses what the interpreter does not support.

    Attributes:
        words: the message without values.
        line: the number of the line in the text of the kernel, from 1; 0 if it is not known.
        program: the program that failed; None while the text is read.
    """

    def __init__(self, message: str, /, line: int = 0, **values: object) -> None:
        self.words = without_values(message) if values else tr(message)
        self.text = tr(message, **values)
        self.line = line
        self.code = ""
        self.program: tuple[int, ...] | None = None
        super().__init__(self.text)

    def parts(self) -> dict[str, object]:
        """Return plain data from which :meth:`of` makes this error in another process."""
        program = None if self.program is None else list(self.program)
        return {"words": self.words, "text": self.text, "line": self.line, "code": self.code, "at": program}

    @classmethod
    def of(cls, parts: dict[str, Any]) -> TileError:
        """Return the error of these :meth:`parts`."""
        error = cls("{text}", line=parts["line"], text=parts["text"])
        error.words, error.code = parts["words"], parts["code"]
        error.program = None if parts["at"] is None else tuple(parts["at"])
        return error

    def __str__(self) -> str:
        where = [tr("program {program}", program=self.program)] if self.program is not None else []
        if self.line:
            where.append(tr("line {line}: {code}", line=self.line, code=self.code))
        return f"{self.text} ({', '.join(where)})" if where else self.text
