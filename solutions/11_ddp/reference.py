"""The library's own implementation under the names of this lab: what ``lab.use_reference("question")`` gives a stuck student."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DistributedSampler

from dlo_lib.parallel.buckets import broadcast_packed, cut_into_buckets
from dlo_lib.parallel.ddp import DDP
from dlo_lib.parallel.sync_batch_norm import gathered_moments

MIB = 2**20


def replicate(module: nn.Module) -> None:
    """Overwrite parameters and buffers with those of rank 0."""
    broadcast_packed([*module.parameters(), *module.buffers()], _world(), MIB)


def average_gradients(module: nn.Module) -> None:
    """Replace each gradient by its average."""
    for parameter in module.parameters():
        if parameter.grad is not None:
            parameter.grad.div_(dist.get_world_size())
            dist.all_reduce(parameter.grad)


def assign_buckets(nbytes: list[int], limit: int) -> list[list[int]]:
    """Gradients of bytes, cut in the order of their arrival."""
    gradients = [torch.empty(size, dtype=torch.uint8, device="meta") for size in reversed(nbytes)]
    return [[len(nbytes) - 1 - place for place in bucket] for bucket in cut_into_buckets(gradients, limit, limit)]


class DataParallel(nn.Module):
    """The library's DDP behind this lab's interface."""

    def __init__(self, module: nn.Module, bucket_bytes: int = MIB) -> None:
        super().__init__()
        self.module = module
        self.ddp = DDP(module, bucket_bytes=bucket_bytes, first_bucket_bytes=bucket_bytes, find_unused_parameters=True)

    def forward(self, *inputs: Any) -> Any:
        """The module's own."""
        return self.ddp(*inputs)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside communicate nothing."""
        with self.ddp.no_sync():
            yield

    def finish(self) -> None:
        """All gradients are averages."""
        self.ddp.finish_grad_sync()


def accumulate(model: Any, losses: list[Callable[[], Tensor]]) -> None:
    """All micro-batches, one communication."""
    for number, loss in enumerate(losses):
        with model.no_sync() if number + 1 < len(losses) else contextlib.nullcontext():
            (loss() / len(losses)).backward()
    model.finish()


def rank_samples(length: int, rank: int, world: int, epoch: int, seed: int = 0) -> list[int]:
    """PyTorch's sampler."""
    sampler: DistributedSampler[int] = DistributedSampler(range(length), world, rank, seed=1_000_003 * seed)
    sampler.set_epoch(epoch)
    return list(sampler)


def global_accuracy(logits: Tensor, labels: Tensor) -> float:
    """The share of right answers on all ranks."""
    counts = torch.stack([(logits.argmax(1) == labels).sum(), torch.tensor(len(labels))])
    dist.all_reduce(counts)
    return float(counts[0] / counts[1])


def global_moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of all ranks' samples."""
    mean, m2, count = gathered_moments(x, [0], _world())
    return mean, m2 / count


def _world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


REFERENCE = {
    "replicate": {"replicate": replicate},
    "average": {"average_gradients": average_gradients},
    "buckets": {"assign_buckets": assign_buckets},
    "overlap": {"DataParallel": DataParallel},
    "accumulate": {"accumulate": accumulate},
    "sampler": {"rank_samples": rank_samples},
    "metrics": {"global_accuracy": global_accuracy},
    "moments": {"global_moments": global_moments},
}
