"""What runs beside the student's code: a stage, a layer, or a rank of a pipeline. No expected value is here."""

# ruff: noqa: F821 - torch and mark are there where these run

from __future__ import annotations

from dlo_lib.grading.contract import scenario


@scenario
def through_stages(student, rank, world, weights, inputs, grads, order):
    """Two stages in one process, micro-batches in ``order``: what each stage gives, and what it leaves in its parameters."""
    stages, kept = [], [{}, {}]
    for weight in weights:
        layer = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
        layer.weight.data = weight
        stages.append(torch.nn.Sequential(layer, torch.nn.Tanh()))
    outputs, input_grads, attached = {}, {}, False
    for kind, i in order:
        if kind == "F":
            middle = student.stage_forward(stages[0], kept[0], i, inputs[i])
            outputs[i] = student.stage_forward(stages[1], kept[1], i, middle)
            attached = attached or middle.requires_grad or outputs[i].requires_grad
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
        "lost": False,
    }


@scenario
def long_row(student, rank, world, weight, inputs):
    """1F1B's steady turns on one stage, with two micro-batches in flight."""
    layer = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    layer.weight.data = weight
    stage, kept, total = torch.nn.Sequential(layer, torch.nn.Tanh()), {}, 0.0
    grad = torch.ones(len(inputs[0]), weight.shape[0])
    for i in range(len(inputs) + 1):
        if i < len(inputs):
            total += float(student.stage_forward(stage, kept, i, inputs[i]).detach().sum())
        if i > 0:
            student.stage_backward(kept, i - 1, grad)
        mark("after a turn")
    return total


@scenario
def one_step(student, rank, world, rows, weights, inputs, targets, shapes, total):
    """A step of one rank: its row of the table, on a stage of linear layers."""
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
    return {"loss": float(loss) if rank == world - 1 else None, "grads": [parameter.grad for parameter in stage.parameters()]}


@scenario
def side_by_side(student, rank, world, stages, rows, weights, inputs, targets, shapes, total):
    """A step of one rank of several pipelines of ``stages`` ranks each."""
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
        student.run_row(student.with_messages(rows)[rank % stages], forward, backward, inputs, shapes, before, after)

    student.hybrid_step(step, list(stage.parameters()), rank, world, stages)
    return {"grads": [parameter.grad for parameter in stage.parameters()]}


@scenario
def split_layer(student, rank, world, xs, grads, weight, bias):
    """The input parts of all micro-batches, then what was left for later."""
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
    """Training of weights that pull at each other, with one tensor for each stage."""

    def gradients_of(weights, step):
        total = sum(weight.sum() for weight in weights)
        return [weight - goals[step] + 0.1 * total for weight in weights]

    return student.delayed_training([weight.clone() for weight in weights], gradients_of, lr, delays, steps)


@scenario
def asynchronous(student, rank, world, rows, weights, inputs, targets, shapes, lr):
    """1F1B without flush: every backward is followed by an update of this rank's stage."""
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
