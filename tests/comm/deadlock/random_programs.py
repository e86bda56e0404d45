"""Random programs for the tests of the explainer: correct by construction, or with one mistake.

A program is a list of steps, drawn from a seed, in the same order for all ranks. Each rank does its part of
each step in that order, waits for asynchronous calls some steps later and in any order, and sleeps or holds
the GIL in between. No rank waits for a step that another rank can only start afterwards, so a correct program
always ends.
"""

from __future__ import annotations

import ctypes
import random
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn

from dlo_lib.base.torch_compat import RELEASE
from tests.fsdp2 import fully_shard

COLLECTIVES = ["all_reduce", "broadcast", "all_gather", "all_gather_single", "reduce_scatter", "reduce",
               "gather", "scatter", "all_to_all",
               "barrier", "object", "functional", "monitored"]  # fmt: skip
MESSAGES = ["send", "isend", "batch", "any"]
MISTAKES = ["skips", "returns", "another type", "another size", "another peer"]


@dataclass
class Step:
    """One operation of the ranks of ``group`` (an index into the program's groups) or of ``pair``."""

    what: str
    group: int = 0
    members: tuple[int, ...] = ()
    pair: tuple[int, int] = (0, 0)
    tag: int = 0
    size: int = 4
    dtype: torch.dtype = torch.float32
    seed: int = 0
    how: dict[int, str] = field(default_factory=dict)
    """By rank: at once, later (it waits some steps afterwards) or in a thread."""


def program(
    seed: int, world: int, length: int, pauses: float = 0.02, hold: float = 0.0, threads: bool = True
) -> list[Step]:
    """Draw a program.

    ``pauses``: the longest sleep; ``hold``: how long the GIL is held at times, in seconds.
    """
    draw = random.Random(seed)
    groups: list[tuple[int, ...]] = [tuple(range(world))]
    steps = [Step("model", seed=seed)] if draw.random() < 0.3 else []
    weights = {
        "collective": 40,
        "message": 25,
        "pause": 15,
        "hold": 1.0 if hold else 0,
        "new_group": 5,
        "destroy": 2,
        "rejoin": 0.3,
    }
    weights |= {"train": 6 if steps else 0, "thread": 4 if threads else 0}
    for number in range(length):
        what = draw.choices(list(weights), list(weights.values()))[0]
        step = Step(what, seed=draw.randrange(1 << 30), size=draw.choice([1, 4, 1000, 100_000]), tag=number)
        step.dtype = draw.choice([torch.float32, torch.float64, torch.int32, torch.bfloat16])
        step.group = draw.randrange(len(groups))
        step.members = groups[step.group]
        if what in ("collective", "thread"):
            step.what = draw.choice(COLLECTIVES) if what == "collective" else "thread"
            if step.members == ():  # destroyed
                step.group, step.members = 0, groups[0]
            step.how = {rank: draw.choice(["now", "later"]) for rank in step.members}
            if what == "thread":
                step.members = groups[0]
                step.how = {rank: draw.choice(["now", "thread"]) for rank in step.members}
        elif what == "message":
            step.what = draw.choice(MESSAGES)
            source, destination = draw.sample(range(world), 2)
            step.pair = (source, destination)
            step.members = step.pair
            step.tag = draw.choice([0, 1, number + 10]) if step.what != "any" else number + 10
            step.how = {rank: draw.choice(["now", "later"]) for rank in step.pair}
        elif what == "pause":
            step.members, step.seed = (
                tuple(draw.sample(range(world), draw.randint(1, world))),
                int(1e6 * draw.random() * pauses),
            )
        elif what == "hold":
            step.members, step.seed = (draw.randrange(world),), int(1e6 * hold)
        elif what == "new_group":
            step.members = tuple(sorted(draw.sample(range(world), draw.randint(1, world))))
            groups.append(step.members)
        elif what == "destroy":
            if step.group == 0 or not step.members:
                continue
            groups[step.group] = ()
        elif what == "rejoin":
            groups[1:] = [()] * (len(groups) - 1)
            if steps and steps[0].what == "model":
                continue
            step.members = groups[0]
        steps.append(step)
    return steps


def run(steps: list[Step], folder: str, mistake: str = "", culprit: int = -1, at: int = -1) -> int:
    """Run this rank's part. ``mistake`` occurs on rank ``culprit`` in step ``at``."""
    rank, world = dist.get_rank(), dist.get_world_size()
    mine = random.Random(rank)
    groups: list[Any] = [dist.group.WORLD]
    own_thread = dist.new_group(list(range(world)))
    pending: list[Callable[[], Any]] = []
    thread: list[threading.Thread] = []
    models: list[nn.Module] = []

    def later(wait: Callable[[], Any], how: str) -> None:
        if how == "later":
            pending.insert(mine.randrange(len(pending) + 1), wait)
        else:
            wait()

    def settle(all_of_it: bool) -> None:
        while pending and (all_of_it or mine.random() < 0.3):
            pending.pop()()

    for number, step in enumerate(steps):
        wrong = mistake if (rank, number) == (culprit, at) else ""
        if wrong == "skips":
            continue
        if wrong == "returns":
            break
        size, dtype, pair = step.size, step.dtype, step.pair
        if wrong == "another type":
            dtype = torch.int64
        if wrong == "another size":
            size += 1
        x = torch.ones(size, dtype=dtype)
        if step.what == "model":
            torch.manual_seed(0)
            models.append(
                nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
            )
            sharded = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
            fully_shard(sharded[0])
            fully_shard(sharded)
            models.append(sharded)
        elif step.what == "train":
            for model in models:
                if RELEASE < (2, 10):  # see comm/tracing/tap.py
                    model.zero_grad()
                model(torch.ones(2, 8)).sum().backward()
        elif step.what == "pause" and rank in step.members:
            time.sleep(step.seed / 1e6)
        elif step.what == "hold" and rank in step.members:
            ctypes.PyDLL(None).usleep(step.seed)  # keeps the GIL
        elif step.what == "new_group":
            groups.append(dist.new_group(list(step.members)))
        elif step.what == "destroy":
            settle(True)
            if rank in step.members:
                dist.destroy_process_group(groups[step.group])
        elif step.what == "rejoin":
            settle(True)
            for one in thread:
                one.join()
            dist.barrier()
            dist.destroy_process_group()
            dist.init_process_group(
                "gloo", init_method=f"file://{folder}/{number}", rank=rank, world_size=world
            )
            own_thread = dist.new_group(list(range(world)))
            groups = [dist.group.WORLD] + [None] * (len(groups) - 1)
        elif step.what == "thread":
            for one in thread:
                one.join()
            thread = []
            if step.how[rank] == "thread":

                def beside(
                    pause: float = mine.random() * 0.5, x: torch.Tensor = x, group: Any = own_thread
                ) -> None:
                    time.sleep(pause)
                    dist.all_reduce(x, group=group)

                thread = [threading.Thread(target=beside)]
                thread[0].start()
            else:
                dist.all_reduce(x, group=own_thread)
        elif step.what in MESSAGES and rank in step.members:
            source, destination = pair
            if wrong == "another peer" and world > 2:
                other = next(one for one in range(world) if one not in pair)
                source, destination = (rank, other) if rank == source else (other, rank)
            _message(step, rank, source, destination, x, later)
        elif step.what in COLLECTIVES and rank in step.members:
            _collective(step, groups[step.group], rank, x, wrong, later)
        settle(False)
    settle(True)
    for one in thread:
        one.join()
    return rank


def _message(step: Step, rank: int, source: int, destination: int, x: torch.Tensor, later: Callable) -> None:
    how = step.how[rank]
    if step.what == "batch":
        operation = (
            dist.P2POp(dist.isend, x, destination, tag=step.tag)
            if rank == source
            else dist.P2POp(dist.irecv, x, source, tag=step.tag)
        )
        for work in dist.batch_isend_irecv([operation]):
            later(work.wait, how)
    elif rank == source:
        if step.what == "isend" or how == "later":
            later(dist.isend(x, destination, tag=step.tag).wait, how)  # type: ignore[union-attr]
        else:
            dist.send(x, destination, tag=step.tag)
    elif step.what == "any":
        dist.recv(x, tag=step.tag)
    elif how == "later":
        later(dist.irecv(x, source, tag=step.tag).wait, how)  # type: ignore[union-attr]
    else:
        dist.recv(x, source, tag=step.tag)


def _collective(step: Step, group: Any, rank: int, x: torch.Tensor, wrong: str, later: Callable) -> None:
    n = len(step.members)
    root = step.members[step.seed % n]
    if wrong == "another peer":
        root = step.members[(step.seed + 1) % n]
    how, size = step.how[rank], x.numel()
    wide = torch.ones(n * size, dtype=x.dtype)
    keep = {"group": group, "async_op": True}
    if step.what == "all_reduce":
        later(dist.all_reduce(x, **keep).wait, how)
    elif step.what == "broadcast":
        later(dist.broadcast(x, root, **keep).wait, how)
    elif step.what == "all_gather":
        later(dist.all_gather(list(wide.chunk(n)), x, **keep).wait, how)
    elif step.what == "all_gather_single":
        later(dist.all_gather_into_tensor(wide, x, **keep).wait, how)
    elif step.what == "reduce_scatter":
        later(dist.reduce_scatter_tensor(x, wide, **keep).wait, how)
    elif step.what == "reduce":
        later(dist.reduce(x, root, **keep).wait, how)
    elif step.what == "gather":
        later(dist.gather(x, list(wide.chunk(n)) if rank == root else None, root, **keep).wait, how)
    elif step.what == "scatter":
        later(dist.scatter(x, list(wide.chunk(n)) if rank == root else None, root, **keep).wait, how)
    elif step.what == "all_to_all":
        me = step.members.index(rank)
        sends, receives = (
            [(me + 2 * other + size) % 5 for other in range(n)],
            [(other + 2 * me + size) % 5 for other in range(n)],
        )
        source, target = torch.ones(sum(sends), dtype=x.dtype), torch.ones(sum(receives), dtype=x.dtype)
        later(dist.all_to_all_single(target, source, receives, sends, **keep).wait, how)
    elif step.what == "barrier":
        dist.barrier(group=group)
    elif step.what == "object":
        said: list[Any] = [None] * n
        dist.all_gather_object(said, {"rank": rank, "text": "x" * (7 * rank)}, group=group)
        word = ["x" * step.size] if rank == root else [None]
        dist.broadcast_object_list(word, root, group=group)
    elif step.what == "functional":
        later(functional.all_reduce(x, "sum", group).clone, how)
    elif step.what == "monitored":
        dist.monitored_barrier(group=group, timeout=timedelta(minutes=5))


def new_folder() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(prefix="dlo-random-programs-")
