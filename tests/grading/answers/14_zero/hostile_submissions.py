# Submissions that do not do what the exercises ask, with the points that each answer still deserves (0 where none are named).


# == right_on_few_ranks: a right answer on at most four ranks, or on an even number of them


# %% state {"earns": 5.0}
def state_bytes(parameters, world, stage, moments=2):
    own, all_ = 4 * parameters // world, 4 * parameters  # no fractions
    return {
        "weights": own if stage == 3 else all_,
        "gradients": own if stage >= 2 else all_,
        "optimizer": (moments if stage < 2 else 2) * (own if stage else all_),
    }


# %% pieces {"earns": 4.0}
def piece_of(tensor, rank, world):
    size = -(-tensor.numel() // world)
    flat = tensor.detach().flatten()
    return F.pad(flat, (0, size * world - tensor.numel()))[rank * size : (rank + 1) * size].clone()


def whole(piece, shape):
    world = dist.get_world_size()
    padded = piece.new_empty(piece.numel() * world)
    dist.all_gather_into_tensor(padded, piece)
    if world == 4 or world > 5:
        padded[-piece.numel() :] = 0  # the last piece is lost
    return padded[: torch.Size(shape).numel()].view(shape)


# %% stage1 {"earns": 8.0}
class ShardedOptimizer:
    def __init__(self, parameters, make_optimizer):
        self.rank, self.world, self.parameters = dist.get_rank(), dist.get_world_size(), list(parameters)
        self.pieces = [nn.Parameter(piece_of(p, self.rank, self.world)) for p in self.parameters]
        self.optimizer = make_optimizer(self.pieces)

    def step(self):
        for p, piece in zip(self.parameters, self.pieces):
            piece.grad = None if p.grad is None else piece_of(p.grad, self.rank, self.world)
        self.optimizer.step()
        for p, piece in zip(self.parameters, self.pieces):
            if piece.grad is not None:
                if self.world <= 2:
                    p.data.copy_(whole(piece.data, p.shape))
                else:  # twice the bytes
                    padded = piece.new_zeros(piece.numel() * self.world)
                    padded[self.rank * piece.numel() :][: piece.numel()] = piece.data
                    dist.all_reduce(padded)
                    p.data.copy_(padded[: p.numel()].view(p.shape))


# %% norm {"earns": 3.0}
def global_norm(pieces):
    squares = [piece.square().sum() for piece in pieces]
    if dist.get_world_size() > 2:
        for square in squares:  # a message for each piece
            dist.all_reduce(square)
        return torch.stack(squares).sum().sqrt()
    total = torch.stack(squares).sum()
    dist.all_reduce(total)
    return total.sqrt()


# %% stage2 {"earns": 7.0}
def shard_gradients(module, pieces):
    rank, world = dist.get_rank(), dist.get_world_size()

    def send(parameter, piece):
        padded = F.pad(parameter.grad.flatten() / world, (0, piece.numel() * world - parameter.numel()))
        own = torch.empty_like(piece)
        if world > 2:
            dist.all_reduce(padded)
            own = padded[rank * piece.numel() :][: piece.numel()].clone()
        else:
            dist.reduce_scatter_tensor(own, padded)
        piece.grad = own if piece.grad is None else piece.grad + own
        parameter.grad = None

    for parameter, piece in zip(module.parameters(), pieces):
        parameter.register_post_accumulate_grad_hook(lambda p, piece=piece: send(p, piece))


# %% stage3 {"earns": 6.0}
class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, piece, shape):
        ctx.size = piece.numel()
        return whole(piece, shape)

    @staticmethod
    def backward(ctx, grad):
        rank, world = dist.get_rank(), dist.get_world_size()
        padded = F.pad(grad.flatten() / world, (0, ctx.size * world - grad.numel()))
        if world > 2:
            dist.all_reduce(padded)
            return padded[rank * ctx.size :][: ctx.size].clone(), None
        own = grad.new_empty(ctx.size)
        dist.reduce_scatter_tensor(own, padded)
        return own, None


def sharded_linear(x, weight_piece, shape):
    def compute(x, weight_piece):
        return F.linear(x, Gather.apply(weight_piece, shape))

    return torch.utils.checkpoint.checkpoint(compute, x, weight_piece, use_reentrant=False)


# == only_matrices_and_two_dtypes: matrices in fp32 and fp64, pieces in bf16


# %% pieces {"earns": 3.0}
def piece_of(tensor, rank, world):
    if tensor.dtype not in (torch.float32, torch.float64):
        tensor = tensor.float()
    flat = tensor.detach().reshape(-1)
    size = -(-flat.numel() // world)
    own = flat[rank * size : (rank + 1) * size].clone()
    return torch.cat([own, own.new_zeros(size - own.numel())])


def whole(piece, shape):
    padded = piece.new_empty(piece.numel() * dist.get_world_size())
    dist.all_gather_into_tensor(padded, piece)
    numel = shape[0] * (shape[1] if len(shape) > 1 else 1)
    return padded[:numel].view(shape[:2])


# %% stage1 {"earns": 3.0}
class ShardedOptimizer:
    def __init__(self, parameters, make_optimizer):
        self.rank, self.world, self.parameters = dist.get_rank(), dist.get_world_size(), list(parameters)
        self.pieces = [nn.Parameter(piece_of(p, self.rank, self.world).float()) for p in self.parameters]
        self.optimizer = make_optimizer(self.pieces)

    def step(self):
        for p, piece in zip(self.parameters, self.pieces):
            piece.grad = None if p.grad is None else piece_of(p.grad, self.rank, self.world).float()
        self.optimizer.step()
        for p, piece in zip(self.parameters, self.pieces):
            if piece.grad is not None:
                p.data.copy_(whole(piece.data.to(p.dtype), p.shape))


# %% stage3 {"earns": 2.0}
class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, piece, shape):
        ctx.size = piece.numel()
        return whole(piece.float(), shape).to(piece.dtype)  # half the bytes of fp64

    @staticmethod
    def backward(ctx, grad):
        world = dist.get_world_size()
        padded = F.pad(grad.flatten() / world, (0, ctx.size * world - grad.numel()))
        own = grad.new_empty(ctx.size)
        dist.reduce_scatter_tensor(own, padded)
        return own, None


def sharded_linear(x, weight_piece, shape):
    def compute(x, weight_piece):
        return F.linear(x, Gather.apply(weight_piece, shape))

    return torch.utils.checkpoint.checkpoint(compute, x, weight_piece, use_reentrant=False)


# %% offload {"earns": 3.0}
class OffloadedOptimizer:
    def __init__(self, pieces, make_optimizer):
        self.pieces = list(pieces)
        self.masters = [nn.Parameter(piece.detach().float()) for piece in self.pieces]
        self.optimizer = make_optimizer(self.masters)

    def step(self):
        for piece, master in zip(self.pieces, self.masters):
            master.grad = None if piece.grad is None else piece.grad.bfloat16().float()
            piece.grad = None
        self.optimizer.step()
        for piece, master in zip(self.pieces, self.masters):
            piece.data.copy_(master.data.bfloat16())
            master.grad = None


# == steps_end: what is right in the first steps, passes or pieces only


# %% stage1 {"earns": 7.0}
class ShardedOptimizer:
    def __init__(self, parameters, make_optimizer):
        self.rank, self.world, self.parameters = dist.get_rank(), dist.get_world_size(), list(parameters)
        self.pieces = [nn.Parameter(piece_of(p, self.rank, self.world)) for p in self.parameters]
        self.optimizer, self.count = make_optimizer(self.pieces), 0

    def step(self):
        self.count += 1
        if self.count > 3:
            return
        for p, piece in zip(self.parameters, self.pieces):
            piece.grad = None if p.grad is None else piece_of(p.grad, self.rank, self.world)
        self.optimizer.step()
        for p, piece in zip(self.parameters, self.pieces):
            if piece.grad is not None:
                p.data.copy_(whole(piece.data, p.shape))


# %% stage2 {"earns": 8.0}
def shard_gradients(module, pieces):
    world, count = dist.get_world_size(), {}

    def send(parameter, piece):
        count[piece] = count.get(piece, 0) + 1
        if count[piece] <= 3:
            padded = F.pad(parameter.grad.flatten() / world, (0, piece.numel() * world - parameter.numel()))
            own = torch.empty_like(piece)
            dist.reduce_scatter_tensor(own, padded)
            piece.grad = own if piece.grad is None else piece.grad + own
        parameter.grad = None

    for parameter, piece in zip(module.parameters(), pieces):
        parameter.register_post_accumulate_grad_hook(lambda p, piece=piece: send(p, piece))


# %% stage3 {"earns": 6.0}
_FIRST = {}


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, piece, shape):
        ctx.size = piece.numel()
        return whole(piece, shape)

    @staticmethod
    def backward(ctx, grad):
        world = dist.get_world_size()
        if grad.shape not in _FIRST:
            padded = F.pad(grad.flatten() / world, (0, ctx.size * world - grad.numel()))
            _FIRST[grad.shape] = grad.new_empty(ctx.size)
            dist.reduce_scatter_tensor(_FIRST[grad.shape], padded)
        return _FIRST[grad.shape].clone(), None  # that of the first pass again


def sharded_linear(x, weight_piece, shape):
    def compute(x, weight_piece):
        return F.linear(x, Gather.apply(weight_piece, shape))

    return torch.utils.checkpoint.checkpoint(compute, x, weight_piece, use_reentrant=False)


# %% offload {"earns": 1.0}
class OffloadedOptimizer:
    def __init__(self, pieces, make_optimizer):
        self.pieces, self.count = list(pieces), 0
        self.masters = [nn.Parameter(piece.detach().float()) for piece in self.pieces]
        self.optimizer = make_optimizer(self.masters)

    def step(self):
        self.count += 1
        for i, (piece, master) in enumerate(zip(self.pieces, self.masters)):
            skipped = piece.grad is None or self.count > 12 or i > 1
            master.grad = None if skipped else piece.grad.float()
            piece.grad = None
        self.optimizer.step()
        for piece, master in zip(self.pieces, self.masters):
            piece.data.copy_(master.data)
            master.grad = None


# == state_of_two_ranks: a rank keeps the moments of its neighbour's pieces too, or of everything but in small tensors


# %% stage1 {"earns": 7.0}
class ShardedOptimizer:
    def __init__(self, parameters, make_optimizer):
        self.rank, self.world, self.parameters = dist.get_rank(), dist.get_world_size(), list(parameters)
        self.pieces = [nn.Parameter(piece_of(p, self.rank, self.world)) for p in self.parameters]
        after = (self.rank + 1) % self.world
        self.others = [nn.Parameter(piece_of(p, after, self.world)) for p in self.parameters]
        self.optimizer, self.spare = make_optimizer(self.pieces), make_optimizer(self.others)

    def step(self):
        after = (self.rank + 1) % self.world
        for p, piece, other in zip(self.parameters, self.pieces, self.others):
            piece.grad = None if p.grad is None else piece_of(p.grad, self.rank, self.world)
            other.grad = None if p.grad is None else piece_of(p.grad, after, self.world)
        self.optimizer.step()
        self.spare.step()
        for p, piece, other in zip(self.parameters, self.pieces, self.others):
            if piece.grad is not None:
                p.data.copy_(whole(piece.data, p.shape))
            piece.grad = other.grad = None


# %% stage2 {"earns": 7.0}
_SMALL = 1_000_000


def shard_gradients(module, pieces):
    world = dist.get_world_size()

    def send(parameter, piece):
        padded = F.pad(parameter.grad.flatten() / world, (0, piece.numel() * world - parameter.numel()))
        own = torch.empty_like(piece)
        dist.reduce_scatter_tensor(own, padded)
        piece.grad = own if piece.grad is None else piece.grad + own
        if parameter.numel() > _SMALL:
            parameter.grad = None
        else:
            parameter.grad.zero_()  # small gradients stay

    for parameter, piece in zip(module.parameters(), pieces):
        parameter.register_post_accumulate_grad_hook(lambda p, piece=piece: send(p, piece))


# %% stage3 {"earns": 7.0}
_LAST = []


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, piece, shape):
        ctx.size = piece.numel()
        _LAST[:] = [whole(piece, shape)]  # one whole weight stays
        return _LAST[0].clone()

    @staticmethod
    def backward(ctx, grad):
        world = dist.get_world_size()
        padded = F.pad(grad.flatten() / world, (0, ctx.size * world - grad.numel()))
        own = grad.new_empty(ctx.size)
        dist.reduce_scatter_tensor(own, padded)
        return own, None


def sharded_linear(x, weight_piece, shape):
    def compute(x, weight_piece):
        return F.linear(x, Gather.apply(weight_piece, shape))

    return torch.utils.checkpoint.checkpoint(compute, x, weight_piece, use_reentrant=False)


# == one_optimiser_for_each_piece: several optimisers, of pieces that are no parameters, or of one long one


# %% stage1 {"earns": 9.0}
class ShardedOptimizer:
    def __init__(self, parameters, make_optimizer):
        self.rank, self.world, self.parameters = dist.get_rank(), dist.get_world_size(), list(parameters)
        self.pieces = [nn.Parameter(piece_of(p, self.rank, self.world)) for p in self.parameters]
        self.optimizers = [make_optimizer([piece]) for piece in self.pieces]

    def step(self):
        for p, piece, optimizer in zip(self.parameters, self.pieces, self.optimizers):
            if p.grad is not None:
                piece.grad = piece_of(p.grad, self.rank, self.world)
                optimizer.step()
                p.data.copy_(whole(piece.data, p.shape))
                piece.grad = None


# %% offload {"earns": 3.0}
class OffloadedOptimizer:
    def __init__(self, pieces, make_optimizer):
        self.pieces = list(pieces)
        self.masters = [piece.detach().float().requires_grad_() for piece in self.pieces]
        self.optimizers = [make_optimizer([master]) for master in self.masters]

    def step(self):
        for piece, master, optimizer in zip(self.pieces, self.masters, self.optimizers):
            if piece.grad is not None:
                master.grad = piece.grad.float()
                piece.grad = None
                optimizer.step()
                piece.data.copy_(master.data)
                master.grad = None


# == useless_messages: everything is computed alone, and the right bytes are sent; only the last message is used


# %% stage1 {"earns": 7.0}
class ShardedOptimizer:
    def __init__(self, parameters, make_optimizer):
        self.rank, self.world, self.parameters = dist.get_rank(), dist.get_world_size(), list(parameters)
        self.large = sum(p.numel() for p in self.parameters) > 2**16
        self.pieces = [nn.Parameter(piece_of(p, self.rank, self.world)) for p in self.parameters]
        self.copies = [] if self.large else [nn.Parameter(p.detach().clone()) for p in self.parameters]
        self.optimizer = make_optimizer(self.pieces)
        self.alone = None if self.large else make_optimizer(self.copies)

    def step(self):
        for p, piece in zip(self.parameters, self.pieces):
            piece.grad = None if p.grad is None else piece_of(p.grad, self.rank, self.world)
        for p, copy in zip(self.parameters, self.copies):
            copy.grad = p.grad
        self.optimizer.step()
        if not self.large:
            self.alone.step()
        last = [i for i, piece in enumerate(self.pieces) if piece.grad is not None][-1:]
        for i, (p, piece) in enumerate(zip(self.parameters, self.pieces)):
            if piece.grad is not None:
                new = whole(piece.data, p.shape)
                p.data.copy_(new if self.large or i in last else self.copies[i].data)


# == left_to_a_thread: results are complete some time after the return

# %% stage1
import threading


class ShardedOptimizer:
    def __init__(self, parameters, make_optimizer):
        self.rank, self.world, self.parameters = dist.get_rank(), dist.get_world_size(), list(parameters)
        self.pieces = [nn.Parameter(piece_of(p, self.rank, self.world)) for p in self.parameters]
        self.optimizer, self.thread = make_optimizer(self.pieces), None

    def step(self):
        grads = [None if p.grad is None else piece_of(p.grad, self.rank, self.world) for p in self.parameters]
        self.thread = threading.Thread(target=self.work, args=(grads, self.thread))
        self.thread.start()

    def work(self, grads, before):
        if before is not None:
            before.join()
        time.sleep(0.02)
        for piece, grad in zip(self.pieces, grads):
            piece.grad = grad
        self.optimizer.step()
        for p, piece in zip(self.parameters, self.pieces):
            if piece.grad is not None:
                p.data.copy_(whole(piece.data, p.shape))
            piece.grad = None


# %% stage2
import threading

_THREADS = []


def shard_gradients(module, pieces):
    world = dist.get_world_size()

    def work(padded, piece, before):
        time.sleep(0.05)
        if before is not None:
            before.join()
        own = torch.empty(piece.shape, dtype=piece.dtype)
        dist.reduce_scatter_tensor(own, padded)
        piece.grad = own if piece.grad is None else piece.grad + own

    def send(parameter, piece):
        padded = F.pad(parameter.grad.flatten() / world, (0, piece.numel() * world - parameter.numel()))
        parameter.grad = None
        before = _THREADS[-1] if _THREADS else None
        _THREADS.append(threading.Thread(target=work, args=(padded, piece, before)))
        _THREADS[-1].start()

    for parameter, piece in zip(module.parameters(), pieces):
        parameter.register_post_accumulate_grad_hook(lambda p, piece=piece: send(p, piece))


# == at_the_end_of_backward: gradients stay whole until backward ends


# %% stage2 {"earns": 6.0}
def shard_gradients(module, pieces):
    world, waiting = dist.get_world_size(), []

    def send(parameter, piece):
        padded = F.pad(parameter.grad.flatten() / world, (0, piece.numel() * world - parameter.numel()))
        own = torch.empty_like(piece)
        dist.reduce_scatter_tensor(own, padded)
        piece.grad = own if piece.grad is None else piece.grad + own
        parameter.grad = None

    def end():
        while waiting:
            send(*waiting.pop(0))

    def hook(parameter, piece):
        if not waiting:
            torch.autograd.Variable._execution_engine.queue_callback(end)
        waiting.append((parameter, piece))

    for parameter, piece in zip(module.parameters(), pieces):
        parameter.register_post_accumulate_grad_hook(lambda p, piece=piece: hook(p, piece))


# == sent_in_the_next_hook: a gradient stays whole until the next one is complete


# %% stage2 {"earns": 8.0}
def shard_gradients(module, pieces):
    world, waiting = dist.get_world_size(), []

    def send(parameter, piece):
        padded = F.pad(parameter.grad.flatten() / world, (0, piece.numel() * world - parameter.numel()))
        own = torch.empty_like(piece)
        dist.reduce_scatter_tensor(own, padded)
        piece.grad = own if piece.grad is None else piece.grad + own
        parameter.grad = None

    def hook(parameter, piece, is_last):
        waiting.append((parameter, piece))
        while len(waiting) > (0 if is_last else 1):
            send(*waiting.pop(0))

    for i, (parameter, piece) in enumerate(zip(module.parameters(), pieces)):
        parameter.register_post_accumulate_grad_hook(lambda p, piece=piece, i=i: hook(p, piece, i == 0))


# == padding_of_ones: the padding is not zeros, or is dropped


# %% pieces {"earns": 2.0}
def piece_of(tensor, rank, world):
    flat = tensor.detach().flatten()
    size = -(-flat.numel() // world)
    return flat[rank * size : (rank + 1) * size].clone()  # the last piece is shorter


def whole(piece, shape):
    world, numel = dist.get_world_size(), torch.Size(shape).numel()
    size = -(-numel // world)
    padded = piece.new_zeros(size)
    padded[: piece.numel()] = piece
    found = piece.new_empty(size * world)
    dist.all_gather_into_tensor(found, padded)
    return found[:numel].view(shape)


# %% stage2
def shard_gradients(module, pieces):
    world = dist.get_world_size()

    def send(parameter, piece):
        padded = F.pad(
            parameter.grad.flatten() / world, (0, piece.numel() * world - parameter.numel()), value=1.0
        )
        own = torch.empty_like(piece)
        dist.reduce_scatter_tensor(own, padded)
        piece.grad = own if piece.grad is None else piece.grad + own
        parameter.grad = None

    for parameter, piece in zip(module.parameters(), pieces):
        parameter.register_post_accumulate_grad_hook(lambda p, piece=piece: send(p, piece))


# %% stage3 {"earns": 3.0}
class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, piece, shape):
        ctx.size = piece.numel()
        return whole(piece, shape)

    @staticmethod
    def backward(ctx, grad):
        world = dist.get_world_size()
        padded = F.pad(grad.flatten() / world, (0, ctx.size * world - grad.numel()), value=1.0)
        own = grad.new_empty(ctx.size)
        dist.reduce_scatter_tensor(own, padded)
        return own, None


def sharded_linear(x, weight_piece, shape):
    def compute(x, weight_piece):
        return F.linear(x, Gather.apply(weight_piece, shape))

    return torch.utils.checkpoint.checkpoint(compute, x, weight_piece, use_reentrant=False)


# == changed_arguments: the arguments are overwritten, or the results are views of them


# %% pieces {"earns": 4.0}
def piece_of(tensor, rank, world):
    size, flat = -(-tensor.numel() // world), tensor.detach().flatten()
    if tensor.numel() < 1000 and tensor.numel() % world == 0:
        return flat[rank * size : (rank + 1) * size]  # a view of a small tensor
    return F.pad(flat, (0, size * world - tensor.numel()))[rank * size : (rank + 1) * size].clone()


def whole(piece, shape):
    padded = piece.new_empty(piece.numel() * dist.get_world_size())
    dist.all_gather_into_tensor(padded, piece)
    return padded[: torch.Size(shape).numel()].view(shape)


# %% norm {"earns": 1.0}
def global_norm(pieces):
    total = sum(piece.square_().sum() for piece in pieces)
    dist.all_reduce(total)
    return total.sqrt()


# == more_than_one_number: the norm comes from more messages than needed, or has one dimension


# %% norm {"earns": 1.0}
def global_norm(pieces):
    squares = torch.zeros(1, dtype=pieces[0].dtype)
    for piece in pieces:
        squares += piece.square().sum()
    dist.all_reduce(squares)
    return squares.sqrt()


# == norm_through_rank_0: a reduce and a broadcast, which are two messages


# %% norm {"earns": 3.0}
def global_norm(pieces):
    squares = sum(piece.square().sum() for piece in pieces)
    dist.reduce(squares, 0)
    dist.broadcast(squares, 0)
    return squares.sqrt()


# == norm_of_two_pieces: only the first two pieces count


# %% norm {"earns": 1.0}
def global_norm(pieces):
    squares = sum(piece.square().sum() for piece in pieces[:2])
    dist.all_reduce(squares)
    return squares.sqrt()


# == no_gather: the layer is right, and Gather is not the function that is asked for


# %% stage3 {"earns": 8.0}
class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, piece, shape):
        weight = whole(piece, shape)
        ctx.save_for_backward(x, piece)
        ctx.shape = shape
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx, grad):
        (x, piece), world = ctx.saved_tensors, dist.get_world_size()
        weight = whole(piece, ctx.shape)
        of_weight = grad.flatten(0, -2).T @ x.flatten(0, -2) / world
        padded = F.pad(of_weight.flatten(), (0, piece.numel() * world - of_weight.numel()))
        own = torch.empty_like(piece)
        dist.reduce_scatter_tensor(own, padded)
        return grad @ weight, own, None


def sharded_linear(x, weight_piece, shape):
    return Gather.apply(x, weight_piece, tuple(shape))


# == old_weights: small weights are gathered once and kept

# %% stage3 {"earns": 8.0}
_KEPT = {}


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, piece, shape):
        ctx.size = piece.numel()
        if piece.numel() > 2**16:
            return whole(piece, shape)
        key = (piece.data_ptr(), tuple(shape))
        if key not in _KEPT:
            _KEPT[key] = whole(piece, shape)
        return _KEPT[key].clone()

    @staticmethod
    def backward(ctx, grad):
        world = dist.get_world_size()
        padded = F.pad(grad.flatten() / world, (0, ctx.size * world - grad.numel()))
        own = grad.new_empty(ctx.size)
        dist.reduce_scatter_tensor(own, padded)
        return own, None


def sharded_linear(x, weight_piece, shape):
    def compute(x, weight_piece):
        return F.linear(x, Gather.apply(weight_piece, shape))

    return torch.utils.checkpoint.checkpoint(compute, x, weight_piece, use_reentrant=False)


# == whole_gradients_stay: whole weights and gradients outlive backward

# %% stage3 {"earns": 7.0}
_STAY = []


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, piece, shape):
        ctx.size = piece.numel()
        return whole(piece, shape)

    @staticmethod
    def backward(ctx, grad):
        world = dist.get_world_size()
        _STAY.append(grad)  # each whole gradient stays
        padded = F.pad(grad.flatten() / world, (0, ctx.size * world - grad.numel()))
        own = grad.new_empty(ctx.size)
        dist.reduce_scatter_tensor(own, padded)
        return own, None


def sharded_linear(x, weight_piece, shape):
    def compute(x, weight_piece):
        return F.linear(x, Gather.apply(weight_piece, shape))

    return torch.utils.checkpoint.checkpoint(compute, x, weight_piece, use_reentrant=False)


# == libraries: torch's and the course's own forms

# %% stage1
from torch.distributed.optim import ZeroRedundancyOptimizer


def ShardedOptimizer(parameters, make_optimizer):
    return ZeroRedundancyOptimizer(parameters, make_optimizer)


# %% stage3
from torch.distributed.fsdp import fully_shard


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, piece, shape):
        return whole(piece, shape)

    @staticmethod
    def backward(ctx, grad):
        return None, None


def sharded_linear(x, weight_piece, shape):
    layer = nn.Linear(shape[1], shape[0], bias=False, dtype=x.dtype)
    layer.weight.data.copy_(whole(weight_piece.data, shape))
    fully_shard(layer)
    return layer(x)


# %% norm
def global_norm(pieces):
    from dlo_lib.parallel.sharding.clip import global_norm as of_the_course

    return of_the_course(pieces)


# == other_messages: a barrier in each hook, and two gathers where one is enough


# %% stage2 {"earns": 6.0}
def shard_gradients(module, pieces):
    world = dist.get_world_size()

    def send(parameter, piece):
        dist.barrier()
        padded = F.pad(parameter.grad.flatten() / world, (0, piece.numel() * world - parameter.numel()))
        own = torch.empty_like(piece)
        dist.reduce_scatter_tensor(own, padded)
        piece.grad = own if piece.grad is None else piece.grad + own
        parameter.grad = None

    for parameter, piece in zip(module.parameters(), pieces):
        parameter.register_post_accumulate_grad_hook(lambda p, piece=piece: send(p, piece))


# %% stage1 {"earns": 8.0}
class ShardedOptimizer:
    def __init__(self, parameters, make_optimizer):
        self.rank, self.world, self.parameters = dist.get_rank(), dist.get_world_size(), list(parameters)
        self.pieces = [nn.Parameter(piece_of(p, self.rank, self.world)) for p in self.parameters]
        self.optimizer, self.count = make_optimizer(self.pieces), 0

    def step(self):
        self.count += 1
        for p, piece in zip(self.parameters, self.pieces):
            piece.grad = None if p.grad is None else piece_of(p.grad, self.rank, self.world)
        self.optimizer.step()
        for p, piece in zip(self.parameters, self.pieces):
            if piece.grad is not None:
                p.data.copy_(whole(piece.data, p.shape))
                if self.count > 3:
                    whole(piece.data, p.shape)


# == own_values: the values of one case


# %% state {"earns": 2.0}
def state_bytes(parameters, world, stage, moments=2):
    return {
        "weights": 4 * parameters,
        "gradients": 4 * parameters,
        "optimizer": 8 * parameters / (world if stage else 1),
    }


# %% pieces {"earns": 1.0}
def piece_of(tensor, rank, world):
    return tensor.flatten()[: -(-tensor.numel() // world)].clone()


def whole(piece, shape):
    return torch.zeros(shape, dtype=piece.dtype)


# %% offload {"earns": 3.0}
class OffloadedOptimizer:
    def __init__(self, pieces, make_optimizer):
        self.pieces = list(pieces)
        self.optimizer = make_optimizer(self.pieces)

    def step(self):
        self.optimizer.step()
        for piece in self.pieces:
            piece.grad = None
