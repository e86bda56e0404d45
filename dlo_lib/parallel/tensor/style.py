"""Styles: how a module is cut over the ranks. A plan maps names of modules to styles
(``apply.parallelize_tensor``).

    ColumnParallel     nn.Linear: output features         RowParallel        nn.Linear: input features
    VocabParallel      nn.Embedding: rows                 VocabParallelHead  nn.Linear: the logits
    SharedInput        a module whose column linears have the same input
    SequenceParallel   a norm or another module that computes on parts of the sequence, with whole parameters
    ShardedActivation  a dropout on activations that differ between the ranks
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import nn

from dlo_lib.errors import UserError
from dlo_lib.parallel.tensor.dropout import ShardedDropout
from dlo_lib.parallel.tensor.embedding import VocabParallelEmbedding
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
    """An ``nn.Linear`` whose output features are cut.

    Args:
        units: the number of units, such as heads, that cannot be cut; None: each feature is one.
        repeat: whether consecutive ranks hold the same unit if there are more ranks than units, as for heads
            of
            keys and values. The gradients are then summed over these ranks.
        gather_output: whether each rank needs all output features.
    """

    units: int | None = None
    repeat: bool = False
    gather_output: bool = False

    def apply(self, cutter: ParamCutter, name: str, module: nn.Module) -> nn.Module:
        module = _linear(name, module)
        features = module.out_features
        copies = cutter.split(name, features, self.units or features, repeat=self.repeat)
        weight, bias = (
            None
            if param is None
            else cutter.cut(param, 0, copies=copies, partial=copies > 1, name=f"{name}.{attribute}")
            for attribute, param in (("weight", module.weight), ("bias", module.bias))
        )
        assert weight is not None
        return ColumnLinear(
            weight,
            bias,
            cutter.group,
            sequence_parallel=cutter.sequence_parallel,
            async_tp=cutter.async_tp,
            gather_output=self.gather_output,
        )


@dataclass(frozen=True)
class RowParallel(TensorStyle):
    """An ``nn.Linear`` whose input features are cut. The bias is whole.

    Args:
        units: as in ``ColumnParallel``.
    """

    units: int | None = None

    def apply(self, cutter: ParamCutter, name: str, module: nn.Module) -> nn.Module:
        module = _linear(name, module)
        cutter.split(name, module.in_features, self.units or module.in_features)
        weight = cutter.cut(module.weight, 1, name=f"{name}.weight")
        if module.bias is not None:
            cutter.keep_whole(module.bias, partial=cutter.sequence_parallel)
        return RowLinear(
            weight,
            module.bias,
            cutter.group,
            sequence_parallel=cutter.sequence_parallel,
            async_tp=cutter.async_tp,
        )


@dataclass(frozen=True)
class VocabParallel(TensorStyle):
    """An ``nn.Embedding`` whose rows are cut. The vocabulary may have any size."""

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
            sequence_parallel=cutter.sequence_parallel,
            padding_idx=module.padding_idx,
        )


@dataclass(frozen=True)
class VocabParallelHead(TensorStyle):
    """The ``nn.Linear`` of the logits. The model returns this rank's part of the vocabulary, and
    ``vocab_parallel_cross_entropy`` computes the loss. The vocabulary may have any size.
    """

    def apply(self, cutter: ParamCutter, name: str, module: nn.Module) -> nn.Module:
        module = _linear(name, module)
        weight = cutter.cut(module.weight, 0, name=f"{name}.weight")
        bias = None if module.bias is None else cutter.cut(module.bias, 0, name=f"{name}.bias")
        rows = -(-module.out_features // cutter.group.ranks)
        cutter.head = (cutter.group.rank * rows, module.out_features)
        return ColumnLinear(
            weight,
            bias,
            cutter.group,
            sequence_parallel=cutter.sequence_parallel,
            async_tp=cutter.async_tp,
        )


@dataclass(frozen=True)
class SharedInput(TensorStyle):
    """A module whose ``children`` are column linears that are called with the same input tensor: they compute
    together, and the gradient of the input is reduced once. Their styles come first in the plan."""

    children: tuple[str, ...]

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
        return module


@dataclass(frozen=True)
class SequenceParallel(TensorStyle):
    """A norm, or another module with whole parameters, that computes on parts of the sequence if the plan has
    sequence parallelism. Its gradients are then summed over the ranks."""

    def apply(self, cutter: ParamCutter, name: str, module: nn.Module) -> nn.Module:
        for param in module.parameters():
            cutter.keep_whole(param, partial=cutter.sequence_parallel)
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


def _linear(name: str, module: nn.Module) -> nn.Linear:
    if not isinstance(module, nn.Linear):
        raise UserError(f"{name} is a {type(module).__name__}: this style needs an nn.Linear")
    return module
