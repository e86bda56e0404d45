"""The mesh: which ranks are in which dimension, on any group and backend, and what is refused."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from dlo_lib.base.errors import UserError
from dlo_lib.launch import run_ranks
from dlo_lib.parallel.mesh import DIMENSIONS, Degrees, ParallelMesh, inner_group


@pytest.mark.parametrize(
    ("degrees", "ranks", "message"),
    [
        (Degrees(dp_shard=3), 8, "dp_shard 3 does not divide 8 ranks: use dp_shard 1, 2, 4 or 8"),
        (Degrees(pp=2, dp_shard=3), 8, "pp 2 x dp_shard 3 does not divide 8 ranks: use dp_shard 1, 2 or 4"),
        (
            Degrees(pp=3, dp_shard=5),
            8,
            "pp 3 x dp_shard 5 does not divide 8 ranks: use factors of 1, 2, 4 or 8",
        ),
        (Degrees(pp=2), 8, "pp 2 makes 2 of 8 ranks: use dp_replicate 4 or dp_shard 4 for all of them"),
        (Degrees(), 2, "every degree is 1, which makes 1 of 2 ranks"),
        (Degrees(dp_shard=4, cp=2, ep=3), 8, "ep 3 does not divide dp_shard x cp = 8: use ep 1, 2, 4 or 8"),
        (Degrees(dp_shard=-1), 8, "dp_shard is -1: use at least 1, or 0"),
        (Degrees(dp_shard=0, pp=0), 8, "pp and dp_shard are 0: leave one degree open at most"),
    ],
)
def test_degrees_that_do_not_fit_are_refused_with_those_that_would(degrees, ranks, message):
    with pytest.raises(UserError) as refused:
        degrees.over(ranks)
    assert str(refused.value).startswith(message)


def test_an_open_degree_takes_what_the_others_leave():
    assert Degrees(pp=2, dp_shard=0).over(8) == Degrees(pp=2, dp_shard=4)
    assert Degrees(pp=2, dp_replicate=0, dp_shard=4).over(8).dp_replicate == 1


def expected(ranks: list[int], shape: dict[str, int], names: tuple[str, ...], rank: int) -> list[int]:
    """By brute force: the ranks that agree with ``rank`` in every other coordinate."""
    coordinates = dict(zip(ranks, itertools.product(*(range(size) for size in shape.values()))))
    others = [index for index, name in enumerate(shape) if name not in names]
    return [
        other
        for other in ranks
        if all(coordinates[other][index] == coordinates[rank][index] for index in others)
    ]


@pytest.mark.parametrize(
    "degrees",
    [
        Degrees(2, 2, 2, 1, 2),
        Degrees(dp_shard=4, cp=2, tp=2, ep=4),
        Degrees(pp=16),
        Degrees(1, 2, 4, 2, 1, 2),
    ],
)
@pytest.mark.parametrize("rank", [0, 5, 15])
def test_ranks_along_dimensions_on_a_fake_group_and_under_fake_tensors(degrees, rank):
    dist.init_process_group("fake", rank=rank, world_size=16, store=FakeStore())
    try:
        with FakeTensorMode():
            mesh = ParallelMesh(degrees)
            shape = {name: getattr(degrees, name) for name in DIMENSIONS}
            inside = degrees.dp_shard * degrees.cp
            # renamed: dp_shard_mod_ep and ep
            of_experts = {**shape, "dp_shard": inside // degrees.ep, "cp": degrees.ep}
            everyone = list(range(16))
            for count in (1, 2, 3):
                for names in itertools.combinations(DIMENSIONS, count):
                    assert mesh.ranks_along(*names) == expected(everyone, shape, names, rank)
                    assert dist.get_process_group_ranks(mesh.group_along(*names)) == mesh.ranks_along(*names)
                    assert mesh.size(*names) == len(mesh.ranks_along(*names))
            assert mesh.ranks_along("ep") == expected(everyone, of_experts, ("cp",), rank)
            assert mesh.ranks_along("dp_shard_mod_ep") == expected(everyone, of_experts, ("dp_shard",), rank)
    finally:
        dist.destroy_process_group()


def on_some_ranks() -> None:
    """Ranks 1 to 4 of 5 make a mesh; rank 0 does not take part."""
    some = dist.new_group([1, 2, 3, 4])
    if dist.get_rank() == 0:
        return
    mesh = ParallelMesh(Degrees(dp_replicate=2, dp_shard=2), some)
    place = dist.get_rank() - 1
    assert (mesh.coordinate("dp_replicate"), mesh.coordinate("dp_shard")) == divmod(place, 2)
    number = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(number, group=mesh.group_along("dp_shard"))
    assert number.item() == (1 + 2 if place < 2 else 3 + 4)
    assert mesh.group_along("dp_replicate", "dp_shard") is some
    assert mesh.group_along("dp_shard") is mesh.group_along("dp_shard")
    theirs = mesh.device_mesh("cpu")
    assert theirs.mesh_dim_names == ("dp_replicate", "dp_shard")
    assert theirs.mesh.tolist() == [[1, 2], [3, 4]]
    assert theirs.get_group("dp_shard") is mesh.group_along("dp_shard")
    assert dist.get_process_group_ranks(inner_group(some, 2)) == ([1, 2] if place < 2 else [3, 4])


def test_a_mesh_over_some_of_the_ranks():
    run_ranks(on_some_ranks, 5)


def with_the_users_own() -> None:
    theirs = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp_shard"))
    mesh = ParallelMesh.of(theirs)
    assert mesh.degrees == Degrees(pp=2, dp_shard=2)
    assert mesh.group_along("pp") is theirs.get_group("pp")
    for names in (("dp", "tp"), ("dp_shard", "pp")):
        with pytest.raises(UserError, match="name them, in order, pp, dp_replicate, dp_shard, cp, tp"):
            ParallelMesh.of(init_device_mesh("cpu", (2, 2), mesh_dim_names=names))


def test_the_users_own_device_mesh():
    run_ranks(with_the_users_own, 4)


def test_without_a_process_group():
    with pytest.raises(UserError, match="a mesh needs a process group"):
        ParallelMesh(Degrees())


def shared_groups() -> None:
    mesh = ParallelMesh(Degrees(dp_shard=2, tp=2))
    shards = mesh.group_along("dp_shard")
    other = mesh.reshaped(Degrees(pp=2, cp=2))
    assert other.group_along("pp") is shards
    assert mesh.group_along("tp") is other.group_along("cp")
    assert other.size("pp") == 2


def test_meshes_of_the_same_ranks_share_groups():
    run_ranks(shared_groups, 4)
