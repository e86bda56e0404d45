"""The library's own implementation under the names of this lab: what ``lab.use_reference("question")`` gives a stuck student."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call

from dlo_lib.optim.step import IGNORE_INDEX, summed_cross_entropy
from dlo_lib.parallel.pipeline.deferred import WeightPart, add_weight_gradients
from dlo_lib.parallel.pipeline.partition import partition
from dlo_lib.parallel.pipeline.schedules import one_f_one_b
from dlo_lib.parallel.pipeline.simulate import simulate
from dlo_lib.parallel.pipeline.table import Action, ActionKind, F, Schedule


def stage_starts(costs: list[float], stages: int) -> list[int]:
    """The first piece of each stage."""
    return [pieces.start for pieces in partition(costs, stages)]


def loss_part(output: Tensor, target: Tensor, targets: list[Tensor]) -> Tensor:
    """A micro-batch's part of the mean loss of all."""
    return summed_cross_entropy(output[None], target[None]) / sum(int((each != IGNORE_INDEX).sum()) for each in targets)


def stage_forward(stage: nn.Module, kept: dict, i: int, x: Tensor, loss: Callable | None = None) -> Tensor:
    """Forward of micro-batch ``i``."""
    x = x.detach().requires_grad_(x.is_floating_point())
    output = stage(x) if loss is None else loss(stage(x))
    kept[i] = x, output
    return output.detach()


def stage_backward(kept: dict, i: int, grad: Tensor | None = None) -> Tensor | None:
    """Backward of micro-batch ``i``."""
    x, output = kept.pop(i)
    output.backward(grad)
    return x.grad


def my_rows(ranks: int, micro_batches: int) -> list[list[str]]:
    """1F1B."""
    return [[str(action) for action in row] for row in one_f_one_b(ranks, micro_batches).rows]


def with_messages(rows: list[list[str]]) -> list[list[str]]:
    """Both ends of each message at the moment when the simulated schedule makes it: one order for all."""
    parsed = tuple(tuple(map(Action.parse, row)) for row in rows)
    micro_batches = 1 + max((action.micro_batch for row in parsed for action in row), default=-1)
    simulation = simulate(Schedule("given", tuple(range(len(rows))), micro_batches, parsed))
    cells = [
        (end, action.micro_batch, rank, action) for rank, row in enumerate(parsed) for (_, end), action in zip(simulation.spans[rank], row)
    ]
    new: list[list[str]] = [[] for _ in rows]
    for _, _, rank, action in sorted(cells, key=lambda cell: cell[:3]):  # by their ends, so what uses comes after what makes
        new[rank].append(str(action))
        forward = action.kind is F
        to = rank + 1 if forward else rank - 1
        if 0 <= to < len(rows):
            send = ActionKind.SEND_FORWARD if forward else ActionKind.SEND_BACKWARD
            receive = ActionKind.RECEIVE_FORWARD if forward else ActionKind.RECEIVE_BACKWARD
            new[rank].append(str(Action(send, rank, action.micro_batch)))
            new[to].append(str(Action(receive, to, action.micro_batch)))
    return new


def run_row(
    row: Iterable[str],
    forward: Callable,
    backward: Callable,
    inputs: list[Tensor] | None,
    shapes: list[tuple[int, ...]],
    before: int | None,
    after: int | None,
) -> Tensor | float:
    """The cells of a row, one after the other, with blocking messages."""
    arrived: dict[Action, Tensor] = {}
    made: dict[tuple[bool, int], Tensor] = {}
    like: dict[int, tuple[int, ...]] = {}
    loss: Tensor | float = 0.0
    for action in map(Action.parse, row):
        kind, stage, i = action
        match kind:
            case ActionKind.RECEIVE_FORWARD | ActionKind.RECEIVE_BACKWARD:
                ahead = kind is ActionKind.RECEIVE_FORWARD
                arrived[action] = torch.empty(shapes[i] if ahead else like[i])
                dist.recv(arrived[action], before if ahead else after)
            case ActionKind.SEND_FORWARD | ActionKind.SEND_BACKWARD:
                ahead = kind is ActionKind.SEND_FORWARD
                dist.send(made.pop((ahead, i)), after if ahead else before)
            case ActionKind.FORWARD:
                x = arrived.pop(Action(ActionKind.RECEIVE_FORWARD, stage, i)) if inputs is None else inputs[i]
                output = forward(i, x)
                like[i] = tuple(output.shape)
                if after is None:
                    loss = loss + output
                else:
                    made[True, i] = output
            case ActionKind.BACKWARD:
                grad = backward(i, arrived.pop(Action(ActionKind.RECEIVE_BACKWARD, stage, i), None))
                if before is not None:
                    made[False, i] = grad
    return loss


def linear_backward(grad_y: Tensor, x: Tensor, weight: nn.Parameter, bias: nn.Parameter, later: list) -> Tensor:
    """The input part now, the weight part later."""
    layer = nn.Linear(1, 1)
    layer.weight, layer.bias = weight, bias
    part = WeightPart()
    part.add(lambda: add_weight_gradients(layer, x.flatten(0, -2), grad_y.flatten(0, -2)))
    later.append(part.run)
    return grad_y @ weight.detach()


def delayed_training(weights: list[Tensor], gradients_of: Callable, lr: float, delays: list[int], steps: int) -> list[Tensor]:
    """Each stage's gradient at weights of its own age."""
    versions = [list(weights)]
    for step in range(steps):
        old = [versions[max(0, step - delay)][stage] for stage, delay in enumerate(delays)]
        versions.append([weight - lr * grad for weight, grad in zip(versions[-1], gradients_of(old, step))])
    return versions[-1]


def stash_forward(stage: nn.Module, kept: dict, i: int, x: Tensor, loss: Callable | None = None) -> Tensor:
    """Forward on a copy of the newest weights, kept for the backward."""
    version = {name: parameter.detach().clone().requires_grad_() for name, parameter in stage.named_parameters()}
    x = x.detach().requires_grad_(x.is_floating_point())
    output = functional_call(stage, version, (x,))
    output = output if loss is None else loss(output)
    kept[i] = version, x, output
    return output.detach()


@torch.no_grad()
def stash_backward(stage: nn.Module, kept: dict, i: int, grad: Tensor | None, lr: float) -> Tensor | None:
    """Backward on the kept version, and an update of the newest weights."""
    version, x, output = kept.pop(i)
    output.backward(grad)
    for name, parameter in stage.named_parameters():
        parameter -= lr * version[name].grad
    return x.grad


def hybrid_step(step: Callable, parameters: list[nn.Parameter], rank: int, world: int, stages: int) -> None:
    """The ranks as a grid of pipelines by stages: messages along a row, gradients along a column."""
    grid = torch.arange(world).view(-1, stages)
    pipeline, place = divmod(rank, stages)
    row = [None, *grid[pipeline].tolist(), None]
    step(row[place], row[place + 2])
    columns = [dist.new_group(column.tolist()) for column in grid.T]
    for parameter in parameters:
        dist.all_reduce(parameter.grad, group=columns[place])


REFERENCE = {
    "partition": {"stage_starts": stage_starts},
    "loss": {"loss_part": loss_part},
    "stage": {"stage_forward": stage_forward, "stage_backward": stage_backward},
    "table": {"my_rows": my_rows},
    "order": {"with_messages": with_messages},
    "loop": {"run_row": run_row},
    "split": {"linear_backward": linear_backward},
    "delayed": {"delayed_training": delayed_training},
    "stash": {"stash_forward": stash_forward, "stash_backward": stash_backward},
    "hybrid": {"hybrid_step": hybrid_step},
}
