"""Another way to write each step, under the names of this lab: what ``lab.use_reference("question")`` gives a stuck student.

The library's FSDP does these things in hooks, behind another interface; where a part of it fits (groups of ranks, checkpoints), it is that part.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

Table = list[tuple[str, int]]
Blocks = list[tuple[int, float]]


def plan(units: int, reshard: bool = True) -> Table:
    """The computations in order; around each one what has to be asked for before, and what can be given back after."""
    order = [("forward", k) for k in range(units)] + [("backward", k) for k in reversed(range(units))]
    table: Table = [("gather", 0)]
    whole = {0}
    for (kind, k), (_, following) in itertools.zip_longest(order, order[1:], fillvalue=("", 0)):
        if following not in whole:
            table.append(("gather", following))
            whole.add(following)
        table.append((kind, k))
        if kind == "backward" or (reshard and k < units - 1):
            table.append(("free", k))
            whole.discard(k) if kind == "forward" else None
        if kind == "backward":
            table.append(("reduce", k))
    return table


def gather_cost(units: Sequence[int], world: int, keep: int) -> tuple[float, float]:
    """Unit by unit."""
    behind = peak = sent = 0.0
    for k, size in enumerate(units):
        following = units[k + 1] if k + 1 < len(units) else 0
        peak = max(peak, behind + size + following)
        behind += size / keep if keep < world else 0
        sent += size * (1 - 1 / world) + (size * (1 - 1 / keep) if k + 1 < len(units) else 0)
    return peak, sent


def forward_time(units: Blocks, alpha: float, beta: float) -> float:
    """Backwards: from the end of the last forward to the beginning of the first gather."""
    seconds = units[-1][1]
    for (_, computing), (size, _) in zip(units[-2::-1], units[:0:-1]):
        seconds += max(computing, alpha + beta * size)
    return alpha + beta * units[0][0] + seconds


def choose_units(blocks: Blocks, limit: int, alpha: float, beta: float) -> list[int]:
    """Every set of places to cut."""
    ways = []
    for cuts in range(len(blocks)):
        for places in itertools.combinations(range(1, len(blocks)), cuts):
            ends = [*places, len(blocks)]
            counts = [end - begin for begin, end in zip([0, *places], ends)]
            units = [(sum(b for b, _ in blocks[e - n : e]), sum(s for _, s in blocks[e - n : e])) for n, e in zip(counts, ends)]
            pairs = [a + b for (a, _), (b, _) in itertools.pairwise(units)] or [units[0][0]]
            if max(pairs) <= limit:
                ways.append((forward_time(units, alpha, beta), counts))
    return min(ways)[1]


def execute(
    table: Table,
    shards: list[Tensor],
    x: Tensor,
    grad: Tensor,
    forward: Callable[[int, Tensor, Tensor], Tensor],
    backward: Callable[[int, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]],
) -> tuple[Tensor, list[Tensor]]:
    """One function for each kind of action."""
    world = dist.get_world_size()
    whole: dict[int, Tensor] = {}
    messages: dict[tuple[str, int], Any] = {}
    inputs: list[Tensor] = []
    gradients: dict[int, Tensor] = {}
    pieces = [torch.empty_like(shard) for shard in shards]

    def gather(k: int) -> None:
        whole[k] = shards[k].new_empty(world * shards[k].numel())
        messages["gather", k] = dist.all_gather_into_tensor(whole[k], shards[k], async_op=True)

    def arrived(k: int) -> Tensor:
        if (message := messages.pop(("gather", k), None)) is not None:
            message.wait()
        return whole[k]

    def go_forward(k: int) -> None:
        nonlocal x
        inputs.append(x)
        x = forward(k, arrived(k), x)

    def go_backward(k: int) -> None:
        nonlocal grad
        grad, gradients[k] = backward(k, arrived(k), inputs.pop(), grad)

    def reduce(k: int) -> None:
        messages["reduce", k] = dist.reduce_scatter_tensor(pieces[k], gradients.pop(k).div_(world), async_op=True)

    actions: dict[str, Callable[[int], Any]] = {
        "gather": gather,
        "forward": go_forward,
        "backward": go_backward,
        "free": whole.pop,
        "reduce": reduce,
    }
    for kind, k in table:
        actions[kind](k)
    for message in messages.values():
        message.wait()
    return x, pieces


class Checkpoint(torch.autograd.Function):
    """The random state by ``torch.random.fork_rng``, which puts the old one back."""

    __signature__ = inspect.Signature()  # as the student's: it is applied, and never made

    @staticmethod
    def forward(ctx: Any, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.again = function, torch.get_rng_state()
        with torch.no_grad():
            return function(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor | None]:
        function, state = ctx.again
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad(), torch.random.fork_rng(devices=[]):
            torch.set_rng_state(state)
            output = function(x)
        output.backward(grad)
        return None, x.grad


class HostOptimizer:
    """Pairs of a parameter and its master."""

    def __init__(self, parameters: list[nn.Parameter], make_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> None:
        self.pairs = [(parameter, nn.Parameter(parameter.detach().to("cpu", torch.float32, copy=True))) for parameter in parameters]
        self.optimizer = make_optimizer([master for _, master in self.pairs])

    @torch.no_grad()
    def step(self) -> None:
        """Gradients down, a step, weights up."""
        for parameter, master in self.pairs:
            master.grad, parameter.grad = None if parameter.grad is None else parameter.grad.to("cpu", torch.float32), None
        self.optimizer.step()
        for parameter, master in self.pairs:
            if master.grad is not None:
                parameter.copy_(master)


def hybrid_groups(world: int, shard_size: int) -> tuple[list[list[int]], list[list[int]]]:
    """A grid and its transpose."""
    grid = torch.arange(world).view(-1, shard_size)
    return grid.tolist(), grid.T.tolist()


def hybrid_mean(gradient: Tensor, rows: dist.ProcessGroup, columns: dist.ProcessGroup) -> Tensor:
    """Large message in the row, small one in the column."""
    ranks = dist.get_world_size(rows)
    piece = torch.empty_like(gradient[: gradient.numel() // ranks])
    dist.reduce_scatter_tensor(piece, gradient, group=rows)
    dist.all_reduce(piece, group=columns)
    return piece.div_(ranks * dist.get_world_size(columns))


def graphs_of(function: Callable[..., Any], *inputs: Any) -> list[int]:
    """A backend that looks and passes on."""
    found: list[torch.fx.GraphModule] = []

    def look(graph_module: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        found.append(graph_module)
        return graph_module.forward

    torch._dynamo.reset()
    torch.compile(function, backend=look)(*inputs)
    return [sum(node.op.startswith("call_") for node in graph_module.graph.nodes) for graph_module in found]


def compile_blocks(blocks: Sequence[nn.Module], backend: Any) -> None:
    """Module hooks run around ``forward``."""
    for block in blocks:
        block.forward = torch.compile(block.forward, backend=backend)  # type: ignore[method-assign]


def fastest(runs: dict[str, list[tuple[int, float, float]]], limit: float) -> tuple[str, int] | None:
    """Batch by batch."""
    best: tuple[float, str, int] | None = None
    for name, points in runs.items():
        batch, rate = points[0][0], 0.0
        while (held := _at(points, batch))[0] <= limit:
            rate, batch = batch / held[1], batch + 1
        if rate and (best is None or rate > best[0]):
            best = rate, name, batch - 1
    return best[1:] if best is not None else None


def _at(points: list[tuple[int, float, float]], batch: int) -> tuple[float, float]:
    """Memory and seconds on the line through the neighbours, or through the last two."""
    lower, upper = next(((a, b) for a, b in itertools.pairwise(points) if batch <= b[0]), (points[-2], points[-1]))
    part = (batch - lower[0]) / (upper[0] - lower[0])
    return lower[1] + part * (upper[1] - lower[1]), lower[2] + part * (upper[2] - lower[2])


REFERENCE = {
    "plan": {"plan": plan},
    "policy": {"gather_cost": gather_cost},
    "wrapping": {"forward_time": forward_time, "choose_units": choose_units},
    "execute": {"execute": execute},
    "checkpoint": {"Checkpoint": Checkpoint},
    "offload": {"HostOptimizer": HostOptimizer},
    "hybrid": {"hybrid_groups": hybrid_groups, "hybrid_mean": hybrid_mean},
    "compile": {"graphs_of": graphs_of, "compile_blocks": compile_blocks},
    "sweep": {"fastest": fastest},
}
