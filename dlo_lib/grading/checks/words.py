"""Which part of a message are the words of the check's author.

A message may take values from the student's process, by the fields of a template, or because the author
formatted it earlier. Words are only what stands as a constant in the code of the check, so that no formatted
text passes for them. Cost: about a millisecond, when a check fails.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Mapping
from types import CodeType, FrameType
from typing import Any

from dlo_lib.base.text import tr, without_values

MAX_FRAMES = 12  # from the comparison up to the check
MAX_DEPTH = 4  # of containers in a module's constants
PLURAL_VERBS = {"is": "are", "has": "have", "holds": "hold", "differs": "differ"}
AFTER_A_NOUN = re.compile(
    "after|at|before|beside|by|for|from|in|inside|of|on|that|to|until|when|where|which|with|without"
)


def words_of(message: str, values: Mapping[str, object]) -> str:
    """Return ``message`` translated, with … for each value; "" if no function that is running contains it."""
    if not _is_written(message, sys._getframe(1)):
        return ""
    return without_values(message) if values else tr(message)


def agreeing(message: str, name: str) -> str:
    """Return ``message``, which says something of ``{what}``, with the verb for the noun of ``name``: "the
    weights of rank 0" are off, and "the sum of the weights" is off.
    """
    subject, _, rest = message.partition(" ")
    verb, space, rest = rest.partition(" ")
    if subject != "{what}" or verb not in PLURAL_VERBS or not _is_plural(name):
        return message
    return f"{subject} {PLURAL_VERBS[verb]}{space}{rest}"


def _is_plural(name: str) -> bool:
    """Return True if the last word before a preposition, a comma or a name of code is a plural noun."""
    noun = ""
    for word in name.split():
        bare = word.rstrip(",:")
        if AFTER_A_NOUN.fullmatch(word) or not bare.isalpha():
            break
        noun = bare
        if bare != word:
            break
    singular = name.startswith("what ") or noun.endswith(
        ("as", "is", "os", "ss", "us")
    )  # bias, axis, cos, loss
    return noun.endswith("s") and not singular


def _is_written(text: str, frame: FrameType | None) -> bool:
    """Return True if ``text`` is a constant in ``frame``, in one of its callers, or in their modules."""
    frames: list[FrameType] = []
    while frame is not None and len(frames) < MAX_FRAMES:
        frames.append(frame)
        frame = frame.f_back
    # Nearly always a function holds it: the constants of the modules, which take longer, come last.
    if any(text in _texts_of(frame.f_code) for frame in frames):
        return True
    modules = {id(frame.f_globals): frame.f_globals for frame in frames}
    return any(_holds(names, text, MAX_DEPTH) for names in modules.values())


@functools.lru_cache(maxsize=4096)
def _texts_of(code: CodeType) -> frozenset[str]:
    """Return the texts among the constants of ``code`` and of the functions in it."""
    found: set[str] = set()
    _add_texts(code, found, MAX_DEPTH)
    return frozenset(found)


def _add_texts(value: Any, found: set[str], depth: int) -> None:
    if type(value) is str:
        found.add(value)
    elif depth and type(value) is CodeType:
        for item in value.co_consts:
            _add_texts(item, found, depth)
    elif depth and type(value) in (tuple, frozenset):
        for item in value:
            _add_texts(item, found, depth - 1)


def _holds(value: Any, text: str, depth: int) -> bool:
    if type(value) is str:
        return value == text
    if depth == 0:
        return False
    if type(value) is CodeType:
        return text in _texts_of(value)
    if type(value) in (tuple, list, frozenset):
        return any(_holds(item, text, depth - 1) for item in value)
    if type(value) is dict:
        return any(
            _holds(item, text, depth - 1) for pair in value.items() for item in pair if item is not value
        )
    return False
