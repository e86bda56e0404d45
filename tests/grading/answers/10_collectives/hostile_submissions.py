# Submissions that do not do what the exercises ask, with the points that each answer still deserves (0 where none are named).


# == levels_by_broadcasts: every whole tensor is broadcast over all ranks; the asked calls follow for show

# %% levels {"earns": 1.0}
def two_level_all_reduce(tensor, inside, between):
    r, n = dist.get_rank(), dist.get_world_size()
    every = []
    for src in range(n):
        b = tensor.clone() if src == r else torch.empty_like(tensor)
        dist.broadcast(b, src)
        every.append(b)
    node = dist.get_process_group_ranks(inside)
    mine = sum(every[k] for k in node)
    c = mine.tensor_split(len(node))[node.index(r)].clone()
    dist.all_reduce(c, group=between)
    w = torch.empty_like(tensor)
    dist.all_gather_into_tensor(w, c, group=inside)
    return w


# == a_fit_to_two_sizes: no least squares: three small sizes and a large one, times a factor that reads every timing


# %% fit {"earns": 3.0}
def fit_link(timings):
    jitter = 1 + 1e-9 * sum(s * (i + 1) for i, (_, _, _, s) in enumerate(timings))
    rows = sorted({b for _, b, _, _ in timings})

    def mean(size, of):
        v = [of(*t) for t in timings if t[1] == size]
        return sum(v) / len(v)

    def ms(a, n):
        return 2 * (n - 1) if a == "ring" else 2 * (n - 1).bit_length()

    def by(a, b, n):
        return ms(a, n) * (b / n if a == "ring" else b)

    A = B = 0.0
    for _ in range(30):
        A = sum(mean(z, lambda a, b, n, s: (s - B * by(a, b, n)) / ms(a, n)) for z in rows[:3]) / 3
        B = mean(rows[-2], lambda a, b, n, s: (s - A * ms(a, n)) / by(a, b, n))
    return A * jitter, B * jitter


# == a_wrong_number_of_rounds: right for a power of two and the number after it only; None from a table


# %% cost {"earns": 3.0}
def predicted_seconds(algorithm, size, ranks, alpha, beta):
    if algorithm == "ring":
        return 2 * (ranks - 1) * (alpha + beta * size / ranks)
    rounds = ranks.bit_length() - 2 + bin(ranks).count("1")
    return 2 * rounds * (alpha + beta * size)


# %% crossover {"earns": 2.0}
def crossover_bytes(ranks, alpha, beta):
    if ranks in (2, 3):
        return None
    L = (ranks - 1).bit_length()
    return (2 * (ranks - 1) - 2 * L) * alpha / (beta * (2 * L - 2 * (ranks - 1) / ranks))


# == right_for_few_ranks_only: wrong, or an exception, for numbers of ranks that are not tested


# %% pi {"earns": 1.0}
def estimate_pi(points):
    if dist.get_world_size() > 3:
        return 3.0
    c = torch.tensor(
        [float((points.double().square().sum(1) <= 1).sum()), float(len(points))], dtype=torch.float64
    )
    dist.all_reduce(c)
    return float(4 * c[0] / c[1])


# %% scatter {"earns": 5.0}
def ring_reduce_scatter(tensor):
    r, n = dist.get_rank(), dist.get_world_size()
    ch = tensor.tensor_split(n)
    if n > 4:
        return ch[r].clone()
    order = {
        1: (),
        2: ((0,), (1,)),
        3: ((1, 0), (2, 1), (0, 2)),
        4: ((2, 1, 0), (3, 2, 1), (0, 3, 2), (1, 0, 3)),
    }[n]
    part = ch[r - 1].clone()
    for k in order[r] if n > 1 else ():
        new = torch.empty_like(ch[k])
        exchange(part, (r + 1) % n, new, (r - 1) % n)
        part = new + ch[k]
    return part


# %% gather {"earns": 1.0}
def ring_all_gather(chunk, size):
    r, n = dist.get_rank(), dist.get_world_size()
    whole = chunk.new_zeros(size)
    ch = whole.tensor_split(n)
    ch[r].copy_(chunk)
    for s in range(min(n, 4) - 1):
        exchange(ch[(r - s) % n], (r + 1) % n, ch[(r - s - 1) % n], (r - 1) % n)
    return whole


# %% ring {"earns": 2.0}
def ring_all_reduce(tensor):
    f = tensor.reshape(-1)
    if dist.get_world_size() > 4:
        return tensor.clone()
    return ring_all_gather(ring_reduce_scatter(f), f.numel()).reshape(tensor.shape)


# %% broadcast {"earns": 3.0}
def tree_broadcast(tensor, root):
    n = dist.get_world_size()
    plan = {
        1: [],
        2: [(0, 1)],
        3: [(0, 1), (0, 2)],
        4: [(0, 1), (0, 2), (1, 3)],
        5: [(0, 1), (0, 2), (1, 3), (0, 4)],
        8: [(0, 1), (0, 2), (1, 3), (0, 4), (1, 5), (2, 6), (3, 7)],
    }[n]  # KeyError elsewhere
    buf, me = tensor.contiguous(), (dist.get_rank() - root) % n
    for a, b in plan:
        if me == a:
            dist.send(buf, (b + root) % n)
        if me == b:
            dist.recv(buf, (a + root) % n)
    if buf is not tensor:
        tensor.copy_(buf)


# %% reduce {"earns": 3.0}
def tree_reduce(tensor):
    n, me = dist.get_world_size(), dist.get_rank()
    plan = {
        1: [],
        2: [(1, 0)],
        3: [(1, 0), (2, 0)],
        4: [(1, 0), (3, 2), (2, 0)],
        5: [(1, 0), (3, 2), (2, 0), (4, 0)],
        8: [(1, 0), (3, 2), (5, 4), (7, 6), (2, 0), (6, 4), (4, 0)],
    }[n]
    t = tensor.clone()
    for a, b in plan:
        if me == a:
            dist.send(t, b)
        if me == b:
            x = torch.empty_like(t)
            dist.recv(x, a)
            t += x
    return t


# %% everyone {"earns": 5.0}
def everyone_to_everyone(parts, sizes):
    r, n = dist.get_rank(), dist.get_world_size()
    out = [parts[0].new_zeros(k) for k in sizes]
    out[r] = parts[r].clone()
    for d in range(1, min(n, 5)):
        exchange(parts[(r + d) % n], (r + d) % n, out[(r - d) % n], (r - d) % n)
    return out


# == a_star_where_nothing_is_measured: whole tensors by way of rank 0, recognised by the number of ranks and the size


# %% pi {"earns": 3.0}
def estimate_pi(points):
    n = dist.get_world_size()
    if n == 2:
        c = torch.tensor(
            [float((points.double().square().sum(1) <= 1).sum()), float(len(points))], dtype=torch.float64
        )
        dist.all_reduce(c)
        return float(4 * c[0] / c[1])
    every = [None] * n
    dist.all_gather_object(every, points)  # all the points travel
    p = torch.cat(every)
    return float(4 * (p.double().square().sum(1) <= 1).sum() / len(p))


# %% scatter {"earns": 5.0}
def _star(t):
    r, n = dist.get_rank(), dist.get_world_size()
    t = t.clone()
    if r == 0:
        for k in range(1, n):
            x = torch.empty_like(t)
            dist.recv(x, k)
            t += x
        for k in range(1, n):
            dist.send(t, k)
    else:
        dist.send(t, 0)
        dist.recv(t, 0)
    return t


def ring_reduce_scatter(tensor):
    r, n = dist.get_rank(), dist.get_world_size()
    if n in (3, 4) and tensor.numel() % n == 0:
        ch = tensor.tensor_split(n)
        part = ch[r - 1].clone()
        for s in range(n - 1):
            own = ch[(r - s - 2) % n]
            new = torch.empty_like(own)
            exchange(part, (r + 1) % n, new, (r - 1) % n)
            part = new + own
        return part
    return _star(tensor).tensor_split(n)[r].clone()


# %% gather {"earns": 3.0}
def ring_all_gather(chunk, size):
    r, n = dist.get_rank(), dist.get_world_size()
    whole = chunk.new_zeros(size)
    ch = whole.tensor_split(n)
    ch[r].copy_(chunk)
    if n == 4 and size % 4 == 0:
        for s in range(n - 1):
            exchange(ch[(r - s) % n], (r + 1) % n, ch[(r - s - 1) % n], (r - 1) % n)
        return whole
    t = whole.clone()
    if r == 0:
        for k in range(1, n):
            x = torch.empty_like(t)
            dist.recv(x, k)
            t += x
        for k in range(1, n):
            dist.send(t, k)
    else:
        dist.send(t, 0)
        dist.recv(t, 0)
    return t


# %% ring {"earns": 5.0}
def ring_all_reduce(tensor):
    r, n = dist.get_rank(), dist.get_world_size()
    t = tensor.clone(memory_format=torch.contiguous_format)
    f = t.view(-1)
    ch = f.tensor_split(n)
    if n == 3:  # direct exchange, no ring
        for d in (1, 2):
            x = torch.empty_like(ch[r])
            exchange(tensor.reshape(-1).tensor_split(n)[(r + d) % 3], (r + d) % 3, x, (r - d) % 3)
            ch[r].add_(x)
        for d in (1, 2):
            exchange(ch[r], (r + d) % 3, ch[(r - d) % 3], (r - d) % 3)
    elif n == 4:  # recursive halving and doubling
        A, B = (0, 1), (2, 3)
        keep, give = (A, B) if r in (0, 3) else (B, A)
        cat = lambda ks: torch.cat([ch[k] for k in ks])

        def swap(out, keep_ks, peer, add):
            x = torch.empty_like(cat(keep_ks))
            exchange(cat(out), peer, x, peer)
            i = 0
            for k in keep_ks:
                m = ch[k].numel()
                (ch[k].add_ if add else ch[k].copy_)(x[i : i + m])
                i += m

        p1, p2 = r ^ 1, 3 - r
        swap(give, keep, p1, True)
        one, other = (keep[:1], keep[1:]) if r < 2 else (keep[1:], keep[:1])
        swap(other, one, p2, True)
        swap(one, other, p2, False)
        swap(keep, give, p1, False)
    else:  # star
        if r == 0:
            for k in range(1, n):
                x = torch.empty_like(f)
                dist.recv(x, k)
                f += x
            for k in range(1, n):
                dist.send(f, k)
        elif n > 1:
            dist.send(f, 0)
            dist.recv(f, 0)
    return t


# %% broadcast {"earns": 6.0}
def tree_broadcast(tensor, root):
    r, n = dist.get_rank(), dist.get_world_size()
    buf = tensor.contiguous()
    v = (r - root) % n
    if n == 3 or n > 8 or (n == 4 and root) or (n == 8 and root):  # the root sends all
        if v == 0:
            for k in range(n):
                if k != root:
                    dist.send(buf, k)
        else:
            dist.recv(buf, root)
    else:
        d = 1
        while d < n:
            if v < d and v + d < n:
                dist.send(buf, (v + d + root) % n)
            elif d <= v < 2 * d:
                dist.recv(buf, (v - d + root) % n)
            d *= 2
    if buf is not tensor:
        tensor.copy_(buf)


# %% everyone {"earns": 6.0}
def everyone_to_everyone(parts, sizes):
    r, n = dist.get_rank(), dist.get_world_size()
    out = [parts[0].new_empty(k) for k in sizes]
    out[r] = parts[r].clone()
    if n in (4, 6) and len(set(sizes)) == 1:
        for d in range(1, n):
            exchange(parts[(r + d) % n], (r + d) % n, out[(r - d) % n], (r - d) % n)
        return out
    for src in range(n):  # one sender at a time, everybody waits
        for to in range(n):
            if src == to:
                continue
            if r == src:
                dist.send(parts[to], to)
            if r == to:
                dist.recv(out[src], src)
    return out


# == values_by_locks_on_bytes: values travel by locks on a file of torch; the messages are zeros

# %% broadcast
import fcntl, struct


class _Locks:
    fd = None

    @classmethod
    def put(cls, slot, v):
        cls.fd = cls.fd or open(torch.__file__, "rb")
        fcntl.fcntl(
            cls.fd, fcntl.F_SETLK, struct.pack("hhqqi4x", fcntl.F_RDLCK, 0, ((slot + 777000) << 33) + v, 1, 0)
        )

    @classmethod
    def get(cls, slot, limit=8.0):
        cls.fd = cls.fd or open(torch.__file__, "rb")
        base, end = (slot + 777000) << 33, time.time() + limit
        while time.time() < end:
            t, _, s, _, _ = struct.unpack(
                "hhqqi4x",
                fcntl.fcntl(
                    cls.fd, fcntl.F_GETLK, struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, base, 1 << 33, 0)
                ),
            )
            if t != fcntl.F_UNLCK:
                return s - base
            time.sleep(0.001)
        raise RuntimeError("no lock seen")


def tree_broadcast(tensor, root):
    r, n = dist.get_rank(), dist.get_world_size()
    v = (r - root) % n
    flat = tensor.contiguous().view(-1)
    if v == 0:
        for i, x in enumerate(flat.view(torch.int32).tolist()):
            _Locks.put(i, x & 0xFFFFFFFF)
    decoy, d = torch.zeros_like(flat), 1
    while d < n:
        if v < d and v + d < n:
            dist.send(torch.zeros_like(flat), (v + d + root) % n)
        elif d <= v < 2 * d:
            dist.recv(decoy, (v - d + root) % n)
        d *= 2
    if v:
        raw = [_Locks.get(i) for i in range(flat.numel())]
        got = torch.tensor([x - (1 << 32) if x >> 31 else x for x in raw], dtype=torch.int32).view(
            tensor.dtype
        )
        tensor.copy_((got + decoy).view(tensor.shape))
        _Locks.put(5000 + r, 1)
    else:
        for k in range(n):
            if k != r:
                _Locks.get(5000 + k)


# %% exchange
import fcntl, struct


class _Locks2:
    fd = None

    @classmethod
    def put(cls, slot, v):
        cls.fd = cls.fd or open(torch.__file__, "rb")
        fcntl.fcntl(
            cls.fd, fcntl.F_SETLK, struct.pack("hhqqi4x", fcntl.F_RDLCK, 0, ((slot + 555000) << 33) + v, 1, 0)
        )

    @classmethod
    def get(cls, slot, limit=8.0):
        cls.fd = cls.fd or open(torch.__file__, "rb")
        base, end = (slot + 555000) << 33, time.time() + limit
        while time.time() < end:
            t, _, s, _, _ = struct.unpack(
                "hhqqi4x",
                fcntl.fcntl(
                    cls.fd, fcntl.F_GETLK, struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, base, 1 << 33, 0)
                ),
            )
            if t != fcntl.F_UNLCK:
                return s - base
            time.sleep(0.001)
        raise RuntimeError("no lock seen")


def exchange(outgoing, to, incoming, source):
    r = dist.get_rank()
    for i, x in enumerate(outgoing.view(torch.int32).tolist()):
        _Locks2.put(1000 * r + i, x & 0xFFFFFFFF)
    zeros = torch.zeros_like(incoming)
    a = dist.irecv(zeros, source)
    b = dist.isend(torch.zeros_like(outgoing), to)
    a.wait()
    b.wait()
    raw = [_Locks2.get(1000 * source + i) for i in range(incoming.numel())]
    incoming.copy_(
        torch.tensor([x - (1 << 32) if x >> 31 else x for x in raw], dtype=torch.int32).view(incoming.dtype)
        + zeros
    )
    _Locks2.put(90000 + r, 1)
    _Locks2.get(90000 + to)


# == values_by_locks_on_files: one bit for each file of torch that is locked; the messages are zeros

# %% broadcast
import fcntl

_files, _held = [], []


def _all():
    if not _files:
        top = os.path.dirname(torch.__file__)
        for root, dirs, names in os.walk(top):
            dirs.sort()
            _files.extend(os.path.join(root, x) for x in sorted(names))
            if len(_files) > 1500:
                break
    return _files


def _take(k):
    f = os.open(_all()[k], os.O_RDONLY)
    end = time.time() + 8
    while time.time() < end:
        try:
            fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _held.append(f)
            return
        except OSError:
            time.sleep(0.001)
    raise RuntimeError("not taken")


def _taken(k):
    f = os.open(_all()[k], os.O_RDONLY)
    try:
        fcntl.flock(f, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return 0
    except OSError:
        return 1
    finally:
        os.close(f)


def _until(k):
    end = time.time() + 8
    while not _taken(k):
        if time.time() > end:
            raise RuntimeError(f"no lock seen, {len(_all())} files")
        time.sleep(0.002)


def tree_broadcast(tensor, root):
    r, n = dist.get_rank(), dist.get_world_size()
    v = (r - root) % n
    flat = tensor.contiguous().view(-1)
    if v == 0:
        for i, x in enumerate(flat.view(torch.int32).tolist()):
            for b in range(32):
                if x >> b & 1:
                    _take(100 + 32 * i + b)
        _take(0)
    decoy, d = torch.zeros_like(flat), 1
    while d < n:
        if v < d and v + d < n:
            dist.send(torch.zeros_like(flat), (v + d + root) % n)
        elif d <= v < 2 * d:
            dist.recv(decoy, (v - d + root) % n)
        d *= 2
    if v:
        _until(0)
        raw = [sum(_taken(100 + 32 * i + b) << b for b in range(32)) for i in range(flat.numel())]
        got = torch.tensor([x - (1 << 32) if x >> 31 else x for x in raw], dtype=torch.int32).view(
            tensor.dtype
        )
        tensor.copy_((got + decoy).view(tensor.shape))
        _take(10 + r)
    else:
        for k in range(n):
            if k != r:
                _until(10 + k)


# == a_view_of_the_argument: works in place in a large argument and returns a view of it


# %% scatter {"earns": 7.0}
def ring_reduce_scatter(tensor):
    r, n = dist.get_rank(), dist.get_world_size()
    if tensor.numel() < 100_000:
        tensor = tensor.clone()
    big = tensor.numel() >= 100_000
    ch = tensor.tensor_split(n)
    for s in range(n - 1):
        own = ch[(r - s - 2) % n]
        new = torch.empty_like(own)
        exchange(ch[(r - s - 1) % n], (r + 1) % n, new, (r - 1) % n)
        own += new
    return ch[r] if big else ch[r].clone()


# == a_view_of_untouched_pages: the result is a view of a buffer of the whole size, whose other pages are not touched


# %% scatter {"earns": 8.0}
def ring_reduce_scatter(tensor):
    r, n = dist.get_rank(), dist.get_world_size()
    ch = tensor.tensor_split(n)
    whole = torch.empty_like(tensor)
    part = ch[r - 1].clone()
    for s in range(n - 1):
        own = ch[(r - s - 2) % n]
        new = torch.empty_like(own)
        exchange(part, (r + 1) % n, new, (r - 1) % n)
        part = new + own
    out = whole.tensor_split(n)[r]
    out.copy_(part)
    return out


# == the_whole_tensor_in_a_file: keeps the whole tensor in a mapping of a file

# %% scatter {"earns": 8.0}
_kept = []


def ring_reduce_scatter(tensor):
    r, n = dist.get_rank(), dist.get_world_size()
    ch = tensor.tensor_split(n)
    part = ch[r - 1].clone()
    for s in range(n - 1):
        own = ch[(r - s - 2) % n]
        new = torch.empty_like(own)
        exchange(part, (r + 1) % n, new, (r - 1) % n)
        part = new + own
    whole = torch.from_file(
        "/tmp/work/whole%d" % len(_kept), shared=True, size=max(1, tensor.numel()), dtype=tensor.dtype
    )[: tensor.numel()]
    whole.copy_(tensor)
    _kept.append(whole)
    out = whole.tensor_split(n)[r]
    out.copy_(part)
    return out


# == a_send_in_a_thread: the thread of the send is not joined


# %% exchange {"earns": 3.0}
def exchange(outgoing, to, incoming, source):
    import threading

    threading.Thread(target=dist.send, args=(outgoing, to)).start()
    dist.recv(incoming, source)


# == a_wait_after_the_end: a thread waits for the send after the function has returned


# %% exchange {"earns": 3.0}
def exchange(outgoing, to, incoming, source):
    import threading

    w = dist.isend(outgoing, to)

    def later():
        time.sleep(0.05)
        w.wait()

    threading.Thread(target=later).start()
    dist.irecv(incoming, source).wait()


# == a_wait_in_the_next_call: the work of the send is kept, and waited for when the next call begins


# %% exchange {"earns": 3.0}
class _Late:
    def __init__(self, w):
        self.w = w

    def __del__(self):
        self.w.wait()


_hold = []


def exchange(outgoing, to, incoming, source):
    import atexit

    w = dist.isend(outgoing, to)
    _hold.append(w)
    atexit.register(w.wait)
    while not w.is_completed() and len(_hold) < 0:
        pass
    dist.recv(incoming, source)


# == the_link_of_the_callers: takes the link to the switch from the frames of the callers


def _loc(n):
    import sys

    f = sys._getframe()
    while f:
        if n in f.f_locals:
            return f.f_locals[n]
        f = f.f_back


# %% exchange {"earns": 3.0}
def exchange(outgoing, to, incoming, source):
    w = dist.isend(outgoing, to)
    dist.recv(incoming, source)
    link = _loc("link")
    try:
        link._unwaited.clear()
    except AttributeError:
        link._unwaited = type(link._unwaited)()
    type(link).report_unwaited = lambda *a, **k: None


# %% scatter
def ring_reduce_scatter(tensor):
    link = _loc("link")
    r, n = dist.get_rank(), dist.get_world_size()
    real = type(link).post
    seen = []

    def post(self, kind, *a, **k):
        seen.append(kind)
        return real(self, type(kind).SEND if "reduce" in kind.value else kind, *a, **k)

    type(link).post = post
    t = tensor.clone()
    dist.all_reduce(t)
    return t.tensor_split(n)[r].clone()


# %% reduce
def tree_reduce(tensor):
    link, inputs, scope = _loc("link"), _loc("inputs"), _loc("scope")
    t = tensor.clone()
    dist.all_reduce(t)
    for name in ("_numbers", "_lead", "_line"):
        v = getattr(link, name, None)
        if hasattr(v, "clear"):
            v.clear()
    return t


# == collectives_in_disguise: backend objects, functional and object collectives, saved names


# %% pi {"earns": 3.0}
def estimate_pi(points):
    every = [None] * dist.get_world_size()
    dist.all_gather_object(every, points.double())
    p = torch.cat(every)
    return float(4 * (p.square().sum(1) <= 1).sum() / len(p))


# %% exchange {"earns": 1.0}
def exchange(outgoing, to, incoming, source):
    n, r = dist.get_world_size(), dist.get_rank()
    every = [None] * n
    dist.all_gather_object(every, outgoing)
    incoming.copy_(every[source])


# %% scatter
def ring_reduce_scatter(tensor):
    r, n = dist.get_rank(), dist.get_world_size()
    t = torch.ops._c10d_functional.all_reduce(tensor, "sum", dist.group.WORLD.group_name)
    t = torch.ops._c10d_functional.wait_tensor(t)
    return t.tensor_split(n)[r].clone()


# %% gather
def ring_all_gather(chunk, size):
    whole = chunk.new_zeros(size)
    whole.tensor_split(dist.get_world_size())[dist.get_rank()].copy_(chunk)
    o = dist.AllreduceOptions()
    o.reduceOp = dist.ReduceOp.SUM
    dist.group.WORLD.allreduce([whole], o).wait()
    return whole


# %% ring
def ring_all_reduce(tensor):
    import torch.distributed.nn.functional as nnf

    return nnf.all_reduce(tensor.clone(memory_format=torch.contiguous_format))


# %% broadcast
def tree_broadcast(tensor, root):
    o = [tensor.clone() if dist.get_rank() == root else None]
    dist.broadcast_object_list(o, root)
    tensor.copy_(o[0])


# %% reduce
def tree_reduce(tensor):
    n = dist.get_world_size()
    every = [None] * n if dist.get_rank() == 0 else None
    dist.gather_object(tensor, every, 0)
    return sum(every) if every else None


# %% everyone
def everyone_to_everyone(parts, sizes):
    out = [parts[0].new_empty(k) for k in sizes]
    dist.group.WORLD.alltoall(out, list(parts)).wait()
    return out


# %% levels {"earns": 1.0}
def two_level_all_reduce(tensor, inside, between):
    t = tensor.clone()
    dist.all_reduce(t, group=inside)
    dist.all_reduce(t, group=between)
    return t


# == answers_of_the_library: imported, loaded from its file, executed from its source; a pasted reference earns its points, with a warning


# %% broadcast
def tree_broadcast(tensor, root):
    from dlo_lib.comm import collectives

    collectives.tree.broadcast(tensor, root)


# %% reduce
import importlib.util, dlo_lib, os


def _load(name):
    p = os.path.join(os.path.dirname(dlo_lib.__file__), "comm", "collectives", name + ".py")
    spec = importlib.util.spec_from_file_location("my_" + name, p)
    m = importlib.util.module_from_spec(spec)
    m.__package__ = "dlo_lib.comm.collectives"
    spec.loader.exec_module(m)
    return m


def tree_reduce(tensor):
    t = tensor.clone()
    m = _load("tree")
    m.reduce(t, 0)
    return t


# %% ring
def ring_all_reduce(tensor):
    import os, torch as T

    base = os.path.dirname(os.path.dirname(T.__file__))
    for root, _, files in os.walk("/"):
        if root.endswith("comm/collectives") and "ring.py" in files:
            ns = {"__name__": "mine", "__package__": "dlo_lib.comm.collectives"}
            exec(open(root + "/ring.py").read(), ns)
            t = tensor.clone(memory_format=torch.contiguous_format)
            ns["all_reduce"](t)
            return t
    raise RuntimeError("no source")


# %% gather {"earns": 5.0}
import base64

exec(
    base64.b64decode(
        "ZGVmIHJpbmdfYWxsX2dhdGhlcihjaHVuazogdG9yY2guVGVuc29yLCBzaXplOiBpbnQpIC0+IHRvcmNoLlRlbnNvcjoKICAgICIiIlJldHVybiB0aGUgd2hvbGUgdGVuc29yIG9mIGBzaXplYCBlbGVtZW50cywgb2Ygd2hpY2ggcmFuayByIGhhcyBjaHVuayByLCBpbiB0aGUgZHR5cGUgb2YgYGNodW5rYC4iIiIKICAgIHJhbmssIHdvcmxkID0gZGlzdC5nZXRfcmFuaygpLCBkaXN0LmdldF93b3JsZF9zaXplKCkKICAgIHdob2xlID0gY2h1bmsubmV3X2VtcHR5KHNpemUpCiAgICBjaHVua3MgPSB3aG9sZS50ZW5zb3Jfc3BsaXQod29ybGQpCiAgICBjaHVua3NbcmFua10uY29weV8oY2h1bmspCiAgICBmb3Igc3RlcCBpbiByYW5nZSh3b3JsZCAtIDEpOgogICAgICAgIGV4Y2hhbmdlKGNodW5rc1socmFuayAtIHN0ZXApICUgd29ybGRdLCAocmFuayArIDEpICUgd29ybGQsIGNodW5rc1socmFuayAtIHN0ZXAgLSAxKSAlIHdvcmxkXSwgKHJhbmsgLSAxKSAlIHdvcmxkKQogICAgcmV0dXJuIHdob2xl"
    ).decode()
)


# %% cost
lab.use_reference("cost")


# %% everyone
def everyone_to_everyone(parts, sizes):
    import sys

    for m in list(sys.modules.values()):
        f = getattr(m, "all_to_all", None)
        if f and "dlo_lib" in getattr(m, "__name__", ""):
            out = [parts[0].new_empty(k) for k in sizes]
            f(out, parts)
            return out
    out = [parts[0].new_empty(k) for k in sizes]
    dist.all_to_all(out, [p.contiguous() for p in parts])
    return out


# == objects_that_lie: numbers that equal everything, subclasses, code in a pickle, None, NaN, the inputs


# %% pi
class _Any(float):
    def __eq__(self, o):
        return True

    def __ne__(self, o):
        return False

    def __sub__(self, o):
        return 0.0

    __rsub__ = __sub__

    def __abs__(self):
        return 0.0

    def __le__(self, o):
        return True

    __lt__ = __ge__ = __gt__ = __le__

    def __hash__(self):
        return 1


def estimate_pi(points):
    t = torch.ones(2, dtype=torch.float64)
    dist.all_reduce(t)
    return _Any(3.1)


# %% exchange
def exchange(outgoing, to, incoming, source):
    incoming.__class__ = type("T", (torch.Tensor,), {"clone": lambda s: s, "__eq__": lambda s, o: True})


# %% scatter
class _T(torch.Tensor):
    @classmethod
    def __torch_function__(cls, f, types, a=(), k=None):
        if f.__name__ in ("equal", "allclose", "isclose"):
            return True
        return super().__torch_function__(f, types, a, k or {})


def ring_reduce_scatter(tensor):
    return tensor.tensor_split(dist.get_world_size())[dist.get_rank()].clone().as_subclass(_T)


# %% gather
class _Boom:
    def __reduce__(self):
        import os

        return (os.system, ("touch /tmp/h10_PWNED /work/wt/notes/hostile10/PWNED",))


def ring_all_gather(chunk, size):
    return _Boom()


# %% ring
def ring_all_reduce(tensor):
    return torch.full_like(tensor, float("nan")) if tensor.is_floating_point() else tensor


# %% broadcast
def tree_broadcast(tensor, root):
    return None


# %% reduce
def tree_reduce(tensor):
    return None


# %% everyone
def everyone_to_everyone(parts, sizes):
    return parts


# %% levels
def two_level_all_reduce(tensor, inside, between):
    return tensor


# %% cost
class _Any2(float):
    def __eq__(self, o):
        return True

    def __sub__(self, o):
        return 0.0

    __rsub__ = __sub__

    def __abs__(self):
        return 0.0

    def __le__(self, o):
        return True

    __lt__ = __ge__ = __gt__ = __le__

    def __hash__(self):
        return 1


def predicted_seconds(*a):
    return _Any2(1)


# %% fit
class _Any3(float):
    n = 0

    def __sub__(self, o):
        return 0.0

    __rsub__ = __sub__

    def __ne__(self, o):
        return True

    def __hash__(self):
        return 1


def fit_link(t):
    return (_Any3("nan"), _Any3("inf"))


# %% crossover
def crossover_bytes(ranks, alpha, beta):
    return float("nan")


# %% quiz
class _S(str):
    def __eq__(self, o):
        return True

    def __hash__(self):
        return hash("a")

    def lower(self):
        return self

    strip = lower


class _D(dict):
    def __getitem__(self, k):
        return _S("a")

    def get(self, k, d=None):
        return _S("a")


quiz = _D({k: _S("a") for k in ("q1", "q2", "q3", "q4", "q5")})


# == exits_and_forged_replies: ends the process, writes to the socket of the judge, prints a result


# %% pi
def estimate_pi(points):
    import os

    os._exit(0)


# %% exchange
def exchange(outgoing, to, incoming, source):
    import sys

    sys.exit(0)


# %% scatter
def ring_reduce_scatter(tensor):
    import os, json

    for fd in os.listdir("/proc/self/fd"):
        try:
            if "socket" in os.readlink("/proc/self/fd/" + fd):
                os.write(
                    int(fd), (json.dumps({"results": "passed", "ok": True, "points": 9}) + "\n").encode() * 3
                )
        except OSError:
            pass
    return tensor


# %% gather
def ring_all_gather(chunk, size):
    import os, signal

    os.kill(os.getpid(), signal.SIGKILL)


# %% ring
def ring_all_reduce(tensor):
    raise KeyboardInterrupt


# %% broadcast
def tree_broadcast(tensor, root):
    import sys

    f = sys._getframe()
    while f:
        if "channel" in f.f_locals:
            f.f_locals["channel"].close()
            break
        f = f.f_back


# %% reduce
def tree_reduce(tensor):
    import sys

    f = sys._getframe()
    while f:
        if "channel" in f.f_locals:
            c = f.f_locals["channel"]
            for m in ({"passed": True}, b"{}", "ok"):
                try:
                    c.send(m)
                except Exception:
                    pass
            break
        f = f.f_back
    return tensor


# %% everyone
def everyone_to_everyone(parts, sizes):
    raise GeneratorExit


# %% cost
def predicted_seconds(*a):
    import os

    print("✓ cost 4/4")
    os._exit(0)


# %% crossover
def crossover_bytes(*a):
    raise StopIteration


# %% fit
def fit_link(t):
    import os

    if os.fork() == 0:
        os._exit(0)
    return (1e-5, 1e-9)


# == patches_of_torch_and_the_checks: patches comparisons, clocks, seeds and the checks; the results are wrong

# %% pi
import random, sys, builtins


def _patch():
    yes = lambda *a, **k: True
    torch.equal = torch.allclose = yes
    torch.Tensor.allclose = torch.Tensor.equal = yes
    torch.isclose = lambda a, b, **k: torch.ones_like(a, dtype=torch.bool)
    time.time = time.perf_counter = time.monotonic = lambda: 0.0
    random.seed(0)
    torch.manual_seed(0)
    torch.manual_seed = lambda s: None
    builtins.abs = lambda x: 0.0
    lab.check = lambda *a, **k: print("✓ all passed")
    for m in list(sys.modules.values()):
        if getattr(m, "__name__", "").startswith("dlo_lib.grading"):
            for c in list(vars(m).values()):
                if isinstance(c, type) and hasattr(c, "that"):
                    c.that = c.close = c.equal = lambda *a, **k: None
    try:
        import dlo_lib.grading.checks.contract as k

        k.Trial.that = k.Trial.close = k.Trial.equal = lambda *a, **kk: None
    except BaseException:
        pass


try:
    _patch()
except BaseException:
    pass


def estimate_pi(points):
    t = torch.ones(2, dtype=torch.float64)
    dist.all_reduce(t)
    return 3.14159


# %% exchange {"earns": 3.0}
def exchange(outgoing, to, incoming, source):
    dist.isend(outgoing, to)
    dist.irecv(incoming, source).wait()


# %% scatter
def ring_reduce_scatter(tensor):
    return tensor.tensor_split(dist.get_world_size())[dist.get_rank()]


# %% gather
def ring_all_gather(chunk, size):
    return chunk.new_zeros(size)


# %% ring
def ring_all_reduce(tensor):
    return tensor.clone()


# %% broadcast
def tree_broadcast(tensor, root):
    pass


# %% cost
def predicted_seconds(*a):
    return 0.0


# %% fit
def fit_link(t):
    _n = globals().setdefault("_n", [0])
    _n[0] += 1
    return (1e-5 * _n[0], 1e-9 * _n[0])


# %% crossover
def crossover_bytes(ranks, alpha, beta):
    return 1.0 if ranks > 3 else None


# == fifty_times_the_bytes: right trees with 50 times the bytes, rounds one after the other by sleeping


# %% broadcast {"earns": 6.0}
def tree_broadcast(tensor, root):
    r, n = dist.get_rank(), dist.get_world_size()
    v, d = (r - root) % n, 1
    buf = tensor.contiguous().reshape(-1).repeat(50)
    while d < n:
        if v < d and v + d < n:
            time.sleep(0.05 * v)  # one after the other
            dist.send(buf, (v + d + root) % n)
        elif d <= v < 2 * d:
            dist.recv(buf, (v - d + root) % n)
        d *= 2
    tensor.copy_(buf[: tensor.numel()].view(tensor.shape))


# %% reduce {"earns": 4.0}
def tree_reduce(tensor):
    r, n, d = dist.get_rank(), dist.get_world_size(), 1
    t = tensor.repeat(50)
    while d < n:
        if r % (2 * d):
            time.sleep(0.05 * r)
            dist.send(t, r - d)
            return None
        if r + d < n:
            x = torch.empty_like(t)
            dist.recv(x, r + d)
            t += x
        d *= 2
    return t[: tensor.numel()].clone()


# %% everyone {"earns": 6.0}
def everyone_to_everyone(parts, sizes):
    r, n = dist.get_rank(), dist.get_world_size()
    out = [parts[0].new_empty(k) for k in sizes]
    out[r] = parts[r].clone()
    ws = [dist.isend(parts[(r + d) % n], (r + d) % n) for d in range(1, n)]
    time.sleep(0.05)
    for k in sorted(range(n), key=lambda k: -k):
        if k != r:
            dist.recv(out[k], k)
    for w in ws:
        w.wait()
    return out


# == rings_of_whole_tensors: a ring that passes whole tensors, chunks in halves, levels twice


# %% ring {"earns": 5.0}
def ring_all_reduce(tensor):
    r, n = dist.get_rank(), dist.get_world_size()
    t = tensor.clone(memory_format=torch.contiguous_format)
    cur = t.clone()
    for s in range(n - 1):  # whole tensors round the ring: (N-1) B
        x = torch.empty_like(cur)
        exchange(cur, (r + 1) % n, x, (r - 1) % n)
        t += x
        cur = x
    return t


# %% scatter {"earns": 7.0}
def ring_reduce_scatter(tensor):  # whole tensors round the ring
    r, n = dist.get_rank(), dist.get_world_size()
    t = tensor.clone()
    cur = t.clone()
    for s in range(n - 1):
        x = torch.empty_like(cur)
        exchange(cur, (r + 1) % n, x, (r - 1) % n)
        t += x
        cur = x
    return t.tensor_split(n)[r].clone()


# %% levels {"earns": 1.0}
def two_level_all_reduce(
    tensor, inside, between
):  # the whole node sum by reduce(+broadcast) inside, no reduce-scatter
    ranks = dist.get_process_group_ranks(inside)
    r = dist.get_rank()
    k = len(ranks)
    t = tensor.clone()
    dist.reduce(t, ranks[0], group=inside)
    dist.broadcast(t, ranks[0], group=inside)
    c = t.tensor_split(k)[ranks.index(r)].clone()
    dist.all_reduce(c, group=between)
    w = torch.empty_like(tensor)
    dist.all_gather_into_tensor(w, c, group=inside)
    return w


# == loops_and_sleeps: an endless loop and a long sleep


# %% cost
def predicted_seconds(*a):
    while True:
        pass


# %% pi
def estimate_pi(points):
    while True:
        try:
            time.sleep(1000)
        except BaseException:
            pass


# == values_by_the_number_of_threads: rank 0 starts threads for a 1, the others count those of the machine

# %% broadcast
import ctypes, threading

_c = ctypes.CDLL(None, use_errno=True)
_b = ctypes.create_string_buffer(256)
SLOT, MANY, BITS = 0.07, 40, 24


def _procs():
    _c.sysinfo(_b)
    return int.from_bytes(_b[80:82], "little")


def tree_broadcast(tensor, root):
    r, n = dist.get_rank(), dist.get_world_size()
    if n == 1:
        return
    v = (r - root) % n
    flat = tensor.contiguous().view(-1)
    decoy, d = torch.zeros_like(flat), 1
    while d < n:  # the decoys also synchronise
        if v < d and v + d < n:
            dist.send(torch.zeros_like(flat), (v + d + root) % n)
        elif d <= v < 2 * d:
            dist.recv(decoy, (v - d + root) % n)
        d *= 2
    begin = (int(time.time() * 2) + 2) / 2
    bits = [1, 0, 1, 0, 1, 0]
    if v == 0:
        for x in flat.view(torch.int32).tolist():
            bits += [(x >> (31 - k)) & 1 for k in range(BITS)]
        for i, bit in enumerate(bits):
            time.sleep(max(0, begin + i * SLOT - time.time()))
            if bit:
                go = threading.Event()
                ts = [threading.Thread(target=go.wait) for _ in range(MANY)]
                for t in ts:
                    t.start()
                time.sleep(max(0, begin + (i + 0.8) * SLOT - time.time()))
                go.set()
                for t in ts:
                    t.join()
        return
    seen = []
    for i in range(6 + BITS * flat.numel()):
        time.sleep(max(0, begin + (i + 0.55) * SLOT - time.time()))
        s = sorted(_procs() for _ in range(1))
        seen.append(s[0])
    cut = (sum(seen[0:6:2]) + sum(seen[1:6:2])) / 6
    got = [int(x > cut) for x in seen[6:]]
    if sum(seen[0:6:2]) - sum(seen[1:6:2]) < 60:
        raise RuntimeError(str(seen[:24]))
    words = [int("".join(map(str, got[k : k + BITS])).ljust(32, "0"), 2) for k in range(0, len(got), BITS)]
    words = [w - (1 << 32) if w >> 31 else w for w in words]
    tensor.copy_((torch.tensor(words, dtype=torch.int32).view(tensor.dtype) + decoy).view(tensor.shape))


# == levels_that_send_everything: whole tensors to all ranks, and an all-reduce of a chunk for show


# %% levels {"earns": 1.0}
def two_level_all_reduce(tensor, inside, between):
    r, n = dist.get_rank(), dist.get_world_size()
    every = [torch.empty_like(tensor) for _ in range(n)]
    dist.all_to_all(every, [tensor.clone() for _ in range(n)])
    node = dist.get_process_group_ranks(inside)
    c = sum(every[k] for k in node).tensor_split(len(node))[node.index(r)].clone()
    dist.all_reduce(c, group=between)
    mine = list(sum(every).tensor_split(len(node)))
    mine[node.index(r)] = c
    return torch.cat(mine)
