"""Fully sharded data parallelism: each rank stores 1/N of the parameters, gradients and optimiser state, and
processes a different part of the batch.

The model is cut into units: its blocks, and the modules before, between and after them. The parameters of a
unit are all-gathered before the unit computes, in forward and again in backward, and are freed afterwards.
When backward has computed the gradients of a unit, they are averaged with a reduce-scatter, and each rank
keeps the part of its shards. While a unit computes, the next unit is gathered and the previous one is
reduced.

    forward    gather 1 | compute 1, gather 2 | compute 2, gather 3 | ...
    backward   compute 3, gather 2 | compute 2, reduce 3, gather 1 | compute 1, reduce 2 | reduce 1

At most two units are unsharded at any time.

Memory per rank between steps, fp32 and AdamW: 16 Psi/N bytes (4 weight + 4 gradient + 8 optimiser). During a
step, two unsharded units and their gradients come in addition.

Bytes sent per rank and step, with f = (N-1)/N: 2 B_p f + B_g f, because each unit is gathered twice. Some
units are gathered only once, which saves B f each: the last unit of forward, with which backward begins, and
embeddings, whose backward does not read the weight. With ``reshard_after_forward=False`` the units remain
unsharded from forward to backward: B_p f + B_g f bytes, at the cost of the memory of the whole model. They
then remain unsharded until the last backward of accumulated micro-batches, as in a pipeline.

Papers: S. Rajbhandari et al., ZeRO (arXiv:1910.02054), stage 3; Y. Zhao et al., PyTorch FSDP
(arXiv:2304.11277). As in PyTorch's ``fully_shard``, each parameter is sharded separately. A shard keeps the
number of dimensions of its parameter, and a unit may contain both frozen and trained parameters.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dlo_lib.base.errors import UserError
from dlo_lib.parallel.backward_pass import without_sync
from dlo_lib.parallel.fsdp.direct_calls import DirectCalls, in_backward
from dlo_lib.parallel.fsdp.dtensors import spec_of
from dlo_lib.parallel.fsdp.held_shards import HeldShards
from dlo_lib.parallel.fsdp.param import FSDPLayout, FSDPParam
from dlo_lib.parallel.fsdp.param_group import FSDPParamGroup
from dlo_lib.parallel.fsdp.state_dict import full_state_dict, load_full_state_dict
from dlo_lib.parallel.fsdp.unit_schedule import UnitSchedule
from dlo_lib.parallel.fsdp.wrap import BlockTypes, cut_into_units
from dlo_lib.parallel.held_params import COMPILE_BLOCKS, refuse_compiled, refuse_max_norm
from dlo_lib.parallel.materialize import Values
from dlo_lib.parallel.mesh import inner_group
from dlo_lib.parallel.protocol import (
    MemoryObserver,
    ModuleWrapper,
    ParamShard,
    SplitDim,
    groups_by_param,
    process_group,
)
from dlo_lib.parallel.sharding.buckets import broadcast_packed
from dlo_lib.parallel.sharding.clip import clip_sharded_grad_norm_
from dlo_lib.parallel.sharding.grad_reduction import GradReduceScatter
from dlo_lib.parallel.sharding.transport import BufferPool, Transport, default_transport

MIB = 2**20


class FSDP(ModuleWrapper):
    """Shards the parameters of ``module`` over ``group``. The parameters are replaced in place by the shards
    of this rank; create the optimiser afterwards.

    Args:
        module: has the same structure on every rank. All ranks must call its units in the same order.
        group: the ranks that share the parameters; None for all ranks.
        blocks: the types of the blocks, each of which becomes a unit; None for the members of the outermost
            ``nn.ModuleList``s and ``nn.ModuleDict``s.
        compute_dtype: dtype of the unsharded parameters and of the floating-point inputs of units; None for
            the dtype of the parameters. The shards, and therefore the optimiser, keep the dtype of the
            parameters.
        reduce_dtype: dtype in which gradients are accumulated and averaged; None for the dtype of the
            parameters.
        reshard_after_forward: True frees a unit after its forward. False keeps it unsharded until backward.
            An integer n keeps 1/n of it on each rank, so that the all-gather of backward involves only n
            consecutive ranks (for example those of a node).
        replicas: the ranks that hold the same shards, for hybrid sharding. Gradients are averaged over them
            as well.
        device: the device of the unsharded parameters; None for the current device of the parameters.
        shard_device: the device of the shards, their gradients and the optimiser state; None for ``device``.
        values: returns the full value of a parameter, for a module without storage (``fsdp.deferred_init``).
            It is called for one parameter at a time. None: the values of the module on the first rank of the
            group.
        transport: how shards are exchanged; None for the cheaper transport. With ``CollectiveTransport()`` a
            trace shows the collectives by name.
        keep_buffers: whether the memory of a message is reused for the next one; None: on the CPU only
            (``sharding.transport`` gives the reason).
        find_unused_parameters: allows parameters without a gradient, as in ``DDP``. A parameter that no rank
            used keeps the gradient None. Ranks may use different parameters of a unit whose inputs have
            gradients, if each backward follows a separate forward. All ranks must use the same units.
        sharded_over: for parameters that only some ranks of ``group`` hold (the experts of
            ``parallel.expert``), these ranks, which share them in shards. In a unit they have their own
            all-gather and reduce-scatter. Their gradients are summed over these ranks and ``replicas``, and
            divided by the number of all ranks, as the other gradients are.

    ``state_dict`` contains ``DTensor``s, also that of the optimiser (``fsdp.dtensors``): save it with
    ``torch.distributed.checkpoint``, or call ``full_state_dict``.

    ``no_sync``, ``finish_grad_sync`` and errors are as in ``DDP``. Gradients accumulate either in
    ``no_sync``, with no communication except the all-gathers and with the memory of the whole gradients, or
    in the shards without ``no_sync``, with one reduce-scatter in each backward pass.

    Parameters may be frozen and thawed afterwards; zeros are sent for a frozen one. Forward may compute
    gradients of its inputs (``torch.autograd.grad`` with ``create_graph=True``); all units then stay
    unsharded until the end of backward. Compile the blocks, not the whole (``parallel.compile``). Call other
    methods of the module by ``call_method``: one that is called directly finds the shards, with which it may
    not compute (``fsdp.direct_calls``).

    Raises:
        UserError: there is no process group; the module is sharded already; a parameter has no gradient (see
            ``find_unused_parameters``) or a sparse one; ``reshard_after_forward`` does not divide the ranks;
            an embedding has ``max_norm``; later, a parameter is new, moved, cast or unfrozen, or is used
            outside of the forward of its module; the optimiser needs whole matrices.
    """

    holds_every_param = True
    takes_added_grads = False

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
        values: Values | None = None,
        transport: Transport | None = None,
        keep_buffers: bool | None = None,
        find_unused_parameters: bool = False,
        sharded_over: Mapping[nn.Parameter, dist.ProcessGroup] | None = None,
    ) -> None:
        super().__init__()
        group = process_group(group, "FSDP")
        sharded_over = sharded_over or {}
        if any(spec_of(param) is not None for param in module.parameters()):
            raise UserError("this module is sharded already: build a new one and wrap it once")
        refuse_max_norm(module)
        self.module = module
        self.group: dist.ProcessGroup = group
        smaller = (
            None if isinstance(reshard_after_forward, bool) else inner_group(group, reshard_after_forward)
        )
        device = device or next(module.parameters(), torch.empty(0)).device
        self.pool = BufferPool(device, keep_buffers if keep_buffers is not None else device.type == "cpu")
        copies = dist.get_world_size(replicas) if replicas is not None else 1
        self._layout = FSDPLayout(
            group,
            transport or default_transport(group, device),
            self.pool,
            device,
            shard_device or device,
            compute_dtype,
            reduce_dtype,
            replicas,
            smaller,
            dist.get_world_size(group) * copies,
        )
        layouts = {
            ranks: replace(
                self._layout,
                group=ranks,
                transport=transport or default_transport(ranks, device),
                post_forward_group=None,
            )
            for ranks in dict.fromkeys(sharded_over.values())
        }
        plans = cut_into_units(module, blocks, sharded_over)
        if values is None:
            for holders in (group, *layouts):
                held = [param for param in module.parameters() if sharded_over.get(param, group) is holders]
                tensors = [*held, *module.buffers()] if holders is group else held
                for ranks in (holders, replicas):
                    if ranks is not None:
                        broadcast_packed(tensors, ranks, 25 * MIB)
        self.units: list[FSDPParamGroup] = []
        while plans:  # remove each plan after use, because it keeps the whole parameters of its unit alive
            plan = plans.pop(0)
            holders = sharded_over.get(plan.param_refs[0].param, group)
            layout = layouts.get(holders, self._layout)
            self.units.append(FSDPParamGroup(plan, layout, values or (lambda param: param.detach())))

        self.sharded_over = {
            param.shard: unit.layout.group
            for unit in self.units
            for param in unit.fsdp_params
            if unit.layout is not self._layout
        }
        """The groups of the parameters that are not sharded over ``group``."""

        groups = [ranks for ranks in (group, replicas) if ranks is not None]
        self._grad_reduction: GradReduceScatter[FSDPParam] = GradReduceScatter(
            self.units,
            groups,
            device,
            find_unused=find_unused_parameters,
            on_end=lambda: self._schedule.end_backward(),
        )
        self._held = HeldShards(module, [param for unit in self.units for param in unit.fsdp_params])
        keep_whole = reshard_after_forward is False
        self._schedule = UnitSchedule(self.units, self._grad_reduction, compute_dtype, keep_whole)
        for unit in self.units:
            for fsdp_param in unit.trained:
                hook = functools.partial(self._grad_reduction.on_gradient, unit, fsdp_param)
                fsdp_param.whole.register_post_accumulate_grad_hook(hook)
        self._is_direct = False  # whether the module runs that is not called through this wrapper
        module.register_forward_pre_hook(self._begin_direct, prepend=True)
        module.register_forward_hook(self._end_direct, always_call=True)
        names = {id(param.shard): param.name for unit in self.units for param in unit.fsdp_params}
        DirectCalls(module, names, lambda: self._schedule.running)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._forward(self.module, args, kwargs)

    def call_method(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call the method ``name`` of the module as ``forward`` is called, for example one that generates
        text. The parameters of the module itself are whole meanwhile. Called by every rank."""
        method = functools.partial(self._schedule.call, self.module, getattr(self.module, name))
        return self._forward(method, args, kwargs)

    def _forward(self, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        self._begin_forward()
        try:
            out = call(*args, **kwargs)
            self._schedule.end_forward()
        finally:
            self._schedule.leave_forward()
        return out

    def _begin_forward(self) -> None:
        refuse_compiled("an FSDP module")
        self._held.follow()
        self._grad_reduction.recover()
        self.pool.release()  # free the buffers of the last backward, because forward needs the memory first
        self._schedule.begin_forward()

    def _begin_direct(self, module: nn.Module, args: Any) -> None:
        if not self._schedule.running and not in_backward():
            self._begin_forward()
            self._is_direct = True

    def _end_direct(self, module: nn.Module, args: Any, out: Any) -> None:
        if self._is_direct:
            self._is_direct = False
            self._schedule.end_forward()
            self._schedule.leave_forward()

    def compile(self, *args: Any, **kwargs: Any) -> None:
        raise UserError(COMPILE_BLOCKS.format("an FSDP module"))

    def no_sync(self) -> AbstractContextManager[None]:
        """Backward passes inside the context accumulate whole gradients on this rank, without a reduction.
        The next backward pass outside averages their sum."""
        return without_sync(self._grad_reduction)

    def finish_grad_sync(self) -> None:
        """Average the gradients that are not averaged yet. After a backward pass outside ``no_sync`` there
        are none."""
        self._grad_reduction.finish()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale the gradients so that their norm over all ranks is at most ``max_norm``.

        Args:
            norm_type: p > 0 of the p-norm; ``math.inf`` for the largest absolute value.

        Returns the norm before scaling, () fp64, the same on every rank.
        """
        shards = self.shards()
        return clip_sharded_grad_norm_(
            [shard.param for shard in shards],
            max_norm,
            (),
            self._layout.device,
            norm_type=norm_type,
            groups_of=groups_by_param(shards),
        )

    def shards(self) -> list[ParamShard]:
        """Return the rows of every parameter that this rank stores. A 0-d parameter is stored whole by one
        rank."""
        found = []
        for unit in self.units:
            rows = (SplitDim(0, unit.layout.group),)
            for param in unit.fsdp_params:
                shape, strides = param.whole.shape, param.whole.stride()
                found.append(ParamShard(param.name, shape, strides, rows, param.shard))
        return found

    def unwrapped(self) -> list[nn.Module]:
        return [self.module]

    def observe_memory(self, observer: MemoryObserver) -> None:
        """Report the shards now, and the buffers of gathering and reducing each time they are allocated."""
        observer.weights(unit.shards for unit in self.units)
        for unit in self.units:
            observer.buffers(fsdp_param.parts for fsdp_param in unit.fsdp_params)
            for fsdp_param in unit.trained:
                fsdp_param.whole.register_hook(lambda gradient: observer.gradients([gradient]))
        self.pool.on_take = lambda message: observer.buffers([message])

    def full_state_dict(self) -> dict[str, Tensor]:
        """Return the ``state_dict`` of the unsharded module, on the CPU of every rank; called by every rank.

        In addition to the result, one unsharded unit at a time is in memory.
        """
        return full_state_dict(self.module, self.units)

    def load_full_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load the shards of this rank from ``state``, the result of ``full_state_dict``; called by every
        rank.

        Raises:
            UserError: the names or shapes are not those of the module.
        """
        load_full_state_dict(self.module, self.units, state)

    def __getstate__(self) -> Any:
        raise UserError(
            "an FSDP module cannot be copied or pickled, because it belongs to a process group: "
            "use full_state_dict()",
        )
