"""``torch.compile`` in a sandbox, which has no C++ compiler.

In a notebook, ``torch.compile`` captures the operations of a function in a graph, and inductor writes C++ for
it, for which g++ needs the headers of the system. A sandbox shows none. There, the graph is captured in the
same way, with its guards and its breaks, and PyTorch's own operators run it (the backend ``aot_eager``), so
that an answer has the same results. A backend that the answer names is left alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


class CapturedOnly(torch._TorchCompileInductorWrapper):
    """Stands for inductor in ``torch.compile``: checks its options, and runs the graph with operators."""

    def __call__(
        self, model_: torch.fx.GraphModule, inputs_: Sequence[Tensor], **options: Any
    ) -> Callable[..., Any]:
        from torch._dynamo.backends.debugging import aot_eager

        return aot_eager(model_, list(inputs_))

    def get_compiler_config(self) -> dict[str, Any]:
        """Return no settings, so that inductor is not imported."""
        return {}


def use_operators_in_compiled_code() -> None:
    """Run what ``torch.compile`` captures with PyTorch's operators in this process and its forks."""
    torch._TorchCompileInductorWrapper = CapturedOnly  # type: ignore[misc]
