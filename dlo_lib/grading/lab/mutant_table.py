"""Mutants as a table of text: a line each for the title, the check with its message, and a change.

A mutant of one or two changes needs three lines or four here, and its code is read without quotes::

    from dlo_lib.grading.lab.mutant_table import mutant_table

    MUTANTS = mutant_table('''
        [mean]
        The sum is divided by two, whatever the number of values
            check_mean: the mean of three values
            len(values)  =>  2
        Values that are not numbers count
            check_finite, check_total: values that are not numbers
            if value == value:  =>
                if value is not None:
    ''')

- ``[mean]``: the question of the mutants below it. A line that begins with ``#`` is a comment.
- ``check_finite, check_total: words``: the check that must fail with these words, then those of ``also``.
- ``old  =>  new``: one line of the solution, or a part of it, and what replaces it. A new text of several
  lines, or a long one, is a block below the line; without any text the old one is removed.
- ``answer:`` and a block: new definitions, instead of changes.

What needs more, such as an old text of several lines, is a ``Mutant`` beside the table.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator

from dlo_lib.base.errors import UserError
from dlo_lib.grading.lab.mutants import Mutant

ITEM = re.compile(r"^(?!#)(\S.*)\n((?:[ ].*\n|\n)*)", re.MULTILINE)
SECTION = re.compile(r"\[(\w+)\]")
CHECKS = re.compile(r"(\w+(?:, \w+)*): (.+)")
CHANGE = re.compile(r"(.*\S)\s+=>\s*(.*)")


def mutant_table(text: str) -> list[Mutant]:
    """Return the mutants of a table, in its order.

    Raises:
        UserError: a line is not one of the forms above.
    """
    mutants, question = [], ""
    for head, body in _items(text):
        if section := SECTION.fullmatch(head):
            question = section[1]
        else:
            mutants.append(_mutant(question, head, body))
    return mutants


def _items(text: str) -> Iterator[tuple[str, str]]:
    """Each line that is not indented, with the lines below it that are."""
    for found in ITEM.finditer(textwrap.dedent(text) + "\n"):
        yield found[1], textwrap.dedent(found[2]).strip("\n")


def _mutant(question: str, title: str, body: str) -> Mutant:
    first, *lines = _items(body) if body else [("", "")]
    checks = CHECKS.fullmatch(first[0])
    if not checks:
        raise UserError(f"mutant {title!r}: its second line should be `check_name: words of the message`")
    answer, replace = "", {}
    for line, block in lines:
        if line == "answer:":
            answer = block
        elif change := CHANGE.fullmatch(line):
            replace[change[1]] = change[2] or block
        else:
            raise UserError(f"mutant {title!r}: {line!r} is neither `old  =>  new` nor `answer:`")
    fails, *also = checks[1].split(", ")
    return Mutant(title, fails, checks[2], replace, answer, question, tuple(also))
