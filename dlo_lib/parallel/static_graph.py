"""A training step that is the same every time can be learnt once: which parameters it uses, and how often each.

Without that knowledge a gradient counts as complete when it first arrives, and a rank has to ask the others in each step which of the
parameters it did not use were used elsewhere. A parameter that a reentrant checkpoint reaches twice would be sent half done.
"""

from __future__ import annotations

from collections.abc import Sequence

from dlo_lib.errors import UserError


class StaticGraph:
    """Counts the arrivals of gradients in each backward pass of this rank, and compares with those of its first.

    Args:
        names: of the parameters, by index.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._seen = [0] * len(names)
        self._expected: list[int] | None = None

    def arrived(self, index: int) -> bool:
        """Whether the gradient is complete with this arrival; never in the first pass, where nobody knows if it comes again."""
        self._seen[index] += 1
        if self._expected is None:
            return False
        if self._seen[index] > self._expected[index]:
            raise UserError(self._changed([index]))
        return self._seen[index] == self._expected[index]

    def end_of_pass(self) -> None:
        """Learn from the first pass, compare the others with it.

        Raises:
            UserError: this pass used other parameters, or one of them more or less often.
        """
        seen, self._seen = self._seen, [0] * len(self._names)
        if self._expected is None:
            self._expected = seen
        different = [index for index, times in enumerate(seen) if times != self._expected[index]]
        if different:
            raise UserError(self._changed(different))

    def forget_pass(self) -> None:
        """After one that was interrupted."""
        self._seen = [0] * len(self._names)

    def _changed(self, indices: list[int]) -> str:
        names = ", ".join(self._names[index] for index in indices)
        return f"the graph is not static: {names} used otherwise than in the first step; use find_unused_parameters=True instead"
