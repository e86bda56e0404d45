"""The tracker counts each storage once, from its allocation to its release, and assigns it to one part."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from dlo_lib.profiling import MemoryTracker, Part


def held(tracker: MemoryTracker) -> int:
    return sum(tracker.live_bytes().values())


def test_views_share_one_storage_which_is_freed_with_the_last_view():
    with FakeTensorMode() as mode, MemoryTracker(mode) as tracker:
        whole = torch.empty(1000)
        view = whole.view(10, 100)[3].t()
        assert held(tracker) == 4000
        del whole
        assert held(tracker) == 4000
        del view
        assert held(tracker) == 0


def test_a_temporary_tensor_is_counted_until_its_release():
    with FakeTensorMode() as mode, MemoryTracker(mode) as tracker:
        x = torch.empty(1000)
        y = (x + 1) * 2
        assert held(tracker) == 8000
    seen = [event.bytes for event in tracker.events()]
    assert seen == [4000, 4000, 4000, -4000]  # x, x + 1, y, and the release of x + 1
    assert y.numel() == 1000


def test_in_place_operators_allocate_nothing():
    with FakeTensorMode() as mode, MemoryTracker(mode) as tracker:
        x = torch.empty(1000)
        x.add_(1).mul_(2)
        torch._foreach_add_([x], 1)
        assert held(tracker) == 4000


def test_resizing_a_storage_to_0_frees_its_memory():
    with FakeTensorMode() as mode, MemoryTracker(mode) as tracker:
        x = torch.empty(1000)
        x.untyped_storage().resize_(0)
        assert held(tracker) == 0
        x.untyped_storage().resize_(4000)
        assert held(tracker) == 4000
        del x
        assert held(tracker) == 0


def test_the_patch_of_resize_is_removed_at_the_end():
    before = torch.UntypedStorage.resize_
    with MemoryTracker():
        assert torch.UntypedStorage.resize_ is not before
    assert torch.UntypedStorage.resize_ is before


def test_fake_tensors_of_another_mode_are_not_memory():
    with FakeTensorMode():
        foreign = torch.empty(1000)
    mode = FakeTensorMode()
    with MemoryTracker(mode) as tracker:
        _ = foreign + 1
        assert held(tracker) == 0


def test_meta_tensors_are_not_memory():
    with FakeTensorMode() as mode, MemoryTracker(mode) as tracker:
        x = torch.empty(1000)
        strides = torch.empty_like(x, device="meta")
        assert strides.shape == (1000,)
        assert held(tracker) == 4000


def test_a_claim_applies_from_the_allocation_on_and_to_the_sources_of_copies_and_sums():
    with FakeTensorMode() as mode, MemoryTracker(mode) as tracker:
        tracker.scope = Part.ACTIVATIONS
        half, other = torch.empty(1000, dtype=torch.bfloat16), torch.empty(1000)
        total = half.float() + other
        tracker.claim([total], Part.GRADIENTS)
        assert {event.part for event in tracker.events()} == {Part.GRADIENTS}
        assert tracker.live_bytes()[Part.GRADIENTS] == 2000 + 4000 + 4000


def test_a_cast_of_a_weight_is_a_cast_weight():
    with FakeTensorMode() as mode, MemoryTracker(mode) as tracker:
        weight = torch.nn.Parameter(torch.empty(10, 100))
        tracker.claim([weight], Part.WEIGHTS)
        with torch.autocast("cpu", torch.bfloat16):
            out = torch.nn.functional.linear(torch.empty(5, 100), weight)
            assert tracker.live_bytes()[Part.CAST_WEIGHTS] == 2000
        del out
        assert tracker.live_bytes()[Part.CAST_WEIGHTS] == 0
        assert tracker.live_bytes()[Part.WEIGHTS] == 4000


def test_only_the_local_shard_of_a_dtensor_counts():
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (4,))
        with FakeTensorMode() as mode:
            sharded = distribute_tensor(torch.empty(1000, 8), mesh, [Shard(0)])
            with MemoryTracker(mode) as tracker:
                doubled = sharded * 2
                assert doubled.shape == (1000, 8)
                assert held(tracker) == 1000 * 8 * 4 // 4
    finally:
        dist.destroy_process_group()


def test_real_tensors_are_counted_as_well():
    with MemoryTracker() as tracker:
        x = torch.ones(1000)
        y = x * 2
        assert held(tracker) == 8000
        del x
        assert held(tracker) == 4000
        assert y.sum() == 2000
