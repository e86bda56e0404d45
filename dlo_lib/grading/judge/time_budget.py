"""The seconds that a submission may use: full limits until it exceeds one, shorter limits afterwards.

An answer that does not end costs its limit, and it fails every try. Without a budget, a submission with an
endless loop in each answer would cost the limits of all its checks, several times. A check has 20 times the
seconds of the reference solution, and still 5 times these seconds after a limit is exceeded, so that a slow
answer and a right answer to another question keep their points. These are seconds of computing or sleeping,
which do not depend on other submissions.
"""

from __future__ import annotations

from collections.abc import Mapping

from dlo_lib.grading.checks.contract import Check
from dlo_lib.grading.checks.outcome import Ended, Status

FULL_SECONDS, FULL_FACTOR = 5.0, 20.0  # at most the limit of the check, at least this
SHORT_SECONDS, SHORT_FACTOR = 1.5, 5.0  # a half, a third, … after one, two, … exceeded limits, down to
LEAST_SECONDS = 0.25  # many times what a check needs whose reference takes milliseconds
SHORT_PART = 5  # of the full limit, where the time of the reference solution is not known
LEAST_LOAD_SECONDS, LOADED_FACTOR = 1.0, 2.0  # of the time in which the cells of this submission have ended
TOTAL_SECONDS, TOTAL_FACTOR = 20.0, 10.0  # of computing, for the whole submission
SPENT = 3  # a submission without seconds left counts as one that has exceeded this many limits


class TimeBudget:
    """The limits of one submission.

    Args:
        reference: seconds in which the reference solution computes or sleeps, by check, as far as known.
    """

    def __init__(self, reference: Mapping[str, float] | None = None) -> None:
        self._reference = dict(reference or {})
        self._exceeded = 0
        self._loaded = 0.0
        self._total = max(TOTAL_SECONDS, TOTAL_FACTOR * sum(self._reference.values()))
        self.computed = 0.0
        """Seconds of computing of the submission so far."""

    @property
    def exceeded(self) -> int:
        """The number of limits that the submission has exceeded."""
        return self._exceeded + (SPENT if self.computed > self._total else 0)

    def note(self, error: Exception) -> None:
        """Count ``error`` if it is an exceeded limit."""
        if isinstance(error, Ended) and error.status in (Status.TIMEOUT, Status.OOM):
            self._exceeded += 1

    def note_load(self, seconds: float) -> None:
        """Record that cells of the submission ended after ``seconds`` of computing."""
        self._loaded = max(self._loaded, seconds)

    def seconds(self, check: Check) -> float:
        """Return the limit of all calls of a check together."""
        known = self._reference.get(check.name)
        if self.exceeded == 0:
            least = check.seconds if known is None else max(FULL_SECONDS, FULL_FACTOR * known)
        else:
            needed = check.seconds / SHORT_PART if known is None else SHORT_FACTOR * known
            least = max(LEAST_SECONDS, SHORT_SECONDS / (1 + self.exceeded), needed)
        return min(check.seconds, least)

    def load_seconds(self, full: float) -> float:
        """Return the limit of all cells together; ``full`` until a limit is exceeded."""
        if self.exceeded == 0:
            return full
        short = full / SHORT_PART / 2 ** (self.exceeded - 1)
        return min(full, max(short, LEAST_LOAD_SECONDS, LOADED_FACTOR * self._loaded))
