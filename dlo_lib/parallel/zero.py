"""ZeRO stage 1: every rank keeps the optimiser's state of 1/N of the parameters, updates these, and sends them to the others.

Data parallelism leaves the same gradients on every rank, and then every rank computes the same update from the same state: N times the
work, and N times 8 bytes a parameter for Adam's moments. Here an optimiser of the wrapped class runs on each rank's pieces alone.

    gradients averaged (DDP)  |  every rank: update of its pieces  |  pieces to everybody (all-gather, in the parameters' own memory)

Memory per rank at rest, fp32 and AdamW: 8 Psi + 8 Psi/N bytes (4 weight + 4 gradient + 8/N optimiser), where DDP holds 16 Psi. Bytes sent:
B_p f for the updates, f = (N-1)/N, beside DDP's 2 B_g f. The update itself takes 1/N of the time. Stage 2 (``parallel.zero2``) shards the
gradients as well. Stage 3, parameters too, is ``parallel.FSDP``: what is gathered for computing and freed has its own rhythm, unit by unit,
and the optimiser there steps on shards that are all a rank has, so nothing of this file is left in it.

Paper: S. Rajbhandari et al., ZeRO (arXiv:1910.02054), section 5.1; state on the CPU: J. Ren et al., ZeRO-Offload (arXiv:2101.06840).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import ParamsT

from dlo_lib.errors import UserError
from dlo_lib.parallel.partition import Partition, Piece, Split
from dlo_lib.parallel.zero_state import full_state_dict, load_full_state_dict

MIB = 2**20

ELEMENTWISE: frozenset[type[torch.optim.Optimizer]] = frozenset(
    getattr(torch.optim, name)
    for name in ("ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
)
"""PyTorch's optimisers that update each element by itself, and so may be given parts of parameters."""


class ShardedOptimizer(torch.optim.Optimizer):
    """``optimizer_cls(params, **options)`` whose state is shared out over the ranks of ``group``; steps as that one would.

    Every rank makes it with the same parameters in the same order, and calls ``step`` with the same gradients in ``.grad`` (as DDP leaves
    them). ``param_groups`` are those of the whole parameters: schedulers and loops that change a learning rate see nothing else.

    Args:
        params: as for any optimiser: parameters, named ones, or groups of them. They are moved into flat memory (``parallel.partition``),
            so make it after the model is on its device and has its values, and do not move that again.
        optimizer_cls: any class whose update of a parameter depends on that parameter alone. Those in ``ELEMENTWISE`` get equal parts of
            memory, others parameters as a whole.
        group: the ranks; None for all.
        partition: of the same parameters, where one exists (``ShardedDDP.partition``); None makes one over ``group``.
        bucket_bytes: the most a message holds (a larger parameter is a message of its own).
        master_dtype: in which the updated copy of each piece is kept, such as fp32 for parameters in bf16; None for the parameters' own
            memory and dtype.
        state_device: where pieces are updated and the optimiser's state lives, such as the CPU for parameters on a GPU; None for where the
            parameters are. Costs B_g/N there and B_p/N back over the bus, per step.
        options: for ``optimizer_cls``.

    Raises:
        UserError: no process group; an optimiser that needs all parameters at once; in ``step``, a sparse gradient or that of a parameter
            that was frozen when it was added.
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
        group = partition.group if partition is not None else group if group is not None else dist.group.WORLD
        if group is None:
            raise UserError("ShardedOptimizer needs a process group: start with torchrun or srun, or call launch.run_ranks")
        if issubclass(optimizer_cls, torch.optim.LBFGS):
            raise UserError("L-BFGS measures along all parameters at once and cannot be sharded: use another optimiser")
        self._cls, self._options = optimizer_cls, options
        self._master_dtype, self._state_device = master_dtype, state_device
        self._may_grow = partition is None
        self.local: torch.optim.Optimizer | None = None
        """The wrapped optimiser, of this rank's pieces."""
        self._lent: list[nn.Parameter] = []  # pieces whose gradients are views of whole ones
        split = Split.ELEMENTS if optimizer_cls in ELEMENTWISE else Split.PARAMETERS
        self.partition = partition or Partition([], group, split=split, bucket_bytes=bucket_bytes)
        if self.partition.split is not split and split is Split.PARAMETERS:
            raise UserError(f"{optimizer_cls.__name__} needs whole parameters: make the partition with split=Split.PARAMETERS")
        super().__init__(params, options)
        if self._may_grow:  # all at once: buckets know nothing of groups
            self.partition.add(param for held in self.param_groups for param in held["params"])
        for held in self.param_groups:
            self._add_to_local(held)
        assert self.local is not None
        self.defaults = self.local.defaults

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As for any optimiser; called by every rank. With the partition of a ``ShardedDDP``, only of parameters in it."""
        super().add_param_group(param_group)
        if self.local is not None:
            if self._may_grow:
                self.partition.add(self.param_groups[-1]["params"])
            self._add_to_local(self.param_groups[-1])

    def _add_to_local(self, held: dict[str, Any]) -> None:
        if missing := [param for param in held["params"] if param.requires_grad and param not in self.partition]:
            raise UserError(f"{len(missing)} parameters are not in the partition: make it of all that will be trained")
        pieces = [self.partition.pieces[param] for param in held["params"] if param in self.partition.pieces]
        if self._master_dtype is not None or self._state_device is not None:
            for piece in pieces:
                copy = piece.mine.detach().to(self._state_device, self._master_dtype, copy=True)
                piece.shard = nn.Parameter(copy)
        # A rank without a piece in the group has an empty one there, which never gets a gradient: optimisers refuse empty groups.
        shards = [piece.shard for piece in pieces] or [_nothing_of(held["params"][0])]
        own = {key: value for key, value in held.items() if key not in _NAMES} | {"params": shards}
        if self.local is None:
            self.local = self._cls([own], **self._options)
        else:
            self.local.add_param_group(own)
        for key, value in self.local.param_groups[-1].items():
            held.setdefault(key, value)

    def pieces(self) -> list[Piece]:
        """What this rank owns, in the order of ``param_groups``."""
        params = (param for held in self.param_groups for param in held["params"])
        return [self.partition.pieces[param] for param in params if param in self.partition.pieces]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update this rank's pieces and exchange them; called by every rank.

        Args:
            closure: computes the loss and the gradients anew, averaged over the ranks; what it returns is returned.
        """
        assert self.local is not None
        for held, own in zip(self.param_groups, self.local.param_groups):
            own.update((key, value) for key, value in held.items() if key not in _NAMES)
        if closure is None:
            self._take_gradients()
        loss = self.local.step() if closure is None else self.local.step(self._for_pieces(closure))
        for held, own in zip(self.param_groups, self.local.param_groups):
            held.update((key, value) for key, value in own.items() if key not in _NAMES)
        self._return_gradients()
        self._publish()
        return loss

    def _for_pieces(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        asked = False

        def evaluate() -> Any:
            nonlocal asked
            if asked:
                self._return_gradients()
                self._publish()  # an optimiser that asks again has moved the parameters meanwhile
            asked = True
            loss = closure()
            self._take_gradients()
            return loss

        return evaluate

    @torch.no_grad()
    def _take_gradients(self) -> None:
        """Give pieces their part of whole gradients; where gradients are sharded, pieces have theirs already."""
        for param in (param for held in self.param_groups for param in held["params"]):
            gradient = param.grad
            if gradient is None:
                continue
            if gradient.layout is not torch.strided:
                raise UserError(f"a parameter of shape {tuple(param.shape)} has a sparse gradient: use sparse=False in its embedding")
            if param not in self.partition:
                raise UserError(f"a parameter of shape {tuple(param.shape)} was unfrozen: make the optimiser after that")
            if piece := self.partition.pieces.get(param):
                piece.shard.grad = piece.of(gradient).to(piece.shard.device, piece.shard.dtype)
                self._lent.append(piece.shard)

    def _return_gradients(self) -> None:
        for shard in self._lent:
            shard.grad = None
        self._lent.clear()

    def _publish(self) -> None:
        if self._master_dtype is not None or self._state_device is not None:
            for piece in self.pieces():
                piece.mine.copy_(piece.shard)
        self.partition.publish()

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        assert self.local is not None
        self.local.zero_grad(set_to_none=True)

    def full_state_dict(self) -> dict[str, Any]:
        """The ``state_dict`` of the wrapped optimiser as if it were not sharded, on the CPU, on every rank; called by every rank."""
        return full_state_dict(self)

    def load_full_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take this rank's part of ``state``, as ``full_state_dict`` or an unsharded optimiser of the class returns it.

        Raises:
            UserError: it is of other groups of parameters.
        """
        load_full_state_dict(self, state)

    def state_dict(self) -> Any:
        raise UserError("one rank's state is no checkpoint: use full_state_dict(), or parallel.sharded_checkpoint.save_sharded")

    def load_state_dict(self, state_dict: Any) -> None:
        raise UserError("what is loaded is the whole state: use load_full_state_dict(), or parallel.sharded_checkpoint.load_sharded")

    def __getstate__(self) -> Any:
        raise UserError("a ShardedOptimizer cannot be copied or pickled, for it belongs to a process group: use full_state_dict()")


def _nothing_of(param: nn.Parameter) -> nn.Parameter:
    """An empty parameter of as many dimensions, for optimisers look at them."""
    return nn.Parameter(param.detach().new_empty((0, *param.shape[1:])))


_NAMES = ("params", "param_names")
"""What a group says of its parameters; all else are hyper-parameters."""
