"""The stand-ins for the functions of a check, in the student's process: a call is a message to the judge."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

from dlo_lib.grading.checks.asked import MOST_BYTES, result_of
from dlo_lib.grading.checks.codec import NotPlain, pack
from dlo_lib.grading.sandbox.channel import Channel


class Asking:
    """Makes the stand-ins that arrive with the judge's questions; one belongs to one question."""

    def __init__(self, channel: Channel) -> None:
        self.question = 0
        """The number of the question that is being answered; 0: none."""
        self._channel, self._serial = channel, 0
        self._lock, self._pid = threading.Lock(), os.getpid()
        channel.stand_in = self.stand_in

    def begin(self, question: int) -> None:
        """Begin to answer a question, which has just been received."""
        self.question = question

    def end(self) -> None:
        """End it: its stand-ins no longer answer."""
        self.question, self._serial = 0, self._serial + 1

    def stand_in(self, index: int, name: str) -> Callable[..., Any]:
        """Return the stand-in for the function with this number in the question that is being received."""
        serial = self._serial

        def call(*args: Any, **kwargs: Any) -> Any:
            if serial != self._serial or os.getpid() != self._pid:
                raise RuntimeError(f"{name} answers only during the call to which it was passed")
            return self._ask(index, name, args, kwargs)

        call.__name__ = call.__qualname__ = name
        return call

    def _ask(self, index: int, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        message = {"asks": self.question, "function": index, "args": list(args), "kwargs": kwargs}
        try:
            size = len(pack(message))
        except NotPlain as error:
            raise TypeError(f"{name} takes plain data, not {error}") from None
        if size > MOST_BYTES:
            raise ValueError(f"{name} takes at most {MOST_BYTES} bytes, not {size}")
        with self._lock:
            self._channel.send(message)
            return result_of(self._channel.receive())
