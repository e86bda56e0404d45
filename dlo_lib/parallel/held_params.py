"""Whether a wrapped module still has the parameters that its wrapper knows.

A wrapper registers hooks on parameters, and some move them into flat memory. A module that is changed
afterwards (a new layer, ``module.bfloat16()``, ``param.data = ...``) would train on silently with gradients
that are not averaged, or with updates that do not reach it. Before each forward, the wrapper compares what it
knows with what the module has, and refuses a change in one sentence.

Cost of a comparison: one pass over the parameters that reads their identity, address and dtype; no
communication.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dlo_lib.base.errors import UserError

_DTYPE = operator.attrgetter("dtype")
_REQUIRES_GRAD = operator.attrgetter("requires_grad")

Slot = tuple[nn.Module, str, Sequence[Tensor]]
"""A module, the attribute under which it holds a parameter, and what it may hold there."""


class HeldMemory:
    """The addresses and dtypes of ``params`` when the wrapper took them.

    Args:
        params: the parameters with their names.
        wrapper: the name of the wrapper, for the message.
    """

    def __init__(self, params: Mapping[nn.Parameter, str], wrapper: str) -> None:
        # Tensors of other classes, such as the fake ones of a simulation, have no address.
        held = {param: name for param, name in params.items() if type(param) in (Tensor, nn.Parameter)}
        self._params, self._names, self._wrapper = list(held), list(held.values()), wrapper
        self._found = self._look()

    def _look(self) -> tuple[list[int], list[object]]:
        return list(map(Tensor.data_ptr, self._params)), list(map(_DTYPE, self._params))

    def check(self) -> None:
        """Compare the parameters with those that the wrapper took.

        Raises:
            UserError: a parameter has other memory or another dtype.
        """
        now = self._look()
        if now == self._found:
            return
        pairs = zip(self._names, zip(*now), zip(*self._found))
        names = [name for name, has, had in pairs if has != had]
        raise UserError(
            f"{_some(names)} got other memory or another dtype after {self._wrapper} had taken it: "
            "move or cast the module first, then wrap it, and write values in place (param.copy_)"
        )


class HeldModule:
    """The modules and parameters of ``root`` when the wrapper took them.

    Args:
        params: the parameters that ``root`` may hold: those at this moment, and those that the wrapper puts
            there in turn.
        wrapper: the name of the wrapper, for the message.
        slots: where ``root`` must always hold a certain parameter.
    """

    def __init__(
        self, root: nn.Module, params: Sequence[Tensor], wrapper: str, slots: Sequence[Slot] = ()
    ) -> None:
        self._root, self._params, self._wrapper = root, params, wrapper
        self._slots = [(module, name, frozenset(map(id, allowed))) for module, name, allowed in slots]
        self._known_params = set(map(id, params))
        self._accept()

    def _accept(self) -> None:
        """Take the modules of ``root``, whose parameters are known, as they are now."""
        self._modules = list(self._root.modules())  # kept, because a new object may get the id of a freed one
        self._dicts: list[dict[str, Any]] = [
            held for module in self._modules for held in (module._modules, module._parameters)
        ]
        self._known = self._known_params | {id(None), *map(id, self._modules)}

    def check(self) -> None:
        """Compare the modules and parameters with those that the wrapper took. New modules without new
        parameters are accepted.

        Raises:
            UserError: there is a new parameter, or a slot does not hold its parameter.
        """
        now = itertools.chain.from_iterable(map(dict.values, self._dicts))
        wrong = [
            (module, name) for module, name, own in self._slots if id(module._parameters.get(name)) not in own
        ]
        if self._known.issuperset(map(id, now)) and not wrong:
            return
        params = self._root.named_parameters()  # a plain tensor is that of torch.func.functional_call
        new = [name for name, param in params if isinstance(param, nn.Parameter) and not self._knows(param)]
        names = {module: name for name, module in self._root.named_modules()}
        new += [f"{names.get(module, '')}.{attribute}".lstrip(".") for module, attribute in wrong]
        if changed := list(dict.fromkeys(new)):
            raise UserError(
                f"{_some(changed)} was added or replaced after {self._wrapper} had wrapped "
                "the module: change the module first, then wrap it"
            )
        self._accept()

    def _knows(self, param: Tensor | None) -> bool:
        return id(param) in self._known_params


COMPILE_BLOCKS = (
    "torch.compile of {} as a whole is not supported, because its hooks would become part of the graph: "
    "compile its blocks with parallel.compile.compile_blocks(module)"
)


def refuse_compiled(what: str) -> None:
    """Refuse a call that ``torch.compile`` traces or has traced.

    Raises:
        UserError: the caller is compiled.
    """
    if torch.compiler.is_compiling() or torch._C._dynamo.eval_frame.get_eval_frame_callback() is not None:
        raise UserError(COMPILE_BLOCKS.format(what))


def requires_grad_of(params: Sequence[Tensor]) -> list[bool]:
    """Return ``requires_grad`` of each tensor of ``params``."""
    return list(map(_REQUIRES_GRAD, params))


def refuse_max_norm(module: nn.Module) -> None:
    """Refuse an embedding whose forward rewrites the rows that it reads.

    Raises:
        UserError: an embedding has ``max_norm``.
    """
    for name, inner in module.named_modules():
        if isinstance(inner, nn.Embedding | nn.EmbeddingBag) and inner.max_norm is not None:
            raise UserError(
                f"{name or 'the embedding'} has max_norm={inner.max_norm}, which rewrites its weight in "
                "forward with the tokens of one rank, so that the ranks would hold different weights: "
                "leave max_norm out, and limit the norm of the rows in place after each step of the optimiser"
            )


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
