"""The stand-ins for the functions of a check, in the student's process: a call is a message to the judge."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

from dlo_lib.grading.checks.codec import enclosed
from dlo_lib.grading.checks.stand_in import stand_in
from dlo_lib.grading.sandbox.channel import Channel


class Asking:
    """Makes the stand-ins that arrive with the judge's questions; one belongs to one question."""

    def __init__(self, channel: Channel) -> None:
        self.question = 0
        """The number of the question that is being answered; 0: none."""
        self.switch: Callable[[int, bytes], Mapping[str, Any]] | None = None
        """Carries the calls of a rank, whose channel the switch reads: the number of a function, and a packed
        call; None: the channel carries them."""
        self._channel, self._serial, self._lock = channel, 0, threading.Lock()
        channel.stand_in = self.stand_in

    def begin(self, question: int) -> None:
        """Begin to answer a question, which has just been received."""
        self.question = question

    def end(self) -> None:
        """End it: its stand-ins no longer answer."""
        self.question, self.switch, self._serial = 0, None, self._serial + 1

    def stand_in(self, index: int, name: str) -> Callable[..., Any]:
        """Return the stand-in for the function with this number in the question that is being received."""
        serial = self._serial

        def ask(call: bytes) -> Mapping[str, Any]:
            if serial != self._serial:
                raise RuntimeError(f"{name} answers only during the call to which it was passed")
            if self.switch is not None:
                return self.switch(index, call)
            with self._lock:
                numbers = {"asks": self.question, "function": index}
                self._channel.send_frame(enclosed(call, numbers, "call"))
                answer: Mapping[str, Any] = self._channel.receive()
            return answer

        return stand_in(name, ask)
