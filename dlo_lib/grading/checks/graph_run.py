"""Run a plain graph of ``dlo_lib.profiling.compile_capture`` in this process.

Only operations of a list are run, on tensors of at most ``MOST_ELEMENTS`` elements. The sizes are computed
first on the ``meta`` device, without memory. Cost: that of the graph, twice.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dlo_lib.base.text import tr
from dlo_lib.grading.checks.exceptions import Wrong

MOST_ELEMENTS, MOST_NODES, MOST_DIGITS = 1 << 17, 2000, 1 << 62
MOST_TOGETHER, MOST_ITEMS = 1 << 24, 1000  # elements of all results of a graph; items of a list

TENSOR_NAMES = """
abs add addcdiv addcmul addmm all amax amin any arange argmax argmin argsort baddbmm bfloat16 bitwise_and
bitwise_not bitwise_or bmm bool broadcast_to cat ceil chunk clamp clamp_max clamp_min clip clone contiguous
copy cos cumprod cumsum detach diagonal div divide double einsum eq exp expand expand_as expm1 eye fill
flatten flip float floor floor_divide full full_like gather ge gelu greater gt half index_add index_copy
index_fill index_select int isclose isfinite isinf isnan layer_norm le lerp less linalg_norm
linalg_vector_norm linear log log1p log_softmax logical_and logical_not logical_or logical_xor logsumexp long
lt masked_fill matmul max maximum mean min minimum mm movedim mul multiply mv nan_to_num nanmean nansum narrow
ne neg negative new_full new_ones new_zeros norm one_hot ones ones_like outer permute pow prod reciprocal relu
remainder repeat repeat_interleave reshape rms_norm roll rsqrt rsub scaled_dot_product_attention scatter
scatter_add select sigmoid sign silu sin size softmax sort split sqrt square squeeze stack std std_mean sub
subtract sum swapaxes t take_along_dim tan tanh tensor tensor_split tile to topk transpose tril triu
true_divide type_as unbind unflatten unsqueeze var var_mean vector_norm view view_as where xor zeros
zeros_like
"""
PYTHON_NAMES = """
abs add and_ eq floordiv ge getitem gt iadd imul invert isub itruediv le lt matmul mod mul ne neg not_ or_ pow
setitem sub truediv
"""
ATEN_NAMES = """
_reshape_alias _softmax _to_copy _unsafe_view alias aminmax arange copy empty empty_like index index_put
lift_fresh new_empty round scalar_tensor slice split_with_sizes trunc unsafe_split zero
"""  # besides the names above
OPERATIONS, PYTHON = frozenset(TENSOR_NAMES.split()), frozenset(PYTHON_NAMES.split())
ATEN = OPERATIONS | frozenset(ATEN_NAMES.split())
ATTRIBUTES = frozenset({"T", "mT", "shape", "ndim"})
WITHOUT_EFFECT = frozenset(
    {"_check", "_set_grad_enabled", "set_grad_enabled", "_assert_scalar", "_check_is_size"}
)
MODULES: dict[str, Any] = {
    "torch": torch,
    "torch.nn.functional": torch.nn.functional,
    "torch.functional": torch.functional,
    "torch._C._nn": torch._C._nn,  # type: ignore[attr-defined]
    "torch._C._linalg": torch._C._linalg,  # type: ignore[attr-defined]
    "torch.linalg": torch.linalg,
}


@dataclass(frozen=True)
class ObservedOperation:
    """An operation that ran.

    Attributes:
        name: its name in ``torch.ops.aten``, without the overload, as ``"add_"``.
        reads: the elements of its largest input; 0 if it has none.
        makes: the elements of the memory of its largest result; that of a view is what it is a view of.
        dtypes: those of its inputs and results, as ``"float32"``.
    """

    name: str
    reads: int
    makes: int
    dtypes: frozenset[str]


def replay_here(
    graph: Mapping[str, Any], args: Sequence[Any], watched: bool = False
) -> tuple[list[Tensor], list[ObservedOperation]]:
    """Run a plain graph in this process; return its outputs, and if ``watched`` its operations."""
    watch = _Watch()
    try:
        with torch.no_grad():
            shapes = [arg.to("meta") if isinstance(arg, Tensor) else arg for arg in args]
            _GraphRun(graph, shapes, "meta").outputs()
            values = [arg.clone() if isinstance(arg, Tensor) else arg for arg in args]
            with watch if watched else nullcontext():
                outputs = _GraphRun(graph, values, "cpu").outputs()
            return outputs, watch.operations
    except Wrong:
        raise
    except Exception as error:
        reason = str(error).splitlines()[0][:120] if str(error) else type(error).__name__
        text = tr("the graph of your function cannot be run on other inputs: {reason}", reason=reason)
        raise Wrong(text, tr("the graph of your function cannot be run on other inputs")) from error


class _Watch(TorchDispatchMode):
    """Keeps the operations that run."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[ObservedOperation] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # the wrapper that skips the compiler imports it, which takes two seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given, made = _tensors((args, kwargs or {})), _tensors(result)
        reads = max((tensor.numel() for tensor in given), default=0)
        memory = [tensor.untyped_storage().nbytes() // tensor.element_size() for tensor in made]
        dtypes = frozenset(str(tensor.dtype).removeprefix("torch.") for tensor in [*given, *made])
        name = func.__name__.split(".")[0]
        self.operations.append(ObservedOperation(name, reads, max(memory, default=0), dtypes))
        return result


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


class _GraphRun:
    """One run of a graph on one device."""

    def __init__(self, graph: Mapping[str, Any], args: Sequence[Any], device: str) -> None:
        self.device = device
        self.values: dict[str, Any] = {}
        self.graph = graph
        self._elements = 0
        inputs, nodes = graph["inputs"], graph["nodes"]
        if (
            type(inputs) is not list
            or type(nodes) is not list
            or len(inputs) != len(args)
            or len(nodes) > MOST_NODES
        ):
            raise unreadable()
        self.values |= {given["name"]: arg for given, arg in zip(inputs, args)}
        for given in inputs:
            if "size" in given:
                name, dim = given["size"]
                self.values[given["name"]] = self.values[name].shape[dim]
        for node in nodes:
            self.values[node["name"]] = self._limited(self._value(node))

    def outputs(self) -> list[Tensor]:
        """Return the tensors among the outputs."""
        found = [self._read(value) for value in self.graph["outputs"]]
        return [value for value in found if isinstance(value, Tensor)]

    def _value(self, node: Mapping[str, Any]) -> Any:
        if node["kind"] == "constant":
            return node["value"].to(self.device)
        args, kwargs = (
            self._read(node["args"]),
            {str(name): self._read(value) for name, value in node["kwargs"].items()},
        )
        return self._function(node["kind"], node["module"], node["op"])(*args, **kwargs)

    def _function(self, kind: str, module: str, name: str) -> Callable[..., Any]:
        if name in WITHOUT_EFFECT:
            return lambda *_, **__: None
        if kind == "function" and module == "_operator" and name in PYTHON:
            return _safe_power if name == "pow" else _of_numbers(name)
        if kind == "function" and module == "builtins" and name == "getattr":
            return _attribute
        if kind == "function" and module == "torch.ops.aten":
            base, _, overload = name.partition(".")
            if (
                base == "_local_scalar_dense"
            ):  # a number that was read from a tensor: a constant where it is used
                return lambda *_, **__: None
            if base.removesuffix("_") in ATEN and hasattr(getattr(torch.ops.aten, base, None), overload):
                return self._on_device(getattr(getattr(torch.ops.aten, base), overload))
        if name.removesuffix("_") in OPERATIONS:
            if kind == "method":
                return lambda tensor, *args, **kwargs: _method(tensor, name)(*args, **kwargs)
            if kind == "function" and module in MODULES and hasattr(MODULES[module], name):
                return self._on_device(getattr(MODULES[module], name))
        raise Wrong(
            tr(
                "the graph holds `{name}`, which the check cannot run: use ordinary operations on tensors",
                name=str(name)[:40],
            ),
            tr("the graph holds an operation that the check cannot run: use ordinary operations on tensors"),
        )

    def _on_device(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def on_device(*args: Any, **kwargs: Any) -> Any:
            with torch.device(self.device):
                return function(*args, **kwargs)

        return on_device

    def _read(self, value: Any) -> Any:
        match value:
            case {"ref": str(name)}:
                return self.values[name]
            case {"slice": [start, stop, step]}:
                return slice(self._read(start), self._read(stop), self._read(step))
            case {"device": _}:
                return self.device
            case {"ellipsis": True}:
                return Ellipsis
            case list():
                read = [self._read(item) for item in value]
                return (
                    tuple(read)
                    if any(item is None or isinstance(item, (slice, type(Ellipsis))) for item in read)
                    else read
                )
            case None | bool() | int() | float() | str() | torch.dtype():
                return value
        raise unreadable()

    def _limited(self, value: Any) -> Any:
        items = value if isinstance(value, (list, tuple)) else [value]
        self._elements += sum(item.numel() for item in items if isinstance(item, Tensor))
        for item in items:
            large = isinstance(item, Tensor) and item.numel() > MOST_ELEMENTS
            large |= len(items) > MOST_ITEMS or self._elements > MOST_TOGETHER
            if large or (isinstance(item, int) and abs(item) > MOST_DIGITS):
                text = tr("the graph of your function makes something too large for the check")
                raise Wrong(text, text)
        return value


def _method(tensor: Any, name: str) -> Callable[..., Any]:
    if not isinstance(tensor, Tensor):
        raise unreadable()
    return getattr(tensor, name)  # type: ignore[no-any-return]


def _attribute(tensor: Any, name: str) -> Any:
    if not isinstance(tensor, Tensor) or name not in ATTRIBUTES:
        raise unreadable()
    return getattr(tensor, name)


def _of_numbers(name: str) -> Callable[..., Any]:
    """Return an operator of Python; a product of a text or a list would grow without limit."""

    def apply(*args: Any) -> Any:
        if name in ("mul", "imul") and not all(isinstance(arg, Tensor | int | float) for arg in args):
            raise unreadable()
        return getattr(operator, name)(*args)

    return apply


def _safe_power(base: Any, exponent: Any) -> Any:
    if not (isinstance(base, Tensor) or isinstance(exponent, Tensor)):
        base, exponent = float(base), float(exponent)  # integers would grow without limit
    return base**exponent


def unreadable() -> Wrong:
    """Return the error for data that are no graph."""
    text = tr("the recorded graph is not one: was torch.compile replaced?")
    return Wrong(text, text)
