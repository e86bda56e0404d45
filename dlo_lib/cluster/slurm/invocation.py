"""One command of SLURM: its environment, how long it may take, and whether its answer is one.

A controller that is busy lets a command wait for minutes, and fails it with a message about the connection.
The command may have been obeyed: an answer that does not come says nothing.
"""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Mapping
from functools import cache

from dlo_lib.base.errors import UserError
from dlo_lib.base.text import tr

_ANSWER_S, _QUERY_S = 60.0, 5.0
_KEPT = ("SLURM_CONF", "SLURM_CLUSTERS")
_OF_A_RANK = re.compile(
    r"(RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|(GROUP|ROLE)_(RANK|WORLD_SIZE|NAME)|MASTER_(ADDR|PORT)"
    r"|TORCHELASTIC_\w+|TMPDIR|OMP_NUM_THREADS"
    r"|DLO_(JOB|LIBRARY|ELEMENT|OUT|PROGRESS(_DECIDES)?|RANKS|LAUNCHER))"
)
_FORMS = {"LC_ALL": "C", "SLURM_TIME_FORMAT": "standard"}
_ALL_ELEMENTS = {"SLURM_BITSTR_LEN": "0"}  # the numbers of all elements of an array, not the first of them
_silent: dict[tuple[str, str], tuple[float, NoAnswer]] = {}


class NoAnswer(UserError):
    """SLURM's controller is busy or down; it may answer later."""


def answer_s() -> float:
    """Return the seconds for which a command may take: ``$DLO_ANSWER_S``, or 60.

    Raises:
        UserError: the variable is no number of seconds.
    """
    return seconds_of("DLO_ANSWER_S", _ANSWER_S)


def query_s() -> float:
    """Return the seconds for which an answer of the queue is valid: ``$DLO_POLL_S``, or 5."""
    return seconds_of("DLO_POLL_S", _QUERY_S)


def seconds_of(name: str, default: float) -> float:
    """Return the number of seconds in a variable of the environment, ``default`` if it is not set.

    Raises:
        UserError: it is no number of seconds.
    """
    given = os.environ.get(name)
    try:
        seconds = float(given or default)
    except ValueError:
        seconds = -1.0
    if seconds < 0:
        raise UserError(tr("{name} is {given!r}: set it to a number of seconds", name=name, given=given))
    return seconds


def submission_environment() -> dict[str, str]:
    """Return the environment that a job may inherit from this process.

    Left out are the SLURM variables of a surrounding job, which would act as options, and those that describe
    a rank, its threads or its temporary folder: with them, each rank of the new job would believe to be the
    rank of this process. Options of the user in ``SBATCH_*`` stay.
    """
    return {
        name: value
        for name, value in os.environ.items()
        if name in _KEPT or not (name.startswith("SLURM_") or _OF_A_RANK.fullmatch(name))
    }


def configuration() -> str:
    """Return what decides which cluster the commands talk to."""
    return ":".join(os.environ.get(name, "") for name in _KEPT)


def call(*command: str, environment: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Return what a command printed, and its status.

    Args:
        environment: of the command; None: :func:`submission_environment`.

    Raises:
        NoAnswer: it has not ended after :func:`answer_s`, and was killed.
        UserError: there is no such command.
    """
    given = submission_environment() if environment is None else environment
    try:
        return subprocess.run(
            command,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=answer_s(),
            env={**given, **_FORMS},
        )
    except FileNotFoundError as error:
        raise UserError(
            tr("no {program} here: SLURM's commands are on the login nodes of a cluster", program=command[0])
        ) from error
    except subprocess.TimeoutExpired as error:
        text = "{program} has not answered for {seconds:g} s: try again later"
        raise NoAnswer(tr(text, program=command[0], seconds=error.timeout)) from error


def asked(*command: str) -> subprocess.CompletedProcess[str]:
    """Return the answer of a command that changes nothing.

    A command that has just not answered in time is not asked again within :func:`query_s`, because a list of
    jobs would wait for each of them.

    Raises:
        NoAnswer: see :func:`call`.
    """
    key = command[0], configuration()
    since, last = _silent.get(key, (0.0, None))
    if last is not None and time.monotonic() - since < query_s():
        raise NoAnswer(str(last))
    try:
        done = call(*command, environment=submission_environment() | _ALL_ELEMENTS)
    except NoAnswer as error:
        _silent[key] = time.monotonic(), error
        raise
    _silent.pop(key, None)
    return done


def ask_anew() -> None:
    """Let the next :func:`asked` ask a command that has just not answered: the user wants a change now."""
    _silent.clear()


def checked(done: subprocess.CompletedProcess[str], may_be_empty: bool = False) -> str:
    """Return the output of a query.

    ``squeue`` prints an error and has the status 0 when it does not find the user, so an empty output with an
    error is no answer.

    Args:
        may_be_empty: whether an empty output without an error is an answer.

    Raises:
        NoAnswer: the command failed, or its output says nothing.
    """
    empty = not done.stdout.strip()
    if done.returncode or (empty and (done.stderr.strip() or not may_be_empty)):
        raise not_answered(done)
    return done.stdout


def not_answered(done: subprocess.CompletedProcess[str]) -> NoAnswer:
    """Return the error for a command that ended without an answer."""
    return NoAnswer(tr("{program} does not answer: {why}", program=done.args[0], why=error_text(done)))


def error_text(done: subprocess.CompletedProcess[str]) -> str:
    """Return the errors that a command printed, in one line, or its status."""
    found = [re.sub(r"^\w+: (?:error: )?", "", line) for line in done.stderr.splitlines() if line.strip()]
    if not found and not done.returncode:
        return tr("its output is empty")
    return "; ".join(found) or tr("status {status}", status=done.returncode)


@cache
def _config_of(_: str) -> Mapping[str, str]:
    answer = checked(asked("scontrol", "show", "config"))
    rows = (line.partition("=") for line in answer.splitlines())
    found = {name.strip(): value.strip() for name, _, value in rows}
    if "ClusterName" not in found:
        raise NoAnswer(tr("scontrol does not answer: {why}", why=tr("its output has no ClusterName")))
    return found


def config(name: str) -> str:
    """Return a value of the controller's configuration; "" if it has none.

    Raises:
        NoAnswer: the controller does not answer.
    """
    return _config_of(configuration()).get(name, "")


def cluster_name() -> str:
    """Return the name of the cluster that the commands of this machine talk to.

    Raises:
        NoAnswer: the controller does not answer.
    """
    return config("ClusterName")
