"""The gradient of a micro-batch replaces that of the one before."""

QUESTION = "reduce"
LOSES = 1
FAILS = "check_accumulates"
SAYS = "only the last micro-batch"


def reduce_gradients(unit: Unit) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    trained = [(shard, whole) for shard, whole in zip(unit.shards, unit.wholes) if whole.requires_grad]
    if not trained:
        return
    gradients = [torch.zeros_like(whole) if whole.grad is None else whole.grad for _, whole in trained]
    packed = pack([gradient.to(unit.reduce_dtype) for gradient in gradients], world)
    for _, whole in trained:
        whole.grad = None
    row = packed.new_empty(packed.shape[1])
    dist.reduce_scatter_tensor(row, packed.view(-1))
    row = (row / world).to(unit.row.dtype)
    for (shard, _), part in zip(trained, shard_views(row, [whole.shape for _, whole in trained], rank, world)):
        shard.grad = part
