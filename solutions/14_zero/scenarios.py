"""What runs beside the student's code on every rank. No expected value is here."""

# ruff: noqa: F821 - torch and mark are there where these run

from __future__ import annotations

from dlo_lib.grading.contract import scenario


@scenario
def made_whole(student, rank, world, piece, shape):
    """``whole`` of this rank's piece."""
    return student.whole(piece, tuple(shape))


@scenario
def one_piece(student, rank, world, value, numel):
    """A piece of a large tensor that is gone, of one value everywhere; some of its numbers. The tensor is made here, for it is large."""
    piece = student.piece_of(torch.full((numel,), value), rank, world)
    mark("the tensor is gone")
    return piece[:: numel // 64].clone()


@scenario
def optimised(student, rank, world, weights, steps, name, options):
    """Parameters after ``steps``, each a list of gradients, None where there is none."""
    parameters = [torch.nn.Parameter(weight.clone()) for weight in weights]
    optimizer = student.ShardedOptimizer(parameters, lambda held: getattr(torch.optim, name)(held, **options))
    for grads in steps:
        for parameter, grad in zip(parameters, grads):
            parameter.grad = None if grad is None else grad.clone()
        optimizer.step()
    return [parameter.detach() for parameter in parameters]


@scenario
def with_large_state(student, rank, world, seed, numel):
    """Two AdamW steps of one large parameter; some of its numbers. Weight and gradient are made here, for they are large."""
    random = torch.Generator().manual_seed(seed)
    parameter = torch.nn.Parameter(torch.randn(numel, generator=random))
    optimizer = student.ShardedOptimizer([parameter], lambda held: torch.optim.AdamW(held, lr=0.05, foreach=False))
    for _ in range(2):
        parameter.grad = torch.randn(numel, generator=random)
        optimizer.step()
    mark("after the steps")
    return parameter.detach()[:: numel // 16].clone()


@scenario
def norms(student, rank, world, grads):
    """The norm, from this rank's pieces."""
    return student.global_norm(grads)


@scenario
def sharded_gradients(student, rank, world, weights, batches):
    """Gradients of the pieces after backward of each batch, and whether the parameters have any of their own."""
    module = torch.nn.ParameterList([torch.nn.Parameter(weight.clone()) for weight in weights])
    pieces = [torch.nn.Parameter(student.piece_of(weight, rank, world)) for weight in weights]
    student.shard_gradients(module, pieces)
    for x in batches:
        for weight in module:
            x = torch.tanh(x @ weight)
        x.square().mean().backward()
    return [piece.grad for piece in pieces], any(parameter.grad is not None for parameter in module)


@scenario
def linear(student, rank, world, x, weight, grad):
    """Output, and the gradients of the input and of this rank's piece."""
    piece = torch.nn.Parameter(student.piece_of(weight, rank, world))
    x = x.clone().requires_grad_()
    out = student.sharded_linear(x, piece, tuple(weight.shape))
    out.backward(grad)
    return out.detach(), x.grad, piece.grad
