"""One unit of FSDP: the shards of its parameters, their all-gather, and the reduce-scatter of their
gradients.

``FSDPParamGroup`` holds the operations. ``unit_schedule`` decides when a unit is gathered and freed, and
``sharding.grad_reduction`` when its gradients are reduced. The methods have the names of PyTorch's
``FSDPParamGroup`` where they do the same.

Each parameter is cut along its first dimension d0 into N parts of ceil(d0/N) rows; the last parts may be
padded or empty. Rank r stores part r of every parameter, concatenated. One all-gather collects all parts of
the unit, ordered by rank, and a copy rearranges them into whole parameters. One reduce-scatter sends the
gradients, packed in the order of the all-gather, to the ranks that own them.

    packed by rank      [ A0 B0 C0 | A1 B1 C1 | ... ]   N rows of S elements
    by parameter        [ A0 A1 ... | B0 B1 ... | C0 C1 ... ]

A whole parameter is always the same tensor object. Freeing it resizes its storage to 0 bytes. The all-gather
of backward resizes the storage and fills it again, so that the tensors which autograd has saved are valid. A
flat buffer across parameter boundaries would need no rearranging, but would cut matrices within a row.
"""

from __future__ import annotations

import enum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from dlo_lib.parallel.fsdp.absent_param import AbsentParam
from dlo_lib.parallel.fsdp.dtensors import ShardSpec, rows_of, show_dtensors, show_optimizer_dtensors
from dlo_lib.parallel.fsdp.param import FSDPLayout, FSDPParam
from dlo_lib.parallel.fsdp.wrap import ParamRef, WrapPlan
from dlo_lib.parallel.materialize import Values
from dlo_lib.parallel.sharding.grad_reduction import divisors
from dlo_lib.parallel.sharding.sharded_grad import GradScope, mark


class ShardedState(enum.Enum):
    """The state of the parameters of a unit on this rank."""

    SHARDED = "sharded"
    GATHERING = "gathering"
    UNSHARDED = "unsharded"


class FSDPParamGroup:
    """Parameters of one dtype that are gathered, freed and reduced together.

    Args:
        plan: the modules and parameters of the unit. In the modules, shards replace the parameters.
        layout: the groups, devices and dtypes.
        values: returns the full value of a parameter. It is called for one parameter at a time.
    """

    def __init__(self, plan: WrapPlan, layout: FSDPLayout, values: Values) -> None:
        self.name, self.call_spans, self.layout = plan.name, plan.call_spans, layout
        self.ranks, self.rank = dist.get_world_size(layout.group), dist.get_rank(layout.group)
        self.state, self._hidden = ShardedState.SHARDED, False
        self._post_forward_shard: Tensor | None = None  # the larger shard between forward and backward
        self._version = -1  # the version counter of the shards at the last all-gather
        dtype = plan.param_refs[0].param.dtype
        self.compute_dtype, self.reduce_dtype = layout.compute_dtype or dtype, layout.reduce_dtype or dtype
        self._divide_before, self._divide_after = divisors(layout.averaged_ranks, self.reduce_dtype)
        rows = [-(-ref.param.shape[:1].numel() // self.ranks) for ref in plan.param_refs]
        self._sizes = [count * ref.param.shape[1:].numel() for count, ref in zip(rows, plan.param_refs)]
        self.shards = torch.zeros(sum(self._sizes), dtype=dtype, device=layout.shard_device)
        self.fsdp_params: list[FSDPParam] = []
        offset = 0
        for ref, size in zip(plan.param_refs, self._sizes):
            self.fsdp_params.append(self._make_param(ref, offset, size, values(ref.param)))
            offset += size
        # The trained parameters are the first ones, see WrapPlan.
        self.trained = [param for param in self.fsdp_params if param.shard.requires_grad]
        self.trained_numel = sum(param.numel for param in self.trained)
        self.missing = len(self.trained)  # the number of gradients that this pass has not computed yet
        # The node of autograd that accumulates a gradient. All trained parameters of a unit share its fate.
        self._accumulator = get_gradient_edge(self.trained[0].whole).node if self.trained else None
        self._grad_scope = GradScope([layout.group], layout.device, rows=True)
        self._packed: Tensor | None = None
        self._pack_views: dict[FSDPParam, list[tuple[Tensor, slice]]] = {}
        self._reduced: Tensor | None = None
        self._swap_params(whole=False)
        by_owner: dict[nn.Module, dict[str, nn.Parameter]] = {}
        for param in self.fsdp_params:
            for module, attribute in param.owners:
                by_owner.setdefault(module, {})[attribute] = param.shard
        for module, shards in by_owner.items():
            show_dtensors(module, shards)
        show_optimizer_dtensors()

    @torch.no_grad()
    def _make_param(self, ref: ParamRef, offset: int, size: int, value: Tensor) -> FSDPParam:
        original, part = ref.param, rows_of(value, self.ranks, self.rank)
        mine = self.shards[offset : offset + part.numel()].view(part.shape)
        mine.copy_(part)
        shard = nn.Parameter(mine, requires_grad=original.requires_grad)
        spec = ShardSpec(ref.name, original.shape, tuple(original.stride()), self.layout.group)
        shard.shard_of = spec  # type: ignore[attr-defined]
        flat = torch.empty(self.ranks * size, dtype=self.compute_dtype, device=self.layout.device)
        # Use .data: with a shared version counter, autograd would take each all-gather for a change of a
        # tensor that it has saved.
        unsharded = flat[: original.numel()].view(original.shape).data
        whole = nn.Parameter(unsharded, requires_grad=original.requires_grad)
        if original._backward_hooks is not None:  # of register_hook; the handle that it returned still works
            whole._backward_hooks = original._backward_hooks
        for after in (original._post_accumulate_grad_hooks or {}).values():
            shard.register_post_accumulate_grad_hook(after)
        _shrink(flat)
        parts, absent = flat.view(self.ranks, size), AbsentParam(ref.name, whole)
        return FSDPParam(ref.name, ref.owners, offset, size, shard, whole, parts, absent)

    def hide_shards(self, hidden: bool) -> None:
        """While the unit is sharded, the modules hold an ``AbsentParam`` if ``hidden``, otherwise the
        shards."""
        self._hidden = hidden
        if self.state is not ShardedState.UNSHARDED:
            self._swap_params(whole=False)

    def gradients_are_computed(self) -> bool:
        """Return whether the running pass of autograd computes the gradients of the parameters, as
        ``backward`` does and ``autograd.grad`` of other tensors does not. Called in a hook."""
        if self._accumulator is None:
            return True
        try:
            return torch._C._will_engine_execute_node(self._accumulator)  # type: ignore[attr-defined]
        except RuntimeError:  # autograd.grad of this parameter, which leaves .grad unchanged
            return False

    def _swap_params(self, whole: bool) -> None:
        for param in self.fsdp_params:
            chosen: Any = param.whole if whole else param.absent if self._hidden else param.shard
            for module, attribute in param.owners:
                module._parameters[attribute] = chosen

    @torch.no_grad()
    def start_all_gather(self) -> None:
        """Start the all-gather of the shards, unless it has started already or the unit is unsharded."""
        if self.state is not ShardedState.SHARDED:
            return
        if self._version != self.shards._version:
            self._post_forward_shard = None  # stale, because an optimiser has changed the shards
        self.state, self._version = ShardedState.GATHERING, self.shards._version
        if self._post_forward_shard is not None and self.layout.post_forward_group is not None:
            mine, group = self._post_forward_shard, self.layout.post_forward_group
        else:
            mine, group = self.shards.to(self.layout.device, self.compute_dtype), self.layout.group
        self._all_gather = self.layout.transport.all_gather_rows(mine, group, self.layout.pool)

    @torch.no_grad()
    def unshard(self) -> None:
        """Make the parameters whole: start the all-gather if it has not started, and wait for it."""
        if self.state is not ShardedState.SHARDED and self._version != self.shards._version:
            self.reshard()  # the whole parameters are stale, because an optimiser has changed the shards
        if self.state is ShardedState.UNSHARDED:
            return
        self.start_all_gather()
        self._all_gather.wait()
        for param in self.fsdp_params:
            _grow(param.parts)
        first = 0
        for some in self._all_gather.rows:
            rows = some.view(some.numel() // max(1, self.shards.numel()), self.shards.numel())
            parts = [param.parts[first : first + len(rows)] for param in self.fsdp_params]
            torch.split_with_sizes_copy(rows, self._sizes, dim=1, out=parts)
            first += len(rows)
        self._post_forward_shard = None
        self._end_all_gather()
        self._swap_params(whole=True)
        self.state = ShardedState.UNSHARDED

    def _end_all_gather(self) -> None:
        self.layout.pool.give(self._all_gather.buffer)
        del self._all_gather

    @torch.no_grad()
    def reshard(self, until_backward: bool = False) -> None:
        """Free the whole parameters.

        Args:
            until_backward: keep this rank's part of the unit within ``post_forward_group``, if there is one.
        """
        if self.state is ShardedState.SHARDED:
            return
        if self.state is ShardedState.GATHERING:
            self._all_gather.wait()
            self._end_all_gather()
            self.state = ShardedState.SHARDED
            return
        if until_backward and (group := self.layout.post_forward_group) is not None:
            rows = self.ranks // dist.get_world_size(group)
            first = dist.get_rank(group) * rows
            parts = [param.parts[first : first + rows] for param in self.fsdp_params]
            self._post_forward_shard = torch.cat(parts, dim=1).view(-1)
        self._swap_params(whole=False)
        for param in self.fsdp_params:
            _shrink(param.parts)
        self.state = ShardedState.SHARDED

    @torch.no_grad()
    def pack(self, param: FSDPParam, gradient: Tensor) -> None:
        """Copy a whole gradient into the packed buffer, or add it to a gradient that is not reduced yet."""
        flat = gradient.reshape(-1)
        for target, part in self._views_of(param):
            source = flat[part].view(target.shape)
            if param.filled:
                target.add_(source, alpha=1 / self._divide_before)
            elif self._divide_before > 1:
                torch.mul(source, 1 / self._divide_before, out=target)
            else:
                target.copy_(source)
        self.missing -= not param.arrived
        param.arrived = param.filled = True

    def _views_of(self, param: FSDPParam) -> list[tuple[Tensor, slice]]:
        """Return views of the packed buffer with the elements of the flat gradient that belong to each
        view."""
        if self._packed is None:
            self._packed = self.layout.pool.take(self.ranks * self.trained_numel, self.reduce_dtype)
            if any(param.parts.numel() > param.whole.numel() for param in self.trained):
                self._packed.zero_()  # because the padding is sent as well
        if param not in self._pack_views:
            # The number of ranks whose part is complete, and the number of elements of the next rank.
            full, rest = divmod(param.whole.numel(), param.numel) if param.numel else (0, 0)
            rows = self._packed.view(self.ranks, -1)[:, param.offset : param.offset + param.numel]
            self._pack_views[param] = [(rows[:full], slice(0, full * param.numel))]
            if rest:
                self._pack_views[param].append((rows[full, :rest], slice(full * param.numel, None)))
        return self._pack_views[param]

    @torch.no_grad()
    def start_reduce_scatter(self) -> list[FSDPParam]:
        """Start the reduce-scatter of the packed gradients. Missing gradients are sent as zeros.

        Returns the parameters whose gradient is missing.
        """
        absent = [param for param in self.trained if not param.filled]
        for param in absent:
            for target, _ in self._views_of(param):
                target.zero_()
        assert self._packed is not None
        layout = self.layout
        self._reduced = torch.empty(self.trained_numel, dtype=self.reduce_dtype, device=layout.device)
        self._wait_sum = layout.transport.reduce_scatter(
            self._reduced, self._packed, layout.group, layout.pool
        )
        for param in self.trained:
            param.filled = False
        return absent

    @torch.no_grad()
    def wait_reduce_scatter(self) -> None:
        """Wait for the sum, which is then divided by the number of all ranks. If the shards have replicas,
        start the all-reduce over them."""
        assert self._reduced is not None
        self._wait_sum()
        del self._wait_sum  # it keeps the sent tensor alive
        replicas = self.layout.replicas
        self._reduced.mul_(1 / self._divide_after)
        if replicas is not None:
            self._wait_sum = dist.all_reduce(self._reduced, group=replicas, async_op=True).wait
        self._release_packed()

    @torch.no_grad()
    def assign_grads(self, unused: set[FSDPParam]) -> None:
        """Assign the averaged gradients to ``.grad`` of the shards, or add them to it, and call the hooks of
        the shards. The parameters in ``unused`` keep None."""
        assert self._reduced is not None
        if self.layout.replicas is not None:
            self._wait_sum()
        means = self._reduced.to(self.shards.device, self.shards.dtype)
        for param in self.trained:
            mean = means[param.offset : param.offset + param.shard.numel()].view(param.shard.shape)
            for hook in (param.shard._backward_hooks or {}).values():
                changed = hook(mean)
                mean = mean if changed is None else changed
            if param.shard.grad is not None:
                param.shard.grad.add_(mean)
            elif param not in unused:
                param.shard.grad = mark(mean, self._grad_scope)
            if param.shard.grad is not None:
                for after in list((param.shard._post_accumulate_grad_hooks or {}).values()):
                    after(param.shard)
        self._reduced = None

    def drop_grads(self) -> None:
        """Discard the packed and the reduced gradients."""
        self._reduced = None
        self._release_packed()
        for param in self.trained:
            param.filled = False

    def _release_packed(self) -> None:
        if self._packed is not None:
            self.layout.pool.give(self._packed)
            self._packed = None
            self._pack_views.clear()

    def finalize_backward(self) -> None:
        """Reset the state of the backward pass. Gradients that are packed and not reduced are kept."""
        self.missing = len(self.trained)
        for param in self.trained:
            param.arrived = False

    @torch.no_grad()
    def gather_full_precision(self) -> list[Tensor]:
        """Return the whole parameters in the dtype of the shards, as new tensors; called by every rank."""
        mine = self.shards.to(self.layout.device)
        by_rank = torch.empty(self.ranks * mine.numel(), dtype=mine.dtype, device=mine.device)
        self.layout.transport.all_gather(by_rank, mine, self.layout.group)()
        flat = [parts.reshape(-1) for parts in by_rank.view(self.ranks, -1).split(self._sizes, dim=1)]
        wholes = [param.whole for param in self.fsdp_params]
        return [value[: whole.numel()].view(whole.shape) for whole, value in zip(wholes, flat)]

    @torch.no_grad()
    def load(self, param: FSDPParam, value: Tensor) -> None:
        """Copy this rank's rows of ``value``, the full value of ``param``, into the shard."""
        param.shard.copy_(rows_of(value, self.ranks, self.rank))


def _grow(tensor: Tensor) -> None:
    tensor.untyped_storage().resize_(tensor.numel() * tensor.element_size())


def _shrink(tensor: Tensor) -> None:
    tensor.untyped_storage().resize_(0)
