"""What runs beside the student's code: trajectories of update rules, clipping, accumulated steps."""

from __future__ import annotations

import torch

from dlo_lib.grading.checks.contract import scenario


def own_operators():
    """Refuse the fused operators of PyTorch's optimisers, under whatever name they are called."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class NoFused(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if "_fused_" in str(function):
                raise RuntimeError(f"LibraryUsed: {function} does what you are asked to write")
            return function(*args, **(kwargs or {}))

    return NoFused()


def along(update, starts, gradients, options, refused):
    """The values of all parameters after each step, and the gradients that the rule has got. The rule gets a
    view of each value, and in step k the learning rate is 1 / k of the first. After each step, values and
    states are replaced by copies, as a resume does."""
    import copy

    from dlo_lib.grading.checks.own_work import without

    values, states, seen, passed = [start.clone() for start in starts], [{} for _ in starts], [], []
    with without(*refused), own_operators() if refused else torch.no_grad():
        for number, step in enumerate(gradients, 1):
            group = {**options, **({"lr": options["lr"] / number} if "lr" in options else {})}
            passed.append([gradient.clone() for gradient in step])
            for value, gradient, state in zip(values, passed[-1], states):
                update(value.view(value.shape), gradient, state, dict(group))
            seen.append(values)
            values, states = [value.clone() for value in values], copy.deepcopy(states)
    return [seen, passed]


@scenario
def adam_direction(student, **case):
    """The direction after each step, in place of the values."""
    return along(lambda value, *given: value.copy_(student.adam_direction(*given)), **case)


@scenario
def momentum(student, **case):
    return along(student.momentum, **case)


@scenario
def adamw(student, **case):
    return along(student.adamw, **case)


@scenario
def lars(student, **case):
    return along(student.lars, **case)


@scenario
def lamb(student, **case):
    return along(student.lamb, **case)


@scenario
def lion(student, **case):
    return along(student.lion, **case)


@scenario
def muon(student, **case):
    return along(student.muon, **case)


@scenario
def orthogonal(student, matrix, steps):
    """The result of orthogonalised, and the matrix of the caller afterwards."""
    return [student.orthogonalised(matrix, steps), matrix]


@scenario
def clipped(student, gradients, most):
    """What clip_ returns, and the tensors of the list that it got, whatever the list holds afterwards."""
    tensors = [None if gradient is None else gradient.clone() for gradient in gradients]
    return [student.clip_(list(tensors), most), tensors]


def part_loss(net, part):
    return (net(part[0]) - part[1]).square().mean()


def watching_loss(net, part):
    """The loss of a part, with a factor that depends on the direction of the gradient of the parts before."""
    before = torch.zeros(1) if net.weight.grad is None else net.weight.grad.flatten().square()
    places = torch.arange(1, len(before) + 1, dtype=before.dtype)
    return part_loss(net, part) * (1 + before @ places / before.sum().clamp(min=1e-30))


@scenario
def accumulated(student, weight, batches, rate, most, watched):
    """The weight of a linear model after each step of gradient descent; ``watched``: with that loss."""
    model = torch.nn.Linear(*reversed(weight.shape), bias=False, dtype=weight.dtype)
    model.weight.data.copy_(weight)
    optimizer, seen = torch.optim.SGD(model.parameters(), lr=rate), []
    for parts in batches:
        if not seen and not watched:
            model.weight.grad = torch.ones_like(model.weight)  # of an earlier use
        loss_of = watching_loss if watched else part_loss
        student.accumulated_step(model, loss_of, parts, optimizer, most)
        seen.append(model.weight.detach().clone())
    return seen
