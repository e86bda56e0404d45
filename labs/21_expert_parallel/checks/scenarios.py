"""Scenarios that run with the student's code on every rank. They contain no expected value."""

# ruff: noqa: F821 - torch and dist are defined where these run

from __future__ import annotations

from dlo_lib.grading.checks.contract import scenario


def group_of(rank, groups):
    """The group of this rank, which all ranks make; None without groups, for all ranks."""
    made = [dist.new_group(ranks) for ranks in groups]
    return next((group for group, ranks in zip(made, groups) if rank in ranks), None)


def with_gradients(out, grad, *leaves):
    """A result and the gradients of ``leaves``, None if the graph of the result does not begin there."""
    if not isinstance(out, torch.Tensor) or not out.requires_grad or out.shape != grad.shape:
        return out, None
    out.backward(grad)
    return out.detach(), [leaf.grad for leaf in leaves]


@scenario
def learns(student, x, weight, k, grad):
    """The weights, and the gradient of the router through them."""
    weight.requires_grad_()
    return with_gradients(student.route(x, weight, k, None)[1], grad, weight)


@scenario
def computed(student, rows, counts, first, second):
    """The operations of ``run_experts`` as data, and its result."""
    from dlo_lib.base.operation_capture import OperationRecorder

    recorder = OperationRecorder({"rows": rows, "first": first, "second": second})
    with recorder, torch.no_grad():
        results = student.run_experts(rows, counts, first, second)
    if not isinstance(results, torch.Tensor):
        return None
    return [recorder.graph([results]), results]


@scenario
def limited(student, cases):
    """``keep_within`` for each order, counts and capacity, and the arguments afterwards."""
    return [[student.keep_within(*case), *case[:2]] for case in cases]


@scenario
def balanced(student, rank, world, probabilities, experts, groups):
    """The balance loss of this rank's group, and the gradient of the probabilities."""
    probabilities.requires_grad_()
    loss = student.balance_loss(probabilities, experts, group_of(rank, groups))
    return with_gradients(loss, torch.ones((), dtype=probabilities.dtype), probabilities)


@scenario
def biased(student, rank, world, bias, counts, rate, groups):
    """The bias of the next step, and the arguments afterwards."""
    return student.update_bias(bias, counts, rate, group_of(rank, groups)), bias, counts


@scenario
def counted(student, rank, world, counts, groups):
    """The counts that a rank receives from its group."""
    return student.exchange_counts(counts, group_of(rank, groups))


@scenario
def exchanged(student, rank, world, rows, send, receive, grad, groups):
    """The rows that a rank receives, and the gradient of those that it sends. The gradient is a transposed
    view."""
    rows.requires_grad_()
    out = student.AllToAll.apply(rows, send, receive, group_of(rank, groups))
    return with_gradients(out, grad.t().contiguous().t(), rows)


@scenario
def expert_parallel(student, rank, world, x, router, first, second, k, bias, grad, groups):
    """The result of the layer on this rank's group, and the gradients of x, the router and its experts."""
    leaves = [tensor.requires_grad_() for tensor in (x, router, first, second)]
    return with_gradients(student.expert_parallel(*leaves, k, group_of(rank, groups), bias), grad, *leaves)


@scenario
def padded_expert_parallel(student, rank, world, x, router, first, second, k, capacity, grad, groups):
    """The same with fixed shapes."""
    leaves = [tensor.requires_grad_() for tensor in (x, router, first, second)]
    out = student.padded_expert_parallel(*leaves, k, capacity, group_of(rank, groups))
    return with_gradients(out, grad, *leaves)


@scenario
def reduced(student, rank, world, shared, experts, groups):
    """Gradients after ``reduce_gradients``; None is a parameter without one."""
    held = []
    for grads in (shared, experts):
        held.append([torch.nn.Parameter(torch.zeros_like(grads[0])) for _ in grads])
        for parameter, grad in zip(held[-1], grads):
            parameter.grad = grad
    student.reduce_gradients(*held, group_of(rank, groups))
    return [[parameter.grad for parameter in parameters] for parameters in held]


@scenario
def whole_step(student, rank, world, ep, x, router, first, second, k, grad):
    """A step of the layer on a grid: the gradients of the router and of this rank's experts."""
    group, replicas = student.make_groups(ep)
    router, first, second = (torch.nn.Parameter(tensor) for tensor in (router, first, second))
    out = student.expert_parallel(x, router, first, second, k, group)
    (out * grad).sum().backward()
    student.reduce_gradients([router], [first, second], replicas)
    return [parameter.grad for parameter in (router, first, second)]
