"""Fully sharded data parallelism: every rank keeps 1/N of parameters, gradients and optimiser state, and sees its own part of the batch.

The model is cut into units (its blocks, and what stands between them). Before a unit computes, in forward and again in backward, its
parameters are gathered from all ranks; afterwards they are freed. When backward has its gradients, they are averaged and each rank keeps
the part that belongs to its shards. While one unit computes, the next one is gathered and the one before is reduced.

    forward    gather 1 | compute 1, gather 2 | compute 2, gather 3 | ...                        whole at any time: two units
    backward   compute 3, gather 2 | compute 2, reduce 3, gather 1 | compute 1, reduce 2 | reduce 1

Memory per rank at rest, fp32 and AdamW: 16 Psi/N bytes (4 weight + 4 gradient + 8 optimiser); while it computes, two units whole and their
gradients beside. Bytes sent per rank and step: 2 B_p f + B_g f, f = (N-1)/N, each unit being gathered twice; less B f for units that need
it only once: the last one of forward, with which backward begins, and embeddings, whose backward reads no weight. B_p f + B_g f when units
stay whole from forward to backward (``reshard_after_forward=False``), which costs the memory of the whole model.

Papers: S. Rajbhandari et al., ZeRO (arXiv:1910.02054), stage 3; Y. Zhao et al., PyTorch FSDP (arXiv:2304.11277). Parameters are sharded one
by one as in PyTorch's `fully_shard`, so an optimiser may treat matrices as such, and frozen ones stand beside trained ones.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from dlo_lib.errors import UserError
from dlo_lib.parallel.backward_pass import without_sync
from dlo_lib.parallel.buckets import broadcast_packed
from dlo_lib.parallel.clip import clip_sharded_grad_norm_
from dlo_lib.parallel.fsdp_state import full_state_dict, load_full_state_dict
from dlo_lib.parallel.hybrid import neighbours_group
from dlo_lib.parallel.pool import Pool
from dlo_lib.parallel.reduction import Reduction
from dlo_lib.parallel.unit import Layout, Slot, State, Unit
from dlo_lib.parallel.units import BlockTypes, Run, cut_into_units
from dlo_lib.parallel.wire import Wire, best_wire

MIB = 2**20


@dataclass
class Calls:
    """How many forward calls of a unit's modules backward has not come to the end of: all, and those that read weights again."""

    all: int = 0
    reading: int = 0


class FSDP(nn.Module):
    """``module`` with its parameters, in place, replaced by this rank's shards of them; make the optimiser afterwards.

    Args:
        module: the same on every rank in structure. All ranks must call its units in the same order.
        group: the ranks that share the parameters; None for all.
        blocks: the types of its blocks, each a unit; None for the members of its outermost ``nn.ModuleList``s and ``ModuleDict``s.
        compute_dtype: of gathered parameters and of floating-point inputs of units; None for the parameters' own. Shards, and with them
            the optimiser, keep the parameters' dtype.
        reduce_dtype: in which gradients are accumulated and averaged; None for the parameters' own dtype.
        reshard_after_forward: free units after forward; False keeps them whole until backward; a number keeps 1/number of them, shared
            by that many consecutive ranks (those of a node), so that the gather for backward stays among these.
        replicas: ranks that hold the same shards, for hybrid sharding; gradients are averaged over them, too.
        device: where parameters are whole; None for where they are now.
        shard_device: where shards live, with gradients and the optimiser's state; None for ``device``.
        values: the value of a parameter, asked for one after the other; for modules without storage (``parallel.deferred_init``).
            None: the module's own, as they are on the group's first rank.
        wire: how shards travel; None for the cheaper way. ``Collectives()`` shows a trace their names.
        keep_buffers: whether the memory of messages is kept for the next one. None: on CPU only (``parallel.pool`` says why).
        find_unused_parameters: as for ``DDP``: allow parameters without gradient. One that no rank used keeps None. Ranks may use different
            ones of a unit whose inputs have gradients, if each backward has a forward of its own; all must come to the same units.

    ``no_sync``, ``finish_grad_sync`` and errors are as for ``DDP``. Gradients accumulate in ``no_sync`` (no communication but the
    gathers, and the memory of whole gradients), or in the shards without it (a reduction for each backward pass).

    Raises:
        UserError: no process group; sharded already; a parameter without gradient (see above), or with a sparse one; a size of smaller
            groups that does not divide the ranks.
    """

    def __init__(
        self,
        module: nn.Module,
        group: dist.ProcessGroup | None = None,
        *,
        blocks: BlockTypes | None = None,
        compute_dtype: torch.dtype | None = None,
        reduce_dtype: torch.dtype | None = None,
        reshard_after_forward: bool | int = True,
        replicas: dist.ProcessGroup | None = None,
        device: torch.device | None = None,
        shard_device: torch.device | None = None,
        values: Callable[[nn.Parameter], Tensor] | None = None,
        wire: Wire | None = None,
        keep_buffers: bool | None = None,
        find_unused_parameters: bool = False,
    ) -> None:
        super().__init__()
        group = group if group is not None else dist.group.WORLD
        if group is None:
            raise UserError("FSDP needs a process group: start with torchrun or srun, or call launch.run_ranks")
        if any(hasattr(param, "shard_of") for param in module.parameters()):
            raise UserError("this module is sharded already: build it anew, then wrap it once")
        self.module = module
        self.group: dist.ProcessGroup = group
        self._keep_whole = reshard_after_forward is False
        smaller = None if isinstance(reshard_after_forward, bool) else neighbours_group(group, reshard_after_forward)
        device = device or next(module.parameters(), torch.empty(0)).device
        self.pool = Pool(device, keep_buffers if keep_buffers is not None else device.type == "cpu")
        self._layout = Layout(
            group,
            wire or best_wire(group, device),
            self.pool,
            device,
            shard_device or device,
            compute_dtype,
            reduce_dtype,
            replicas,
            smaller,
        )
        plans = cut_into_units(module, blocks)
        if values is None:
            for ranks in (group, replicas):
                if ranks is not None:
                    broadcast_packed([*module.parameters(), *module.buffers()], ranks, 25 * MIB)
        self.units: list[Unit] = []
        while plans:  # a plan refers to the whole parameters: they go unit by unit
            self.units.append(Unit(plans.pop(0), self._layout, values or (lambda param: param.detach())))

        runs = [(unit, run) for unit in self.units for run in unit.runs]
        self._planned = sorted(runs, key=lambda entry: entry[1].position)  # the order of the last forward
        self._entered: list[tuple[Unit, Run]] = []  # of this one, so far
        self._to_come: list[Unit] = []  # units whose weights backward needs, the next one last
        self._in_backward: set[Unit] = set()
        self._open: dict[Unit, Calls] = {unit: Calls() for unit in self.units}
        groups = [ranks for ranks in (group, replicas) if ranks is not None]
        self._reduction: Reduction[Slot] = Reduction(self.units, groups, device, find_unused=find_unused_parameters, on_end=self._end_pass)
        for unit, run in runs:
            for inner in run.modules:
                inner.register_forward_pre_hook(functools.partial(self._before_forward, unit, run), with_kwargs=True)
                inner.register_forward_hook(functools.partial(self._after_forward, unit, run))
        for unit in self.units:
            for slot in unit.trained:
                slot.whole.register_post_accumulate_grad_hook(functools.partial(self._reduction.on_gradient, unit, slot))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._reduction.recover()
        self._entered = []
        self.pool.release()  # what the last backward needed this one needs late, when the activations have gone that are to come now
        for unit in self.units:
            if unit.state is State.GATHERING:  # for a forward that an exception ended; an optimiser may have stepped meanwhile
                unit.free()
        out = self.module(*args, **kwargs)
        self._planned = self._entered
        for unit in self.units:  # gathered for a module that was then not called, or called in another order than registered
            if not self._stays_whole(unit):
                unit.free()
        return out

    def no_sync(self) -> AbstractContextManager[None]:
        """Backward passes inside add to local, whole gradients; the next one outside averages the sum."""
        return without_sync(self._reduction)

    def finish_grad_sync(self) -> None:
        """Average what is not averaged yet; nothing is left to do after a backward pass outside ``no_sync``."""
        self._reduction.finish()

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale the gradients so that their 2-norm over all ranks is at most ``max_norm``; the norm before, ()."""
        return clip_sharded_grad_norm_(self.parameters(), max_norm, self.group, self._layout.device)

    def full_state_dict(self) -> dict[str, Tensor]:
        """The values of the module as if it were not sharded, on the CPU, on every rank. Holds one unit whole at a time beside them."""
        return full_state_dict(self.module, self.units)

    def load_full_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take this rank's shards of ``state``, as ``full_state_dict`` returns it; called by every rank."""
        load_full_state_dict(self.module, self.units, state)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        raise UserError("one rank's shards are no checkpoint: use full_state_dict(), or parallel.sharded_checkpoint.save")

    def __getstate__(self) -> Any:
        raise UserError("an FSDP cannot be copied or pickled, for it belongs to a process group: use full_state_dict()")

    def _before_forward(self, unit: Unit, run: Run, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Make the unit whole, begin to gather the next one, and prepare to hear from backward when the module's part is over."""
        again = unit in self._in_backward  # activation checkpointing computes it a second time
        unit.unshard()
        if module is run.modules[0] and not again:
            self._enter(unit, run)
        inputs = 0

        def ended(gradient: Tensor) -> None:
            nonlocal inputs
            inputs -= 1
            if inputs == 0:
                self._after_backward(unit, module)

        def prepared(tensor: Tensor) -> Tensor:
            nonlocal inputs
            if not tensor.is_floating_point():
                return tensor
            if self._layout.compute_dtype is not None:
                tensor = tensor.to(self._layout.compute_dtype)
            if again or not (tensor.requires_grad and torch.is_grad_enabled()):
                return tensor
            # A tensor of its own, for the hooks of one tensor run in the order of registration: that of the unit before would come
            # first, and gather a third unit before this one is freed.
            tensor = tensor.view_as(tensor)
            tensor.register_hook(ended)
            inputs += 1
            return tensor

        return tree_map_only(Tensor, prepared, (args, kwargs))

    def _enter(self, unit: Unit, run: Run) -> None:
        position = len(self._entered)
        self._entered.append((unit, run))
        if torch.is_grad_enabled() and unit.trained:
            self._reduction.expect(unit)
        if torch.is_grad_enabled() and not all(_reads_no_weight_in_backward(module) for module in run.modules):
            self._to_come.append(unit)
        if self._entered[position:] == self._planned[position : position + 1] and position + 1 < len(self._planned):
            self._planned[position + 1][0].start_gather()  # meets the others' while this unit computes; its own turn waits for it

    def _after_forward(self, unit: Unit, run: Run, module: nn.Module, args: Any, out: Any) -> None:
        if unit in self._in_backward:
            return
        if torch.is_grad_enabled():
            self._open[unit].all += 1
            if not _reads_no_weight_in_backward(module):
                self._open[unit].reading += 1
                for tensor in tree_leaves(out):
                    if isinstance(tensor, Tensor) and tensor.requires_grad:
                        tensor.register_hook(functools.partial(self._before_backward, unit))
        if module is run.modules[-1] and not self._stays_whole(unit):
            unit.free(until_backward=torch.is_grad_enabled())

    def _stays_whole(self, unit: Unit) -> bool:
        """Until backward: all units, or the one with which backward begins."""
        last = len(self._entered) >= len(self._planned) and self._to_come[-1:] == [unit]
        return torch.is_grad_enabled() and (self._keep_whole or last)

    def _before_backward(self, unit: Unit, gradient: Tensor) -> None:
        """Make the unit whole again and begin to gather the one that backward needs next."""
        if unit in self._in_backward:
            return
        self._reduction.begin()
        self._in_backward.add(unit)
        while self._to_come and self._to_come.pop() is not unit:
            pass
        unit.unshard()
        if self._to_come:
            self._to_come[-1].start_gather()

    def _after_backward(self, unit: Unit, module: nn.Module) -> None:
        """The gradients of a call's inputs are known, so its part of backward is over."""
        calls = self._open[unit]
        calls.all -= 1
        calls.reading -= not _reads_no_weight_in_backward(module)
        # Below zero in a second pass through a graph, whose calls are counted no more: then units end with the pass.
        if calls.reading == 0:
            self._in_backward.discard(unit)
            unit.free()
        if calls.all == 0:
            self._reduction.complete(unit)  # parameters that this rank did not use: their gradients will not come

    def _end_pass(self) -> None:
        self._in_backward.clear()
        self._to_come.clear()
        for unit in self.units:
            unit.free()
            self._open[unit] = Calls()


def _reads_no_weight_in_backward(module: nn.Module) -> bool:
    """The gradient of an embedding is a sum of rows: only their numbers are needed."""
    return isinstance(module, nn.Embedding) and module.max_norm is None
