# Odd but right submissions: each answer earns all points of its question.


# == lambdas: lambdas, tables and a comprehension

# %% state
state_bytes = lambda parameters, world, stage, moments=2: {
    name: 4 * parameters * times / (world if stage >= first else 1)
    for name, first, times in zip(("weights", "gradients", "optimizer"), (3, 2, 1), (1, 1, moments))
}


# %% pieces
piece_of = lambda tensor, rank, world: (
    F.pad(tensor.detach().reshape(-1), (0, -tensor.numel() % world)).view(world, -1)[rank].clone()
)
whole = lambda piece, shape: (
    lambda padded: (
        dist.all_gather_into_tensor(padded, piece),
        padded.split([torch.Size(shape).numel(), padded.numel() - torch.Size(shape).numel()])[0].view(shape),
    )[1]
)(piece.new_empty(piece.numel() * dist.get_world_size()))


# %% norm
global_norm = lambda pieces: (lambda s: (dist.all_reduce(s), s.sqrt_())[1])(
    sum((p * p).sum() for p in pieces)
)


# %% stage2
shard_gradients = lambda module, pieces: (
    [
        p.register_post_accumulate_grad_hook(
            lambda p, piece=piece: (
                (
                    (own := torch.empty_like(piece)),
                    dist.reduce_scatter_tensor(
                        own,
                        F.pad(p.grad.flatten(), (0, -p.numel() % dist.get_world_size()))
                        / dist.get_world_size(),
                    ),
                    setattr(piece, "grad", own if piece.grad is None else own + piece.grad),
                    setattr(p, "grad", None),
                )
                and None
            )
        )
        for p, piece in zip(module.parameters(), pieces)
    ]
    and None
)


# %% quiz
quiz = dict(zip((f"q{i}" for i in range(1, 6)), "cadbc"))


# == numpy_and_lists: NumPy, collectives of lists, an optimiser of torch

# %% pieces
import numpy as np


def piece_of(tensor, rank, world):
    flat = tensor.detach().flatten()
    size = int(np.ceil(flat.numel() / world))
    numbers = np.arange(rank * size, (rank + 1) * size)
    inside = torch.from_numpy(numbers[numbers < flat.numel()])
    piece = torch.zeros(size, dtype=tensor.dtype)
    piece[: len(inside)] = flat[inside]
    return piece


def whole(piece, shape):
    pieces = [torch.empty_like(piece) for _ in range(dist.get_world_size())]
    dist.all_gather(pieces, piece)
    return torch.cat(pieces)[: int(np.prod(shape))].reshape(shape)


# %% stage1
class ShardedOptimizer(torch.optim.Optimizer):
    def __init__(self, parameters, make_optimizer):
        super().__init__(parameters, {})
        held = [p for group in self.param_groups for p in group["params"]]
        self.pairs = {p: nn.Parameter(piece_of(p, dist.get_rank(), dist.get_world_size())) for p in held}
        self.local = make_optimizer(list(self.pairs.values()))

    @torch.no_grad()
    def step(self, closure=None):
        used = {p: piece for p, piece in self.pairs.items() if p.grad is not None}
        for p, piece in used.items():
            piece.grad = piece_of(p.grad, dist.get_rank(), dist.get_world_size())
        self.local.step()
        self.local.zero_grad()
        for p, piece in used.items():
            p.copy_(whole(piece.detach(), p.shape))


# %% norm
def global_norm(pieces):
    own = torch.linalg.vector_norm(torch.cat([piece.flatten() for piece in pieces]))
    norms = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(norms, own)
    return torch.linalg.vector_norm(torch.stack(norms))


# %% stage2
def shard_gradients(module, pieces):
    world = dist.get_world_size()

    def hook_for(piece):
        def hook(parameter):
            padded = F.pad(parameter.grad.reshape(-1), (0, -parameter.numel() % world))
            own = torch.zeros_like(piece)
            dist.reduce_scatter(own, list(padded.chunk(world)))
            if piece.grad is None:
                piece.grad = torch.zeros_like(piece)
            piece.grad.add_(own, alpha=1 / world)
            parameter.grad = None

        return hook

    for parameter, piece in zip(module.parameters(), pieces):
        parameter.register_post_accumulate_grad_hook(hook_for(piece))


# == functional_collectives: functional collectives, and asynchronous ones with a wait

# %% pieces
import torch.distributed._functional_collectives as funcol


def piece_of(tensor, rank, world):
    def halves(flat, size):  # recursion
        return flat[:size].clone() if rank == 0 else flat[rank * size :][:size].clone()

    size = -(-tensor.numel() // world)
    own = halves(tensor.detach().flatten(), size)
    return torch.cat([own, own.new_zeros(size - len(own))])


def whole(piece, shape):
    padded = funcol.wait_tensor(funcol.all_gather_tensor(piece, 0, dist.group.WORLD))
    return padded[: torch.Size(shape).numel()].reshape(shape)


# %% stage1
class ShardedOptimizer:
    """All gathers are started first, and then each is waited for."""

    def __init__(self, parameters, make_optimizer):
        self.parameters = list(parameters)
        self.pieces = [nn.Parameter(self.cut(p)) for p in self.parameters]
        self.optimizer = make_optimizer(self.pieces)

    def cut(self, tensor):
        return piece_of(tensor, dist.get_rank(), dist.get_world_size())

    def step(self):
        for p, piece in zip(self.parameters, self.pieces):
            piece.grad = p.grad if p.grad is None else self.cut(p.grad)
        self.optimizer.step()
        started = []
        for p, piece in zip(self.parameters, self.pieces):
            if p.grad is not None:
                padded = piece.data.new_empty(piece.numel() * dist.get_world_size())
                started.append((dist.all_gather_into_tensor(padded, piece.data, async_op=True), p, padded))
        for work, p, padded in started:
            work.wait()
            p.data.view(-1).copy_(padded[: p.numel()])


# %% stage3
import torch.distributed._functional_collectives as funcol


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(piece, shape):
        return whole(piece, shape)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.size = inputs[0].numel()

    @staticmethod
    def backward(ctx, grad):
        padded = F.pad(grad.reshape(-1), (0, ctx.size * dist.get_world_size() - grad.numel()))
        own = funcol.reduce_scatter_tensor(padded, "sum", 0, dist.group.WORLD)
        return funcol.wait_tensor(own) / dist.get_world_size(), None


def sharded_linear(x, weight_piece, shape):
    return torch.utils.checkpoint.checkpoint(
        lambda x, piece: x @ Gather.apply(piece, tuple(shape)).mT, x, weight_piece, use_reentrant=False
    )


# == noms_francais: French names, generators, a class with __call__

# %% state
from dataclasses import asdict, dataclass


@dataclass
class Etat:
    weights: float
    gradients: float
    optimizer: float


def state_bytes(parameters, world, stage, moments=2):
    entier, part = parameters * 4.0, parameters * 4.0 / world
    etat = Etat(entier, entier, entier * moments)
    match stage:
        case 1:
            etat.optimizer = part * moments
        case 2:
            etat.gradients, etat.optimizer = part, part * moments
        case 3:
            etat = Etat(part, part, part * moments)
    return asdict(etat)


# %% stage1
class OptimiseurFragmente:
    def __init__(self, parametres, fabrique):
        self.parametres = tuple(parametres)
        self.fragments = [torch.nn.Parameter(f) for f in self.fragments_de(self.parametres)]
        self.optimiseur = fabrique(self.fragments)

    @staticmethod
    def fragments_de(tenseurs):
        for tenseur in tenseurs:
            yield None if tenseur is None else piece_of(tenseur, dist.get_rank(), dist.get_world_size())

    def step(self):
        for fragment, gradient in zip(self.fragments, self.fragments_de(p.grad for p in self.parametres)):
            fragment.grad = gradient
        self.optimiseur.step()
        for parametre, fragment in zip(self.parametres, self.fragments):
            if fragment.grad is not None:
                parametre.detach().copy_(whole(fragment.detach(), parametre.shape))


ShardedOptimizer = OptimiseurFragmente


# %% stage2
class Envoi:
    def __init__(self, fragment):
        self.fragment, self.monde = fragment, dist.get_world_size()

    def __call__(self, parametre):
        rempli = self.fragment.new_zeros(self.monde * self.fragment.numel())
        rempli[: parametre.numel()] = parametre.grad.detach().flatten()
        parametre.grad = None
        rempli /= self.monde
        recu = torch.empty_like(self.fragment.data)
        dist.reduce_scatter_tensor(recu, rempli.detach())
        if self.fragment.grad is not None:
            recu += self.fragment.grad
        self.fragment.grad = recu


def shard_gradients(module, pieces):
    for parametre, fragment in zip(module.parameters(), pieces):
        parametre.register_post_accumulate_grad_hook(Envoi(fragment))


# %% offload
class OffloadedOptimizer:
    def __init__(self, fragments, fabrique):
        self.paires = [(f, torch.nn.Parameter(f.detach().cpu().to(torch.float))) for f in fragments]
        self.optimiseur = fabrique([maitre for _, maitre in self.paires])

    def step(self):
        actifs = [paire for paire in self.paires if paire[0].grad is not None]
        for fragment, maitre in actifs:
            maitre.grad = fragment.grad.cpu().to(maitre)
        self.optimiseur.step()
        with torch.no_grad():
            for fragment, maitre in actifs:
                fragment.copy_(maitre)
                fragment.grad = maitre.grad = None


# == one_message_a_step: all pieces are views of one flat tensor, and travel in one all-gather


# %% stage1
class ShardedOptimizer:
    def __init__(self, parameters, make_optimizer):
        self.rank, self.world, self.parameters = dist.get_rank(), dist.get_world_size(), list(parameters)
        self.pieces = [nn.Parameter(piece_of(p, self.rank, self.world)) for p in self.parameters]
        self.optimizer = make_optimizer(self.pieces)

    def step(self):
        for p, piece in zip(self.parameters, self.pieces):
            piece.grad = None if p.grad is None else piece_of(p.grad, self.rank, self.world)
        self.optimizer.step()
        for dtype in sorted({p.dtype for p in self.parameters}, key=str):
            pairs = [
                (p, piece.data)
                for p, piece in zip(self.parameters, self.pieces)
                if p.dtype == dtype and p.grad is not None
            ]
            if pairs:
                flat = torch.cat([piece for _, piece in pairs])
                rows = flat.new_empty(self.world, flat.numel())
                dist.all_gather_into_tensor(rows.view(-1), flat)
                at = 0
                for p, piece in pairs:
                    columns = rows[:, at : at + piece.numel()].flatten()
                    p.data.copy_(columns[: p.numel()].view(p.shape))
                    at += piece.numel()


# %% offload
class OffloadedOptimizer:
    """The masters are views of one flat tensor."""

    def __init__(self, pieces, make_optimizer):
        self.pieces = list(pieces)
        flat = torch.cat([piece.detach().to("cpu", torch.float32) for piece in self.pieces])
        self.masters = [nn.Parameter(part) for part in flat.split([piece.numel() for piece in self.pieces])]
        self.optimizer = make_optimizer(self.masters)

    def step(self):
        for piece, master in zip(self.pieces, self.masters):
            if piece.grad is not None:
                master.grad = piece.grad.to("cpu").float()
                piece.grad = None
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        for piece, master in zip(self.pieces, self.masters):
            piece.data[:] = master.data.to(piece.dtype)


# == no_checkpoint: saved tensors are hooks that gather again; a function for the whole layer


# %% stage3
class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, piece, shape):
        ctx.save_for_backward(piece)
        return whole(piece, shape)

    @staticmethod
    def backward(ctx, grad):
        (piece,) = ctx.saved_tensors
        world = dist.get_world_size()
        padded = torch.zeros(world, piece.numel(), dtype=grad.dtype)
        padded.view(-1)[: grad.numel()] = grad.flatten()
        own = torch.empty_like(padded[0])
        dist.reduce_scatter_tensor(own, padded.view(-1), op=dist.ReduceOp.SUM)
        return own.div_(world), None


def sharded_linear(x, weight_piece, shape):
    class Marked:
        pass

    weight = Gather.apply(weight_piece, tuple(shape))

    def pack(tensor):
        return Marked() if tensor.data_ptr() == weight_data else tensor

    def unpack(held):
        return whole(weight_piece.detach(), tuple(shape)).T if isinstance(held, Marked) else held

    weight_data = weight.data_ptr()
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        return x @ weight.T


# %% stage2
def shard_gradients(module, pieces):
    """An all-to-all and a sum on each rank, which are a reduce-scatter."""
    world = dist.get_world_size()

    def hook(parameter, piece):
        padded = F.pad(parameter.grad.flatten() / world, (0, piece.numel() * world - parameter.numel()))
        parts = torch.empty_like(padded)
        dist.all_to_all_single(parts, padded)
        own = parts.view(world, -1).sum(0)
        piece.grad = own if piece.grad is None else piece.grad + own
        parameter.grad = None

    for parameter, piece in zip(module.parameters(), pieces):
        parameter.register_post_accumulate_grad_hook(lambda p, piece=piece: hook(p, piece))


# == the_layer_as_a_function: Gather beside a function that gathers again in its backward


# %% stage3
class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, piece, shape):
        ctx.size = piece.numel()
        return whole(piece, shape)

    @staticmethod
    def backward(ctx, grad):
        return averaged(grad, ctx.size), None


def averaged(grad, size):
    world = dist.get_world_size()
    own = grad.new_empty(size)
    dist.reduce_scatter_tensor(own, F.pad(grad.flatten() / world, (0, size * world - grad.numel())))
    return own


class Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, piece, shape):
        ctx.save_for_backward(x, piece)
        ctx.shape = shape
        return F.linear(x, whole(piece, shape))

    @staticmethod
    def backward(ctx, grad):
        x, piece = ctx.saved_tensors
        of_x = grad @ whole(piece, ctx.shape)
        return of_x, averaged(grad.flatten(0, -2).T @ x.flatten(0, -2), piece.numel()), None


def sharded_linear(x, weight_piece, shape):
    return Linear.apply(x, weight_piece, tuple(shape))


# == views_of_the_parameters: pieces are views of the parameters where nothing is padded


# %% stage1
class ShardedOptimizer:
    def __init__(self, parameters, make_optimizer):
        self.rank, self.world, self.parameters = dist.get_rank(), dist.get_world_size(), list(parameters)
        self.pieces = [nn.Parameter(self.view_of(p.data)) for p in self.parameters]
        self.optimizer = make_optimizer(self.pieces)

    def view_of(self, tensor):
        if tensor.numel() % self.world:
            return piece_of(tensor, self.rank, self.world)
        return tensor.view(self.world, -1)[self.rank]

    def step(self):
        for p, piece in zip(self.parameters, self.pieces):
            piece.grad = None if p.grad is None else piece_of(p.grad, self.rank, self.world)
        self.optimizer.step()
        for p, piece in zip(self.parameters, self.pieces):
            if piece.grad is not None:
                p.data.copy_(whole(piece.data.clone(), p.shape))
            piece.grad = None


# %% norm
def global_norm(pieces):
    from functools import reduce

    own = reduce(
        lambda total, piece: total + torch.dot(piece, piece), pieces, torch.zeros((), dtype=pieces[0].dtype)
    )
    dist.all_reduce(own, op=dist.ReduceOp.SUM)
    return own**0.5


# %% offload
def OffloadedOptimizer(pieces, make_optimizer):
    """A function that returns an object with a step."""
    from types import SimpleNamespace

    masters = [nn.Parameter(piece.detach().to("cpu", torch.float32, copy=True)) for piece in pieces]
    optimizer = make_optimizer(masters)

    def step():
        for piece, master in zip(pieces, masters):
            master.grad, piece.grad = (None if piece.grad is None else piece.grad.to("cpu").float()), None
        optimizer.step()
        for piece, master in zip(pieces, masters):
            with torch.no_grad():
                piece.set_(piece) if piece.dtype == master.dtype else piece.copy_(master)
            master.grad = None

    return SimpleNamespace(step=step)
