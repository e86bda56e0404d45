"""Scenarios that run with the student's code on every rank. They contain no expected value."""

# ruff: noqa: F821 - torch, dist and mark are defined where these run

from __future__ import annotations

from dlo_lib.grading.checks.contract import scenario


@scenario
def learns(student, rank, world, x, weight, k, grad):
    """The gradient of the router through the weights."""
    weight.requires_grad_()
    weights = student.route(x, weight, k, None)[1]
    if not isinstance(weights, torch.Tensor) or not weights.requires_grad:
        return None
    weights.backward(grad)
    return weight.grad


@scenario
def balanced(student, rank, world, probabilities, experts):
    """The balance loss and the gradient of the probabilities."""
    probabilities.requires_grad_()
    loss = student.balance_loss(probabilities, experts, None)
    if not isinstance(loss, torch.Tensor) or not loss.requires_grad:
        return loss, None
    loss.backward()
    return loss.detach(), probabilities.grad


@scenario
def biased(student, rank, world, bias, counts, rate):
    """The bias of the next step, and the arguments afterwards."""
    return student.update_bias(bias, counts, rate, None), bias, counts


@scenario
def counted(student, rank, world, counts, groups):
    """The counts that a rank receives from its group; without groups, from all ranks."""
    group = None
    for ranks in groups:
        made = dist.new_group(ranks)
        group = made if rank in ranks else group
    return student.exchange_counts(counts, group)


@scenario
def exchanged(student, rank, world, rows, send, receive, grad, groups):
    """The rows that a rank receives, and the gradient of those that it sends. The gradient is a transposed view."""
    group = None
    for ranks in groups:
        made = dist.new_group(ranks)
        group = made if rank in ranks else group
    rows.requires_grad_()
    out = student.AllToAll.apply(rows, send, receive, group)
    if not isinstance(out, torch.Tensor) or not out.requires_grad or out.shape != grad.shape:
        return out, None
    out.backward(grad.t().contiguous().t())
    return out.detach(), rows.grad


@scenario
def layer(student, rank, world, x, router, first, second, k, bias, grad):
    """The result of the layer, and the gradients of x, the router and this rank's experts."""
    leaves = [tensor.requires_grad_() for tensor in (x, router, first, second)]
    out = student.expert_parallel(*leaves, k, None, bias)
    if not isinstance(out, torch.Tensor) or not out.requires_grad:
        return out, None
    out.backward(grad)
    return out.detach(), [leaf.grad for leaf in leaves]


@scenario
def padded(student, rank, world, x, router, first, second, k, capacity, grad):
    """The same with fixed shapes."""
    leaves = [tensor.requires_grad_() for tensor in (x, router, first, second)]
    out = student.padded_expert_parallel(*leaves, k, capacity, None)
    if not isinstance(out, torch.Tensor) or not out.requires_grad:
        return out, None
    out.backward(grad)
    return out.detach(), [leaf.grad for leaf in leaves]


@scenario
def reduced(student, rank, world, shared, experts, groups):
    """Gradients after ``reduce_gradients``; None is a parameter without one."""
    for ranks in groups:
        made = dist.new_group(ranks)
        replicas = made if rank in ranks else None
        if replicas is not None:
            mine = replicas
    held = []
    for grads in (shared, experts):
        parameters = [torch.nn.Parameter(torch.zeros(2 if grad is None else grad.shape, dtype=torch.float64)) for grad in grads]
        for parameter, grad in zip(parameters, grads):
            parameter.grad = grad
        held.append(parameters)
    student.reduce_gradients(*held, mine)
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
