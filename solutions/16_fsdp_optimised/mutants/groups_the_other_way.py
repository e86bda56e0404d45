"""Shard groups are the columns: every gather crosses nodes."""

QUESTION = "hybrid"
LOSES = 1
FAILS = "check_groups"
SAYS = "the shard groups"


def hybrid_groups(world, shard_size):
    rows = [list(range(first, first + shard_size)) for first in range(0, world, shard_size)]
    return [list(range(place, world, shard_size)) for place in range(shard_size)], rows


def hybrid_mean(gradient, rows, columns):
    shards, replicas = dist.get_world_size(rows), dist.get_world_size(columns)
    piece = gradient.new_empty(gradient.numel() // shards)
    dist.reduce_scatter_tensor(piece, gradient, group=rows)
    dist.all_reduce(piece, group=columns)
    return piece / (shards * replicas)
