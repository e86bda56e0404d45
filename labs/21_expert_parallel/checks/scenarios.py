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
def limited(student, rank, world, cases):
    """``keep_within`` for each order, counts and capacity, and the arguments afterwards."""
    return [
        [student.keep_within(order, counts, capacity), order, counts] for order, counts, capacity in cases
    ]


@scenario
def balanced(student, rank, world, probabilities, experts, groups):
    """The balance loss of this rank's group and the gradient of the probabilities; without groups, of all
    ranks."""
    made = [dist.new_group(ranks) for ranks in groups]
    group = next((each for each, ranks in zip(made, groups) if rank in ranks), None)
    probabilities.requires_grad_()
    loss = student.balance_loss(probabilities, experts, group)
    if not isinstance(loss, torch.Tensor) or not loss.requires_grad:
        return loss, None
    loss.backward()
    return loss.detach(), probabilities.grad


@scenario
def biased(student, rank, world, bias, counts, rate, groups):
    """The bias of the next step, and the arguments afterwards."""
    made = [dist.new_group(ranks) for ranks in groups]
    group = next((each for each, ranks in zip(made, groups) if rank in ranks), None)
    return student.update_bias(bias, counts, rate, group), bias, counts


@scenario
def counted(student, rank, world, counts, groups):
    """The counts that a rank receives from its group; without groups, from all ranks."""
    made = [dist.new_group(ranks) for ranks in groups]
    group = next((each for each, ranks in zip(made, groups) if rank in ranks), None)
    return student.exchange_counts(counts, group)


@scenario
def exchanged(student, rank, world, rows, send, receive, grad, groups):
    """The rows that a rank receives, and the gradient of those that it sends. The gradient is a transposed
    view."""
    made = [dist.new_group(ranks) for ranks in groups]
    group = next((each for each, ranks in zip(made, groups) if rank in ranks), None)
    rows.requires_grad_()
    out = student.AllToAll.apply(rows, send, receive, group)
    if not isinstance(out, torch.Tensor) or not out.requires_grad or out.shape != grad.shape:
        return out, None
    out.backward(grad.t().contiguous().t())
    return out.detach(), rows.grad


@scenario
def layer(student, rank, world, x, router, first, second, k, bias, grad, groups):
    """The result of the layer on this rank's group, and the gradients of x, the router and this rank's
    experts."""
    made = [dist.new_group(ranks) for ranks in groups]
    group = next((each for each, ranks in zip(made, groups) if rank in ranks), None)
    leaves = [tensor.requires_grad_() for tensor in (x, router, first, second)]
    out = student.expert_parallel(*leaves, k, group, bias)
    if not isinstance(out, torch.Tensor) or not out.requires_grad:
        return out, None
    out.backward(grad)
    return out.detach(), [leaf.grad for leaf in leaves]


@scenario
def padded(student, rank, world, x, router, first, second, k, capacity, grad, groups):
    """The same with fixed shapes."""
    made = [dist.new_group(ranks) for ranks in groups]
    group = next((each for each, ranks in zip(made, groups) if rank in ranks), None)
    leaves = [tensor.requires_grad_() for tensor in (x, router, first, second)]
    out = student.padded_expert_parallel(*leaves, k, capacity, group)
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
        parameters = [
            torch.nn.Parameter(torch.zeros(2 if grad is None else grad.shape, dtype=torch.float64))
            for grad in grads
        ]
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
