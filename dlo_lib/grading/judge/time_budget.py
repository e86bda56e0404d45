"""The seconds that a submission may use: full limits until it exceeds one, shorter limits afterwards.

An answer that does not end costs its limit, and it fails every try. Without a budget, a submission with an
endless loop in each answer would cost the limits of all its checks, several times. After a limit is exceeded,
a check still has several times the seconds of the reference solution, so that a right answer to another
question keeps its points. These are seconds of computing, which do not depend on other submissions.
"""

from __future__ import annotations

from collections.abc import Mapping

from dlo_lib.grading.checks.contract import Check
from dlo_lib.grading.checks.outcome import Ended, Status

FULL_SECONDS, FULL_FACTOR = 10.0, 20.0  # at most the limit of the check, at least this
SHORT_SECONDS, SHORT_FACTOR = 4.0, 5.0  # halved with each limit that is exceeded, down to
LEAST_SECONDS = 1.0  # far more than most checks need, also on a loaded machine
SHORT_PART = 5  # of the full limit, where the time of the reference solution is not known
TOTAL_SECONDS, TOTAL_FACTOR = 60.0, 10.0  # of computing, for the whole submission
SPENT = 3  # a submission without seconds left counts as one that has exceeded this many limits


class TimeBudget:
    """The limits of one submission.

    Args:
        reference: seconds of computing of the reference solution by check, as far as they are known.
    """

    def __init__(self, reference: Mapping[str, float] | None = None) -> None:
        self._reference = dict(reference or {})
        self._exceeded = 0
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

    def seconds(self, check: Check) -> float:
        """Return the limit of all calls of a check together."""
        known = self._reference.get(check.name)
        if self.exceeded == 0:
            least = check.seconds if known is None else max(FULL_SECONDS, FULL_FACTOR * known)
        else:
            needed = check.seconds / SHORT_PART if known is None else SHORT_FACTOR * known
            least = max(LEAST_SECONDS, SHORT_SECONDS / 2**self.exceeded, needed)
        return min(check.seconds, least)

    def load_seconds(self, full: float) -> float:
        """Return the limit of all cells together; ``full`` until a limit is exceeded."""
        return full if self.exceeded == 0 else full / SHORT_PART
