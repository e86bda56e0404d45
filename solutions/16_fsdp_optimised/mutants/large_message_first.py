"""The whole gradient is averaged between nodes, then scattered in the node."""

QUESTION = "hybrid"
LOSES = 2
FAILS = "check_hybrid_traffic"
SAYS = "all-reduce of the piece"


def hybrid_groups(world, shard_size):
    rows = [list(range(first, first + shard_size)) for first in range(0, world, shard_size)]
    return rows, [list(range(place, world, shard_size)) for place in range(shard_size)]


def hybrid_mean(gradient, rows, columns):
    shards, replicas = dist.get_world_size(rows), dist.get_world_size(columns)
    whole, piece = gradient.clone(), gradient.new_empty(gradient.numel() // shards)
    dist.all_reduce(whole, group=columns)
    dist.reduce_scatter_tensor(piece, whole, group=rows)
    return piece / (shards * replicas)
