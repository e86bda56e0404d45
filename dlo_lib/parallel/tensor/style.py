"""Styles: how a module is cut over the ranks. A plan maps names of modules to styles
(``apply.parallelize_tensor``).

    ColumnParallel     nn.Linear: output features         RowParallel        nn.Linear: input features
    VocabParallel      nn.Embedding: rows                 VocabParallelHead  nn.Linear: the logits
    SharedInput        a module whose column linears have the same input
    ShardedHeads       an attention that has its sizes and its dropout between two linears in attributes
    SequenceParallel   a norm or another module that computes on parts of the sequence, with whole parameters
    SplitSequence      a module after which, or at whose input, activations become parts of the sequence
    ShardedActivation  a dropout on activations that differ between the ranks

A linear is an ``nn.Linear`` or the ``Conv1D`` of transformers, which stores its weight transposed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor, nn

from dlo_lib.base.errors import UserError
from dlo_lib.parallel.tensor.dropout import ShardedDropout, random_of_rank_between
from dlo_lib.parallel.tensor.embedding import VocabParallelEmbedding
from dlo_lib.parallel.tensor.functions import SEQUENCE, gather_from_group, split_to_group
from dlo_lib.parallel.tensor.layout import ParamCutter
from dlo_lib.parallel.tensor.linear import ColumnLinear, RowLinear, SharedColumns


class TensorStyle(ABC):
    """How one module is cut."""

    @abstractmethod
    def apply(self, cutter: ParamCutter, name: str, module: nn.Module) -> nn.Module:
        """Return the module that replaces ``module``, or ``module`` itself.

        Raises:
            UserError: the module has another type, or its size does not divide.
        """


@dataclass(frozen=True)
class ColumnParallel(TensorStyle):
    """A linear whose output features are cut.

    Args:
        units: the number of units, such as heads, that cannot be cut; None: each feature is one.
        repeat: whether consecutive ranks hold the same unit if there are more ranks than units, as for heads
            of keys and values. The gradients are then summed over these ranks.
        gather_output: whether each rank needs all output features; not with sections.
        sections: the number of equal sections of the output that are cut separately, such as 3 for queries,
            keys and values in one matrix. ``units`` is the number in one section.
    """

    units: int | None = None
    repeat: bool = False
    gather_output: bool = False
    sections: int = 1

    def apply(self, cutter: ParamCutter, name: str, module: nn.Module) -> nn.Module:
        linear = _linear(name, module)
        features, rest = divmod(linear.out_features, self.sections)
        if rest:
            raise UserError(
                f"{name} has {linear.out_features} features, which are not {self.sections} equal sections: "
                "give their number"
            )
        if self.gather_output and self.sections > 1:
            raise UserError(f"the sections of {name} are not gathered in order: leave gather_output out")
        copies = cutter.split(name, features, self.units or features, repeat=self.repeat)
        weight, bias = (
            None
            if param is None
            else cutter.cut(
                param,
                dim,
                copies=copies,
                sections=self.sections,
                partial=copies > 1,
                name=f"{name}.{attribute}",
            )
            for attribute, param, dim in (
                ("weight", linear.weight, int(linear.transposed)),
                ("bias", linear.bias, 0),
            )
        )
        assert weight is not None
        return ColumnLinear(
            weight,
            bias,
            cutter.group,
            sequence_parallel=cutter.sequence_parallel,
            async_tp=cutter.async_tp,
            gather_output=self.gather_output,
            transposed=linear.transposed,
        )


@dataclass(frozen=True)
class RowParallel(TensorStyle):
    """A linear whose input features are cut. The bias is whole.

    Args:
        units: as in ``ColumnParallel``.
    """

    units: int | None = None

    def apply(self, cutter: ParamCutter, name: str, module: nn.Module) -> nn.Module:
        linear = _linear(name, module)
        cutter.split(name, linear.in_features, self.units or linear.in_features)
        weight = cutter.cut(linear.weight, int(not linear.transposed), name=f"{name}.weight")
        if linear.bias is not None:
            cutter.keep_whole(linear.bias, partial=cutter.sequence_parallel)
        return RowLinear(
            weight,
            linear.bias,
            cutter.group,
            sequence_parallel=cutter.sequence_parallel,
            async_tp=cutter.async_tp,
            transposed=linear.transposed,
        )


@dataclass(frozen=True)
class VocabParallel(TensorStyle):
    """An ``nn.Embedding`` whose rows are cut. The vocabulary may have any size.

    Args:
        whole_sequence: whether the result is the whole sequence also with sequence parallelism, for a model
            that takes its positions from it. ``SplitSequence`` follows.
    """

    whole_sequence: bool = False

    def apply(self, cutter: ParamCutter, name: str, module: nn.Module) -> nn.Module:
        if not isinstance(module, nn.Embedding) or module.max_norm is not None or module.sparse:
            raise UserError(
                f"{name} is not an nn.Embedding with dense gradients and no max_norm: leave it whole"
            )
        weight = cutter.cut(module.weight, 0, name=f"{name}.weight")
        rows = -(-module.num_embeddings // cutter.group.ranks)
        return VocabParallelEmbedding(
            weight,
            cutter.group.rank * rows,
            cutter.group,
            sequence_parallel=cutter.sequence_parallel and not self.whole_sequence,
            padding_idx=module.padding_idx,
        )


@dataclass(frozen=True)
class VocabParallelHead(TensorStyle):
    """The ``nn.Linear`` of the logits. The model returns this rank's part of the vocabulary, and
    ``vocab_parallel_cross_entropy`` computes the loss. The vocabulary may have any size.

    Args:
        whole_sequence: whether its input is the whole sequence also with sequence parallelism, after a
            ``SequenceParallel`` with ``gather_output``.
    """

    whole_sequence: bool = False

    def apply(self, cutter: ParamCutter, name: str, module: nn.Module) -> nn.Module:
        if not isinstance(module, nn.Linear):
            raise UserError(f"{name} is a {type(module).__name__}: this style needs an nn.Linear")
        weight = cutter.cut(module.weight, 0, name=f"{name}.weight")
        bias = None if module.bias is None else cutter.cut(module.bias, 0, name=f"{name}.bias")
        rows = -(-module.out_features // cutter.group.ranks)
        cutter.head = (cutter.group.rank * rows, module.out_features)
        return ColumnLinear(
            weight,
            bias,
            cutter.group,
            sequence_parallel=cutter.sequence_parallel and not self.whole_sequence,
            async_tp=cutter.async_tp and not self.whole_sequence,
        )


@dataclass(frozen=True)
class SharedInput(TensorStyle):
    """A module whose ``children`` are column linears that are called with the same input tensor: they compute
    together, and the gradient of the input is reduced once. Their styles come first in the plan.

    Args:
        children: the names of the column linears.
        last: the name of a row linear that the module calls last, or None. Random numbers between the column
            linears and this linear differ between the ranks, as the dropout of attention needs.
    """

    children: tuple[str, ...]
    last: str | None = None

    def apply(self, cutter: ParamCutter, name: str, module: nn.Module) -> nn.Module:
        found = [getattr(module, child, None) for child in self.children]
        columns = [child for child in found if isinstance(child, ColumnLinear)]
        if len(columns) < len(found):
            raise UserError(
                f"{name}: give {', '.join(self.children)} the style ColumnParallel before SharedInput"
            )
        shared = SharedColumns(columns)
        for column in columns:
            column.shared = shared
        if cutter.sequence_parallel:
            shared.gather_for(module)
        if self.last is not None:
            last = getattr(module, self.last, None)
            if not isinstance(last, RowLinear):
                raise UserError(f"{name}: give {self.last} the style RowParallel before SharedInput")
            random_of_rank_between(columns[0], last, cutter.group.rank)
        return module


@dataclass(frozen=True)
class SequenceParallel(TensorStyle):
    """A norm, or another module with whole parameters, that computes on parts of the sequence if the plan has
    sequence parallelism. Its gradients are then summed over the ranks.

    Args:
        gather_output: whether its output is the whole sequence, for a model that changes its shape.
    """

    gather_output: bool = False

    def apply(self, cutter: ParamCutter, name: str, module: nn.Module) -> nn.Module:
        for param in module.parameters():
            cutter.keep_whole(param, partial=cutter.sequence_parallel)
        if cutter.sequence_parallel and self.gather_output:
            module.register_forward_hook(lambda _, args, out: gather_from_group(out, cutter.group, SEQUENCE))
        return module


@dataclass(frozen=True)
class SplitSequence(TensorStyle):
    """A module, such as the dropout after the embeddings, whose output is the whole sequence on every rank.
    With sequence parallelism, each rank keeps its part.

    Args:
        of_input: whether the first argument is split instead, as for the first block of a model that has no
            module between the embeddings and this block.
    """

    of_input: bool = False

    def apply(self, cutter: ParamCutter, name: str, module: nn.Module) -> nn.Module:
        def split(x: Tensor) -> Tensor:
            return split_to_group(x, cutter.group, SEQUENCE)

        if cutter.sequence_parallel and self.of_input:
            module.register_forward_pre_hook(lambda _, args: (split(args[0]), *args[1:]))
        elif cutter.sequence_parallel:
            module.register_forward_hook(lambda _, args, out: split(out))
        return module


@dataclass(frozen=True)
class ShardedHeads(TensorStyle):
    """An attention that calls its column linear ``first`` and its row linear ``last``, and computes on the
    heads of this rank between them. Random numbers between the two differ between the ranks. Their styles
    come first in the plan.

    Args:
        first, last: the names of the two linears.
        sizes: the attributes that hold a number of features of all heads; they become those of this rank.
    """

    first: str
    last: str
    sizes: tuple[str, ...] = ()

    def apply(self, cutter: ParamCutter, name: str, module: nn.Module) -> nn.Module:
        first, last = (getattr(module, child, None) for child in (self.first, self.last))
        if not isinstance(first, ColumnLinear) or not isinstance(last, RowLinear):
            raise UserError(
                f"{name}: give {self.first} the style ColumnParallel and {self.last} the style RowParallel "
                "before ShardedHeads"
            )
        for size in self.sizes:
            setattr(module, size, getattr(module, size) // cutter.group.ranks)
        random_of_rank_between(first, last, cutter.group.rank)
        return module


@dataclass(frozen=True)
class ShardedActivation(TensorStyle):
    """A dropout whose activations differ between the ranks: always, for heads of attention, or only with
    sequence parallelism (``only_in_sequence``). Its random numbers then differ too."""

    only_in_sequence: bool = False

    def apply(self, cutter: ParamCutter, name: str, module: nn.Module) -> nn.Module:
        if self.only_in_sequence and not cutter.sequence_parallel:
            return module
        return ShardedDropout(module, cutter.group)


class _Linear(NamedTuple):
    """A linear layer; its weight is (in, out) if ``transposed``, otherwise (out, in)."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    transposed: bool = False

    @property
    def out_features(self) -> int:
        return self.weight.shape[1 if self.transposed else 0]

    @property
    def in_features(self) -> int:
        return self.weight.shape[0 if self.transposed else 1]


def _linear(name: str, module: nn.Module) -> _Linear:
    if isinstance(module, nn.Linear):
        assert isinstance(module.weight, nn.Parameter)
        return _Linear(module.weight, module.bias)
    kind = type(module)
    if (kind.__module__, kind.__name__) == ("transformers.pytorch_utils", "Conv1D"):  # without its import
        weight, bias = module.get_parameter("weight"), module.get_parameter("bias")
        return _Linear(weight, bias, transposed=True)
    raise UserError(f"{name} is a {kind.__name__}: this style needs an nn.Linear, or Conv1D of transformers")
