"""The code that calls the student's functions: a stage, a layer, or a rank of a pipeline, without expected
values."""

# ruff: noqa: F821 - the process that runs these functions defines torch and mark

from __future__ import annotations

from dlo_lib.grading.checks.contract import claimed, scenario


def stage_of(weights):
    """A stage of linear layers, each followed by tanh, with these weights and biases; a bias may be None."""
    stage = torch.nn.Sequential()
    for weight, bias in weights:
        layer = torch.nn.Linear(*reversed(weight.shape), bias=bias is not None)
        layer.weight.data = weight
        if bias is not None:
            layer.bias.data = bias
        stage.extend([layer, torch.nn.Tanh()])
    return stage


def loss_of(targets, i, total=None):
    """The loss of micro-batch ``i``, a sum divided by ``total`` or by its targets; None without targets."""
    if targets is None:
        return None

    def loss(output):
        added = torch.nn.functional.cross_entropy(output, targets[i], reduction="sum")
        return added / (total or len(targets[i]))

    return loss


def beside(rank, world):
    """The neighbours of a rank in a pipeline of all ranks."""
    return (rank - 1 if rank > 0 else None), (rank + 1 if rank < world - 1 else None)


def work_of(forward, backward, stage, targets, total=None):
    """The functions with which ``run_row`` runs a stage: ``forward`` and ``backward`` of the student."""
    kept = {}

    def run_forward(i, x):
        mark("at work")
        return forward(stage, kept, i, x, loss_of(targets, i, total))

    return run_forward, lambda i, grad: backward(kept, i, grad)


@scenario
def through_stages(student, weights, inputs, grads, order):
    """Run two stages in one process, micro-batches in ``order``; return outputs and gradients."""
    stages, kept = [stage_of([(weight, None)]) for weight in weights], [{}, {}]
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
def tokens_to_loss(student, table, ids, targets):
    """Run an embedding, then a stage with the loss; return the loss and the gradient of the embedding."""
    first, kept = torch.nn.Embedding(*table.shape, dtype=table.dtype), [{}, {}]
    first.weight.data = table
    try:
        middle = student.stage_forward(first, kept[0], 0, ids)
    except RuntimeError as error:
        if "floating point" in str(error):
            return None
        raise
    loss = student.stage_forward(torch.nn.Tanh(), kept[1], 0, middle, loss_of([targets], 0))
    student.stage_backward(kept[0], 0, student.stage_backward(kept[1], 0, None))
    return loss, first.weight.grad


@scenario
def long_row(student, rank, world, weight, inputs):
    """Run the steady state of 1F1B on one stage, with two micro-batches in flight."""
    stage, kept, total = stage_of([(weight, None)]), {}, 0.0
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
    stage, row = stage_of(weights), student.with_messages(rows)[rank]
    work = work_of(student.stage_forward, student.stage_backward, stage, targets, total)
    loss = student.run_row(row, *work, inputs, shapes, *beside(rank, world))
    return {
        "loss": None if targets is None else float(torch.as_tensor(loss).detach()),
        "grads": [parameter.grad for parameter in stage.parameters()],
    }


@scenario
def whole_rank(student, rank, world, rows, weights, inputs, targets, every_target, shapes):
    """Run a step of one rank by pipeline_step, on a stage of linear layers."""
    torch.set_default_dtype(weights[0][0].dtype)
    stage, row = stage_of(weights), student.with_messages(rows)[rank]
    loss = student.pipeline_step(stage, row, inputs, targets, every_target, shapes, *beside(rank, world))
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
    stage, row = stage_of(weights), student.with_messages(rows)[rank % stages]
    work = work_of(student.stage_forward, student.stage_backward, stage, targets, total)

    def step(before, after):
        student.run_row(row, *work, inputs, shapes, *(neighbours or (before, after)))

    group = student.stage_group(rank, world, stages)
    for _ in range(steps):
        stage.zero_grad()
        student.hybrid_step(step, list(stage.parameters()), rank, stages, group)
    return {"grads": [parameter.grad for parameter in stage.parameters()]}


@scenario
def split_layer(student, xs, grads, weight, bias):
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
def delayed_run(student, weights, goals, lr, delays, steps):
    """Train weights whose gradients depend on all stages, with one tensor for each stage."""

    def gradients_of(weights, step):
        total = sum(weight.sum() for weight in weights)
        return [weight - goals[step] + 0.1 * total for weight in weights]

    return student.delayed_training(weights, gradients_of, lr, delays, steps)


@scenario
def asynchronous(student, rank, world, rows, weights, inputs, targets, shapes, lr):
    """Run 1F1B without flush: the stage of this rank is updated after every backward."""
    torch.set_default_dtype(weights[0][0].dtype)
    stage, row = stage_of(weights), student.with_messages(rows)[rank]

    def backward(kept, i, grad):
        return student.stash_backward(stage, kept, i, grad, lr)

    work = work_of(student.stash_forward, backward, stage, targets)
    student.run_row(row, *work, inputs, shapes, *beside(rank, world))
    return [parameter.detach() for parameter in stage.parameters()]
