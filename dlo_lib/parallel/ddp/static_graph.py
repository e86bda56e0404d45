"""Static graphs: when every step uses the same parameters the same number of times, the first step can record
them.

Without this record, a gradient counts as complete when autograd computes it for the first time, and the ranks
exchange in each step which parameters they used. A parameter that a reentrant checkpoint reaches twice would
be sent before its gradient is complete.
"""

from __future__ import annotations

from collections.abc import Sequence

from dlo_lib.base.errors import UserError


class StaticGraph:
    """Counts how often each gradient is computed in a backward pass of this rank, and compares the counts
    with those of the first pass.

    Args:
        names: the names of the parameters, by index.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._seen = [0] * len(names)
        self._expected: list[int] | None = None

    def arrived(self, index: int) -> bool:
        """Count one computation of a gradient and return whether the gradient is complete. In the first pass
        the result is False, because the final count is unknown.

        Raises:
            UserError: the gradient is computed more often than in the first pass.
        """
        self._seen[index] += 1
        if self._expected is None:
            return False
        if self._seen[index] > self._expected[index]:
            raise UserError(self._changed([index]))
        return self._seen[index] == self._expected[index]

    def end_of_pass(self) -> None:
        """Store the counts of the first pass, or compare those of a later pass with them.

        Raises:
            UserError: the counts of this pass differ from those of the first pass.
        """
        seen, self._seen = self._seen, [0] * len(self._names)
        if self._expected is None:
            self._expected = seen
        different = [index for index, times in enumerate(seen) if times != self._expected[index]]
        if different:
            raise UserError(self._changed(different))

    def discard_pass(self) -> None:
        """Discard the counts of an interrupted pass."""
        self._seen = [0] * len(self._names)

    def _changed(self, indices: list[int]) -> str:
        names = ", ".join(self._names[index] for index in indices)
        return (
            f"the graph is not static: {names} used otherwise than in the first step: "
            "use find_unused_parameters=True instead"
        )
