# Odd but right submissions: each answer earns all points of its question.


# == a_comprehension: the quiz from a comprehension

# %% quiz
quiz = {"q1": "b", "q2": "d", "q3": "a", "q4": "c", "q5": "b", "q6": "a"}


# == lambdas: lambdas, partial, itertools

# %% rows
own_rows = lambda length, rank, world: (
    (c := -(-length // world)),
    tuple(min(r * c, length) for r in (rank, rank + 1)),
)[1]


# %% units
unit_of = lambda names, blocks: next(
    (b for b in blocks if not [n for n in names if n[: len(b) + 1] != b + "."]), None
)


# %% forward
before_forward = lambda unit, args: (unshard(unit), cast(args, unit.compute_dtype))[-1]
after_forward = lambda unit, output, is_root: None if is_root and output.requires_grad else reshard(unit)


# %% reshard
reshard = lambda unit: ([w.untyped_storage().resize_(0) for w in unit.wholes], put(unit, False))[1]


# %% end
from functools import partial


def _end(pending):
    [(reduce_gradients(u), reshard(u)) for u in iter(lambda: pending.pop(0) if pending else None, None)]


queue_end = lambda pending: torch.autograd.Variable._execution_engine.queue_callback(partial(_end, pending))


# %% padding
padding = lambda shapes, world: (
    -sum(map(math.prod, shapes)) % world,
    sum(math.prod(s[1:]) * (-(s[0] if s else 1) % world) for s in map(tuple, shapes)),
)


# %% flat
flat_shard = lambda tensors, rank, world: (
    lambda f: F.pad(f, (0, -f.numel() % world)).chunk(world)[rank].clone() if f.numel() else f
)(torch.cat([t.reshape(-1) for t in tensors]))
flat_whole = lambda shard, shapes: (
    lambda f: (
        dist.all_gather_into_tensor(f, shard),
        [
            p.view(s)
            for p, s in zip(
                f.split([*map(math.prod, shapes), f.numel() - sum(map(math.prod, shapes))]), shapes
            )
        ],
    )[1]
)(shard.new_empty(dist.get_world_size() * shard.numel()))


# %% quiz
quiz = dict(zip((f"q{i}" for i in range(1, 7)), "bdacba"))


# == lists_and_classes: collectives of lists, an instance of a class as the function


# %% unshard
class Gatherer:
    def __call__(self, unit: Unit) -> None:
        if not unit.is_whole:
            self.fill(unit, self.rows(unit))
            put(unit, True)

    @staticmethod
    def rows(unit):
        mine = unit.row.detach().to(unit.compute_dtype)
        rows = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(rows, mine)
        return torch.stack(rows)

    def fill(self, unit, packed):
        for whole, value in zip(unit.wholes, unpack(packed, unit.shapes)):
            whole.untyped_storage().resize_(value.nbytes)
            whole.data[...] = value


unshard = Gatherer()


# %% reduce
def reduce_gradients(unit: Unit) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    trained = [(s, w) for s, w in zip(unit.shards, unit.wholes) if w.requires_grad]
    if trained:
        grads = [w.grad if w.grad is not None else torch.zeros_like(w) for _, w in trained]
        for _, w in trained:
            w.grad = None
        packed = pack([g.to(unit.reduce_dtype) for g in grads], world).div_(world)
        del grads
        row = torch.empty_like(packed[0])
        dist.reduce_scatter(row, list(packed.unbind()))
        for (s, _), part in zip(trained, shard_views(row, [w.shape for _, w in trained], rank, world)):
            part = part.to(s.dtype).clone()
            if s.grad is None:
                s.grad = part
            else:
                s.grad.add_(part)


# == functional_collectives: functional collectives, and asynchronous ones with a wait

# %% unshard
import torch.distributed._functional_collectives as funcol


def unshard(unit: Unit) -> None:
    if unit.is_whole:
        return
    row = unit.row.detach().to(unit.compute_dtype)
    got = funcol.all_gather_tensor(row, 0, dist.group.WORLD)
    got = got.wait() if hasattr(got, "wait") else got
    for whole, value in zip(unit.wholes, unpack(got.view(dist.get_world_size(), -1), unit.shapes)):
        storage = whole.untyped_storage()
        storage.resize_(whole.numel() * whole.element_size())
        raw = torch.empty(0, dtype=whole.dtype).set_(storage, 0, (whole.numel(),))
        raw.copy_(value.flatten())
    put(unit, True)


# %% reduce
def reduce_gradients(unit: Unit) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    trained = [(shard, whole) for shard, whole in zip(unit.shards, unit.wholes) if whole.requires_grad]
    if not trained:
        return
    gradients = [torch.zeros_like(whole) if whole.grad is None else whole.grad for _, whole in trained]
    packed = pack([gradient.to(unit.reduce_dtype) for gradient in gradients], world)
    row = packed.new_empty(packed.shape[1])
    work = dist.reduce_scatter_tensor(row, packed.view(-1), op=dist.ReduceOp.SUM, async_op=True)
    gradients.clear()
    for _, whole in trained:
        whole.grad = None
    work.wait()
    del packed
    row = row.mul(1 / world).to(unit.row.dtype)
    for (shard, whole), part in zip(trained, shard_views(row, [w.shape for _, w in trained], rank, world)):
        shard.grad = part + (0 if shard.grad is None else shard.grad)


# == an_autograd_function: an autograd Function in place of a hook


# %% backward
class EndOfUnit(torch.autograd.Function):
    @staticmethod
    def forward(ctx, arg, unit, pending):
        ctx.unit, ctx.pending = unit, pending
        return arg.view_as(arg)

    @staticmethod
    def backward(ctx, grad):
        unit = ctx.unit
        del ctx.pending[ctx.pending.index(unit)]
        reduce_gradients(unit)
        reshard(unit)
        return grad, None, None


def watch_output(unit: Unit, output: torch.Tensor, pending: list[Unit]) -> None:
    @output.register_hook
    def begin(grad):
        pending.append(unit)
        unshard(pending[-1])
        return grad


def watch_input(unit: Unit, arg: torch.Tensor, pending: list[Unit]) -> torch.Tensor:
    return EndOfUnit.apply(arg, unit, pending)


# == a_computed_copy: a computed copy in place of a view, recursion, broadcasts

# %% backward
from functools import partial


def _begin(unit, pending, grad):
    unshard(unit)
    pending += [unit]


def _end(unit, pending, grad):
    pending.remove(unit)
    reduce_gradients(unit)
    reshard(unit)


def watch_output(unit: Unit, output: torch.Tensor, pending: list[Unit]) -> None:
    output.register_hook(partial(_begin, unit, pending))


def watch_input(unit: Unit, arg: torch.Tensor, pending: list[Unit]) -> torch.Tensor:
    separate = arg * 1
    separate.register_hook(partial(_end, unit, pending))
    return separate


# %% end
def queue_end(pending: list[Unit]) -> None:
    def rest():
        match pending:
            case []:
                return
            case [first, *others]:
                pending[:] = others
                reduce_gradients(first)
                reshard(first)
                rest()

    torch.autograd.Variable._execution_engine.queue_callback(rest)


# %% state
def full_state(model: nn.Module, units: list[Unit]) -> dict[str, torch.Tensor]:
    """A broadcast of each rank's row, unit by unit."""
    rank, world = dist.get_rank(), dist.get_world_size()
    keep = model.state_dict().keys()
    state = {}
    for unit in units:
        packed = unit.row.detach().new_empty(world, unit.row.numel())
        packed[rank] = unit.row.detach()
        for source in range(world):
            dist.broadcast(packed[source], source)
        for names, value in zip(unit.names, unpack(packed, unit.shapes)):
            value = value.clone()
            state |= dict.fromkeys(names, value)
    return state | {name: buffer.detach().clone() for name, buffer in model.named_buffers() if name in keep}


# == french_names_and_a_thread: French names, decorators, a context manager, a joined thread

# %% unshard
import contextlib
import functools
import threading


def une_fois(f):
    """N'appelle la fonction que si l'unité n'est pas entière."""

    @functools.wraps(f)
    def g(unité):
        return None if unité.is_whole else f(unité)

    return g


@contextlib.contextmanager
def mémoire(unité):
    for entier in unité.wholes:
        entier.untyped_storage().resize_(entier.numel() * entier.element_size())
    yield unité.wholes
    put(unité, True)


@une_fois
def unshard(unit: Unit) -> None:
    morceau = unit.row.detach().to(unit.compute_dtype)
    paquet = morceau.new_empty(dist.get_world_size(), morceau.numel())
    fil = threading.Thread(target=dist.all_gather_into_tensor, args=(paquet.view(-1), morceau))
    fil.start()
    fil.join()
    with mémoire(unit) as entiers, torch.no_grad():
        for entier, valeur in zip(entiers, unpack(paquet, unit.shapes)):
            entier.data.copy_(valeur)


# %% forward
def before_forward(unit: Unit, args: tuple) -> tuple:
    unshard(unit)
    nouveaux = []
    for a in args:
        try:
            nouveaux.append(a.to(unit.compute_dtype) if torch.is_floating_point(a) else a)
        except TypeError:
            nouveaux.append(a)
    return tuple(nouveaux)


def after_forward(unit: Unit, output: torch.Tensor, is_root: bool) -> None:
    garder = is_root and output.grad_fn is not None
    garder or reshard(unit)


# %% rows
def own_rows(length: int, rank: int, world: int) -> tuple[int, int]:
    """Par récursion : le premier rang prend sa part, le reste est pour les autres."""

    def part(début, r):
        fin = min(début + (length + world - 1) // world, length)
        return (début, fin) if r == 0 else part(fin, r - 1)

    return part(0, rank)


# %% units
import re


def unit_of(names: list[str], blocks: list[str]) -> str | None:
    found = {next((b for b in blocks if re.match(re.escape(b) + r"\.", n)), None) for n in names}
    return found.pop() if len(found) == 1 else None


# %% padding
import numpy as np


def padding(shapes: list[tuple[int, ...]], world: int) -> tuple[int, int]:
    with_meta = [torch.empty(tuple(s) or (1,), device="meta") for s in shapes]
    n = sum(t.numel() for t in with_meta)
    rows = int(np.sum([np.ceil(len(t) / world) * world * (t.numel() // len(t)) for t in with_meta])) - n
    return int(np.ceil(n / world) * world - n), rows


# == the_newest_names: the newest names of collectives, out= buffers, log_softmax by hand


# %% reduce
def reduce_gradients(unit: Unit) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    shards, wholes = [], []
    for shard, whole in zip(unit.shards, unit.wholes):
        if whole.requires_grad:
            shards.append(shard)
            wholes.append(whole)
    if len(shards) == 0:
        return

    def taken():
        for whole in wholes:
            grad, whole.grad = whole.grad, None
            yield (torch.zeros(whole.shape, dtype=whole.dtype) if grad is None else grad).to(
                unit.reduce_dtype
            )

    packed = pack(list(taken()), world)
    row = torch.zeros(packed.size(1), dtype=packed.dtype)
    getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)(row, packed.flatten())
    torch.true_divide(row, world, out=row)
    for shard, part in zip(shards, shard_views(row, [tuple(whole.shape) for whole in wholes], rank, world)):
        old = torch.zeros_like(shard) if shard.grad is None else shard.grad
        shard.grad = (old + part.to(shard.dtype)).detach()


# %% reshard
def reshard(unit: Unit) -> None:
    put(unit, False)
    for storage in {whole.untyped_storage() for whole in unit.wholes}:
        if storage.size():
            storage.resize_(0)


# %% train
def train_step(
    model: nn.Module, units: list[Unit], optimizer: torch.optim.Optimizer, micro_batches: list
) -> float:
    world = dist.get_world_size()
    n = torch.zeros(1, dtype=torch.long)
    for batch in micro_batches:
        n += batch[1].ne(-100).sum()
    dist.all_reduce(n)
    losses = []
    for tokens, targets in micro_batches:
        logits = model(tokens)
        if logits.dtype.itemsize < 4:
            logits = logits.to(torch.float32)
        logp = logits.log_softmax(-1)
        used = targets != -100
        nll = -logp.gather(-1, targets.clamp_min(0).unsqueeze(-1)).squeeze(-1)
        loss = (nll * used).sum() / (n.item() / world)
        torch.autograd.backward(loss)
        losses.append(loss.item() / world)
    mean = torch.tensor([math.fsum(losses)], dtype=torch.float64)
    work = dist.all_reduce(mean, async_op=True)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    work.wait()
    return mean.item()


# %% quiz
quiz = {}
for q, a in [("q1", "b"), ("q2", "d"), ("q3", "a"), ("q4", "c"), ("q5", "b"), ("q6", "a")]:
    quiz.setdefault(q, a)


# == shard_views_of_all_ranks: the state from cuts of each row, hooks that clean up with finally


# %% state
def full_state(model: nn.Module, units: list[Unit]) -> dict[str, torch.Tensor]:
    world, result = dist.get_world_size(), {}
    for unit in reversed(units):
        rows = [torch.empty_like(unit.row) for _ in range(world)]
        dist.all_gather(rows, unit.row.detach().clone())
        views = [shard_views(row.detach(), unit.shapes, rank, world) for rank, row in enumerate(rows)]
        for i, names in enumerate(unit.names):
            whole = torch.cat([view[i] for view in views]).reshape(unit.shapes[i])
            for name in names[::-1]:
                result[name] = whole
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                result[f"{prefix}.{name}" if prefix else name] = buffer.clone()
    return result


# %% train
def train_step(
    model: nn.Module, units: list[Unit], optimizer: torch.optim.Optimizer, micro_batches: list
) -> float:
    ranks = dist.get_world_size()
    counted = torch.stack([(y != -100).sum() for _, y in micro_batches]).sum().double()
    dist.all_reduce(counted)

    def one(x, y):
        z = model(x)
        z = z if z.dtype is torch.float64 else z.float()
        ce = nn.CrossEntropyLoss(ignore_index=-100, reduction="none")(z.movedim(-1, 1), y).sum()
        (ce * (ranks / counted)).backward()
        return ce.detach().double() / counted

    total = sum(one(x, y) for x, y in micro_batches)
    dist.all_reduce(total)
    optimizer.step()
    any(setattr(p, "grad", None) for p in trained_shards(units))
    return total.item()


# %% end
def queue_end(pending: list[Unit]) -> None:
    def f():
        try:
            for unit in sorted(pending, key=lambda u: sum(map(math.prod, u.shapes))):
                reduce_gradients(unit)
                reshard(unit)
        finally:
            del pending[:]

    engine = torch.autograd.variable.Variable._execution_engine
    engine.queue_callback(f)


# %% reshard
def reshard(unit: Unit) -> None:
    def free(n=0):
        if n < len(unit.wholes):
            unit.wholes[n].data.untyped_storage().resize_(0)
            free(n + 1)

    free()
    put(unit, False)


# == multi_grad_hooks: register_multi_grad_hook, a clone, a deque

# %% backward
from torch.autograd.graph import register_multi_grad_hook


def watch_output(unit: Unit, output: torch.Tensor, pending: list[Unit]) -> None:
    def begin(grad):
        unshard(unit)
        pending.insert(len(pending), unit)

    register_multi_grad_hook((output,), begin, mode="any")


def watch_input(unit: Unit, arg: torch.Tensor, pending: list[Unit]) -> torch.Tensor:
    mine = arg.clone()

    @mine.register_hook
    def end(grad):
        reduce_gradients(unit)
        reshard(unit)
        pending[:] = [other for other in pending if other is not unit]

    return mine


# %% end
from collections import deque


def queue_end(pending: list[Unit]) -> None:
    class End:
        def __call__(self):
            left = deque(pending)
            pending.clear()
            while left:
                unit = left.popleft()
                try:
                    reduce_gradients(unit)
                finally:
                    reshard(unit)

    torch.autograd.Variable._execution_engine.queue_callback(End())
