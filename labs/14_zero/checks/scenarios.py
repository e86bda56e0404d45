"""Scenarios that run with the student's code on every rank. They contain no expected value."""

# ruff: noqa: F821 - torch and mark are defined where these run

from __future__ import annotations

from dlo_lib.grading.checks.contract import scenario


@scenario
def made_whole(student, rank, world, piece, shape):
    """``whole`` of this rank's piece."""
    return student.whole(piece, tuple(shape))


@scenario
def one_piece(student, rank, world, value, numel):
    """Some numbers of a piece of a large constant tensor that is deleted. The tensor is created here because it is large."""
    piece = student.piece_of(torch.full((numel,), value), rank, world)
    mark("the tensor is gone")
    return piece[:: numel // 64].clone()


@scenario
def optimised(student, rank, world, weights, steps, name, options):
    """Parameters after ``steps``, each a list of gradients, None where there is none; the memory that they had before."""
    parameters = [torch.nn.Parameter(weight.clone()) for weight in weights]
    memory = [parameter.data.view(-1) for parameter in parameters]
    optimizer = student.ShardedOptimizer(parameters, lambda held: getattr(torch.optim, name)(held, **options))
    for grads in steps:
        for parameter, grad in zip(parameters, grads):
            parameter.grad = None if grad is None else grad.clone()
        optimizer.step()
    return [parameter.detach() for parameter in parameters], memory


@scenario
def with_large_state(student, rank, world, seed, numel):
    """Two AdamW steps of one large parameter for each rank; some of their numbers. Weights and gradients are created here because they are
    large."""
    random = torch.Generator().manual_seed(seed)
    parameters = [torch.nn.Parameter(torch.randn(numel // world, generator=random)) for _ in range(world)]
    optimizer = student.ShardedOptimizer(parameters, lambda held: torch.optim.AdamW(held, lr=0.05, foreach=False))
    for _ in range(2):
        for parameter in parameters:
            parameter.grad = torch.randn(numel // world, generator=random)
        optimizer.step()
    mark("after the steps")
    return [parameter.detach()[:: numel // 64].clone() for parameter in parameters]


@scenario
def norms(student, rank, world, grads):
    """The norm, from this rank's pieces."""
    return student.global_norm(grads)


@scenario
def sharded_gradients(student, rank, world, weights, batches):
    """Gradients of the pieces after backward of each batch, and whether the parameters have any gradient."""
    module = torch.nn.ParameterList([torch.nn.Parameter(weight.clone()) for weight in weights])
    pieces = [torch.nn.Parameter(student.piece_of(weight, rank, world)) for weight in weights]
    student.shard_gradients(module, pieces)
    for x in batches:
        for weight in module:
            x = torch.tanh(x @ weight)
        x.square().mean().backward()
    return [piece.grad for piece in pieces], any(parameter.grad is not None for parameter in module)


@scenario
def large_gradients(student, rank, world, seed, rows, width):
    """Memory after backward of two large layers; sums of the gradients of the pieces, None where there is none."""
    random = torch.Generator().manual_seed(seed)
    module = torch.nn.ParameterList([torch.nn.Parameter(torch.randn(width, width, generator=random) / width**0.5) for _ in range(2)])
    pieces = [torch.nn.Parameter(student.piece_of(weight, rank, world)) for weight in module]
    student.shard_gradients(module, pieces)
    x = torch.randn(rows, width, generator=random)
    torch.tanh(torch.tanh(x @ module[0]) @ module[1]).square().mean().backward()
    mark("after backward")
    return [None if piece.grad is None else piece.grad.sum().item() for piece in pieces]


@scenario
def linear(student, rank, world, x, weight, grad, passes=1):
    """Output, and the gradients of the input and of this rank's piece, after ``passes`` passes."""
    piece = torch.nn.Parameter(student.piece_of(weight, rank, world))
    x = x.clone().requires_grad_()
    for _ in range(passes):
        out = student.sharded_linear(x, piece, tuple(weight.shape))
        out.backward(grad)
    return out.detach(), x.grad, piece.grad


@scenario
def large_linear(student, rank, world, seed, width):
    """Memory after forward of three large layers of which this rank has pieces."""
    random = torch.Generator().manual_seed(seed)
    weights = (torch.randn(width, width, generator=random) / width**0.5 for _ in range(3))
    pieces = [torch.nn.Parameter(student.piece_of(weight, rank, world)) for weight in weights]
    x = torch.randn(2, width, generator=random)
    for piece in pieces:
        x = torch.tanh(student.sharded_linear(x, piece, (width, width)))
    mark("after forward")
    x.sum().backward()
    return x.detach()


@scenario
def offloaded(student, rank, world, values, steps, name, options):
    """After ``steps``, each a list of gradients: the pieces, the memory that they had before, the masters, and which of pieces and masters
    still have a gradient."""
    pieces = [torch.nn.Parameter(value.clone()) for value in values]
    memory, masters = [piece.data.view(-1) for piece in pieces], []

    def make_optimizer(held):
        masters.extend(held)
        return getattr(torch.optim, name)(masters, **options)

    optimizer = student.OffloadedOptimizer(pieces, make_optimizer)
    for grads in steps:
        for piece, grad in zip(pieces, grads):
            piece.grad = None if grad is None else grad.clone()
        optimizer.step()
    left = [any(held.grad is not None for held in each) for each in (pieces, masters)]
    return [piece.detach() for piece in pieces], memory, [master.detach() for master in masters], left
