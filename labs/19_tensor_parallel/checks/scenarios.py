"""Scenarios that run with the student's code on every rank. They contain no expected value."""

# ruff: noqa: F821 - torch, dist and mark are defined where these run

from __future__ import annotations

from dataclasses import replace

from dlo_lib.grading.checks.contract import Scenario, scenario


@scenario
def layer(student, rank, world, tensors, fixed, grad, groups):
    """The result of a function, the gradients of its arguments except those at ``fixed``, and the arguments
    afterwards.

    The function gets the group of this rank in ``groups``; without groups, None. Of a class it is the method
    ``apply``.
    """
    group = None
    for ranks in groups:
        made = dist.new_group(ranks)
        group = made if rank in ranks else group
    trained = [
        tensor
        for i, tensor in enumerate(tensors)
        if isinstance(tensor, torch.Tensor) and tensor.is_floating_point() and i not in fixed
    ]
    for tensor in trained:
        tensor.requires_grad_()
    function = student.FUNCTION
    out = getattr(function, "apply", function)(*tensors, group)
    if not isinstance(out, torch.Tensor) or not out.requires_grad:
        return out, None, [tensor.detach() for tensor in trained], grad
    out.backward(grad)
    return out.detach(), [tensor.grad for tensor in trained], [tensor.detach() for tensor in trained], grad


@scenario
def layers(student, rank, world, cases):
    """``layer`` for several functions, one after another: one run instead of several."""
    made = {}
    results = []
    for function, case in zip(student.FUNCTION, cases):
        group = None
        for ranks in case["groups"]:
            members = made.setdefault(tuple(ranks), None) or dist.new_group(ranks)
            made[tuple(ranks)] = members
            group = members if rank in ranks else group
        tensors, grad = case["tensors"], case["grad"]
        trained = [
            tensor for tensor in tensors if isinstance(tensor, torch.Tensor) and tensor.is_floating_point()
        ]
        for tensor in trained:
            tensor.requires_grad_()
        out = getattr(function, "apply", function)(*tensors, group)
        grads = None
        if isinstance(out, torch.Tensor) and out.requires_grad:
            out.backward(grad)
            out, grads = out.detach(), [tensor.grad for tensor in trained]
        results.append((out, grads, [tensor.detach() for tensor in trained], grad))
    return results


def layer_of(*names: str) -> Scenario:
    """The scenario ``layer`` with this function of the student, or ``layers`` with these; the ranks get only
    functions that a scenario names."""
    if len(names) == 1:
        return replace(layer, source=layer.source.replace("student.FUNCTION", f"student.{names[0]}"))
    called = ", ".join(f"student.{name}" for name in names)
    return replace(layers, source=layers.source.replace("student.FUNCTION", f"({called})"))


@scenario
def parts_of(student, rank, world, weights, dims):
    """``shard`` of each weight."""
    return [student.shard(weight, dim, None) for weight, dim in zip(weights, dims)]


@scenario
def part_of_large(student, rank, world, seed, width):
    """Memory after a large weight was cut; the first row of the part, and its shape."""
    random = torch.Generator().manual_seed(seed)
    weight = torch.randn(width, width, generator=random)
    own = student.shard(weight, 0, None)
    del weight
    mark("after shard")
    return own[0, :4].clone(), list(own.shape)


@scenario
def whole_step(student, rank, world, sizes, state, tokens, targets):
    """A step of a Llama: the loss; by name, the shapes and the gradients of this rank's parameters."""
    from dlo_lib.models.llama import Llama, LlamaConfig

    model = Llama(LlamaConfig(**sizes), dtype=torch.float64)
    model.load_state_dict(state)
    step = student.tensor_parallel(model, None)
    loss = step(tokens, targets)
    shapes, grads = {}, {}
    for name, parameter in model.named_parameters():
        own, grad = parameter, parameter.grad
        if hasattr(parameter, "to_local"):  # a DTensor; the gradient of its embedding is whole
            own, grad = parameter.to_local(), grad.redistribute(placements=parameter.placements).to_local()
        shapes[name], grads[name] = list(own.shape), grad
    return loss.detach() if isinstance(loss, torch.Tensor) else loss, shapes, grads


@scenario
def grouped(student, rank, world, widths):
    """Sums of powers of two of the ranks over both groups, for each width of the tensor-parallel group."""
    found = []
    for tp in widths:
        sums = []
        for group in student.make_groups(tp):
            total = torch.tensor(2.0**rank)
            dist.all_reduce(total, group=group)
            sums.append(float(total))
        found.append(sums)
    return found


@scenario
def averaged(student, rank, world, grads, groups):
    """Gradients after ``average_gradients`` over this rank's group; None is a parameter without one."""
    group = None
    for ranks in groups:
        made = dist.new_group(ranks)
        group = made if rank in ranks else group
    parameters = []
    for grad in grads:
        parameter = torch.nn.Parameter(torch.zeros(2 if grad is None else grad.shape, dtype=torch.float64))
        parameter.grad = grad
        parameters.append(parameter)
    student.average_gradients(parameters, group)
    return [parameter.grad for parameter in parameters]


@scenario
def grid_step(student, rank, world, tp, sizes, state, tokens, targets):
    """A step of a Llama on a grid: the gradients of this rank's parameters, averaged."""
    from dlo_lib.models.llama import Llama, LlamaConfig

    model = Llama(LlamaConfig(**sizes), dtype=torch.float64)
    model.load_state_dict(state)
    tp_group, dp_group = student.make_groups(tp)
    student.tensor_parallel(model, tp_group)(tokens, targets)
    student.average_gradients(model.parameters(), dp_group)
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@scenario
def dropped(student, rank, world, xs, p, differs, seed):
    """Successive dropouts with one generator, and the same with a generator in the same state; the global
    generators of the ranks have different states."""
    torch.manual_seed(seed + 1 + rank)
    results = []
    for _ in range(2):
        generator = torch.Generator().manual_seed(seed)
        calls = zip(xs, differs)
        results.append([student.dropout_on_ranks(x, p, differ, generator, None) for x, differ in calls])
    return results


@scenario
def sharing_step(student, rank, world, tensors, fixed, grad, groups):
    """``shared_kv_attention``, whose key and value heads a group shares: the result and the gradients."""
    sharing = None
    for ranks in groups:
        made = dist.new_group(ranks)
        sharing = made if rank in ranks else sharing
    for i, tensor in enumerate(tensors):
        tensor.requires_grad_(i not in fixed)
    out = student.shared_kv_attention(*tensors, None, sharing)
    if not isinstance(out, torch.Tensor) or not out.requires_grad:
        return out, None
    out.backward(grad)
    return out.detach(), [tensor.grad for i, tensor in enumerate(tensors) if i not in fixed]
