"""Trainers of others, as texts: right ones, and the same with one planted fault.

Each is written with PyTorch's own wrappers only. A fault is a list of replacements in the text of a right
trainer.
"""

from __future__ import annotations

DDP = """
import torch, torch.nn.functional as F, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

IGNORED, MAX_NORM_OF_STEP, MICRO = -100, 0.5, 4


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(12, 8)
        self.hidden = nn.Linear(8, 8)
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.embed.weight
        self.drop = nn.Dropout(0.1)

    def forward(self, tokens):
        return self.head(self.drop(torch.tanh(self.hidden(self.embed(tokens)))))


def build():
    torch.manual_seed(3)
    model = Net()
    batches = []
    for _ in range(3):
        tokens = torch.randint(1, 12, (8, 5))
        targets = torch.randint(1, 12, (8, 5))
        for row in range(8):
            targets[row, : row // 2] = IGNORED
        batches.append((tokens, targets))
    if dist.is_initialized():
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, optimizer, batches


def loss(model, batch):
    tokens, targets = batch
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), ignore_index=IGNORED)


def step(model, optimizer, batch):
    tokens, targets = batch
    rank, world = dist.get_rank(), dist.get_world_size()
    valid = (targets != IGNORED).sum()
    tokens, targets = tokens[rank::world], targets[rank::world]
    for part, wanted in zip(tokens.chunk(MICRO), targets.chunk(MICRO)):
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(part).flatten(0, 1)
        total = F.cross_entropy(logits, wanted.flatten(), ignore_index=IGNORED, reduction="sum")
        (total * world / valid).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM_OF_STEP)
    optimizer.step()
    optimizer.zero_grad()
"""

FSDP = """
import torch, torch.nn.functional as F, torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def build():
    model = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.LayerNorm(7), nn.Linear(7, 3))
    batches = [(torch.randn(8, 6, dtype=torch.float32), torch.randn(8, 3)) for _ in range(3)]
    if dist.is_initialized():
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        fully_shard(model[0], mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), batches


def loss(model, batch):
    return F.mse_loss(model(batch[0]), batch[1])


def step(model, optimizer, batch):
    rank, world = dist.get_rank(), dist.get_world_size()
    inputs, targets = batch[0].chunk(world)[rank], batch[1].chunk(world)[rank]
    F.mse_loss(model(inputs), targets).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
    optimizer.step()
    optimizer.zero_grad()
"""

TENSOR = """
import torch, torch.nn.functional as F, torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel, RowwiseParallel, SequenceParallel, PrepareModuleInput, parallelize_module,
)
from torch.distributed.tensor import Shard, Replicate


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(6, 8), nn.Linear(8, 6), nn.LayerNorm(6)

    def forward(self, x):
        return self.norm(x + self.down(torch.tanh(self.up(x))))


def build():
    model = Net()
    batches = [(torch.randn(4, 6), torch.randn(4, 6)) for _ in range(3)]
    if dist.is_initialized():
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False), batches


def loss(model, batch):
    return F.mse_loss(model(batch[0]), batch[1])


def step(model, optimizer, batch):
    loss(model, batch).backward()
    optimizer.step()
    optimizer.zero_grad()
"""

PIPELINE = """
import torch, torch.nn.functional as F, torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

MICRO, MAX = 4, 0.05


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.first = nn.Embedding(12, 8), nn.Linear(8, 8)
        self.second, self.head = nn.Linear(8, 8), nn.Linear(8, 12, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        if self.embed is not None:
            x = torch.tanh(self.first(self.embed(x)))
        if self.head is not None:
            x = self.head(torch.tanh(self.second(x)))
        return x


def build():
    model = Net()
    batches = [(torch.randint(0, 12, (8, 5)), torch.randint(0, 12, (8, 5))) for _ in range(3)]
    if dist.is_initialized():
        if dist.get_rank() == 0:
            model.second = model.head = None
        else:
            model.head.weight = nn.Parameter(model.head.weight.detach().clone())
            model.embed = model.first = None
    return model, torch.optim.SGD(model.parameters(), lr=0.1), batches


def criterion(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def loss(model, batch):
    return criterion(model(batch[0]), batch[1])


def step(model, optimizer, batch):
    rank = dist.get_rank()
    stage = PipelineStage(model, rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, MICRO, loss_fn=criterion)
    schedule.step(batch[0]) if rank == 0 else schedule.step(target=batch[1])
    tied = model.embed.weight if rank == 0 else model.head.weight
    dist.all_reduce(tied.grad)
    squares = torch.stack([one.grad.square().sum() for one in model.parameters() if one is not tied])
    square = squares.sum()
    dist.all_reduce(square)
    norm = (square + tied.grad.square().sum()).sqrt()
    for one in model.parameters():
        one.grad.mul_((MAX / norm).clamp(max=1))
    optimizer.step()
    optimizer.zero_grad()


MAX_NORM = MAX
"""

MARKED = """
import sys
import torch, torch.nn.functional as F, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main(micro):
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))  # parity: model
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-2)
    data = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(100):
        for _ in range(micro):
            inputs = torch.randn(4, 6, generator=data)
            labels = torch.randint(0, 3, (4,), generator=data)
            loss = F.cross_entropy(wrapped(inputs), labels)  # parity: loss
            (loss / micro).backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]))
"""


def planted(text: str, *replacements: tuple[str, str]) -> str:
    """Return a trainer with a fault; each replaced text occurs in it."""
    for old, new in replacements:
        assert old in text, old
        text = text.replace(old, new)
    return text
