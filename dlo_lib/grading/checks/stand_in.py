"""The stand-in for a function of a check in the student's process, and the answer to its calls.

Wherever a stand-in is, it takes and returns plain data only, within one limit of size. How a call reaches the
check is what differs: by the channel of a worker, by the switch of a rank, or directly in a notebook.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import numpy
import torch
from torch import Tensor

from dlo_lib.grading.checks.asked import MOST_BYTES, Asked, result_of
from dlo_lib.grading.checks.codec import NotPlain, pack

Ask = Callable[[bytes], Mapping[str, Any]]
"""Passes the packed ``[args, kwargs]`` of a call to the check; returns what ``Asked.answer`` returns."""


def stand_in(name: str, ask: Ask) -> Callable[..., Any]:
    """Return the function that the student's code calls; ``ask`` passes its calls to the check.

    A child of this process cannot call it, because it shares the connection with this process.
    """
    pid = os.getpid()

    def call(*args: Any, **kwargs: Any) -> Any:
        if os.getpid() != pid:
            raise RuntimeError(f"{name} answers only the process to which it was passed")
        try:
            sent = pack([list(args), kwargs])
        except NotPlain as error:
            raise TypeError(f"{name} takes plain data, not {error}") from None
        if len(sent) > MOST_BYTES:
            raise ValueError(f"{name} takes at most {MOST_BYTES} bytes, not {len(sent)}")
        return result_of(ask(sent))

    call.__name__ = call.__qualname__ = name
    return call


def answer_to(asked: Asked, call: Any) -> bytes:
    """Return the packed answer to the unpacked call of a stand-in.

    Raises:
        NotPlain: no stand-in makes this call.
    """
    match call:
        case [args, kwargs]:
            answer = asked.answer(args, kwargs)
        case _:
            raise NotPlain("a call without arguments")
    try:
        return pack(answer)
    except NotPlain as error:
        return pack(asked.fails(TypeError(f"{asked.name} of the check returns {error}")))


def as_tensor(data: bytes) -> Tensor:
    """Return the bytes as uint8, 1-D: the form in which a packed call is part of a message."""
    return torch.from_numpy(numpy.frombuffer(data, dtype=numpy.uint8).copy())
