"""How the parameters of a model are cut over the ranks of tensor parallelism, by their names.

A parameter is cut along one dimension into equal parts, one for each rank. If there are fewer parts than
ranks (fewer heads of keys and values than ranks), consecutive ranks hold the same part. A parameter that is
not cut is one part that all ranks hold.

The gradient of a parameter that several ranks hold is either equal on them, or a *partial* gradient, whose
sum over these ranks is the gradient: that of the shared heads, and with sequence parallelism that of the
norms and biases, which compute on parts of the sequence.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from dlo_lib.base.errors import UserError
from dlo_lib.parallel.materialize import Values
from dlo_lib.parallel.mesh import factors_in_words, inner_group
from dlo_lib.parallel.protocol import SplitDim
from dlo_lib.parallel.tensor.exchange import TensorGroup


@dataclass(frozen=True)
class ParamPart:
    """The part of a parameter that this rank holds.

    Attributes:
        shape, strides: those of the whole parameter.
        placement: the dimension, the number of consecutive ranks that hold the same part, and the number of
            sections.
        partial: whether the gradient is partial.
    """

    shape: torch.Size
    strides: tuple[int, ...]
    placement: SplitDim
    partial: bool = False

    def of(self, whole: Tensor) -> Tensor:
        """Return the part of a tensor with the shape of the parameter, as a view if there is one section."""
        return self.placement.part_of(whole) if self.shape else whole


@dataclass
class TensorLayout:
    """The parts of all parameters of a model.

    Attributes:
        group: the ranks.
        parts: by the name in the model; a tied parameter has several names.
        head: the first token of this rank's logits and the size of the whole vocabulary, if the output of the
            model is this rank's part of the vocabulary.
        sequence_parallel: whether the blocks compute on parts of the sequence.
        values: returns the value of this rank's part of a parameter on the meta device; None if the model has
            values.
        sum_groups: the groups over which partial gradients are summed, by the number of their ranks.
    """

    group: TensorGroup
    parts: dict[str, ParamPart]
    head: tuple[int, int] | None
    sequence_parallel: bool
    values: Values | None
    sum_groups: dict[int, dist.ProcessGroup]


class ParamCutter:
    """Cuts the parameters of a model; the styles of modules call it.

    Args:
        group: the ranks.
        sequence_parallel: whether blocks compute on parts of the sequence.
        async_tp: whether these parts travel during the products.
        values: returns the value of a parameter on the meta device; None if the model has values.
    """

    def __init__(
        self, group: TensorGroup, sequence_parallel: bool, async_tp: bool, values: Values | None
    ) -> None:
        self.group, self.sequence_parallel, self.async_tp = group, sequence_parallel, async_tp
        self._values = values
        self.head: tuple[int, int] | None = None
        self._part_of: dict[nn.Parameter, ParamPart] = {}
        self._whole_of: dict[nn.Parameter, nn.Parameter] = {}  # of parameters on the meta device
        # From whole to part, for tied parameters. A whole parameter that no module holds any more is freed.
        self._cut = WeakTensorKeyDictionary()

    def split(self, name: str, size: int, units: int, *, repeat: bool = False) -> int:
        """Return the number of consecutive ranks that hold the same part, if ``size`` features consist of
        ``units`` that cannot be cut, such as heads.

        Args:
            repeat: whether several ranks may hold the same unit.

        Raises:
            UserError: the ranks do not divide the units. The message names degrees that do.
        """
        ranks = self.group.ranks
        if units < 1 or size % units:
            raise UserError(
                f"{name} has {size} features, which are not {units} equal units: give their number"
            )
        if units % ranks == 0:
            return 1
        if repeat and ranks % units == 0:
            return ranks // units
        what = f"{units} units of {size // units}" if size != units else f"{size} features"
        raise UserError(
            f"tp {ranks} does not divide {name}, which has {what}: use tp {factors_in_words(units)}"
        )

    def cut(
        self,
        param: Tensor,
        dim: int,
        *,
        copies: int = 1,
        sections: int = 1,
        partial: bool = False,
        name: str = "a parameter",
    ) -> nn.Parameter:
        """Return this rank's part of ``param`` along ``dim``, as a new parameter. The parts have
        ceil(size * copies / ranks) rows of each section, the last ones fewer.

        Raises:
            UserError: this rank would have no rows, or the parameter is cut in two ways.
        """
        assert isinstance(param, nn.Parameter)
        part = self._part(param, SplitDim(dim, self.group.group, copies, sections), partial, name)
        if param in self._cut:
            new: nn.Parameter = self._cut[param]
            if self._part_of[new] != part:
                raise UserError(
                    f"{name} is tied to a parameter that is cut in another way: give both one style"
                )
            return new
        value = part.of(param.detach())
        value = torch.empty_like(value) if param.is_meta else value.clone(memory_format=torch.preserve_format)
        new = nn.Parameter(value, requires_grad=param.requires_grad)
        self._cut[param], self._part_of[new] = new, part
        if param.is_meta:
            self._whole_of[new] = param
        return new

    def keep_whole(self, param: nn.Parameter, *, partial: bool = False) -> None:
        """Record that all ranks hold ``param``, and whether its gradient is partial."""
        self._part_of[param] = self._part(
            param, SplitDim(0, self.group.group, self.group.ranks), partial, "a parameter"
        )

    def layout(self, model: nn.Module) -> TensorLayout:
        """Return the layout of ``model``, whose modules have been replaced. Parameters without a style are
        whole, with equal gradients."""
        parts = {}
        for name, param in model.named_parameters(remove_duplicate=False):
            if param not in self._part_of:
                self.keep_whole(param)
            parts[name] = self._part_of[param]
        values = None if self._values is None else self.value
        group, ranks = self.group.group, self.group.ranks
        counts = sorted({part.placement.copies for part in parts.values() if part.partial})
        groups = {count: group if count == ranks else inner_group(group, count) for count in counts}
        return TensorLayout(self.group, parts, self.head, self.sequence_parallel, values, groups)

    def value(self, param: nn.Parameter) -> Tensor:
        """Return the value of this rank's part of ``param``, which is on the meta device."""
        assert self._values is not None
        if param not in self._whole_of:
            return self._values(param)
        return self._part_of[param].of(self._values(self._whole_of[param])).clone()

    def _part(self, param: nn.Parameter, placement: SplitDim, partial: bool, name: str) -> ParamPart:
        rows = param.shape[placement.dim] if param.dim() else 0
        if param.numel() and param.dim() and placement.rows(rows)[1] < 1:
            raise UserError(f"{name} has {rows} rows, which leaves none for a rank: use a smaller tp")
        return ParamPart(param.shape, param.stride(), placement, partial)


def whole_from_parts(parts: list[Tensor], part: ParamPart) -> Tensor:
    """Concatenate the parts of the ranks, in order, each padded to the rows of the first one."""
    if not part.shape:
        return parts[0]
    distinct, dim = parts[:: part.placement.copies], part.placement.dim
    if part.placement.sections > 1:
        by_section = [each.unflatten(dim, (part.placement.sections, -1)) for each in distinct]
        return torch.cat(by_section, dim + 1).flatten(dim, dim + 1)
    return torch.cat(distinct, dim).narrow(dim, 0, part.shape[dim])


def part_of_state(layout: TensorLayout, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return this rank's parts of a whole ``state_dict``."""
    parts = layout.parts
    return {name: parts[name].of(value) if name in parts else value for name, value in state.items()}
