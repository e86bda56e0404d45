"""Which parameters travel together: a model cut into units, of which sharded data parallelism holds at most two whole at a time.

A unit is a block (a transformer layer), or a *run*: what stands before, between or after blocks, such as an embedding, or the last norm
with the output projection. What a module around blocks holds itself is a unit that lasts as long as its forward. Parameters that two
places share bring these into one unit, so a tied embedding and output projection are gathered for the one and again for the other.

Small units need little memory and send many small messages; large ones the reverse. A transformer's blocks are the usual middle.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import nn

from dlo_lib.errors import UserError

BlockTypes = type[nn.Module] | tuple[type[nn.Module], ...]


@dataclass(eq=False)
class Place:
    """A parameter and everywhere it is: ``owners`` are (module, attribute)."""

    name: str
    param: nn.Parameter
    owners: list[tuple[nn.Module, str]]


@dataclass(frozen=True, eq=False)
class Run:
    """Modules that follow each other and need the same unit; ``position`` is that of the run in the model, as registered."""

    modules: tuple[nn.Module, ...]
    position: int


@dataclass(eq=False)
class Plan:
    """One unit: the runs that need it, and its parameters, trained ones first."""

    runs: list[Run]
    places: list[Place] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.places[0].name.rpartition(".")[0] or "the model"


def cut_into_units(module: nn.Module, blocks: BlockTypes | None) -> list[Plan]:
    """The units of ``module`` in the order of registration.

    Args:
        blocks: types whose outermost instances are units of their own; None for the members of the outermost ``nn.ModuleList``s and
            ``nn.ModuleDict``s.

    Raises:
        UserError: no module is of these types; a parameter that is no floating-point number.
    """
    found = outermost_blocks(module, blocks)
    if blocks is not None and not found:
        names = ", ".join(kind.__name__ for kind in (blocks if isinstance(blocks, tuple) else (blocks,)))
        raise UserError(f"no module is a {names}: name the type of the model's blocks, or leave it out")
    plans: list[Plan] = []
    for joins, pieces in itertools.groupby(_pieces(module, found), key=lambda piece: piece[1]):
        modules = [piece for piece, _ in pieces]
        for run in [tuple(modules)] if joins else [(single,) for single in modules]:
            plans.append(Plan([Run(run, len(plans))]))
    return _by_dtype(_assigned(module, plans, found))


def _pieces(current: nn.Module, blocks: set[int]) -> Iterator[tuple[nn.Module, bool]]:
    """What holds the parameters at and below ``current``, in order, and whether it may join a run with its neighbours."""
    if id(current) in blocks:
        yield current, False
    elif not any(id(inner) in blocks for inner in current.modules()):
        if next(current.parameters(), None) is not None:
            yield current, True
    else:
        if next(current.parameters(recurse=False), None) is not None:
            yield current, False
        for child in current.children():
            yield from _pieces(child, blocks)


def outermost_blocks(module: nn.Module, blocks: BlockTypes | None) -> set[int]:
    """The ids of the blocks in ``module``, as ``cut_into_units`` finds them."""
    found: set[int] = set()

    def visit(current: nn.Module) -> None:
        for child in current.children():
            if isinstance(child, blocks) if blocks is not None else isinstance(current, nn.ModuleList | nn.ModuleDict):
                found.add(id(child))
            else:
                visit(child)

    visit(module)
    return found


def _assigned(module: nn.Module, plans: list[Plan], blocks: set[int]) -> list[Plan]:
    """``plans`` with the parameters they hold; those that share one become one, in the first one's place."""
    names = {id(inner): name for name, inner in module.named_modules()}
    plan_of_param: dict[int, Plan] = {}
    places: dict[int, Place] = {}
    for plan in list(plans):
        holder = plan
        for outer in (outer for run in plan.runs for outer in run.modules):
            around_blocks = id(outer) not in blocks and any(id(inner) in blocks for inner in outer.modules())
            for inner in [outer] if around_blocks else outer.modules():
                for attribute, param in inner.named_parameters(recurse=False):
                    first = plan_of_param.setdefault(id(param), holder)
                    if first is not holder:
                        holder = _merge(first, holder, plans, plan_of_param)
                    if id(param) not in places:
                        if not param.is_floating_point():
                            raise UserError(f"{attribute} holds {param.dtype}: only floating-point parameters can be sharded")
                        name = f"{names[id(inner)]}.{attribute}".lstrip(".")
                        places[id(param)] = Place(name, param, [])
                        holder.places.append(places[id(param)])
                    if (inner, attribute) not in places[id(param)].owners:
                        places[id(param)].owners.append((inner, attribute))
    return [plan for plan in plans if plan.places]


def _merge(first: Plan, second: Plan, plans: list[Plan], plan_of_param: dict[int, Plan]) -> Plan:
    first.runs += second.runs
    first.places += second.places
    for key, plan in plan_of_param.items():
        if plan is second:
            plan_of_param[key] = first
    plans.remove(second)
    return first


def _by_dtype(plans: list[Plan]) -> list[Plan]:
    """A message is of one dtype: a unit with several becomes several. Trained parameters first: they alone have gradients to send."""
    cut = []
    for plan in plans:
        dtypes: dict[torch.dtype, list[Place]] = {}
        for place in plan.places:
            dtypes.setdefault(place.param.dtype, []).append(place)
        cut += [Plan(plan.runs, sorted(places, key=lambda place: not place.param.requires_grad)) for places in dtypes.values()]
    return cut
