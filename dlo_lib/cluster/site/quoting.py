"""Values in a job script: in its head, where sbatch reads them, and in its lines of bash.

After ``#SBATCH``, sbatch splits a line at blanks, ends it at a ``#``, and removes quotes and backslashes.
:func:`directive` writes each option so that sbatch reads the same value again. In bash, ``shlex.quote`` keeps
a value, and :func:`expanded` keeps it too, except variables such as ``$WORK``.
"""

from __future__ import annotations

import re
from pathlib import Path

from dlo_lib.base.errors import UserError
from dlo_lib.base.text import tr

MOST_BYTES = 200
"""Of a job's name: the accounting keeps 255, and the digest of the job is part of it."""

_PLAIN = re.compile(r"[\w@%+=:,./~\[\]-]*", re.ASCII)


def directive(name: str, value: str | bool = True) -> str:
    r"""Return an option of sbatch with its value, as a word of a line that begins with ``#SBATCH``.

    >>> print(directive("nodes", "2"), directive("exclusive"), directive("job-name", 'a "b" #2'))
    --nodes=2 --exclusive --job-name="a \"b\" #2"

    Args:
        name: of the option, without ``--``.
        value: True for an option without a value.

    Raises:
        UserError: the value has a character that no line can hold.
    """
    if value is True:
        return f"--{name}"
    text = check_text(f"--{name}", str(value))
    if _PLAIN.fullmatch(text):
        return f"--{name}={text}"
    return '--{}="{}"'.format(name, re.sub(r'(["\\])', r"\\\1", text))


def check_text(what: str, text: str) -> str:
    """Return a text that a line can hold.

    Args:
        what: the name of the value, for the message.

    Raises:
        UserError: it has a line break or another control character, or is no valid Unicode.
    """
    if any(ord(letter) < 32 or ord(letter) == 127 for letter in text):
        said = "{what} is {text!r}: leave out the line break or control character, which no script can hold"
        raise UserError(tr(said, what=what, text=text))
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        said = "{what} is {text!r}: it is not valid UTF-8, so use other characters"
        raise UserError(tr(said, what=what, text=text)) from None
    return text


def check_name(name: str) -> str:
    """Return the name of a job.

    Raises:
        UserError: SLURM and its accounting cannot hold it.
    """
    check_text("name", name)
    if len(name.encode()) > MOST_BYTES:
        said = "name has {count} bytes: use at most {most}"
        raise UserError(tr(said, count=len(name.encode()), most=MOST_BYTES))
    return name


def output_pattern(folder: Path, file: str) -> str:
    """Return a file of a folder as the value of ``--output``, in which ``%`` begins a number of the job.

    Args:
        folder: its name is kept.
        file: may have such numbers: ``%a.out``.

    Raises:
        UserError: SLURM cannot write to files of this folder.
    """
    if "\\" in str(folder):
        said = "{folder} has a backslash, and SLURM writes no output there: set DLO_HOME to another folder"
        raise UserError(tr(said, folder=folder))
    return f"{str(folder).replace('%', '%%')}/{file}"


def expanded(text: str) -> str:
    """Return a word of bash that is ``text``, with the values of its variables (``$NAME``, ``${NAME}``).

    >>> print(expanded('$WORK/a "b" $(c)'))
    "$WORK/a \\"b\\" \\$(c)"
    """
    return '"{}"'.format(re.sub(r'(["\\`]|\$(?![A-Za-z_{]))', r"\\\1", text))
