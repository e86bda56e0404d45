"""What runs beside the student's code: trajectories of update rules, steps of ``Rule``, accumulated steps."""

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
    """The values of all parameters after each step. After each step, values and states are replaced by
    copies, as a resume does."""
    import copy

    from dlo_lib.grading.checks.own_work import without

    values, states, seen = [start.clone() for start in starts], [{} for _ in starts], []
    with without(*refused), own_operators() if refused else torch.no_grad():
        for step in gradients:
            for value, gradient, state in zip(values, step, states):
                update(value, gradient.clone(), state, dict(options))
            seen.append(values)
            values, states = [value.clone() for value in values], copy.deepcopy(states)
    return seen


@scenario
def momentum_steps(student, **case):
    return along(student.momentum, **case)


@scenario
def adamw_steps(student, **case):
    return along(student.adamw, **case)


@scenario
def lars_steps(student, **case):
    return along(student.lars, **case)


@scenario
def lamb_steps(student, **case):
    return along(student.lamb, **case)


@scenario
def lion_steps(student, **case):
    return along(student.lion, **case)


@scenario
def muon_steps(student, **case):
    return along(student.muon, **case)


@scenario
def adam_steps(student, starts, gradients, options, refused):
    """The direction after each step, in place of the values."""

    def replaced(value, gradient, state, group):
        value.copy_(student.adam_direction(gradient, state, group))

    return along(replaced, starts, gradients, options, refused)


def counted(parameter, gradient, state, group):
    """An update whose k-th step of a parameter has the length k; the length also depends on its shape."""
    state["steps"] = state.get("steps", 0) + 1
    state["sum"] = state.get("sum", torch.zeros_like(parameter)) + gradient
    parameter.sub_(group["rate"] * state["steps"] * state["sum"])


def parameters_of(starts):
    return [torch.nn.Parameter(start.clone()) for start in starts]


def stepped(optimizer, parameters, gradients):
    seen = []
    for step in gradients:
        for parameter, gradient in zip(parameters, step):
            parameter.grad = None if gradient is None else gradient.clone()
        optimizer.step()
        seen.append([parameter.detach().clone() for parameter in parameters])
    return seen


@scenario
def ruled(student, starts, gradients, rates, default, refused):
    """The parameters after each step of ``Rule``; a group for each of ``rates``, None for the default."""
    from dlo_lib.grading.checks.own_work import without

    parameters, groups = parameters_of(starts), []
    for parameter, rate in zip(parameters, rates):
        groups.append({"params": [parameter]} | ({} if rate is None else {"rate": rate}))
    with without(*refused):
        return stepped(student.Rule(groups, counted, rate=default), parameters, gradients)


@scenario
def saved(student, starts, gradients, rate):
    """A run that stops: its parameters, and its state dict as the bytes of a file."""
    import io

    parameters, file = parameters_of(starts), io.BytesIO()
    optimizer = student.Rule(parameters, counted, rate=rate)
    seen = stepped(optimizer, parameters, gradients)
    torch.save(optimizer.state_dict(), file)
    return [seen[-1], torch.tensor(list(file.getvalue()), dtype=torch.uint8)]


@scenario
def resumed(student, starts, file, gradients, rate):
    """The parameters after each step of a new ``Rule`` that loads the file."""
    import io

    parameters = parameters_of(starts)
    optimizer = student.Rule(parameters, counted, rate=rate)
    optimizer.load_state_dict(torch.load(io.BytesIO(bytes(file.tolist())), weights_only=True))
    return stepped(optimizer, parameters, gradients)


@scenario
def clipped(student, gradients, most):
    """What clip_ returns, and the gradients afterwards."""
    gradients = [None if gradient is None else gradient.clone() for gradient in gradients]
    return [student.clip_(gradients, most), gradients]


@scenario
def accumulated(student, weight, batches, rate, most):
    """The weight of a linear model after each step of plain gradient descent; a step has several parts."""
    model = torch.nn.Linear(*reversed(weight.shape), bias=False, dtype=weight.dtype)
    model.weight.data.copy_(weight)
    optimizer, seen = torch.optim.SGD(model.parameters(), lr=rate), []
    for parts in batches:
        student.accumulated_step(
            model, lambda net, part: (net(part[0]) - part[1]).square().mean(), parts, optimizer, most
        )
        seen.append(model.weight.detach().clone())
    return seen
