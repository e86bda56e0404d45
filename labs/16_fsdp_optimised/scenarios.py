"""What runs beside the student's code: a unit's computing, a block, a hook. No expected value is here."""

# ruff: noqa: F821 - torch, dist and mark are there where these run

from __future__ import annotations

from dlo_lib.grading.contract import scenario


@scenario
def carried_out(student, rank, world, table, shards, shapes, x, grad):
    """``execute`` on units tanh(x W); whoever computes says so on the wire, in a group of its own."""
    milestones = dist.new_group(list(range(world)))

    def matrix(k, weights):
        dist.all_reduce(torch.zeros(1), group=milestones)
        rows, columns = shapes[k]
        return weights[: rows * columns].view(rows, columns)

    def forward(k, weights, x):
        return torch.tanh(x @ matrix(k, weights))

    def backward(k, weights, x, grad):
        matrix_k = matrix(k, weights)
        inner = grad * (1 - torch.tanh(x @ matrix_k) ** 2)
        of_weights = torch.zeros_like(weights)
        of_weights[: matrix_k.numel()] = (x.T @ inner).flatten()
        return inner @ matrix_k.T, of_weights

    y, grads = student.execute([tuple(action) for action in table], shards, x, grad, forward, backward)
    return {"output": y, "grads": list(grads)}


@scenario
def carried_out_at_size(student, rank, world, table, seed, units, width):
    """The same with large units; the memory whenever one computes. Weights are made here, for they are large."""
    random = torch.Generator().manual_seed(seed)
    weights = [torch.randn(width * width, generator=random) / width**0.5 for _ in range(units)]
    shards = [weight.view(world, -1)[rank].clone() for weight in weights]
    x, grad = torch.randn(2, width, generator=random), torch.randn(2, width, generator=random)
    del weights

    def forward(k, weights, x):
        mark("computing")
        return torch.tanh(x @ weights.view(width, width))

    def backward(k, weights, x, grad):
        mark("computing")
        matrix = weights.view(width, width)
        inner = grad * (1 - torch.tanh(x @ matrix) ** 2)
        return inner @ matrix.T, (x.T @ inner).flatten()

    y, grads = student.execute([tuple(action) for action in table], shards, x, grad, forward, backward)
    return {"output": y, "sums": [float(piece.double().sum()) for piece in grads]}


@scenario
def checkpointed(student, rank, world, weights, x, grad, seed, drop):
    """Blocks tanh(dropout(x W)), each in a checkpoint; a computation says so on the wire."""
    parameters = [torch.nn.Parameter(weight.clone()) for weight in weights]
    x = x.clone().requires_grad_()

    def block(parameter):
        def compute(x):
            if world > 1:
                dist.all_reduce(torch.zeros(1))
            return torch.tanh(torch.nn.functional.dropout(x @ parameter, drop) @ parameter.T)

        return compute

    torch.manual_seed(seed)
    y = x
    for parameter in parameters:
        y = student.Checkpoint.apply(block(parameter), y)
    between = torch.rand(3)
    y.backward(grad)
    return {
        "output": y.detach(),
        "x": x.grad,
        "weights": [parameter.grad for parameter in parameters],
        "random": torch.cat([between, torch.rand(3)]),
    }


@scenario
def deep_forward(student, rank, world, seed, blocks, rows, width, depth):
    """Memory after the forward of blocks with many layers inside; the weights are few."""
    random = torch.Generator().manual_seed(seed)
    weight = torch.nn.Parameter(torch.randn(width, width, generator=random) / width**0.5)
    x = torch.randn(rows, width, generator=random).requires_grad_()

    def compute(x):
        for _ in range(depth):
            x = torch.tanh(x @ weight)
        return x

    y = x
    for _ in range(blocks):
        y = student.Checkpoint.apply(compute, y)
    mark("after forward")
    y.sum().backward()
    return {"output": y.detach()[:, 0].clone(), "x": x.grad[:, 0].clone()}


@scenario
def offloaded(student, rank, world, weights, steps, dtype, lr):
    """Parameters after steps, each a list of gradients, None where there is none; whether a gradient stayed."""
    kind = getattr(torch, dtype)
    parameters = [torch.nn.Parameter(weight.to(kind)) for weight in weights]
    places = [parameter.data_ptr() for parameter in parameters]
    optimizer, stayed = student.HostOptimizer(parameters, lambda held: torch.optim.AdamW(held, lr=lr, weight_decay=0.1)), False
    for grads in steps:
        for parameter, grad in zip(parameters, grads):
            parameter.grad = None if grad is None else grad.to(kind)
        optimizer.step()
        stayed = stayed or any(parameter.grad is not None for parameter in parameters)
    moved = [parameter.data_ptr() for parameter in parameters] != places
    return {"weights": [parameter.detach() for parameter in parameters], "stayed": stayed, "moved": moved}


@scenario
def hybrid(student, rank, world, gradient, rows, columns):
    """This rank's piece, and the gradient afterwards."""
    row = [dist.new_group(ranks) for ranks in rows][[rank in ranks for ranks in rows].index(True)]
    column = [dist.new_group(ranks) for ranks in columns][[rank in ranks for ranks in columns].index(True)]
    piece = student.hybrid_mean(gradient, row, column)
    return {"piece": piece, "gradient": gradient}


@scenario
def counted(student, rank, world, segments, times, size):
    """What ``graphs_of`` says of a function with a break between segments of so many operations."""
    breaks = ["torch._dynamo.graph_break()", 'print("", end="")']
    lines = ["def function(x):"]
    for i, count in enumerate(segments):
        lines += ["    " + breaks[i % 2]] * (i > 0) + ["    x = x.sin()"] * count
    scope = {"torch": torch}
    exec("\n".join([*lines, "    return x"]), scope)
    return [student.graphs_of(scope["function"], torch.zeros(size)) for _ in range(times)]


@scenario
def compiled_blocks(student, rank, world, shards, depths, x, amount, hooks):
    """Blocks whose hooks bring their weight and take it away; each graph adds ``amount`` for each of its operations to what it gives."""

    class Block(torch.nn.Module):
        def __init__(self, depth):
            super().__init__()
            self.depth, self.weight = depth, None

        def forward(self, x):
            for _ in range(self.depth):
                x = torch.tanh(x * self.weight)
            return x

    def bring(shard):
        def hook(module, args):
            module.weight = shard + shard

        return hook

    def take(module, args, output):
        module.weight = None

    def backend(graph_module, example_inputs):
        operations = sum(node.op in ("call_function", "call_method", "call_module") for node in graph_module.graph.nodes)

        def run(*args):
            return [output + operations * amount if torch.is_tensor(output) else output for output in graph_module.forward(*args)]

        return run

    torch._dynamo.reset()
    blocks = torch.nn.ModuleList([Block(depth) for depth in depths])
    for block, shard in zip(blocks, shards):
        if hooks:
            block.register_forward_pre_hook(bring(shard))
            block.register_forward_hook(take)
        else:
            block.weight = shard + shard
    student.compile_blocks(blocks, backend)
    with torch.no_grad():
        for block in blocks:
            x = block(x)
    return x
