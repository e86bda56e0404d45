"""The whole gradients are kept until the next backward."""

QUESTION = "reduce"
LOSES = 2
FAILS = "check_gradients_freed"
SAYS = "still holds a whole gradient"


def reduce_gradients(unit: Unit) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    trained = [(shard, whole) for shard, whole in zip(unit.shards, unit.wholes) if whole.requires_grad]
    if not trained:
        return
    gradients = [torch.zeros_like(whole) if whole.grad is None else whole.grad for _, whole in trained]
    packed = pack([gradient.to(unit.reduce_dtype) for gradient in gradients], world)
    row = packed.new_empty(packed.shape[1])
    dist.reduce_scatter_tensor(row, packed.view(-1))
    row = (row / world).to(unit.row.dtype)
    for (shard, _), part in zip(trained, shard_views(row, [whole.shape for _, whole in trained], rank, world)):
        shard.grad = part if shard.grad is None else shard.grad + part
