"""Cuts a model into units. Sharded data parallelism gathers the parameters of a unit together.

A unit is a block (a transformer layer), or the modules before, between or after blocks, for example an
embedding, or the last norm together with the output projection. The direct parameters of a module that
contains blocks are a unit that stays unsharded during the forward of this module. Modules that share a
parameter belong to one unit: a tied embedding and output projection are gathered once for each of the two
modules.

Small units need little memory and send many small messages; large units need more memory and send fewer
messages. The blocks of a transformer are the usual compromise.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn

from dlo_lib.base.errors import UserError

BlockTypes = type[nn.Module] | tuple[type[nn.Module], ...]


@dataclass(eq=False)
class ParamRef:
    """A parameter and its ``owners``: all pairs (module, attribute) under which the model holds it."""

    name: str
    param: nn.Parameter
    owners: list[tuple[nn.Module, str]]


@dataclass(frozen=True, eq=False)
class CallSpan:
    """Successive modules that need the same unit; ``position`` is the number of the span in order of
    registration."""

    modules: tuple[nn.Module, ...]
    position: int


@dataclass(eq=False)
class WrapPlan:
    """One unit: the call spans that need it, and its parameters, the trained ones first."""

    call_spans: list[CallSpan]
    param_refs: list[ParamRef] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.param_refs[0].name.rpartition(".")[0] or "the model"


def cut_into_units(
    module: nn.Module,
    blocks: BlockTypes | None,
    sharded_over: Mapping[nn.Parameter, dist.ProcessGroup] | None = None,
) -> list[WrapPlan]:
    """Return the units of ``module`` in the order of registration.

    Args:
        blocks: the types whose outermost instances become one unit each; None for the members of the
            outermost ``nn.ModuleList``s and ``nn.ModuleDict``s.
        sharded_over: the group of parameters that are not sharded over the group of the other ones.

    Raises:
        UserError: no module has one of these types; a parameter does not have a floating-point dtype.
    """
    found = outermost_blocks(module, blocks)
    if blocks is not None and not found:
        names = ", ".join(kind.__name__ for kind in (blocks if isinstance(blocks, tuple) else (blocks,)))
        raise UserError(f"no module is a {names}: name the type of the model's blocks, or leave it out")
    plans: list[WrapPlan] = []
    for joins, members in itertools.groupby(_span_modules(module, found), key=lambda member: member[1]):
        modules = [member for member, _ in members]
        for span in [tuple(modules)] if joins else [(single,) for single in modules]:
            plans.append(WrapPlan([CallSpan(span, len(plans))]))
    return _split_by_message(_assign_params(module, plans, found), sharded_over or {})


def _span_modules(current: nn.Module, blocks: set[int]) -> Iterator[tuple[nn.Module, bool]]:
    """Yield the modules that hold the parameters of ``current``, in order, with True for a module that may
    share a span with its neighbours."""
    if id(current) in blocks:
        yield current, False
    elif not any(id(inner) in blocks for inner in current.modules()):
        if next(current.parameters(), None) is not None:
            yield current, True
    else:
        if next(current.parameters(recurse=False), None) is not None:
            yield current, False
        for child in current.children():
            yield from _span_modules(child, blocks)


def outermost_blocks(module: nn.Module, blocks: BlockTypes | None) -> set[int]:
    """Return the ids of the blocks in ``module``; ``blocks`` is as in ``cut_into_units``."""
    found: set[int] = set()

    def visit(current: nn.Module) -> None:
        for child in current.children():
            listed = isinstance(current, nn.ModuleList | nn.ModuleDict)
            if isinstance(child, blocks) if blocks is not None else listed:
                found.add(id(child))
            else:
                visit(child)

    visit(module)
    return found


def _assign_params(module: nn.Module, plans: list[WrapPlan], blocks: set[int]) -> list[WrapPlan]:
    """Add the parameters to ``plans``. Plans that share a parameter are merged, at the position of the
    first."""
    names = {id(inner): name for name, inner in module.named_modules()}
    plan_of_param: dict[int, WrapPlan] = {}
    param_refs: dict[int, ParamRef] = {}
    for plan in list(plans):
        holder = plan
        for outer in (outer for span in plan.call_spans for outer in span.modules):
            around_blocks = id(outer) not in blocks and any(id(inner) in blocks for inner in outer.modules())
            for inner in [outer] if around_blocks else outer.modules():
                for attribute, param in inner.named_parameters(recurse=False):
                    first = plan_of_param.setdefault(id(param), holder)
                    if first is not holder:
                        holder = _merge(first, holder, plans, plan_of_param)
                    if id(param) not in param_refs:
                        if not param.is_floating_point():
                            raise UserError(
                                f"{attribute} has dtype {param.dtype}: "
                                "only floating-point parameters can be sharded",
                            )
                        name = f"{names[id(inner)]}.{attribute}".lstrip(".")
                        param_refs[id(param)] = ParamRef(name, param, [])
                        holder.param_refs.append(param_refs[id(param)])
                    if (inner, attribute) not in param_refs[id(param)].owners:
                        param_refs[id(param)].owners.append((inner, attribute))
    return [plan for plan in plans if plan.param_refs]


def _merge(
    first: WrapPlan,
    second: WrapPlan,
    plans: list[WrapPlan],
    plan_of_param: dict[int, WrapPlan],
) -> WrapPlan:
    first.call_spans += second.call_spans
    first.param_refs += second.param_refs
    for key, plan in plan_of_param.items():
        if plan is second:
            plan_of_param[key] = first
    plans.remove(second)
    return first


def _split_by_message(
    plans: list[WrapPlan], sharded_over: Mapping[nn.Parameter, dist.ProcessGroup]
) -> list[WrapPlan]:
    """Split each unit by dtype and group, because a message has one of each. The trained parameters come
    first, so that their gradients are contiguous."""
    split = []
    for plan in plans:
        messages: dict[tuple[torch.dtype, dist.ProcessGroup | None], list[ParamRef]] = {}
        for param_ref in plan.param_refs:
            kind = (param_ref.param.dtype, sharded_over.get(param_ref.param))
            messages.setdefault(kind, []).append(param_ref)
        for param_refs in messages.values():
            trained_first = sorted(param_refs, key=lambda param_ref: not param_ref.param.requires_grad)
            split.append(WrapPlan(plan.call_spans, trained_first))
    return split
