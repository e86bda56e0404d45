"""Cuts the experts of a model over ranks, in place.

    mesh: ep is a part of the ranks with different data, dp_shard x cp
    experts        rank r of ``ep`` keeps the experts r E/ep to (r+1) E/ep - 1; the ranks of
                   dp_replicate x dp_shard_mod_ep hold the same experts
    all others     every rank holds a copy: routers, shared experts, attention, norms, embeddings

Gradients. The dispatch has sent to an expert the tokens of all ``ep`` ranks, so its gradient is already the
sum over them. It remains to be summed over the ranks that hold the same expert, and divided by the number of
*all* ranks with different data, as the other gradients are:
    expert    (sum over the ranks with the same experts) / N        others    (sum over all N ranks) / N

Parity. The model on N ranks with different data equals the model in one process on all the data: without a
capacity, exactly. The balance loss is that of the whole batch, because the loads are summed over all ranks
before they are multiplied by the probabilities. With a capacity, each rank limits the rows that *it* sends to
an expert to ceil(factor * its tokens * top_k / E). This is the custom of the field (the groups of GShard, the
cores of Switch Transformer), because it needs no communication before the dispatch. It is not the capacity
over the whole batch: a rank whose tokens prefer one expert drops some of them, even if the other ranks leave
room. The twin of N ranks is therefore one process that limits each part of the batch by itself.

FSDP shards the experts of a rank over dp_shard_mod_ep, and all other parameters over dp_shard x cp.

With tensor parallelism, the ranks of ``tp`` hold the same experts and compute the same tokens, because
experts are not cut. With sequence parallelism, they compute different tokens, and the gradients of routers
and experts are summed over them (``tensor``).

Memory per rank: 1/ep of the experts, of their gradients and of their optimiser state. Bytes sent: see
``expert.dispatch``.

Papers: GShard (arXiv:2006.16668), section 2.2 and 3.2; Switch Transformer (arXiv:2101.03961), section 2.2.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dlo_lib.base.errors import UserError
from dlo_lib.models.moe import MoELayer
from dlo_lib.parallel.expert.dispatch import AllToAllExchange
from dlo_lib.parallel.materialize import Values
from dlo_lib.parallel.protocol import SplitDim, process_group
from dlo_lib.parallel.sharding.buckets import broadcast_packed

MIB = 2**20


@dataclass(frozen=True, eq=False)
class ExpertPart:
    """A parameter of experts: the shape and strides of that of all experts, and this rank's part of it."""

    shape: torch.Size
    strides: tuple[int, ...]
    placement: SplitDim


@dataclass(frozen=True, eq=False)
class ExpertLayout:
    """The experts of a model after ``parallelize_experts``.

    Attributes:
        group: the ranks that together store all experts.
        replicas: the ranks that store the same experts.
        batch: the ranks with different data.
        parts: the parameters of the experts, by their names in the model.
        shards: the ranks that store the same experts, over which FSDP shards them.
        values: returns the value of this rank's part of a parameter on the meta device; None if the model has
            values.
    """

    group: dist.ProcessGroup
    replicas: dist.ProcessGroup
    batch: dist.ProcessGroup
    parts: dict[str, ExpertPart]
    shards: dist.ProcessGroup
    values: Values | None = None

    def reduced_over(self, module: nn.Module) -> dict[nn.Parameter, dist.ProcessGroup]:
        """Return the ranks over which the gradient of each parameter of experts is summed: the argument
        ``reduced_over`` of ``DDP``. ``module`` is the model, or a part of it with the names of the model."""
        return {param: self.replicas for name, param in module.named_parameters() if name in self.parts}

    def sharded_over(self, module: nn.Module) -> dict[nn.Parameter, dist.ProcessGroup]:
        """Return the ranks over which each parameter of experts is sharded: the argument ``sharded_over`` of
        ``FSDP``. ``module`` is as in ``reduced_over``."""
        return {param: self.shards for name, param in module.named_parameters() if name in self.parts}


@torch.no_grad()
def parallelize_experts(
    model: nn.Module,
    group: dist.ProcessGroup | None = None,
    *,
    replicas: dist.ProcessGroup | None = None,
    batch: dist.ProcessGroup | None = None,
    shards: dist.ProcessGroup | None = None,
    tokens: dist.ProcessGroup | None = None,
    values: Values | None = None,
) -> ExpertLayout:
    """Cut the experts of every ``MoELayer`` of ``model`` over the ranks of ``group``, in place; called by
    every rank. Each rank keeps num_experts / ep experts. Call it before the data-parallel wrapper and the
    optimiser are created.

    With the groups of a ``ParallelMesh``::

        layout = parallelize_experts(
            model,
            mesh.group_along("ep"),
            replicas=mesh.group_along("dp_replicate", "dp_shard_mod_ep"),
            batch=mesh.group_along("dp_replicate", "dp_shard", "cp"),
        )
        wrapped = ExpertParallel(DDP(model, layout.batch, reduced_over=layout.reduced_over(model)), layout)

    Args:
        model: has the same structure on every rank. All ranks start from the experts and routers of the first
            rank of ``batch``, so that the seed of that rank gives the weights of one process. A model on the
            meta device is cut without storage.
        group: the ranks that together store all experts; None for all ranks. With a single rank, nothing is
            cut, and only the losses and loads are summed over ``batch``.
        replicas: the ranks that store the same experts as this one; None for this rank alone, if ``group`` is
            ``batch``.
        batch: the ranks with different data, over which gradients are averaged; None for ``group``.
        shards: the ranks over which FSDP shards the experts of this rank; None for ``replicas``.
        tokens: the ranks whose layers compute different tokens, for the losses and the balance bias: those of
            ``tp`` too with sequence parallelism. None for ``batch``.
        values: returns the value of a parameter, for a model on the meta device; None for the values of the
            model.

    Returns the layout, for ``ExpertParallel``.

    Raises:
        UserError: there is no process group; the model has no ``MoELayer``; ``ep`` does not divide the number
            of experts; the number of ranks of the groups contradict each other; the experts are cut already.
    """
    group = process_group(group, "expert parallelism")
    batch = group if batch is None else batch
    ranks, everyone = dist.get_world_size(group), dist.get_world_size(batch)
    if replicas is None:
        if everyone != ranks:
            raise UserError(
                f"{everyone} ranks with different data hold {everyone // ranks} copies of each expert: "
                "give replicas, the ranks with the same experts"
            )
        replicas = dist.new_group([dist.get_rank()], use_local_synchronization=True)
        assert isinstance(replicas, dist.ProcessGroup)  # this rank is its member
    copies = dist.get_world_size(replicas)
    if copies * ranks != everyone:
        raise UserError(
            f"ep {ranks} x {copies} ranks with the same experts makes {copies * ranks} of {everyone} ranks "
            f"with different data: use {everyone // ranks or 1} for each expert"
        )
    layers = [(name, module) for name, module in model.named_modules() if isinstance(module, MoELayer)]
    if not layers:
        raise UserError("the model has no mixture-of-experts layer: use ep 1, or a model such as tiny-moe")
    for name, layer in layers:
        _check(name, layer, ranks)
    parts: dict[str, ExpertPart] = {}
    whole_of: dict[nn.Parameter, nn.Parameter] = {}  # of parameters on the meta device
    placement = SplitDim(0, group)
    for name, layer in layers:
        tensors = [*layer.experts.parameters(), *layer.router.parameters(), *layer.router.buffers()]
        if not tensors[0].is_meta:
            broadcast_packed(tensors, batch, 25 * MIB)
        for key, param in list(layer.experts.named_parameters()):
            parts[f"{name}.experts.{key}".lstrip(".")] = ExpertPart(param.shape, param.stride(), placement)
            mine = param.detach().chunk(ranks)[dist.get_rank(group)]
            # A copy, so that the memory of the other experts is freed.
            value = torch.empty_like(mine) if param.is_meta else mine.clone()
            new = nn.Parameter(value, param.requires_grad)
            setattr(layer.experts, key, new)
            if param.is_meta:
                whole_of[new] = param
        layer.exchange = AllToAllExchange(group, batch, tokens)
    own = None if values is None else _values_of_parts(values, whole_of, ranks, dist.get_rank(group))
    return ExpertLayout(group, replicas, batch, parts, replicas if shards is None else shards, own)


def _values_of_parts(
    values: Values, whole_of: Mapping[nn.Parameter, nn.Parameter], ranks: int, rank: int
) -> Values:
    """Return a function that returns the value of this rank's part of a parameter on the meta device."""

    def value(param: nn.Parameter) -> Tensor:
        if param not in whole_of:
            return values(param)
        return values(whole_of[param]).chunk(ranks)[rank].clone()

    return value


def _check(name: str, layer: MoELayer, ranks: int) -> None:
    count = layer.config.num_experts
    if isinstance(layer.exchange, AllToAllExchange):
        raise UserError(f"the experts of {name} are cut already: build a new model and cut it once")
    if count % ranks:
        fits = [str(number) for number in range(1, count + 1) if count % number == 0]
        cure = f"{', '.join(fits[:-1])} or {fits[-1]}" if len(fits) > 1 else fits[0]
        raise UserError(f"ep {ranks} does not divide the {count} experts of {name}: use ep {cure}")
