"""Scenarios that run with the student's code on every rank. They contain no expected value."""

# ruff: noqa: F821 - dist and mark are defined where these run

from __future__ import annotations

import torch

from dlo_lib.grading.checks.contract import scenario


@scenario
def separate(student, tensor, world):
    """What a tensor holds after all of its pieces have changed."""
    for rank in range(world):
        student.piece_of(tensor, rank, world).zero_()
    return tensor


@scenario
def made_whole(student, rank, world, piece, shape):
    """``whole`` of this rank's piece."""
    return student.whole(piece, tuple(shape))


@scenario
def one_piece(student, rank, world, value, numel):
    """Some numbers of a piece of a large constant tensor that is deleted. The tensor is created here because
    it is large."""
    piece = student.piece_of(torch.full((numel,), value), rank, world)
    mark("the tensor is gone")
    return piece[:: numel // 64].clone()


@scenario
def optimised(student, rank, world, weights, steps, name, options, late=-1):
    """Parameters after ``steps``, each a list of gradients, None where there is none; and the memory that
    they had before. The rank ``late`` begins the last step later than the others."""
    import time

    parameters = [torch.nn.Parameter(weight.clone()) for weight in weights]
    memory = [parameter.data.view(-1) for parameter in parameters]
    optimizer = student.ShardedOptimizer(parameters, lambda held: getattr(torch.optim, name)(held, **options))
    for number, grads in enumerate(steps, 1):
        for parameter, grad in zip(parameters, grads):
            parameter.grad = None if grad is None else grad.clone()
        if number == len(steps):
            mark("last step")
            time.sleep(0.05 if rank == late else 0)
        optimizer.step()
    found = [parameter.detach().clone() for parameter in parameters]
    mark("returned")
    return found, memory


class Together(torch.optim.Optimizer):
    """Momentum of gradients that are divided by the norm of all gradients together: what one optimiser was
    made of shows in its updates."""

    def __init__(self, held, lr):
        super().__init__(held, {"lr": lr})

    @torch.no_grad()
    def step(self):
        groups = [(each, group["lr"]) for group in self.param_groups for each in group["params"]]
        norm = sum(each.grad.double().square().sum() for each, _ in groups).sqrt()
        for each, lr in groups:
            moment = self.state[each].get("moment", 0) * 0.9 + each.grad / norm.to(each.dtype)
            self.state[each]["moment"] = moment
            each -= lr * moment


@scenario
def optimised_together(student, rank, world, weights, steps, lr):
    """Parameters after the steps of one optimiser ``Together``. A rank has the gradients of its pieces; the
    others are NaN."""
    made = []

    def make_optimizer(held):
        held = [each for one in held for each in (one["params"] if isinstance(one, dict) else [one])]
        if made:
            raise RuntimeError("make_optimizer is called again")
        if not all(isinstance(each, torch.nn.Parameter) for each in held):
            raise TypeError("make_optimizer gets a tensor that is no nn.Parameter")
        made.append(held)
        return Together(held, lr)

    parameters = [torch.nn.Parameter(weight.clone()) for weight in weights]
    optimizer = student.ShardedOptimizer(parameters, make_optimizer)
    for grads in steps:
        for parameter, grad in zip(parameters, grads):
            parameter.grad = grad.clone()
        optimizer.step()
    return [parameter.detach() for parameter in parameters]


@scenario
def with_large_state(student, rank, world, seed, numel):
    """Two steps of AdamW with three moments for one large parameter for each rank; some of their numbers. The
    second step needs the moments of the first. Weights and gradients are created here because they are
    large."""
    random = torch.Generator().manual_seed(seed)
    parameters = [torch.nn.Parameter(torch.rand(numel // world, generator=random)) for _ in range(world)]
    optimizer = student.ShardedOptimizer(
        parameters, lambda held: torch.optim.AdamW(held, lr=0.05, amsgrad=True, foreach=False)
    )
    for name in ("after a step", "after the steps"):
        for parameter in parameters:
            parameter.grad = torch.rand(numel // world, generator=random).sub_(0.5)
        optimizer.step()
        for parameter in parameters:
            parameter.grad = None
        mark(name)
    return [parameter.detach()[:: numel // 64].clone() for parameter in parameters]


@scenario
def norms(student, rank, world, grads):
    """The norm, from this rank's pieces; and the pieces after it."""
    return student.global_norm(grads), grads


@scenario
def sharded_gradients(student, rank, world, weights, batches, marked=False, late=-1):
    """Gradients of the pieces after backward of each batch, and which parameters still have a gradient. A
    weight of one dimension is a bias. ``marked``: a barrier before the gradient of the first weight. The rank
    ``late`` begins the last backward later than the others."""
    import time

    module = torch.nn.ParameterList([torch.nn.Parameter(weight.clone()) for weight in weights])
    pieces = [torch.nn.Parameter(student.piece_of(weight, rank, world)) for weight in weights]
    student.shard_gradients(module, pieces)
    if marked:
        module[0].register_hook(lambda grad: dist.barrier())
    for number, x in enumerate(batches, 1):
        for weight in module:
            x = torch.tanh(x @ weight) if weight.dim() == 2 else x + weight
        if rank == late and number == len(batches):
            time.sleep(0.05)
        x.square().mean().backward()
    found = [None if piece.grad is None else piece.grad.clone() for piece in pieces]
    mark("returned")
    return found, [parameter.grad is not None for parameter in module]


@scenario
def large_gradients(student, rank, world, seed, rows, width):
    """Memory before the last gradient and after backward of four large layers; sums of the gradients of the
    pieces, None where there is none."""
    random = torch.Generator().manual_seed(seed)
    module = torch.nn.ParameterList(
        [
            torch.nn.Parameter(3.5 * (torch.rand(width, width, generator=random) - 0.5) / width**0.5)
            for _ in range(4)
        ]
    )
    pieces = [torch.nn.Parameter(student.piece_of(weight, rank, world)) for weight in module]
    student.shard_gradients(module, pieces)
    module[0].register_hook(lambda grad: mark("before the last gradient"))
    x = torch.randn(rows, width, generator=random)
    for weight in module:
        x = torch.tanh(x @ weight)
    x.square().mean().backward()
    mark("after backward")
    return [None if piece.grad is None else piece.grad.sum().item() for piece in pieces]


@scenario
def gathered(student, rank, world, value, grad):
    """``Gather`` of this rank's piece of ``value``, and the gradient of the piece if that of the whole is
    ``grad``."""
    piece = torch.nn.Parameter(student.piece_of(value, rank, world))
    whole = student.Gather.apply(piece, tuple(value.shape))
    if whole.shape == grad.shape:
        whole.backward(grad)
    return whole.detach(), piece.grad


@scenario
def linear(student, rank, world, weight, xs, grads, later=()):
    """A pass for each of ``xs``, with the gradients of the outputs: outputs, gradients of the inputs, and
    that of this rank's piece. ``later`` is added to the weight after each pass."""
    piece = torch.nn.Parameter(student.piece_of(weight, rank, world))
    outs, of_xs = [], []
    for number, (x, grad) in enumerate(zip(xs, grads)):
        x = x.clone().requires_grad_()
        out = student.sharded_linear(x, piece, tuple(weight.shape))
        out.backward(grad)
        outs.append(out.detach())
        of_xs.append(x.grad)
        if number < len(later):
            piece.data += student.piece_of(later[number], rank, world)
    return outs, of_xs, piece.grad


@scenario
def large_linear(student, rank, world, seed, width):
    """Memory after forward of three large layers of which this rank has pieces, in the middle of backward,
    and after it."""
    random = torch.Generator().manual_seed(seed)
    weights = (3.5 * (torch.rand(width, width, generator=random) - 0.5) / width**0.5 for _ in range(3))
    pieces = [torch.nn.Parameter(student.piece_of(weight, rank, world)) for weight in weights]
    x = torch.randn(2, width, generator=random)
    for number, piece in enumerate(pieces):
        x = torch.tanh(student.sharded_linear(x, piece, (width, width)))
        if number == 0:
            x.register_hook(lambda grad: mark("before the last layer of backward"))
    mark("after forward")
    x.sum().backward()
    mark("after backward")
    return x.detach(), [piece.grad.sum().item() for piece in pieces]


@scenario
def offloaded(student, rank, world, values, steps, name, options):
    """After ``steps``, each a list of gradients: the pieces, the memory that they had before, and whether one
    still has a gradient."""
    pieces = [torch.nn.Parameter(value.clone()) for value in values]
    memory = [piece.data.view(-1) for piece in pieces]
    optimizer = student.OffloadedOptimizer(pieces, lambda held: getattr(torch.optim, name)(held, **options))
    for grads in steps:
        for piece, grad in zip(pieces, grads):
            piece.grad = None if grad is None else grad.clone()
        optimizer.step()
    return [piece.detach() for piece in pieces], memory, any(piece.grad is not None for piece in pieces)


@scenario
def offloaded_together(student, rank, world, values, steps, lr):
    """The pieces after the steps of one optimiser ``Together``. ``make_optimizer`` raises an error that names
    the mistake; the updates show it too."""
    made = []

    def make_optimizer(held):
        held = [each for one in held for each in (one["params"] if isinstance(one, dict) else [one])]
        if made:
            raise RuntimeError("make_optimizer is called again")
        if not all(isinstance(each, torch.nn.Parameter) for each in held):
            raise TypeError("make_optimizer gets a tensor that is no nn.Parameter")
        kinds = [str(each.dtype) for each in held if each.dtype != torch.float32]
        if kinds:
            raise TypeError(f"make_optimizer gets a master of {kinds[0]}")
        made.append(held)
        return Together(held, lr)

    pieces = [torch.nn.Parameter(value.clone()) for value in values]
    optimizer = student.OffloadedOptimizer(pieces, make_optimizer)
    for grads in steps:
        for piece, grad in zip(pieces, grads):
            piece.grad = grad.clone()
        optimizer.step()
    return [piece.detach() for piece in pieces]


@scenario
def large_offloaded(student, rank, world, seed, numel):
    """Memory after a step of two large pieces; some of their numbers. Pieces and gradients are created here
    because they are large."""
    random = torch.Generator().manual_seed(seed)
    pieces = [torch.nn.Parameter(torch.rand(numel, generator=random).bfloat16()) for _ in range(2)]
    optimizer = student.OffloadedOptimizer(pieces, lambda held: torch.optim.SGD(held, lr=0.5, foreach=False))
    for piece in pieces:
        piece.grad = torch.rand(numel, generator=random).sub_(0.5).bfloat16()
    optimizer.step()
    mark("after the step")
    return [piece.detach()[:: numel // 64].clone() for piece in pieces]
