"""The code that calls the student's functions: a stage, a layer, or a rank of a pipeline, without expected
values."""

# ruff: noqa: F821 - the process that runs these functions defines torch and mark

from __future__ import annotations

from dlo_lib.grading.checks.contract import claimed, scenario


@scenario
def through_stages(student, rank, world, weights, inputs, grads, order):
    """Run two stages in one process, micro-batches in ``order``; return outputs and gradients."""
    stages, kept = [], [{}, {}]
    for weight in weights:
        layer = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
        layer.weight.data = weight
        stages.append(torch.nn.Sequential(layer, torch.nn.Tanh()))
    outputs, input_grads, attached, changed = {}, {}, False, False
    for kind, i in order:
        if kind == "F":
            middle = student.stage_forward(stages[0], kept[0], i, inputs[i])
            given = middle.detach()
            outputs[i] = student.stage_forward(stages[1], kept[1], i, given)
            attached = attached or middle.requires_grad or outputs[i].requires_grad
            changed = changed or inputs[i].requires_grad or given.requires_grad
        else:
            grad = student.stage_backward(kept[1], i, grads[i])
            if grad is None:
                return {"lost": True}
            input_grads[i] = student.stage_backward(kept[0], i, grad)
    return {
        "outputs": [outputs[i].detach() for i in range(len(inputs))],
        "inputs": [input_grads[i] for i in range(len(inputs))],
        "weights": [stage[0].weight.grad for stage in stages],
        "attached": attached,
        "changed": changed,
        "lost": False,
    }


@scenario
def tokens_to_loss(student, rank, world, table, ids, targets):
    """Run an embedding, then a stage with the loss; return the loss and the gradient of the embedding."""
    first, kept = torch.nn.Embedding(*table.shape, dtype=table.dtype), [{}, {}]
    first.weight.data = table
    try:
        middle = student.stage_forward(first, kept[0], 0, ids)
    except RuntimeError as error:
        if "floating point" in str(error):
            return {"refused": True}
        raise
    loss = student.stage_forward(
        torch.nn.Tanh(), kept[1], 0, middle, lambda output: torch.nn.functional.cross_entropy(output, targets)
    )
    student.stage_backward(kept[0], 0, student.stage_backward(kept[1], 0, None))
    return {"loss": loss, "grad": first.weight.grad, "refused": False}


@scenario
def long_row(student, rank, world, weight, inputs):
    """Run the steady state of 1F1B on one stage, with two micro-batches in flight."""
    layer = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    layer.weight.data = weight
    stage, kept, total = torch.nn.Sequential(layer, torch.nn.Tanh()), {}, 0.0
    grad = torch.ones(len(inputs[0]), weight.shape[0])
    for i in range(len(inputs) + 1):
        if i < len(inputs):
            total += float(student.stage_forward(stage, kept, i, inputs[i].clone()).detach().sum())
        if i > 0:
            student.stage_backward(kept, i - 1, grad)
        mark("after a turn")
    return total


@scenario
def one_step(student, rank, world, rows, weights, inputs, targets, shapes, total):
    """Run a step of one rank: its row of the table, on a stage of linear layers."""
    torch.set_default_dtype(weights[0][0].dtype)
    stage, kept = torch.nn.Sequential(), {}
    for weight, bias in weights:
        layer = torch.nn.Linear(weight.shape[1], weight.shape[0])
        layer.weight.data, layer.bias.data = weight, bias
        stage.extend([layer, torch.nn.Tanh()])

    def forward(i, x):
        mark("at work")
        loss = None
        if rank == world - 1:

            def loss(output):
                return torch.nn.functional.cross_entropy(output, targets[i], reduction="sum") / total

        return student.stage_forward(stage, kept, i, x, loss)

    def backward(i, grad):
        return student.stage_backward(kept, i, grad)

    row = student.with_messages(rows)[rank]
    before, after = (rank - 1 if rank > 0 else None), (rank + 1 if rank < world - 1 else None)
    loss = torch.as_tensor(student.run_row(row, forward, backward, inputs, shapes, before, after)).detach()
    return {
        "loss": float(loss) if rank == world - 1 else None,
        "grads": [parameter.grad for parameter in stage.parameters()],
    }


@scenario
def whole_rank(student, rank, world, rows, weights, inputs, targets, every_target, shapes):
    """Run a step of one rank by pipeline_step, on a stage of linear layers."""
    torch.set_default_dtype(weights[0][0].dtype)
    stage = torch.nn.Sequential()
    for weight, bias in weights:
        layer = torch.nn.Linear(weight.shape[1], weight.shape[0])
        layer.weight.data, layer.bias.data = weight, bias
        stage.extend([layer, torch.nn.Tanh()])
    row = student.with_messages(rows)[rank]
    before, after = (rank - 1 if rank > 0 else None), (rank + 1 if rank < world - 1 else None)
    loss = student.pipeline_step(stage, row, inputs, targets, every_target, shapes, before, after)
    return {"loss": loss, "grads": [parameter.grad for parameter in stage.parameters()]}


@scenario
def neighbours(student, rank, world, stages, before_is, after_is):
    """Run hybrid_step with a step that adds a number for each neighbour that it is given: its gradient.

    before_is, after_is: these numbers by rank, then the one for None, then the one for anything else.
    """
    parameter, passed = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64)), []
    parameter.grad = torch.zeros(2, dtype=torch.float64)

    def step(before, after):
        passed.append(f"step({before}, {after})")
        places = [world if neighbour is None else neighbour for neighbour in (before, after)]
        known = [place if place in range(world + 1) else -1 for place in places]
        parameter.grad.add_(torch.stack([before_is[known[0]], after_is[known[1]]]))

    student.hybrid_step(step, [parameter], rank, stages, student.stage_group(rank, world, stages))
    return {"passed": claimed(", ".join(passed) or "none"), "grad": parameter.grad}


@scenario
def side_by_side(
    student, rank, world, steps, stages, rows, weights, inputs, targets, shapes, total, neighbours=None
):
    """Run a step of one rank of several pipelines of ``stages`` ranks each."""
    torch.set_default_dtype(weights[0][0].dtype)
    stage, kept = torch.nn.Sequential(), {}
    for weight, bias in weights:
        layer = torch.nn.Linear(weight.shape[1], weight.shape[0])
        layer.weight.data, layer.bias.data = weight, bias
        stage.extend([layer, torch.nn.Tanh()])

    def forward(i, x):
        loss = None
        if targets is not None:

            def loss(output):
                return torch.nn.functional.cross_entropy(output, targets[i], reduction="sum") / total

        return student.stage_forward(stage, kept, i, x, loss)

    def backward(i, grad):
        return student.stage_backward(kept, i, grad)

    def step(before, after):
        before, after = neighbours or (before, after)
        student.run_row(
            student.with_messages(rows)[rank % stages], forward, backward, inputs, shapes, before, after
        )

    group = student.stage_group(rank, world, stages)
    for _ in range(steps):
        stage.zero_grad()
        student.hybrid_step(step, list(stage.parameters()), rank, stages, group)
    return {"grads": [parameter.grad for parameter in stage.parameters()]}


@scenario
def split_layer(student, rank, world, xs, grads, weight, bias):
    """Run the input parts of all micro-batches, then the work in ``later``."""
    weight, bias = torch.nn.Parameter(weight), torch.nn.Parameter(bias)
    later, inputs = [], []
    with torch.no_grad():
        for x, grad in zip(xs, grads):
            inputs.append(student.linear_backward(grad, x, weight, bias, later))
        early = weight.grad is not None or bias.grad is not None
        left = len(later)
        for work in later:
            work()
    return {"inputs": inputs, "early": early, "left": left, "weight": weight.grad, "bias": bias.grad}


@scenario
def delayed_run(student, rank, world, weights, goals, lr, delays, steps):
    """Train weights whose gradients depend on all stages, with one tensor for each stage."""

    def gradients_of(weights, step):
        total = sum(weight.sum() for weight in weights)
        return [weight - goals[step] + 0.1 * total for weight in weights]

    return student.delayed_training([weight.clone() for weight in weights], gradients_of, lr, delays, steps)


@scenario
def asynchronous(student, rank, world, rows, weights, inputs, targets, shapes, lr):
    """Run 1F1B without flush: the stage of this rank is updated after every backward."""
    torch.set_default_dtype(weights[0][0].dtype)
    stage, kept = torch.nn.Sequential(), {}
    for weight, bias in weights:
        layer = torch.nn.Linear(weight.shape[1], weight.shape[0])
        layer.weight.data, layer.bias.data = weight, bias
        stage.extend([layer, torch.nn.Tanh()])

    def forward(i, x):
        mark("at work")
        loss = None
        if rank == world - 1:

            def loss(output):
                return torch.nn.functional.cross_entropy(output, targets[i])

        return student.stash_forward(stage, kept, i, x, loss)

    def backward(i, grad):
        return student.stash_backward(stage, kept, i, grad, lr)

    before, after = (rank - 1 if rank > 0 else None), (rank + 1 if rank < world - 1 else None)
    student.run_row(student.with_messages(rows)[rank], forward, backward, inputs, shapes, before, after)
    return [parameter.detach() for parameter in stage.parameters()]
