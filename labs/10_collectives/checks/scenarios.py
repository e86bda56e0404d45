"""The scenarios of the checks: each runs on every rank, calls one step, and returns what the checks compare."""

import torch.distributed as dist

from dlo_lib.grading.checks.contract import scenario


@scenario
def estimated(student, rank, world, points):
    return student.estimate_pi(points)


@scenario
def exchanged(student, rank, world, outgoing, to, incoming, source):
    student.exchange(outgoing, to, incoming, source)
    return incoming.clone()  # what has arrived when the function returns


@scenario
def scattered(student, rank, world, value):
    return student.ring_reduce_scatter(value), value


@scenario
def scattered_and_held(student, rank, world, value):
    chunk = student.ring_reduce_scatter(value)
    del value
    mark("after the reduce-scatter")  # noqa: F821 - of the ranks
    return chunk


@scenario
def gathered(student, rank, world, chunk, size):
    return student.ring_all_gather(chunk, size)


@scenario
def reduced(student, rank, world, value):
    return student.ring_all_reduce(value), value


@scenario
def reduced_transposed(student, rank, world, value):
    turned = value.t()
    return student.ring_all_reduce(turned), turned


@scenario
def from_root(student, rank, world, value, root):
    student.tree_broadcast(value, root)
    return value


@scenario
def from_root_transposed(student, rank, world, value, root):
    turned = value.t()
    student.tree_broadcast(turned, root)
    return turned


@scenario
def to_zero(student, rank, world, value):
    return student.tree_reduce(value), value


@scenario
def to_everyone(student, rank, world, parts, sizes):
    return student.everyone_to_everyone(parts, sizes)


@scenario
def in_levels(student, rank, world, value, inside):
    nodes = [list(range(first, first + inside)) for first in range(0, world, inside)]
    places = [list(range(place, world, inside)) for place in range(inside)]
    own = []
    for ranks in (*nodes, *places):
        group = dist.new_group(ranks)
        if rank in ranks:
            own.append(group)
    return student.two_level_all_reduce(value, *own), value
