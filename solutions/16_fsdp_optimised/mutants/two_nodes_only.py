"""Divided as if there were two nodes, always."""

QUESTION = "hybrid"
LOSES = 2
FAILS = "check_hybrid_mean"
SAYS = "the piece on rank"


def hybrid_groups(world, shard_size):
    rows = [list(range(first, first + shard_size)) for first in range(0, world, shard_size)]
    return rows, [list(range(place, world, shard_size)) for place in range(shard_size)]


def hybrid_mean(gradient, rows, columns):
    shards, replicas = dist.get_world_size(rows), 2
    piece = gradient.new_empty(gradient.numel() // shards)
    dist.reduce_scatter_tensor(piece, gradient, group=rows)
    dist.all_reduce(piece, group=columns)
    return piece / (shards * replicas)
