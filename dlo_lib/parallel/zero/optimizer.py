"""ZeRO stage 1: each rank stores the optimiser state of 1/N of the parameters, updates these parameters, and
sends them to the other ranks.

With data parallelism every rank has the same gradients and the same optimiser state, and computes the same
update: N times the work, and N times 8 bytes per parameter for the moments of Adam. Here, an optimiser of the
wrapped class updates only the pieces of this rank.

    average the gradients (DDP)  |  each rank updates its pieces  |  all-gather of the pieces, in place

Memory per rank between steps, fp32 and AdamW: 8 Psi + 8 Psi/N bytes (4 weight + 4 gradient + 8/N optimiser);
DDP needs 16 Psi. Bytes sent, with f = (N-1)/N: B_p f for the updates, in addition to the 2 B_g f of DDP. The
update takes 1/N of the time.

Stage 2 (``zero.sharded_ddp``) also shards the gradients. Stage 3 (``parallel.FSDP``) also shards the
parameters; it does not use this file, because its optimiser updates shards directly.

Paper: S. Rajbhandari et al., ZeRO (arXiv:1910.02054), section 5.1; state on the CPU: J. Ren et al.,
ZeRO-Offload (arXiv:2101.06840).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import ParamsT

from dlo_lib.base.errors import UserError
from dlo_lib.parallel.protocol import FlatRange, MemoryObserver, ParamShard, process_group
from dlo_lib.parallel.sharding.elementwise import ELEMENTWISE, updates_params
from dlo_lib.parallel.sharding.sharded_grad import RemoteGrad
from dlo_lib.parallel.zero.flat_params import Partition, PartitionBy, Piece
from dlo_lib.parallel.zero.state_dict import full_state_dict, load_full_state_dict, load_local_state

MIB = 2**20


class ShardedOptimizer(torch.optim.Optimizer):
    """Shards the state of ``optimizer_cls(params, **options)`` over the ranks of ``group``. The updates are
    those of the unsharded optimiser.

    Every rank creates it with the same parameters in the same order, and calls ``step`` with the same
    gradients in ``.grad``, for example those of DDP. ``param_groups`` contain the whole parameters, so that
    learning-rate schedulers work unchanged.

    Args:
        params: parameters, named parameters, or parameter groups, as for any optimiser. They are moved into
            flat memory (``zero.flat_params``): create the optimiser after the model has its values and is on
            its device, and do not move the model afterwards.
        optimizer_cls: a class whose update of a parameter depends on that parameter only. For the classes in
            ``sharding.elementwise.ELEMENTWISE``, each rank updates an equal part of the memory; for others,
            whole parameters. An unknown class is tried on small parameters first, unless its attribute
            ``updates_each_param`` is True.
        group: the ranks; None for all ranks.
        partition: an existing partition of the same parameters (``ShardedDDP.partition``); None creates one
            over ``group``.
        bucket_bytes: the largest size of a message. A larger parameter is a message by itself.
        master_dtype: the dtype of the updated copy of each piece, for example fp32 for parameters in bf16;
            None updates the memory of the parameters.
        state_device: the device of the update and of the optimiser state, for example the CPU for parameters
            on a GPU; None for the device of the parameters. In each step, B_g/N bytes are copied to this
            device and B_p/N bytes back.
        options: keyword arguments of ``optimizer_cls``.

    Raises:
        UserError: there is no process group; the optimiser needs all parameters at once, as L-BFGS and
            Prodigy do; in ``step``, a gradient is sparse, or belongs to a parameter that was frozen when it
            was added, or a parameter was moved or cast in the meantime.
    """

    def __init__(
        self,
        params: ParamsT,
        optimizer_cls: type[torch.optim.Optimizer],
        *,
        group: dist.ProcessGroup | None = None,
        partition: Partition | None = None,
        bucket_bytes: int = 25 * MIB,
        master_dtype: torch.dtype | None = None,
        state_device: torch.device | None = None,
        **options: Any,
    ) -> None:
        group = partition.group if partition is not None else process_group(group, "ShardedOptimizer")
        if issubclass(optimizer_cls, torch.optim.LBFGS):
            raise UserError(
                "L-BFGS needs all parameters at once and cannot be sharded: use another optimiser"
            )
        self._cls, self._options = optimizer_cls, options
        self._master_dtype, self._state_device = master_dtype, state_device
        self._may_grow = partition is None
        self.local: torch.optim.Optimizer | None = None
        """The wrapped optimiser, which updates the pieces of this rank."""
        self._ids: list[list[int]] = []  # of the parameters of each group
        self._grad_views: list[nn.Parameter] = []  # the shards whose gradients are views of whole gradients
        split = PartitionBy.ELEMENTS if optimizer_cls in ELEMENTWISE else PartitionBy.PARAMETERS
        self.partition = partition or Partition([], group, split=split, bucket_bytes=bucket_bytes)
        if self.partition.split is not split and split is PartitionBy.PARAMETERS:
            raise UserError(
                f"{optimizer_cls.__name__} needs whole parameters: "
                "make the partition with split=PartitionBy.PARAMETERS",
            )
        super().__init__(params, options)
        self._check_each_param_alone()
        # Add the parameters of all groups together, because a bucket may contain several groups
        if self._may_grow:
            self.partition.add(param for held in self.param_groups for param in held["params"])
        for held in self.param_groups:
            self._add_to_local(held)
        assert self.local is not None
        self.defaults = self.local.defaults

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as in any optimiser; called by every rank. With the partition of a ``ShardedDDP``, the
        parameters must be in this partition."""
        super().add_param_group(param_group)
        if self.local is not None:
            self._check_each_param_alone()
            if self._may_grow:
                self.partition.add(self.param_groups[-1]["params"])
            self._add_to_local(self.param_groups[-1])

    def _check_groups(self) -> None:
        """Refuse parameters that are in ``param_groups`` without ``add_param_group``, because the wrapped
        optimiser does not have them."""
        if [[id(param) for param in held["params"]] for held in self.param_groups] != self._ids:
            raise UserError(
                "the parameters in param_groups were changed, which the optimisers of the pieces do not "
                "follow: add parameters by add_param_group on every rank, or make a new ShardedOptimizer"
            )

    def _check_each_param_alone(self) -> None:
        if self.partition.ranks == 1 or updates_params(self._cls, self.param_groups, self._options):
            return
        name = self._cls.__name__
        raise UserError(
            f"{name} does not update each parameter by itself, and ShardedOptimizer gives each rank some of "
            f"them: use an optimiser of single parameters, such as AdamW or Adafactor, or DDP with {name} "
            "itself, which has all parameters on every rank"
        )

    def _add_to_local(self, held: dict[str, Any]) -> None:
        if missing := [
            param for param in held["params"] if param.requires_grad and param not in self.partition
        ]:
            raise UserError(
                f"{len(missing)} parameters are not in the partition: "
                "make it of all parameters that will be trained",
            )
        pieces = [self.partition.pieces[param] for param in held["params"] if param in self.partition.pieces]
        if self._master_dtype is not None or self._state_device is not None:
            for piece in pieces:
                copy = piece.mine.detach().to(self._state_device, self._master_dtype, copy=True)
                piece.shard = nn.Parameter(copy)
        # Optimisers refuse empty groups: a rank that owns no piece of the group uses an empty parameter.
        shards = [piece.shard for piece in pieces] or [_empty_param_like(held["params"][0])]
        own = {key: value for key, value in held.items() if key not in _PARAM_KEYS} | {"params": shards}
        if self.local is None:
            self.local = self._cls([own], **self._options)
        else:
            self.local.add_param_group(own)
        for key, value in self.local.param_groups[-1].items():
            held.setdefault(key, value)
        self._ids.append([id(param) for param in held["params"]])

    def pieces(self) -> list[Piece]:
        """Return the pieces that this rank owns, in the order of ``param_groups``."""
        params = (param for held in self.param_groups for param in held["params"])
        return [self.partition.pieces[param] for param in params if param in self.partition.pieces]

    def shards(self, whole: Iterable[ParamShard]) -> list[ParamShard]:
        """Return the pieces of this rank; ``whole`` are the parameters of the model, which are not
        sharded."""
        of = {shard.param: shard for shard in whole}

        def shard_of(piece: Piece) -> ParamShard:
            placement = (FlatRange(piece.start),)
            return replace(of[piece.param], strides=piece.strides, placement=placement, param=piece.shard)

        return [shard_of(piece) for piece in self.pieces()]

    def observe_memory(self, observer: MemoryObserver) -> None:
        """Report the flat memory of the parameters."""
        observer.weights(bucket.flat for bucket in self.partition.buckets)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update the pieces of this rank and exchange them; called by every rank.

        Args:
            closure: recomputes the loss and the gradients, averaged over the ranks.

        Returns the result of ``closure``; None without one.
        """
        assert self.local is not None
        self.partition.check()
        self._check_groups()
        for held, own in zip(self.param_groups, self.local.param_groups):
            own.update((key, value) for key, value in held.items() if key not in _PARAM_KEYS)
        if closure is None:
            self._set_shard_grads()
        loss = self.local.step() if closure is None else self.local.step(self._closure_for_shards(closure))
        for held, own in zip(self.param_groups, self.local.param_groups):
            held.update((key, value) for key, value in own.items() if key not in _PARAM_KEYS)
        self._clear_shard_grads()
        self.sync_params()
        return loss

    def _closure_for_shards(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        called = False

        def evaluate() -> Any:
            nonlocal called
            if called:
                self._clear_shard_grads()
                self.sync_params()  # the optimiser may have changed the parameters since the last call
            called = True
            loss = closure()
            self._set_shard_grads()
            return loss

        return evaluate

    @torch.no_grad()
    def _set_shard_grads(self) -> None:
        """Set the gradients of the shards from the whole gradients. With sharded gradients they are set
        already."""
        for param in (param for held in self.param_groups for param in held["params"]):
            gradient = param.grad
            if gradient is None or isinstance(gradient, RemoteGrad):
                continue
            if gradient.layout is not torch.strided:
                raise UserError(
                    f"a parameter of shape {tuple(param.shape)} has a sparse gradient: "
                    "use sparse=False in its embedding",
                )
            if param not in self.partition:
                raise UserError(
                    f"a parameter of shape {tuple(param.shape)} was unfrozen: make the optimiser after that",
                )
            if piece := self.partition.pieces.get(param):
                piece.shard.grad = piece.of(gradient).to(piece.shard.device, piece.shard.dtype)
                self._grad_views.append(piece.shard)

    def _clear_shard_grads(self) -> None:
        for shard in self._grad_views:
            shard.grad = None
        self._grad_views.clear()

    def sync_params(self) -> None:
        """Send the pieces of this rank to the other ranks, and receive theirs; called by every rank. ``step``
        calls it."""
        if self._master_dtype is not None or self._state_device is not None:
            for piece in self.pieces():
                piece.mine.copy_(piece.shard)
        self.partition.sync_params()

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        assert self.local is not None
        self.local.zero_grad(set_to_none=True)
        self.partition.discard_unaveraged()

    def full_state_dict(self) -> dict[str, Any]:
        """Return the ``state_dict`` of the unsharded optimiser, on the CPU of every rank; called by every
        rank."""
        return full_state_dict(self)

    def load_full_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the part of this rank from ``state``, the result of ``full_state_dict`` or the ``state_dict``
        of an unsharded optimiser of the same class.

        Raises:
            UserError: the parameter groups of ``state`` have other sizes.
        """
        load_full_state_dict(self, state)

    def load_local_state(
        self,
        values: Mapping[nn.Parameter, dict[str, Any]],
        groups: list[dict[str, Any]],
    ) -> None:
        """Set the optimiser state of this rank.

        Args:
            values: the state by shard (``Piece.shard``) and key.
            groups: the hyper-parameters of each parameter group.
        """
        load_local_state(self, values, groups)

    def state_dict(self) -> Any:
        raise UserError(
            "the state of one rank is not a checkpoint: "
            "use full_state_dict() or parallel.checkpoint.save_sharded",
        )

    def load_state_dict(self, state_dict: Any) -> None:
        raise UserError(
            "a ShardedOptimizer does not load the state of one rank: "
            "use load_full_state_dict() or parallel.checkpoint.load_sharded",
        )

    def __getstate__(self) -> Any:
        raise UserError(
            "a ShardedOptimizer cannot be copied or pickled, because it belongs to a process group: "
            "use full_state_dict()",
        )


def _empty_param_like(param: nn.Parameter) -> nn.Parameter:
    """Return an empty parameter with the same number of dimensions, because some optimisers depend on it."""
    return nn.Parameter(param.detach().new_empty((0, *param.shape[1:])))


_PARAM_KEYS = ("params", "param_names")
"""The keys of a parameter group that are not hyper-parameters."""
