"""Compute with what a student sent: in a notebook in this process, under the judge in a separate one.

A recorded graph and the text of a kernel are no code, but to run them can take any time and memory. So the
judge gives them to a *calculator*: a process in the sandbox of the student's workers, with their limits, that
has never run a student's code. The judge trusts its results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import Tensor

from dlo_lib.grading.checks.contract import Scenario, scenario
from dlo_lib.tiles.faults import TileError
from dlo_lib.tiles.launch import Traffic, running_elsewhere
from dlo_lib.tiles.program import NotWrittenError

Calculate = Callable[[Scenario, Mapping[str, Any]], Any]
_calculator: ContextVar[Calculate | None] = ContextVar("calculator", default=None)


@contextmanager
def calculated_by(calculate: Calculate) -> Iterator[None]:
    """Let ``calculate`` run graphs and kernels in the context."""
    token = _calculator.set(calculate)
    try:
        with running_elsewhere(_run_kernel):
            yield
    finally:
        _calculator.reset(token)


def calculator() -> Calculate | None:
    """Return the calculator of this context; None: what a student sent is run in this process."""
    return _calculator.get()


@scenario
def launch(student: Any, text: str, grid: Any, stores: Any, views: Any, args: Any, most_work: int) -> Any:
    """Run a kernel; return what is in its tensors afterwards, and its traffic, or its fault."""
    from dataclasses import asdict

    from dlo_lib.tiles.faults import TileError
    from dlo_lib.tiles.launch import run
    from dlo_lib.tiles.program import NotWrittenError

    tensors = {name: stores[of].as_strided(*place) for name, (of, *place) in views.items()}
    given = {name: tensors.get(name, args.get(name)) for name in [*args, *views]}
    try:
        traffic = run(text, tuple(grid), given, most_work)
    except NotWrittenError as error:
        return {"not_written": str(error)}
    except TileError as error:
        return {"fault": error.parts()}
    return {"stores": stores, "traffic": asdict(traffic)}


def _run_kernel(text: str, grid: Sequence[int], args: Mapping[str, Any], most_work: int) -> Traffic:
    """Run a kernel in the calculator; its tensors change in place, as in this process."""
    calculate = _calculator.get()
    assert calculate is not None
    stores, views = _as_stores({name: value for name, value in args.items() if isinstance(value, Tensor)})
    numbers = {name: value for name, value in args.items() if name not in views}
    inputs = {
        "text": text,
        "grid": list(grid),
        "stores": stores,
        "views": views,
        "args": numbers,
        "most_work": most_work,
    }
    answer = calculate(launch, inputs)
    if "not_written" in answer:
        raise NotWrittenError(answer["not_written"])
    if "fault" in answer:
        raise TileError.of(answer["fault"])
    for store, after in zip(stores, answer["stores"]):
        store.copy_(after)
    return Traffic(**answer["traffic"])


def _as_stores(tensors: Mapping[str, Tensor]) -> tuple[list[Tensor], dict[str, list[Any]]]:
    """Return the memory of the tensors, and for each of them its number, sizes, strides and offset there.

    Tensors that share memory share it in the calculator too.
    """
    stores: list[Tensor] = []
    numbers: dict[tuple[Any, ...], int] = {}
    views = {}
    for name, tensor in tensors.items():
        tensor = tensor.detach()
        key = tensor.untyped_storage().data_ptr(), tensor.dtype
        if tensor.numel() == 0 or key not in numbers:
            numbers[key] = len(stores)
            size = tensor.untyped_storage().nbytes() // tensor.element_size()
            stores.append(tensor.as_strided((size,), (1,), 0))
        place = [list(tensor.shape), list(tensor.stride()), tensor.storage_offset()]
        views[name] = [numbers[key], *place]
    return stores, views
