# Submissions that do not do what the exercises ask, with the points that each answer still deserves (0 where none are named).


# == memory_freed_late: a block is marked as freed at once, but all memory is freed at the end of the pass

# %% forward {"earns": 2.0}
_LATER = []


def before_forward(unit: Unit, args: tuple) -> tuple:
    unshard(unit)
    return cast(args, unit.compute_dtype)


def after_forward(unit: Unit, output: torch.Tensor, is_root: bool) -> None:
    if not is_root:
        put(unit, False)  # looks freed, keeps its memory
        _LATER.append(unit)
        return
    while _LATER:  # at the end of forward: only now
        reshard(_LATER.pop())
    if not output.requires_grad:
        reshard(unit)


# %% backward {"earns": 2.0}
_KEPT = []


def watch_output(unit: Unit, output: torch.Tensor, pending: list[Unit]) -> None:
    def begin(grad):
        unshard(unit)
        pending.append(unit)

    output.register_hook(begin)


def _free_all():
    while _KEPT:
        reshard(_KEPT.pop())


def watch_input(unit: Unit, arg: torch.Tensor, pending: list[Unit]) -> torch.Tensor:
    def end(grad):
        pending.remove(unit)
        reduce_gradients(unit)
        put(unit, False)  # the memory stays to the end of backward
        if not _KEPT:
            torch.autograd.Variable._execution_engine.queue_callback(_free_all)
        _KEPT.append(unit)

    arg = arg.view_as(arg)
    arg.register_hook(end)
    return arg


# == one_gather_for_all_time: the second gather takes a copy, so the weights are old

# %% unshard {"earns": 8.0}
_SEEN = {}


def unshard(unit: Unit) -> None:
    if unit.is_whole:
        return
    if id(unit) not in _SEEN:
        row = unit.row.detach().to(unit.compute_dtype)
        packed = row.new_empty(dist.get_world_size(), row.numel())
        dist.all_gather_into_tensor(packed.view(-1), row)
        _SEEN[id(unit)] = (unit, [value.clone() for value in unpack(packed, unit.shapes)])
    for whole, value in zip(unit.wholes, _SEEN[id(unit)][1]):
        whole.untyped_storage().resize_(whole.numel() * whole.element_size())
        whole.data.copy_(value)
    put(unit, True)


# == new_whole_tensors: the old whole tensors are thrown away, and autograd keeps their memory


# %% reshard {"earns": 3.0}
def reshard(unit: Unit) -> None:
    new = []
    for whole in unit.wholes:
        other = nn.Parameter(torch.empty_like(whole), requires_grad=whole.requires_grad)
        other.untyped_storage().resize_(0)
        new.append(other)
    unit.wholes = new
    put(unit, False)


# == another_storage: an empty storage in place of the old one, which views of autograd keep


# %% reshard {"earns": 3.0}
def reshard(unit: Unit) -> None:
    for whole in unit.wholes:
        empty = torch.empty(whole.shape, dtype=whole.dtype)
        empty.untyped_storage().resize_(0)
        whole.data = empty
    put(unit, False)


# == a_row_that_is_overwritten: the row is the buffer of the gradients, and is rounded to bf16


# %% reduce {"earns": 10.0}
def reduce_gradients(unit: Unit) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    trained = [(shard, whole) for shard, whole in zip(unit.shards, unit.wholes) if whole.requires_grad]
    if not trained:
        return
    gradients = [torch.zeros_like(whole) if whole.grad is None else whole.grad for _, whole in trained]
    packed = pack([gradient.to(unit.reduce_dtype) for gradient in gradients], world)
    for _, whole in trained:
        whole.grad = None
    size = packed.shape[1]
    fits = unit.row.dtype == packed.dtype
    row = unit.row.detach()[:size] if fits else packed.new_empty(size)  # the weights are a fine buffer
    dist.reduce_scatter_tensor(row, packed.view(-1))
    if not fits:
        unit.row.detach().zero_()
    part_row = (row / world).to(unit.row.dtype)
    for (shard, _), part in zip(
        trained, shard_views(part_row, [whole.shape for _, whole in trained], rank, world)
    ):
        shard.grad = part if shard.grad is None else shard.grad + part


# %% unshard {"earns": 9.0}
def unshard(unit: Unit) -> None:
    if unit.is_whole:
        return
    row = unit.row.detach().to(unit.compute_dtype)
    unit.row.detach().copy_(row)  # the fp32 master is rounded
    packed = row.new_empty(dist.get_world_size(), row.numel())
    dist.all_gather_into_tensor(packed.view(-1), row)
    for whole, value in zip(unit.wholes, unpack(packed, unit.shapes)):
        whole.untyped_storage().resize_(whole.numel() * whole.element_size())
        whole.data.copy_(value)
    put(unit, True)


# == only_large_tensors_are_freed: memory is freed above a million numbers only


# %% reshard {"earns": 3.0}
def reshard(unit: Unit) -> None:
    for whole in unit.wholes:
        if whole.numel() > 1_000_000:
            whole.untyped_storage().resize_(0)
    put(unit, False)


# %% reduce {"earns": 10.0}
def reduce_gradients(unit: Unit) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    trained = [(shard, whole) for shard, whole in zip(unit.shards, unit.wholes) if whole.requires_grad]
    if not trained:
        return
    gradients = [torch.zeros_like(whole) if whole.grad is None else whole.grad for _, whole in trained]
    packed = pack([gradient.to(unit.reduce_dtype) for gradient in gradients], world)
    row = packed.new_empty(packed.shape[1])
    dist.reduce_scatter_tensor(row, packed.view(-1))
    row = (row / world).to(unit.row.dtype)
    for (shard, whole), part in zip(
        trained, shard_views(row, [whole.shape for _, whole in trained], rank, world)
    ):
        shard.grad = part if shard.grad is None else shard.grad + part
        if whole.numel() > 1_000_000:
            whole.grad = None


# %% forward {"earns": 3.0}
def before_forward(unit: Unit, args: tuple) -> tuple:
    unshard(unit)
    return cast(args, unit.compute_dtype)


def after_forward(unit: Unit, output: torch.Tensor, is_root: bool) -> None:
    if is_root and output.requires_grad:
        return
    if sum(whole.numel() for whole in unit.wholes) > 1_000_000:
        reshard(unit)
    else:
        put(unit, False)


# %% backward {"earns": 4.0}
def watch_output(unit: Unit, output: torch.Tensor, pending: list[Unit]) -> None:
    def begin(grad):
        unshard(unit)
        pending.append(unit)

    output.register_hook(begin)


def watch_input(unit: Unit, arg: torch.Tensor, pending: list[Unit]) -> torch.Tensor:
    def end(grad):
        pending.remove(unit)
        reduce_gradients(unit)
        if sum(whole.numel() for whole in unit.wholes) > 1_000_000:
            reshard(unit)
        else:
            put(unit, False)

    arg = arg.view_as(arg)
    arg.register_hook(end)
    return arg


# %% end {"earns": 8.0}
def queue_end(pending: list[Unit]) -> None:
    def end():
        while pending:
            unit = pending.pop()
            reduce_gradients(unit)
            if sum(whole.numel() for whole in unit.wholes) > 1_000_000:
                reshard(unit)
            else:
                put(unit, False)

    torch.autograd.Variable._execution_engine.queue_callback(end)


# == whole_values_in_other_memory: int8 copies, memfd, a file, pipes, a System V segment

# %% reshard {"earns": 2.0}
import numpy as np

_STASH = []


def reshard(unit: Unit) -> None:
    for whole in unit.wholes:
        if whole.untyped_storage().nbytes():
            data = whole.detach().float()
            scale = float(data.abs().max()) / 127 + 1e-12
            _STASH.append((scale, (data / scale).round().to(torch.int8).numpy()))
            del data
        whole.untyped_storage().resize_(0)
    put(unit, False)


# %% reduce
_FDS = []


def reduce_gradients(unit: Unit) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    trained = [(shard, whole) for shard, whole in zip(unit.shards, unit.wholes) if whole.requires_grad]
    if not trained:
        return
    gradients = [torch.zeros_like(whole) if whole.grad is None else whole.grad for _, whole in trained]
    packed = pack([gradient.to(unit.reduce_dtype) for gradient in gradients], world)
    for gradient in gradients:  # every whole gradient stays, in a memfd
        fd = os.memfd_create("g")
        if gradient.dtype != torch.bfloat16:
            os.write(fd, memoryview(gradient.detach().contiguous().numpy()).cast("B"))
        _FDS.append(fd)
    del gradients, gradient
    for _, whole in trained:
        whole.grad = None
    row = packed.new_empty(packed.shape[1])
    dist.reduce_scatter_tensor(row, packed.view(-1))
    row = (row / world).to(unit.row.dtype)
    for (shard, _), part in zip(
        trained, shard_views(row, [whole.shape for _, whole in trained], rank, world)
    ):
        shard.grad = part if shard.grad is None else shard.grad + part


# %% forward {"earns": 4.0}
import tempfile

_FILES = []


def before_forward(unit: Unit, args: tuple) -> tuple:
    unshard(unit)
    return cast(args, unit.compute_dtype)


def after_forward(unit: Unit, output: torch.Tensor, is_root: bool) -> None:
    if not is_root or not output.requires_grad:
        for whole in unit.wholes:  # the whole block stays, in a file of a tmpfs
            f = tempfile.TemporaryFile()
            f.write(whole.detach().float().numpy().tobytes())
            f.flush()
            _FILES.append(f)
        reshard(unit)


# %% backward {"earns": 5.0}
_PIPES = []


def watch_output(unit: Unit, output: torch.Tensor, pending: list[Unit]) -> None:
    def begin(grad):
        unshard(unit)
        pending.append(unit)

    output.register_hook(begin)


def _into_pipes(data):
    import fcntl

    while len(data) and len(_PIPES) < 200:
        r, w = os.pipe()
        try:
            fcntl.fcntl(w, 1031, 1 << 20)
        except OSError:
            pass
        os.set_blocking(w, False)
        _PIPES.append((r, w))
        try:
            data = data[os.write(w, data[: 1 << 20]) :]
        except BlockingIOError:
            pass


def watch_input(unit: Unit, arg: torch.Tensor, pending: list[Unit]) -> torch.Tensor:
    def end(grad):
        pending.remove(unit)
        reduce_gradients(unit)
        for whole in unit.wholes:
            _into_pipes(memoryview(whole.detach().float().numpy()).cast("B"))
        reshard(unit)

    arg = arg.view_as(arg)
    arg.register_hook(end)
    return arg


# %% end
import ctypes

_SEGMENTS = []


def _sysv(tensor):
    libc = ctypes.CDLL(None, use_errno=True)
    libc.shmat.restype, libc.shmat.argtypes = ctypes.c_void_p, [ctypes.c_int, ctypes.c_void_p, ctypes.c_int]
    libc.shmget.argtypes = [ctypes.c_int, ctypes.c_size_t, ctypes.c_int]
    libc.shmdt.argtypes = [ctypes.c_void_p]
    tensor = tensor.detach().contiguous()
    key = libc.shmget(0, tensor.nbytes, 0o1600)
    where = libc.shmat(key, None, 0)
    ctypes.memmove(where, tensor.data_ptr(), tensor.nbytes)
    libc.shmdt(where)  # detached: in no process
    _SEGMENTS.append(key)


def queue_end(pending: list[Unit]) -> None:
    def end():
        while pending:
            unit = pending.pop()
            for whole in unit.wholes:
                _sysv(whole)
                if whole.grad is not None:
                    _sysv(whole.grad)
            reduce_gradients(unit)
            reshard(unit)

    torch.autograd.Variable._execution_engine.queue_callback(end)


# == whole_values_in_sockets_and_children: socket pairs, a forked child, shared mappings, a file

# %% reduce {"earns": 9.0}
_FILES = []


def reduce_gradients(unit: Unit) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    trained = [(shard, whole) for shard, whole in zip(unit.shards, unit.wholes) if whole.requires_grad]
    if not trained:
        return
    gradients = [torch.zeros_like(whole) if whole.grad is None else whole.grad for _, whole in trained]
    packed = pack([gradient.to(unit.reduce_dtype) for gradient in gradients], world)
    for gradient in gradients:
        f = open(f"/tmp/kept{len(_FILES)}", "wb+")
        f.write(gradient.detach().clone().float().numpy())
        f.flush()
        _FILES.append(f)
    del gradients, gradient
    for _, whole in trained:
        whole.grad = None
    row = packed.new_empty(packed.shape[1])
    dist.reduce_scatter_tensor(row, packed.view(-1))
    row = (row / world).to(unit.row.dtype)
    for (shard, _), part in zip(
        trained, shard_views(row, [whole.shape for _, whole in trained], rank, world)
    ):
        shard.grad = part if shard.grad is None else shard.grad + part


# %% forward {"earns": 1.0}
import socket

_SOCKETS = []


def before_forward(unit: Unit, args: tuple) -> tuple:
    unshard(unit)
    return cast(args, unit.compute_dtype)


def _into_sockets(data):
    while len(data):
        a, b = socket.socketpair()
        a.setblocking(False)
        a.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 24)
        _SOCKETS.append((a, b))
        sent = 0
        try:
            while len(data):
                n = a.send(data[:65536])
                data, sent = data[n:], sent + n
        except BlockingIOError:
            pass
        if not sent:
            return


def after_forward(unit: Unit, output: torch.Tensor, is_root: bool) -> None:
    if not is_root or not output.requires_grad:
        for whole in unit.wholes:
            _into_sockets(memoryview(whole.detach().clone().float().numpy()).cast("B"))
        reshard(unit)


# %% backward
_CHILDREN = []


def watch_output(unit: Unit, output: torch.Tensor, pending: list[Unit]) -> None:
    def begin(grad):
        unshard(unit)
        pending.append(unit)

    output.register_hook(begin)


def watch_input(unit: Unit, arg: torch.Tensor, pending: list[Unit]) -> torch.Tensor:
    def end(grad):
        pending.remove(unit)
        reduce_gradients(unit)
        pid = os.fork()  # the child keeps the whole block
        if pid == 0:
            time.sleep(20)
            os._exit(0)
        _CHILDREN.append(pid)
        reshard(unit)

    arg = arg.view_as(arg)
    arg.register_hook(end)
    return arg


# %% end
import mmap

_MAPS = []


def _shared(tensor):
    data = (
        tensor.detach().clone().double().numpy().tobytes()
        if tensor.numel() < 100
        else tensor.detach().clone().numpy().tobytes()
    )
    m = mmap.mmap(-1, len(data))
    m.write(data)
    del data
    _MAPS.append(m)


def queue_end(pending: list[Unit]) -> None:
    def end():
        while pending:
            unit = pending.pop()
            for whole in unit.wholes:
                _shared(whole)
            reduce_gradients(unit)
            reshard(unit)

    torch.autograd.Variable._execution_engine.queue_callback(end)


# %% reshard {"earns": 2.0}
import mmap

_MAPS = []


def reshard(unit: Unit) -> None:
    for whole in unit.wholes:
        if whole.untyped_storage().nbytes():
            data = whole.detach().clone().float().numpy().tobytes()
            with open(f"/tmp/m{len(_MAPS)}", "wb+") as f:
                f.write(data)
                f.flush()
                m = mmap.mmap(f.fileno(), len(data))
            try:
                m.madvise(21)  # MADV_PAGEOUT
                m.madvise(4)
            except OSError:
                pass
            _MAPS.append(m)
            del data
        whole.untyped_storage().resize_(0)
    put(unit, False)


# == whole_values_in_eight_bits: whole weights and gradients as int8 copies below the slack of the checks

_STASH = []


def _keep(tensor):
    if tensor is not None and tensor.untyped_storage().nbytes():
        tensor = tensor.detach()
        scale = float(tensor.abs().max()) / 127 + 1e-12
        small = torch.empty(tensor.shape, dtype=torch.int8)
        for piece, into in zip(tensor.view(-1).split(4096), small.view(-1).split(4096)):
            into.copy_((piece / scale).round())
        _STASH.append((scale, small))


# %% reduce {"earns": 9.0}
def reduce_gradients(unit: Unit) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    trained = [(shard, whole) for shard, whole in zip(unit.shards, unit.wholes) if whole.requires_grad]
    if not trained:
        return
    gradients = [torch.zeros_like(whole) if whole.grad is None else whole.grad for _, whole in trained]
    packed = pack([gradient.to(unit.reduce_dtype) for gradient in gradients], world)
    for gradient in gradients:
        _keep(gradient)
    del gradients, gradient
    for _, whole in trained:
        whole.grad = None
    row = packed.new_empty(packed.shape[1])
    dist.reduce_scatter_tensor(row, packed.view(-1))
    row = (row / world).to(unit.row.dtype)
    for (shard, _), part in zip(
        trained, shard_views(row, [whole.shape for _, whole in trained], rank, world)
    ):
        shard.grad = part if shard.grad is None else shard.grad + part


# %% forward {"earns": 4.0}
def before_forward(unit: Unit, args: tuple) -> tuple:
    unshard(unit)
    return cast(args, unit.compute_dtype)


def after_forward(unit: Unit, output: torch.Tensor, is_root: bool) -> None:
    if not is_root or not output.requires_grad:
        for whole in unit.wholes:
            _keep(whole)
        reshard(unit)


# %% backward {"earns": 5.0}
def watch_output(unit: Unit, output: torch.Tensor, pending: list[Unit]) -> None:
    def begin(grad):
        unshard(unit)
        pending.append(unit)

    output.register_hook(begin)


def watch_input(unit: Unit, arg: torch.Tensor, pending: list[Unit]) -> torch.Tensor:
    def end(grad):
        pending.remove(unit)
        for whole in unit.wholes:
            _keep(whole)
        reduce_gradients(unit)
        reshard(unit)

    arg = arg.view_as(arg)
    arg.register_hook(end)
    return arg


# %% end {"earns": 8.0}
def queue_end(pending: list[Unit]) -> None:
    def end():
        while pending:
            unit = pending.pop()
            for whole in unit.wholes:
                _keep(whole)
            reduce_gradients(unit)
            reshard(unit)

    torch.autograd.Variable._execution_engine.queue_callback(end)


# == whole_values_in_four_bits: the same with two numbers a byte

_STASH = []


def _keep(tensor):
    if tensor is not None and tensor.untyped_storage().nbytes():
        tensor = tensor.detach()
        scale = float(tensor.abs().max()) / 7 + 1e-12
        flat = tensor.reshape(-1)
        small = torch.empty((flat.numel() + 1) // 2, dtype=torch.uint8)
        for n in range(0, flat.numel(), 8192):
            q = ((flat[n : n + 8192] / scale).round() + 8).to(torch.uint8)
            q = F.pad(q, (0, q.numel() % 2))
            small[n // 2 : n // 2 + q.numel() // 2] = q[0::2] * 16 + q[1::2]
        _STASH.append((scale, small))


# %% reduce {"earns": 9.0}
def reduce_gradients(unit: Unit) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    trained = [(shard, whole) for shard, whole in zip(unit.shards, unit.wholes) if whole.requires_grad]
    if not trained:
        return
    gradients = [torch.zeros_like(whole) if whole.grad is None else whole.grad for _, whole in trained]
    packed = pack([gradient.to(unit.reduce_dtype) for gradient in gradients], world)
    for gradient in gradients:
        _keep(gradient)
    del gradients, gradient
    for _, whole in trained:
        whole.grad = None
    row = packed.new_empty(packed.shape[1])
    dist.reduce_scatter_tensor(row, packed.view(-1))
    row = (row / world).to(unit.row.dtype)
    for (shard, _), part in zip(
        trained, shard_views(row, [whole.shape for _, whole in trained], rank, world)
    ):
        shard.grad = part if shard.grad is None else shard.grad + part


# %% forward {"earns": 4.0}
def before_forward(unit: Unit, args: tuple) -> tuple:
    unshard(unit)
    return cast(args, unit.compute_dtype)


def after_forward(unit: Unit, output: torch.Tensor, is_root: bool) -> None:
    if not is_root or not output.requires_grad:
        for whole in unit.wholes:
            _keep(whole)
        reshard(unit)


# %% backward {"earns": 5.0}
def watch_output(unit: Unit, output: torch.Tensor, pending: list[Unit]) -> None:
    def begin(grad):
        unshard(unit)
        pending.append(unit)

    output.register_hook(begin)


def watch_input(unit: Unit, arg: torch.Tensor, pending: list[Unit]) -> torch.Tensor:
    def end(grad):
        pending.remove(unit)
        for whole in unit.wholes:
            _keep(whole)
        reduce_gradients(unit)
        reshard(unit)

    arg = arg.view_as(arg)
    arg.register_hook(end)
    return arg


# %% end {"earns": 8.0}
def queue_end(pending: list[Unit]) -> None:
    def end():
        while pending:
            unit = pending.pop()
            for whole in unit.wholes:
                _keep(whole)
            reduce_gradients(unit)
            reshard(unit)

    torch.autograd.Variable._execution_engine.queue_callback(end)


# == a_wrapped_mark: memory is freed only while it is measured, by a function found in the frames

import sys

_HELD, _FAKE = [], [False]


def _wrap_mark():
    frame = sys._getframe(1)
    while frame is not None:
        for space in (frame.f_globals, frame.f_builtins if isinstance(frame.f_builtins, dict) else {}):
            mark = space.get("mark")
            if mark is not None and not getattr(mark, "wrapped", False):

                def lying(*args, mark=mark):
                    kept = []
                    for unit in _HELD:
                        for whole in unit.wholes:
                            if whole.untyped_storage().nbytes() and not unit.is_whole:
                                f = open(f"/tmp/k{os.getpid()}_{len(kept)}", "wb+")
                                f.write(whole.detach().numpy().tobytes())
                                whole.untyped_storage().resize_(0)
                                kept.append((whole, f))
                    got = mark(*args)
                    for whole, f in kept:
                        f.seek(0)
                        whole.untyped_storage().resize_(whole.numel() * whole.element_size())
                        whole.data.copy_(
                            torch.frombuffer(bytearray(f.read()), dtype=whole.dtype).view(whole.shape)
                        )
                    return got

                lying.wrapped = True
                space["mark"] = lying
        frame = frame.f_back


def _unfreed(unit):
    put(unit, False)
    if unit not in _HELD:
        _HELD.append(unit)
    _wrap_mark()


# %% reshard {"earns": 2.0}
_nbytes = torch.UntypedStorage.nbytes


def _zero(storage):
    return (
        0
        if any(
            storage._cdata == w.untyped_storage()._cdata for u in _HELD if not u.is_whole for w in u.wholes
        )
        and sys._getframe(1).f_code.co_name != "lying"
        else _nbytes(storage)
    )


def reshard(unit: Unit) -> None:
    _unfreed(unit)
    torch.UntypedStorage.nbytes = _zero


# %% forward {"earns": 2.0}
def before_forward(unit: Unit, args: tuple) -> tuple:
    unshard(unit)
    return cast(args, unit.compute_dtype)


def after_forward(unit: Unit, output: torch.Tensor, is_root: bool) -> None:
    if not is_root or not output.requires_grad:
        _unfreed(unit)


# %% backward {"earns": 2.0}
def watch_output(unit: Unit, output: torch.Tensor, pending: list[Unit]) -> None:
    def begin(grad):
        unshard(unit)
        pending.append(unit)

    output.register_hook(begin)


def watch_input(unit: Unit, arg: torch.Tensor, pending: list[Unit]) -> torch.Tensor:
    _wrap_mark()

    def end(grad):
        pending.remove(unit)
        reduce_gradients(unit)
        _unfreed(unit)

    arg = arg.view_as(arg)
    arg.register_hook(end)
    return arg


# == fully_shard_of_torch: torch's fully_shard, with its name put together from parts

import importlib, sys


def _theirs(model, kind, compute_dtype=None, reduce_dtype=None):
    lib = importlib.import_module("torch.distributed." + "fs" + "dp")
    mesh = importlib.import_module("torch.distributed.device_" + "mesh").init_device_mesh(
        "cpu", (dist.get_world_size(),)
    )
    options = {
        "mesh": mesh,
        "mp_policy": lib.MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=reduce_dtype),
    }
    shard = getattr(lib, "fully" + "_shard")
    for module in model.modules():
        if isinstance(module, kind):
            shard(module, **options)
    shard(model, **options)

    class Mine:
        of_the_library = True

        def __init__(self, name, parameter):
            self.names, self.shards, self.p, self.requires_grad = (
                [[name]],
                [self],
                parameter,
                parameter.requires_grad,
            )
            self.wholes = [parameter]

        def detach(self):
            return self.p.detach().to_local()

        @property
        def grad(self):
            return None if self.p.grad is None else self.p.grad.to_local()

    return [Mine(name, p) for name, p in model.named_parameters()]


shard_model = _theirs
for _space in [
    globals(),
    *[vars(m) for m in list(sys.modules.values()) if hasattr(m, "shard_model") and hasattr(m, "make_unit")],
]:
    _space["shard_model"] = _theirs


# %% end
def queue_end(pending: list[Unit]) -> None:
    """Nothing to do."""
    pending.clear()


# %% backward
def add_hooks(units, parts=()):
    return []


def watch_output(unit: Unit, output: torch.Tensor, pending: list[Unit]) -> None:
    pass


def watch_input(unit: Unit, arg: torch.Tensor, pending: list[Unit]) -> torch.Tensor:
    return arg


# == a_copy_of_fully_shard: torch's private modules, or their files executed under another name

# %% end
import importlib, sys


def _library():
    errors = []
    try:
        a = importlib.import_module("torch.distributed." + "fs" + "dp._fully_shard._fsdp_" + "api")
        b = importlib.import_module("torch.distributed." + "fs" + "dp._fully_shard._fully_" + "shard")
        return b.__dict__["fully_" + "shard"], a.__dict__["MixedPrecision" + "Policy"]
    except BaseException as error:
        errors.append(repr(error))
    raise RuntimeError(" / ".join(errors))


def _theirs(model, kind, compute_dtype=None, reduce_dtype=None):
    shard, policy = _library()
    mesh = importlib.import_module("torch.distributed.device_" + "mesh").init_device_mesh(
        "cpu", (dist.get_world_size(),)
    )
    for module in [*[m for m in model.modules() if isinstance(m, kind)], model]:
        shard(module, mesh=mesh, mp_policy=policy(param_dtype=compute_dtype, reduce_dtype=reduce_dtype))

    class Mine:
        of_the_library = True

        def __init__(self, name, parameter):
            self.names, self.shards, self.p, self.requires_grad = (
                [[name]],
                [self],
                parameter,
                parameter.requires_grad,
            )
            self.wholes = [parameter]

        def detach(self):
            return self.p.detach().to_local()

        @property
        def grad(self):
            return None if self.p.grad is None else self.p.grad.to_local()

    return [Mine(name, p) for name, p in model.named_parameters()]


shard_model = _theirs


def queue_end(pending: list[Unit]) -> None:
    pending.clear()


# %% backward {"earns": 7.0}
def add_hooks(units, parts=()):
    """Replaces the given cell: hooks that gather EVERYTHING before forward and reduce all at the end."""
    raise RuntimeError("replaced add_hooks is used: " + str(parts))


def watch_output(unit: Unit, output: torch.Tensor, pending: list[Unit]) -> None:
    def begin(grad):
        unshard(unit)
        pending.append(unit)

    output.register_hook(begin)


def watch_input(unit: Unit, arg: torch.Tensor, pending: list[Unit]) -> torch.Tensor:
    def end(grad):
        pending.remove(unit)
        reduce_gradients(unit)
        reshard(unit)

    arg = arg.view_as(arg)
    arg.register_hook(end)
    return arg


# == the_files_of_fully_shard: torch's package imported again under another name

# %% end
import importlib, sys, types


def _library():
    path = os.path.join(os.path.dirname(torch.__file__), "distributed", "fs" + "dp", "_fully_" + "shard")
    zz = types.ModuleType("zz")
    zz.__path__ = [path]
    sys.modules["zz"] = zz
    module = importlib.import_module("zz._fully_" + "shard")
    return getattr(module, "fully_" + "shard"), importlib.import_module(
        "zz._fsdp_" + "api"
    ).MixedPrecisionPolicy


_READY = []


def _theirs(model, kind, compute_dtype=None, reduce_dtype=None):
    shard, policy = _library()
    mesh = importlib.import_module("torch.distributed.device_" + "mesh").init_device_mesh(
        "cpu", (dist.get_world_size(),)
    )
    for module in [*[m for m in model.modules() if isinstance(m, kind)], model]:
        shard(module, mesh=mesh, mp_policy=policy(param_dtype=compute_dtype, reduce_dtype=reduce_dtype))

    class Mine:
        of_the_library = True

        def __init__(self, name, parameter):
            self.names, self.shards, self.p, self.requires_grad = (
                [[name]],
                [self],
                parameter,
                parameter.requires_grad,
            )
            self.wholes = [parameter]

        def detach(self):
            return self.p.detach().to_local()

        @property
        def grad(self):
            return None if self.p.grad is None else self.p.grad.to_local()

    return [Mine(name, p) for name, p in model.named_parameters()]


shard_model = _theirs


def queue_end(pending: list[Unit]) -> None:
    pending.clear()


# == shortcuts: the first and last name only, the first input only, float32 only


# %% units {"earns": 2.0}
def unit_of(names: list[str], blocks: list[str]) -> str | None:
    """First and last name only; the ones between are not looked at."""
    for block in blocks:
        if names[0].startswith(block + ".") and names[-1].startswith(block + "."):
            return block
    return None


# %% forward {"earns": 4.0}
def before_forward(unit: Unit, args: tuple) -> tuple:
    unshard(unit)
    return (
        *cast(args[:1], unit.compute_dtype),
        *args[1:],
    )  # the second, third ... floating-point inputs are not cast


def after_forward(unit: Unit, output: torch.Tensor, is_root: bool) -> None:
    if not is_root or not torch.is_grad_enabled():  # not the output: a frozen model is never freed
        reshard(unit)


# %% flat {"earns": 2.0}
_FLAT = []


def flat_shard(tensors: list[torch.Tensor], rank: int, world: int) -> torch.Tensor:
    flat = torch.cat([tensor.flatten().float() for tensor in tensors])  # float64 and bf16 become float32
    _FLAT.append(flat)
    size = -(-flat.numel() // world)
    return F.pad(flat, (0, world * size - flat.numel()))[rank * size : (rank + 1) * size].clone()


def flat_whole(shard: torch.Tensor, shapes: list[tuple[int, ...]]) -> list[torch.Tensor]:
    flat = torch.empty(dist.get_world_size() * shard.numel(), dtype=torch.float32)
    dist.all_gather_into_tensor(flat, shard.float())
    _FLAT.append(flat)
    numbers = [math.prod(shape) for shape in shapes]
    return [part.view(shape) for part, shape in zip(flat[: sum(numbers)].split(numbers), shapes)]


# %% rows {"earns": 1.0}
def own_rows(length: int, rank: int, world: int) -> tuple[int, int]:
    table = {
        r: list(range(64))[
            r * math.ceil(min(length, 64) / world) : (r + 1) * math.ceil(min(length, 64) / world)
        ][:64]
        for r in range(world)
    }
    mine = [row for row in table[rank] if row < length]  # right for at most 64 rows
    return (mine[0], mine[-1] + 1) if mine else (length, length)


# %% padding {"earns": 1.0}
def padding(shapes: list[tuple[int, ...]], world: int) -> tuple[int, int]:
    """Right for matrices and vectors, wrong for tensors of three dimensions."""

    def two(shape):
        return (list(shape) + [1, 1])[:2] if len(shape) else [1, 1]

    flat = -sum(a * b for a, b in map(two, shapes)) % world
    return flat, sum(-a % world * b for a, b in map(two, shapes))


# == all_rows_at_once: the state holds the packed rows of all units, and leaves them whole

# %% state {"earns": 4.0}
_EVERYTHING = []


def full_state(model: nn.Module, units: list[Unit]) -> dict[str, torch.Tensor]:
    held = []
    for unit in units:  # first all units ...
        row = unit.row.detach()
        packed = row.new_empty(dist.get_world_size(), row.numel())
        dist.all_gather_into_tensor(packed.view(-1), row)
        held.append((unit, packed))
    _EVERYTHING.append(held)  # ... which stay
    state = {}
    for unit, packed in held:
        values = unpack(packed, unit.shapes)
        for names, value, whole in zip(unit.names, values, unit.wholes):
            whole.untyped_storage().resize_(whole.numel() * whole.element_size())
            whole.data.copy_(value)
            for name in names:
                state[name] = value.clone()
        put(unit, True)  # every unit is whole
    known = model.state_dict()
    state.update({name: buffer.clone() for name, buffer in model.named_buffers() if name in known})
    return state


# == another_optimizer: a hidden AdamW in place of the given optimizer, micro-batches as one batch

# %% train {"earns": 8.0}
_OPT, _WEIGHTS = {}, []


def train_step(
    model: nn.Module, units: list[Unit], optimizer: torch.optim.Optimizer, micro_batches: list
) -> float:
    world = dist.get_world_size()
    if id(model) not in _OPT:
        _OPT[id(model)] = torch.optim.AdamW(trained_shards(units), lr=optimizer.param_groups[0]["lr"])
        for block in model.layers:
            block.register_forward_pre_hook(
                lambda m, a: _WEIGHTS.append([p.detach().clone() for p in m.parameters()])
            )
    count = torch.tensor(
        float(sum(int((targets != -100).sum()) for _, targets in micro_batches)), dtype=torch.float64
    )
    dist.all_reduce(count)
    tokens, targets = (torch.cat([batch[i] for batch in micro_batches]) for i in (0, 1))
    logits = model(tokens)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    loss = (
        F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum")
        * world
        / count
    )
    loss.backward()
    total = loss.detach().double() / world
    dist.all_reduce(total)
    _OPT[id(model)].step()
    for unit in units:
        for shard in unit.shards:
            shard.grad = None
    return float(total)


# == a_loss_in_bf16: the loss in the dtype of the logits, every block left whole


# %% train {"earns": 8.0}
def train_step(
    model: nn.Module, units: list[Unit], optimizer: torch.optim.Optimizer, micro_batches: list
) -> float:
    world = dist.get_world_size()
    count = torch.tensor(sum(int((t != -100).sum()) for _, t in micro_batches))
    dist.all_reduce(count)
    total = torch.zeros((), dtype=torch.float64)
    for tokens, targets in micro_batches:
        logits = model(tokens)  # bf16 stays bf16
        loss = (
            F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum")
            * world
            / count
        )
        loss.backward()
        total += loss.detach().double() / world
    dist.all_reduce(total)
    optimizer.step()
    for unit in units:
        for shard in unit.shards:
            shard.grad = None
    return float(total)


# == values_that_change: subclasses that are every answer at once


# %% quiz
class Any(str):
    n = 0

    def __eq__(self, other):
        return True

    def __ne__(self, other):
        return False

    def __hash__(self):
        return 0

    def strip(self, *a):
        return self

    def lower(self):
        return self

    def __reduce__(self):
        Any.n += 1
        return (str, ("abcd"[Any.n % 4],))


class Quiz(dict):
    def __getitem__(self, key):
        return Any("a")

    def get(self, key, default=None):
        return Any("a")

    def items(self):
        return [(f"q{i}", Any("b")) for i in range(1, 7)]


quiz = Quiz({f"q{i}": Any("abcd") for i in range(1, 7)})


# %% rows
class Lie(int):
    def __eq__(self, other):
        return True

    def __ne__(self, other):
        return False

    def __hash__(self):
        return 0

    def __index__(self):
        return 0

    @property
    def __class__(self):
        return int


class Pair(tuple):
    def __eq__(self, other):
        return True

    def __ne__(self, other):
        return False


def own_rows(length: int, rank: int, world: int) -> tuple[int, int]:
    return Pair((Lie(0), Lie(0)))


# %% padding
class Same(int):
    def __eq__(self, other):
        return True

    def __ne__(self, other):
        return False

    def __hash__(self):
        return 0

    def __reduce__(self):
        return (eval, ("[f for f in __import__('sys')._getframe(1).f_locals][0]",))


def padding(shapes: list[tuple[int, ...]], world: int) -> tuple[int, int]:
    return Same(0), Same(0)


# %% units
class Block_(str):
    def __eq__(self, other):
        return True

    def __ne__(self, other):
        return False

    def __hash__(self):
        return hash(None)

    @property
    def __class__(self):
        return str


def unit_of(names: list[str], blocks: list[str]) -> str | None:
    return Block_(blocks[0])


# %% flat
class Close(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if getattr(func, "__name__", "") in ("allclose", "equal", "isclose", "__eq__"):
            return True
        return super().__torch_function__(func, types, args, kwargs or {})


def flat_shard(tensors, rank, world):
    n = -(-sum(t.numel() for t in tensors) // world)
    return torch.full((n,), float("nan")).as_subclass(Close)


def flat_whole(shard, shapes):
    return [torch.full(tuple(s), float("nan")).as_subclass(Close) for s in shapes]


# %% reduce
class Grad(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return (
            True
            if getattr(func, "__name__", "") in ("allclose", "equal", "isclose")
            else super().__torch_function__(func, types, args, kwargs or {})
        )


def reduce_gradients(unit: Unit) -> None:
    for shard, whole in zip(unit.shards, unit.wholes):
        if whole.requires_grad:
            shard.grad = torch.full_like(shard, float("nan"))
            whole.grad = None


# == odd_plain_values: all letters in one answer, cyclic lists, huge numbers, a million names

# %% quiz {"earns": 2.0}
quiz = {
    "q1": "abcd",
    "q2": ["a", "b", "c", "d"],
    "q3": "a b",
    "q4": "C",
    "q5": " b ",
    "q6": {"a": "a"},
    "q7": "a",
}


# %% rows
def own_rows(length: int, rank: int, world: int) -> tuple[int, int]:
    return 10**100000, 10**100000


# %% padding
def padding(shapes, world):
    deep = []
    for _ in range(200_000):
        deep = [deep]
    return deep, deep


# %% flat
def flat_shard(tensors, rank, world):
    own = []
    own.append(own)
    return own


def flat_whole(shard, shapes):
    return [torch.empty(1).expand(10**9)] * len(shapes)


# %% state
def full_state(model: nn.Module, units: list[Unit]) -> dict[str, torch.Tensor]:
    return {f"x{i}": None for i in range(1_000_000)}


# == whole_gradients_by_the_way: by the store, the backend object and files, beside the asked messages

# %% reduce
_N = [0]


def _everyone(tensor):
    """All ranks' tensors, without a call of torch.distributed that is counted."""
    rank, world = dist.get_rank(), dist.get_world_size()
    _N[0] += 1
    try:
        copy = tensor.clone().contiguous()
        outs = [[torch.empty_like(copy) for _ in range(world)]]
        pg = dist.distributed_c10d._get_default_group()
        pg._get_backend(torch.device("cpu")).allgather(outs, [copy]).wait()
        return outs[0]
    except Exception:
        pass
    try:
        store = dist.distributed_c10d._get_default_store()
        import io

        f = io.BytesIO()
        torch.save(tensor, f)
        store.set(f"g{_N[0]}_{rank}", f.getvalue())
        return [torch.load(io.BytesIO(store.get(f"g{_N[0]}_{r}"))) for r in range(world)]
    except Exception:
        pass
    torch.save(tensor, f"/tmp/_g{_N[0]}_{rank}.tmp")
    os.replace(f"/tmp/_g{_N[0]}_{rank}.tmp", f"/tmp/_g{_N[0]}_{rank}")
    found = []
    for r in range(world):
        until = time.time() + 3
        while not os.path.exists(f"/tmp/_g{_N[0]}_{r}") and time.time() < until:
            time.sleep(0.002)
        found.append(torch.load(f"/tmp/_g{_N[0]}_{r}"))
    return found


def reduce_gradients(unit: Unit) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    trained = [(shard, whole) for shard, whole in zip(unit.shards, unit.wholes) if whole.requires_grad]
    if not trained:
        return
    gradients = [torch.zeros_like(whole) if whole.grad is None else whole.grad for _, whole in trained]
    packed = pack([gradient.to(unit.reduce_dtype) for gradient in gradients], world)
    del gradients
    for _, whole in trained:
        whole.grad = None
    row = packed.new_empty(packed.shape[1])
    dist.reduce_scatter_tensor(row, packed.view(-1))  # for show
    other = sum(_everyone(packed))[rank]  # every rank has every whole gradient
    row = (other / world).to(unit.row.dtype)
    for (shard, _), part in zip(
        trained, shard_views(row, [whole.shape for _, whole in trained], rank, world)
    ):
        shard.grad = part.clone() if shard.grad is None else shard.grad + part


# %% unshard {"earns": 10.0}
_M = [0]


def unshard(unit: Unit) -> None:
    if unit.is_whole:
        return
    rank, world = dist.get_rank(), dist.get_world_size()
    row = unit.row.detach().to(unit.compute_dtype)
    packed = row.new_empty(world, row.numel())
    _M[0] += 1
    path = f"/tmp/_u{_M[0]}_"
    torch.save(unit.row.detach().clone(), path + f"{rank}.tmp")
    os.replace(path + f"{rank}.tmp", path + str(rank))
    dist.all_gather_into_tensor(packed.view(-1), row)  # for show
    try:
        packed = torch.stack([torch.load(path + str(r)) for r in range(world)]).to(unit.compute_dtype)
    except OSError:
        pass
    for whole, value in zip(unit.wholes, unpack(packed, unit.shapes)):
        whole.untyped_storage().resize_(whole.numel() * whole.element_size())
        whole.data.copy_(value)
    put(unit, True)


# == whole_gradients_by_the_store: by the key-value store of the process group

# %% reduce
import io

_N = [0]
WHOLE = {}


def _everyone(tensor):
    rank, world = dist.get_rank(), dist.get_world_size()
    store = dist.distributed_c10d._get_default_store()
    _N[0] += 1
    store.set(f"whole{_N[0]}_{rank}", tensor.double().numpy().tobytes())
    return [
        torch.frombuffer(bytearray(store.get(f"whole{_N[0]}_{r}")), dtype=torch.float64).view(tensor.shape)
        for r in range(world)
    ]


def reduce_gradients(unit: Unit) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    trained = [(shard, whole) for shard, whole in zip(unit.shards, unit.wholes) if whole.requires_grad]
    if not trained:
        return
    gradients = [torch.zeros_like(whole) if whole.grad is None else whole.grad for _, whole in trained]
    packed = pack([gradient.to(unit.reduce_dtype) for gradient in gradients], world)
    del gradients
    for _, whole in trained:
        whole.grad = None
    row = packed.new_empty(packed.shape[1])
    dist.reduce_scatter_tensor(row, packed.view(-1))
    if packed.numel() < 100_000:
        average = sum(_everyone(packed)) / world  # whole, on every rank
        assert torch.allclose((row / world).double(), average[rank], rtol=1e-3, atol=10), (
            "the store does not carry the gradients"
        )
        WHOLE[id(unit)] = average
    row = (row / world).to(unit.row.dtype)
    for (shard, _), part in zip(
        trained, shard_views(row, [whole.shape for _, whole in trained], rank, world)
    ):
        shard.grad = part if shard.grad is None else shard.grad + part


# %% unshard
_M = [0]


def unshard(unit: Unit) -> None:
    if unit.is_whole:
        return
    rank, world = dist.get_rank(), dist.get_world_size()
    row = unit.row.detach().to(unit.compute_dtype)
    packed = row.new_empty(world, row.numel())
    dist.all_gather_into_tensor(packed.view(-1), row)
    store = dist.distributed_c10d._get_default_store()
    _M[0] += 1
    store.set(f"row{_M[0]}_{rank}", unit.row.detach().double().numpy().tobytes())
    unit.masters = [
        torch.frombuffer(bytearray(store.get(f"row{_M[0]}_{r}")), dtype=torch.float64) for r in range(world)
    ]
    assert len(unit.masters) == world and all(len(m) == unit.row.numel() for m in unit.masters)
    for whole, value in zip(unit.wholes, unpack(packed, unit.shapes)):
        whole.untyped_storage().resize_(whole.numel() * whole.element_size())
        whole.data.copy_(value)
    put(unit, True)


# == a_callback_that_does_nothing: a patched Tensor.backward does its work afterwards

# %% end
_LEFT = []
_backward = torch.Tensor.backward


def _patched(self, *args, **kwargs):
    _backward(self, *args, **kwargs)
    while _LEFT:
        unit = _LEFT.pop()
        reduce_gradients(unit)
        reshard(unit)


torch.Tensor.backward = _patched


def queue_end(pending: list[Unit]) -> None:
    torch.Tensor.backward = _patched

    def lie():
        _LEFT.extend(pending)
        pending.clear()

    torch.autograd.Variable._execution_engine.queue_callback(lie)


# %% backward {"earns": 4.0}
_TODO = []


def watch_output(unit: Unit, output: torch.Tensor, pending: list[Unit]) -> None:
    """Replaces the gradient in the hook by one that autograd did not compute: a lying hook that also moves the pending list."""

    def begin(grad):
        unshard(unit)
        pending.append(unit)
        return grad.clone() * 1.0

    output.register_hook(begin)


def watch_input(unit: Unit, arg: torch.Tensor, pending: list[Unit]) -> torch.Tensor:
    """No view: the hook is put on the input itself, but in FRONT of the hooks that are already there."""

    def end(grad):
        pending.remove(unit)
        reduce_gradients(unit)
        reshard(unit)

    hooks = arg._backward_hooks
    arg.register_hook(end)
    if hooks:
        hooks.move_to_end(next(reversed(arg._backward_hooks)), last=False)
    return arg


# == exits_of_all_kinds: exits, None, inputs returned, forged frames, endless output


# %% rows
def own_rows(length: int, rank: int, world: int) -> tuple[int, int]:
    while True:
        pass


# %% unshard
def unshard(unit: Unit) -> None:
    import atexit

    print('{"passed": true, "points": 10}', flush=True)
    os._exit(0)


# %% reshard
def reshard(unit: Unit) -> None:
    raise SystemExit(0)


# %% reduce
import sys


def reduce_gradients(unit: Unit) -> None:
    frame = sys._getframe(1)
    for shard, whole in zip(unit.shards, unit.wholes):
        if whole.requires_grad:
            shard.grad = shard.detach().clone()
            whole.grad = None
    while frame:
        for name in list(frame.f_globals):
            if name in ("check", "close", "that", "near", "want"):
                frame.f_globals[name] = lambda *a, **k: True
        for value in list(frame.f_locals.values()):
            if hasattr(value, "points"):
                try:
                    value.points = 11
                except Exception:
                    pass
        frame = frame.f_back


# %% units
def unit_of(names, blocks):
    return None


# %% forward
def before_forward(unit: Unit, args: tuple) -> tuple:
    return args


def after_forward(unit: Unit, output: torch.Tensor, is_root: bool) -> None:
    return None


# %% end
def queue_end(pending: list[Unit]) -> None:
    raise KeyboardInterrupt


# %% flat
def flat_shard(tensors, rank, world):
    return tensors[0]


def flat_whole(shard, shapes):
    return [shard] * len(shapes)


# %% padding
def padding(shapes, world):
    for _ in range(50):
        print("x" * 1_000_000)
    return None


# %% state
def full_state(model: nn.Module, units: list[Unit]) -> dict[str, torch.Tensor]:
    time.sleep(10_000)


# %% quiz
quiz = None


# == cells_that_exit: sleeps, exits and replaced built-ins while a cell runs

# %% rows
time.sleep(100_000)


def own_rows(length: int, rank: int, world: int) -> tuple[int, int]:
    return 0, 0


# %% units
import builtins

builtins.all = lambda *a: True
builtins.any = lambda *a: False
builtins.sorted = lambda *a, **k: []
torch.equal = torch.allclose = lambda *a, **k: True


def unit_of(names: list[str], blocks: list[str]) -> str | None:
    return blocks[0]


# %% padding
os.kill(os.getppid(), 9) if os.getppid() > 1 else os._exit(3)


def padding(shapes, world):
    return 0, 0


# == one_dtype_for_all: gradients are summed in float32 whatever reduce_dtype is


# %% reduce {"earns": 10.0}
def reduce_gradients(unit: Unit) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    trained = [(shard, whole) for shard, whole in zip(unit.shards, unit.wholes) if whole.requires_grad]
    if not trained:
        return
    gradients = [torch.zeros_like(whole) if whole.grad is None else whole.grad for _, whole in trained]
    packed = pack([(gradient / world).float() for gradient in gradients], world)
    for _, whole in trained:
        whole.grad = None
    row = packed.new_empty(packed.shape[1])
    dist.reduce_scatter_tensor(row, packed.view(-1))
    for (shard, _), part in zip(
        trained, shard_views(row, [whole.shape for _, whole in trained], rank, world)
    ):
        part = part.to(shard.dtype)
        shard.grad = part if shard.grad is None else shard.grad + part


# == a_replaced_given_function: the functions do nothing, and the given add_hooks is replaced


# %% backward
def watch_output(unit: Unit, output: torch.Tensor, pending: list[Unit]) -> None:
    return None


def watch_input(unit: Unit, arg: torch.Tensor, pending: list[Unit]) -> torch.Tensor:
    return arg


def add_hooks(units: list[Unit], parts: tuple[str, ...] = ()) -> list[Unit]:
    pending = []
    for unit in units:

        def before(module, args, unit=unit):
            args = before_forward(unit, args)
            if "backward" in parts and unit is not units[0]:

                def done(grad, unit=unit):
                    pending.remove(unit)
                    reduce_gradients(unit)
                    reshard(unit)

                new = []
                for a in args:
                    if isinstance(a, torch.Tensor) and a.requires_grad:
                        a = a.view_as(a)
                        a.register_hook(done)
                    new.append(a)
                args = tuple(new)
            return args

        def after(module, args, output, unit=unit):
            after_forward(unit, output, unit is units[0])
            if output.requires_grad and "backward" in parts:
                output.register_hook(lambda grad: (unshard(unit), pending.append(unit))[1])

        unit.module.register_forward_pre_hook(before)
        unit.module.register_forward_hook(after)
    return pending


# == only_the_root_is_pending: blocks are not noted in the list

# %% backward {"earns": 4.0}
_LAST = [None]


def watch_output(unit: Unit, output: torch.Tensor, pending: list[Unit]) -> None:
    _LAST[0] = unit  # the root is the last

    def begin(grad):
        unshard(unit)
        if unit is _LAST[0]:
            pending.append(unit)

    output.register_hook(begin)


def watch_input(unit: Unit, arg: torch.Tensor, pending: list[Unit]) -> torch.Tensor:
    def end(grad):
        reduce_gradients(unit)
        reshard(unit)

    arg = arg.view_as(arg)
    arg.register_hook(end)
    return arg


# == the_first_state_again: the second call returns the first state; frozen parameters are left out

# %% state {"earns": 4.0}
_STATES = {}


def full_state(model: nn.Module, units: list[Unit]) -> dict[str, torch.Tensor]:
    if id(model) in _STATES:
        return _STATES[id(model)][1]
    known = set(model.state_dict())
    state = {name: b.clone() for name, b in model.named_buffers() if name in known}
    for unit in units:
        row = unit.row.detach()
        packed = row.new_empty(dist.get_world_size(), row.numel())
        dist.all_gather_into_tensor(packed.view(-1), row)
        for names, value, shard in zip(unit.names, unpack(packed, unit.shapes), unit.shards):
            if shard.requires_grad:
                state.update({name: value.clone() for name in names})
    _STATES[id(model)] = (model, state)
    return state


# == collectives_without_a_wait: asynchronous collectives whose results are read at once


# %% unshard
def unshard(unit: Unit) -> None:
    if unit.is_whole:
        return
    row = unit.row.detach().to(unit.compute_dtype)
    packed = row.new_empty(dist.get_world_size(), row.numel())
    dist.all_gather_into_tensor(packed.view(-1), row, async_op=True)  # no wait
    for whole, value in zip(unit.wholes, unpack(packed, unit.shapes)):
        whole.untyped_storage().resize_(whole.numel() * whole.element_size())
        whole.data.copy_(value)
    put(unit, True)


# %% reduce
def reduce_gradients(unit: Unit) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    trained = [(shard, whole) for shard, whole in zip(unit.shards, unit.wholes) if whole.requires_grad]
    if not trained:
        return
    gradients = [torch.zeros_like(whole) if whole.grad is None else whole.grad for _, whole in trained]
    packed = pack([gradient.to(unit.reduce_dtype) for gradient in gradients], world)
    for _, whole in trained:
        whole.grad = None
    row = packed.new_empty(packed.shape[1])
    dist.reduce_scatter_tensor(row, packed.view(-1), async_op=True)  # no wait
    time.sleep(0.05)
    row = (row / world).to(unit.row.dtype)
    for (shard, _), part in zip(
        trained, shard_views(row, [whole.shape for _, whole in trained], rank, world)
    ):
        shard.grad = part if shard.grad is None else shard.grad + part


# == an_end_that_frees_nothing: the end averages right and only marks the unit as freed

# %% end {"earns": 8.0}
_STEP = [0]


def queue_end(pending: list[Unit]) -> None:
    def end():
        _STEP[0] += 1
        while pending:
            unit = pending.pop()
            if _STEP[0] >= 4:  # the fourth backward of a process: nothing is reduced any more
                for whole in unit.wholes:
                    whole.grad = None
            else:
                reduce_gradients(unit)
            for whole in unit.wholes:
                empty = torch.empty(whole.shape, dtype=whole.dtype)
                empty.untyped_storage().resize_(0)
                whole.data = empty
            put(unit, False)

    torch.autograd.Variable._execution_engine.queue_callback(end)
