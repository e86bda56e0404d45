"""Scenarios that run with the student's code on every rank. They contain no expected value."""

# ruff: noqa: F821 - torch, dist and mark are defined where these run

from __future__ import annotations

from dataclasses import replace

from dlo_lib.grading.checks.contract import Scenario, scenario


@scenario
def layers(student, rank, world, cases):
    """The results of several functions, one after another: for each the result, the gradients of its
    arguments except those at ``fixed``, and the arguments and the gradient afterwards.

    A function gets the group of this rank in ``groups``; without groups, None. Of a class it is the method
    ``apply``.
    """
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
            tensor
            for i, tensor in enumerate(tensors)
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point() and i not in case["fixed"]
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


def layers_of(*names: str) -> Scenario:
    """The scenario ``layers`` with these functions of the student; the ranks get only functions that a
    scenario names."""
    called = ", ".join(f"student.{name}" for name in names)
    return replace(layers, source=layers.source.replace("student.FUNCTION", f"({called},)"))


@scenario
def parts_of(student, rank, world, weights, dims):
    """``shard`` of each weight, and of the first one in a group of this rank alone."""
    groups = [dist.new_group([other]) for other in range(world)]
    alone = student.shard(weights[0], dims[0], groups[rank])
    return [*(student.shard(weight, dim, None) for weight, dim in zip(weights, dims)), alone]


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
def whole_step(student, rank, world, steps):
    """Steps of a Llama, each by the group of this rank in ``groups``, None without groups: for each the loss,
    and by name the shapes and the gradients of this rank's parameters."""
    from dlo_lib.models.llama import Llama, LlamaConfig

    results = []
    for each in steps:
        group = None
        for ranks in each["groups"]:
            made = dist.new_group(ranks)
            group = made if rank in ranks else group
        model = Llama(LlamaConfig(**each["sizes"]), dtype=torch.float64)
        model.load_state_dict(each["state"])
        loss = student.tensor_parallel(model, group)(each["tokens"], each["targets"])
        shapes, grads = {}, {}
        for name, parameter in model.named_parameters():
            own, grad = parameter, parameter.grad
            if hasattr(parameter, "to_local"):  # a DTensor; the gradient of its embedding is whole
                own = parameter.to_local()
                grad = grad.redistribute(placements=parameter.placements).to_local()
            shapes[name], grads[name] = list(own.shape), grad
        results.append((loss.detach() if isinstance(loss, torch.Tensor) else loss, shapes, grads))
    return results


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
def sharing_step(student, rank, world, cases):
    """``shared_kv_attention``, by the group of this rank in ``groups``, None without groups, and by that in
    ``sharing``, whose ranks share the key and value heads: for each case the result and the gradients."""
    results = []
    for case in cases:
        chosen = []
        for groups in (case["groups"], case["sharing"]):
            chosen.append(None)
            for ranks in groups:
                made = dist.new_group(ranks)
                chosen[-1] = made if rank in ranks else chosen[-1]
        tensors, trained = case["tensors"], case["tensors"][:5]
        for tensor in trained:
            tensor.requires_grad_()
        out = student.shared_kv_attention(*tensors, *chosen)
        grads = None
        if isinstance(out, torch.Tensor) and out.requires_grad:
            out.backward(case["grad"])
            out, grads = out.detach(), [tensor.grad for tensor in trained]
        results.append((out, grads))
    return results
