# Odd but right submissions: each answer earns all points of its question.


# == lambdas: lambdas, walrus operators, one expression for each answer

# %% pi
estimate_pi = lambda p: (lambda c: (dist.all_reduce(c), 4 * c[0, 0].item() / c[0, 1].item())[1])(
    torch.tensor([[int((p.pow(2).sum(-1) <= 1).sum()), p.size(0)]])
)


# %% exchange
exchange = lambda o, to, i, source: (
    [
        w.wait()
        for w in dist.batch_isend_irecv([dist.P2POp(dist.isend, o, to), dist.P2POp(dist.irecv, i, source)])
    ]
    and None
)


# %% cost
predicted_seconds = lambda algorithm, size, ranks, alpha, beta: {
    "ring": lambda: (2 * ranks - 2) * alpha + beta * size * (2 * ranks - 2) / ranks,
    "tree": lambda: 2 * len(bin(ranks - 1)[2:].lstrip("0")) * (alpha + beta * size),
}[algorithm]()


# %% crossover
crossover_bytes = lambda ranks, alpha, beta: (lambda m, b: alpha * m / beta / b if m > 0 else None)(
    ranks - 1 - (ranks - 1).bit_length(), (ranks - 1).bit_length() - (ranks - 1) / ranks
)


# %% broadcast
tree_broadcast = lambda tensor, root: (
    lambda r, n, buf: (
        (
            [
                (dist.send(buf, (v + d + root) % n) if v < d else dist.recv(buf, (v - d + root) % n))
                for v in [(r - root) % n]
                for d in (1 << k for k in range((n - 1).bit_length()))
                if (v < d and v + d < n) or d <= v < 2 * d
            ],
            tensor.copy_(buf),
        )
        and None
        if n > 1
        else None
    )
)(dist.get_rank(), dist.get_world_size(), tensor.clone(memory_format=torch.contiguous_format))


# %% quiz
quiz = dict(zip(("q1", "q2", "q3", "q4", "q5"), "bcada"))


# == classes: classes, methods, properties, exceptions as control flow


# %% scatter
class _Ring:
    def __init__(self):
        pass

    @property
    def me(self):
        return dist.get_rank()

    @property
    def world(self):
        return dist.get_world_size()

    def turn(self, out, into):
        exchange(out, (self.me + 1) % self.world, into, (self.me - 1) % self.world)
        return into


class _Scatter(_Ring):
    def __call__(self, tensor):
        pieces = tensor.tensor_split(self.world)
        acc = pieces[self.me - 1].clone()
        for k in range(self.me - 2, self.me - self.world - 1, -1):
            acc = self.turn(acc, torch.zeros_like(pieces[k % self.world])).add_(pieces[k % self.world])
        return acc


ring_reduce_scatter = _Scatter()


# %% gather
class _Gather:
    def __call__(self, chunk, size):
        r, n = dist.get_rank(), dist.get_world_size()
        whole = torch.empty(size, dtype=chunk.dtype)
        slots = list(whole.tensor_split(n))
        slots[r][...] = chunk
        receives = [dist.irecv(slots[(r - s) % n], (r - 1) % n) for s in range(1, n)]
        sends = []
        for s in range(n - 1):
            sends.append(dist.isend(slots[(r - s) % n], (r + 1) % n))
            receives[s].wait()
        for w in sends:
            w.wait()
        return whole


ring_all_gather = _Gather()


# %% reduce
class _Tree:
    def __call__(self, tensor):
        return self.up(tensor.clone(), 1)

    def up(self, acc, d):
        r, n = dist.get_rank(), dist.get_world_size()
        if d >= n:
            return acc
        if r & d:
            dist.send(acc, r ^ d)
            return None
        if (r | d) < n:
            other = torch.empty_like(acc)
            dist.recv(other, r | d)
            acc.add_(other)
        return self.up(acc, 2 * d)


tree_reduce = _Tree()


# %% levels
class _Two:
    def __call__(self, tensor, inside, between):
        size = inside.size()
        c = tensor.new_zeros(tensor.numel() // size)
        work = dist.reduce_scatter_tensor(
            c, tensor.clone(), op=dist.ReduceOp.SUM, group=inside, async_op=True
        )
        work.wait()
        dist.all_reduce(c, dist.ReduceOp.SUM, between, async_op=True).wait()
        whole = torch.zeros(tensor.shape, dtype=tensor.dtype)
        dist.all_gather_into_tensor(whole, c, inside)
        return whole


two_level_all_reduce = _Two()


# == numpy: most of the arithmetic in NumPy

# %% pi
import numpy as np


def estimate_pi(points):
    p = points.numpy().astype(np.float64)
    c = np.array([np.count_nonzero((p**2).sum(axis=1) <= 1.0), len(p)], dtype=np.int64)
    dist.all_reduce(torch.from_numpy(c))
    return float(np.float64(4) * c[0] / c[1])


# %% scatter
import numpy as np


def ring_reduce_scatter(tensor):
    r, n = dist.get_rank(), dist.get_world_size()
    own = np.array_split(tensor.numpy(), n)
    part = own[(r - 1) % n].copy()
    for s in range(n - 1):
        arrives = np.empty_like(own[(r - s - 2) % n])
        exchange(torch.from_numpy(part), (r + 1) % n, torch.from_numpy(arrives), (r - 1) % n)
        part = arrives + own[(r - s - 2) % n]
    return torch.from_numpy(part)


# %% gather
import numpy as np


def ring_all_gather(chunk, size):
    r, n = dist.get_rank(), dist.get_world_size()
    lengths = [size // n + (k < size % n) for k in range(n)]
    got = {r: chunk.numpy().copy()}
    for s in range(n - 1):
        into = np.empty(lengths[(r - s - 1) % n], dtype=chunk.numpy().dtype)
        exchange(torch.from_numpy(got[(r - s) % n]), (r + 1) % n, torch.from_numpy(into), (r - 1) % n)
        got[(r - s - 1) % n] = into
    return torch.from_numpy(np.concatenate([got[k] for k in range(n)]))


# %% fit
import numpy as np


def fit_link(timings):
    M, y = [], []
    for a, b, n, s in timings:
        k = 2 * (n - 1) if a == "ring" else 2 * int(np.ceil(np.log2(n)))
        M.append([k / s, k * b / (n if a == "ring" else 1) / s])
        y.append(1.0)
    M, y = np.array(M), np.array(y)
    sol, *_ = np.linalg.lstsq(M / M.max(0), y, rcond=None)
    return tuple(sol / M.max(0))


# %% crossover
import numpy as np


def crossover_bytes(ranks, alpha, beta):
    L = np.ceil(np.log2(ranks))
    saved = (ranks - 1) - L
    return None if saved <= 0 else np.float64(saved * alpha / (beta * (L - (ranks - 1) / ranks)))


# %% cost
import numpy as np


def predicted_seconds(algorithm, size, ranks, alpha, beta):
    x = np.array([2 * (ranks - 1), 2 * np.ceil(np.log2(ranks))])
    return (x * (alpha + beta * size / np.array([ranks, 1.0])))[["ring", "tree"].index(algorithm)]


# == recursion: recursive trees by halves, the far half first


# %% broadcast
def tree_broadcast(tensor, root):
    r, n = dist.get_rank(), dist.get_world_size()
    buf = tensor.contiguous()
    me = (r - root) % n

    def half(lo, hi):  # lo has the tensor
        if hi - lo < 2:
            return
        span = 1 << ((hi - lo - 1).bit_length() - 1)
        mid = lo + span
        if me == lo:
            dist.send(buf, (mid + root) % n)
        if me == mid:
            dist.recv(buf, (lo + root) % n)
        half(lo, mid) if me < mid else half(mid, hi)

    half(0, n)
    if buf.data_ptr() != tensor.data_ptr():
        tensor.copy_(buf)


# %% reduce
def tree_reduce(tensor):
    me, n = dist.get_rank(), dist.get_world_size()

    def total(lo, hi):
        if hi - lo == 1:
            return tensor.clone()
        mid = (lo + hi + 1) // 2
        if me >= mid:
            t = total(mid, hi)
            if me == mid:
                dist.send(t, lo)
            return None if me != mid else t
        t = total(lo, mid)
        if me == lo:
            x = torch.empty_like(t)
            dist.recv(x, mid)
            t = t + x
        return t

    return total(0, n)


# %% gather
def ring_all_gather(chunk, size):
    r, n = dist.get_rank(), dist.get_world_size()

    def go(last, s, found):
        if s == n:
            return found
        length = size // n + ((r - s) % n < size % n)
        new = torch.empty(length, dtype=chunk.dtype)
        exchange(last, (r + 1) % n, new, (r - 1) % n)
        return go(new, s + 1, found | {(r - s) % n: new})

    d = go(chunk.contiguous(), 1, {r: chunk})
    return torch.cat([d[k] for k in range(n)])


# %% everyone
def everyone_to_everyone(parts, sizes):
    r, n = dist.get_rank(), dist.get_world_size()

    def go(d):
        if d == n:
            return {r: parts[r].clone()}
        got = torch.empty(sizes[(r + d) % n], dtype=parts[0].dtype)
        exchange(parts[(r - d) % n].contiguous(), (r - d) % n, got, (r + d) % n)
        return {(r + d) % n: got, **go(d + 1)}

    return [v for _, v in sorted(go(1).items(), key=lambda kv: kv[0])]


# == batches: batch_isend_irecv throughout, a padded ring to the left


# %% exchange
def exchange(outgoing, to, incoming, source):
    ops = [dist.P2POp(dist.irecv, incoming, source), dist.P2POp(dist.isend, outgoing, to)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()


# %% everyone
def everyone_to_everyone(parts, sizes):
    r, n = dist.get_rank(), dist.get_world_size()
    out = [torch.empty(k, dtype=parts[0].dtype) for k in sizes]
    out[r].copy_(parts[r])
    ops = []
    for d in range(1, n):
        a, b = (r + d) % n, (r - d) % n
        if parts[a].numel():
            ops.append(dist.P2POp(dist.isend, parts[a], a))
        if sizes[b]:
            ops.append(dist.P2POp(dist.irecv, out[b], b))
    for w in dist.batch_isend_irecv(ops) if ops else ():
        w.wait()
    return out


# %% ring
def ring_all_reduce(tensor):
    r, n = dist.get_rank(), dist.get_world_size()
    if n == 1:
        return tensor.clone()
    size = tensor.numel()
    step = -(-size // n)
    f = torch.zeros(step * n, dtype=tensor.dtype)
    f[:size] = tensor.reshape(-1)
    ch = list(f.view(n, step))
    left, right = (r - 1) % n, (r + 1) % n

    def swap(out, into):
        for w in dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, out, left), dist.P2POp(dist.irecv, into, right)]
        ):
            w.wait()

    for s in range(n - 1):
        x = torch.empty(step, dtype=tensor.dtype)
        swap(ch[(r + s) % n], x)
        ch[(r + s + 1) % n] += x
    for s in range(n - 1):
        swap(ch[(r + s - 1) % n], ch[(r + s) % n])
    return f[:size].reshape(tensor.shape).clone()


# %% scatter
def ring_reduce_scatter(tensor):
    r, n = dist.get_rank(), dist.get_world_size()
    own = [c.clone() for c in tensor.tensor_split(n)]
    for s in range(n - 1):
        new = torch.empty_like(own[(r - s - 2) % n])
        for w in dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, own[(r - s - 1) % n], (r + 1) % n),
                dist.P2POp(dist.irecv, new, (r - 1) % n),
            ]
        ):
            w.wait()
        own[(r - s - 2) % n] += new
    return own[r]


# == threads_that_are_joined: a joined thread, partners by exclusive or, another tree


# %% exchange
def exchange(outgoing, to, incoming, source):
    from threading import Thread

    t = Thread(target=dist.send, args=(outgoing, to))
    t.start()
    dist.recv(incoming, source)
    t.join()


# %% everyone
def everyone_to_everyone(parts, sizes):
    r, n = dist.get_rank(), dist.get_world_size()
    out = [parts[0].new_empty(k) for k in sizes]
    out[r] = parts[r].clone()
    for d in range(n if n & (n - 1) else 1, 2 * n if n & (n - 1) else n):
        if n & (n - 1):
            a = b = (d - r) % n  # partners sum to d: some ranks pause
        else:
            a = b = r ^ d
        if a == r:
            continue
        w = dist.isend(parts[a], a)
        dist.recv(out[b], b)
        w.wait()
    return out


# %% broadcast
def tree_broadcast(tensor, root):
    r, n = dist.get_rank(), dist.get_world_size()
    v = (r - root) % n
    buf = tensor.contiguous()
    k = 0
    top = (n - 1).bit_length()
    low = (v & -v).bit_length() - 1 if v else top
    if v:
        dist.recv(buf, (v - (1 << low) + root) % n)
    pending = [dist.isend(buf, (v + (1 << j) + root) % n) for j in range(low - 1, -1, -1) if v + (1 << j) < n]
    for w in pending:
        w.wait()
    if buf is not tensor:
        tensor.copy_(buf)


# %% reduce
def tree_reduce(tensor):
    r, active = dist.get_rank(), dist.get_world_size()
    t = tensor.clone()
    while active > 1:  # the upper half sends to the lower half
        half = (active + 1) // 2
        if r >= half:
            dist.send(t, r - half)
            return None
        if r + half < active:
            x = torch.empty_like(t)
            dist.recv(x, r + half)
            t += x
        active = half
    return t


# %% levels
def two_level_all_reduce(tensor, inside, between):
    k = dist.get_world_size(inside)
    c = torch.empty_like(tensor.view(k, -1)[0])
    dist.reduce_scatter(c, list(tensor.clone().chunk(k)), group=inside)
    dist.all_reduce(c, group=between)
    parts = [torch.empty_like(c) for _ in range(k)]
    dist.all_gather(parts, c, group=inside)
    return torch.cat(parts)


# == ordered_and_numeric: blocking calls in an order, simulated rounds, fractions, bisection


# %% exchange
def exchange(outgoing, to, incoming, source):
    if dist.get_rank() < to:
        dist.send(outgoing, to)
        dist.recv(incoming, source)
    else:
        dist.recv(incoming, source)
        dist.send(outgoing, to)


# %% cost
def predicted_seconds(algorithm, size, ranks, alpha, beta):
    t = 0.0
    if algorithm == "tree":
        have = {0}
        while len(have) < ranks:
            have |= {h + len(have) for h in have if h + len(have) < ranks}
            t += alpha + beta * size
        return 2 * t
    for phase in range(2):
        for step in range(ranks - 1):
            t += alpha + beta * size / ranks
    return t


# %% fit
from fractions import Fraction as F


def fit_link(timings):
    a = b = c = p = q = F(0)
    for name, size, n, s in timings:
        s = F(s)
        k = F(2 * (n - 1)) if name == "ring" else F(2 * (n - 1).bit_length())
        y = k * size / (n if name == "ring" else 1)
        a += (k / s) ** 2
        b += k * y / s**2
        c += (y / s) ** 2
        p += k / s
        q += y / s
    det = a * c - b * b
    return float((p * c - q * b) / det), float((a * q - b * p) / det)


# %% crossover
def crossover_bytes(ranks, alpha, beta):
    cost = lambda name, size: predicted_seconds(name, size, ranks, alpha, beta)
    if cost("tree", 0) >= cost("ring", 0):
        return None
    lo, hi = 0.0, 1.0
    while cost("tree", hi) < cost("ring", hi):
        hi *= 2
    for _ in range(200):
        mid = (lo + hi) / 2
        lo, hi = (mid, hi) if cost("tree", mid) < cost("ring", mid) else (lo, mid)
    return (lo + hi) / 2


# %% pi
def estimate_pi(points):
    z = torch.complex(
        (torch.linalg.vector_norm(points.double(), dim=1) <= 1).sum().double(),
        torch.tensor(float(len(points)), dtype=torch.float64),
    ).reshape(1)
    v = torch.view_as_real(z).reshape(-1).contiguous()
    dist.all_reduce(v)
    return (4 * v[0] / v[1]).item()


# %% quiz
quiz = {"q1": "B", "q2": " c ", "q3": "a", "q4": "D", "q5": "a"}


# == generators_and_partials: generators, partial, decorators, match, tags, whole numbers


# %% pi
def estimate_pi(points: torch.Tensor) -> float:
    inside = sum(1 for x, y in points.tolist() if x * x + y * y <= 1)
    counts = torch.tensor([inside, len(points)], dtype=torch.int32)
    dist.all_reduce(counts, op=dist.ReduceOp.SUM)
    a, b = map(int, counts)
    return 4 * a / b


# %% exchange
import functools


def _waits(f):
    @functools.wraps(f)
    def g(*a, **k):
        for w in list(f(*a, **k)):
            w.wait()

    return g


@_waits
def exchange(outgoing, to, incoming, source):
    yield dist.isend(tensor=outgoing, dst=to, tag=7)
    yield dist.irecv(tensor=incoming, src=source, tag=7)


# %% scatter
def _steps(tensor):
    r, n = dist.get_rank(), dist.get_world_size()
    yield tensor.tensor_split(n)[(r - 1) % n].detach().clone()
    for k in range(2, n + 1):
        yield tensor.tensor_split(n)[(r - k) % n]


def ring_reduce_scatter(tensor):
    r, n = dist.get_rank(), dist.get_world_size()
    gen = _steps(tensor)
    out = next(gen)
    for own in gen:
        into = own.new_empty(own.shape)
        wait = dist.isend(out, (r + 1) % n)
        dist.recv(into, src=(r - 1) % n)
        wait.wait()
        out = torch.add(into, own)
    return out


# %% broadcast
from functools import partial


def tree_broadcast(tensor, root):
    n = dist.get_world_size()
    me = dist.get_rank()
    real = partial(lambda v, root, n: (v + root) % n, root=root, n=n)
    have, todo = [0], list(range(1, n))
    flat = tensor.contiguous().clone()
    while todo:
        now = []
        for h in have:
            if not todo:
                break
            t = todo.pop()
            now.append(t)
            match me:
                case x if x == real(h):
                    dist.send(flat, real(t))
                case x if x == real(t):
                    dist.recv(flat, real(h))
        have += now
    tensor[...] = flat


# %% everyone
def everyone_to_everyone(parts, sizes):
    r, n = dist.get_rank(), dist.get_world_size()
    got = [None] * n
    got[r] = parts[r]
    works = []
    for d in range(1, n):
        got[(r - d) % n] = torch.empty((sizes[(r - d) % n],), dtype=parts[r].dtype)
        works += [dist.irecv(got[(r - d) % n], (r - d) % n), dist.isend(parts[(r + d) % n], (r + d) % n)]
    [w.wait() for w in works]
    return tuple(got)


# %% quiz
quiz = {f"q{i}": a for i, a in enumerate("bcada", 1)}
