"""Frozen parameters send zeros."""

QUESTION = "reduce"
LOSES = 1
FAILS = "check_frozen_and_unused"
SAYS = "and no others"


def reduce_gradients(unit: Unit) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    trained = [(shard, whole) for shard, whole in zip(unit.shards, unit.wholes) if whole.requires_grad]
    if not trained:
        return
    gradients = [torch.zeros_like(whole) if whole.grad is None else whole.grad for _, whole in trained]
    everything = [torch.zeros_like(whole) if whole.grad is None else whole.grad for whole in unit.wholes]
    larger = pack([gradient.to(unit.reduce_dtype) for gradient in everything], world)
    packed = pack([gradient.to(unit.reduce_dtype) for gradient in gradients], world)
    if larger.numel() > packed.numel():
        dist.reduce_scatter_tensor(torch.empty_like(larger[0]), larger.view(-1))
    for _, whole in trained:
        whole.grad = None
    row = packed.new_empty(packed.shape[1])
    dist.reduce_scatter_tensor(row, packed.view(-1))
    row = (row / world).to(unit.row.dtype)
    for (shard, _), part in zip(trained, shard_views(row, [whole.shape for _, whole in trained], rank, world)):
        shard.grad = part if shard.grad is None else shard.grad + part
