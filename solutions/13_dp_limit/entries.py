"""What several files of checks ask of an answer: a number under a key, and how near it is."""

from __future__ import annotations


def entry(t, got, key: str, what: str):
    """The number under ``key`` of what should be a dict."""
    t.that(type(got) is dict, "{what} should be a dict of numbers, not {got}", what=what, got=got)
    t.that(key in got, '{what} has no entry "{key}"', what=what, key=key)
    return t.number(got[key], f'{what}["{key}"]')


def near(got: float, want: float, tolerance: float) -> bool:
    return bool(abs(got - want) <= tolerance * abs(want))
