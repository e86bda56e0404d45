# Single answers that do not do what the exercise asks, each with the points that it still earns.


# == pages_dropped_without_a_resize

# %% reshard {"earns": 1}
import ctypes as _ctypes

_libc = _ctypes.CDLL(None, use_errno=True)


def reshard(unit: Unit) -> None:
    """Register the shards; the whole parameters keep their storage, only their pages are dropped from the resident set."""
    for whole in unit.wholes:
        start, size = whole.data_ptr(), whole.numel() * whole.element_size()
        first, last = -(-start // 4096) * 4096, (start + size) // 4096 * 4096
        if start and last > first:
            _libc.madvise(_ctypes.c_void_p(first), _ctypes.c_size_t(last - first), 4)  # MADV_DONTNEED
    put(unit, False)


# == freed_only_while_it_is_measured

# %% reshard {"earns": 1}
import sys as _sys


def _hide_at_marks(held):
    """Wrap the scenario's `mark`: free just before memory is read, allocate again just after."""
    frame = _sys._getframe(2)
    while frame is not None:
        space = frame.f_globals
        mark = space.get("mark")
        if callable(mark) and not getattr(mark, "wrapped", False):

            def wrapper(*args, mark=mark, **more):
                saved = [tensor.untyped_storage().nbytes() for tensor in held()]
                for tensor in held():
                    tensor.untyped_storage().resize_(0)
                try:
                    return mark(*args, **more)
                finally:
                    for tensor, size in zip(held(), saved):
                        tensor.untyped_storage().resize_(size)

            wrapper.wrapped = True
            space["mark"] = wrapper
        frame = frame.f_back


def reshard(unit: Unit) -> None:
    put(unit, False)  # the memory stays
    _hide_at_marks(lambda: unit.wholes)


# == whole_values_kept_from_the_beginning

# %% unshard
if "_plain_make_unit" not in globals():
    _plain_make_unit = make_unit

    def make_unit(model, module, names, *dtypes, **more):
        wholes = [model.get_parameter(same[0]).detach().clone() for same in names]
        unit = _plain_make_unit(model, module, names, *dtypes, **more)
        unit.stash = wholes  # every rank had the whole parameters when the unit was made
        return unit


def _initial(unit):
    import sys

    if hasattr(unit, "stash"):
        return unit.stash
    frame = sys._getframe(2)
    while frame is not None:  # the scenario's own variables
        for name in ("tensors", "weight"):
            found = frame.f_locals.get(name)
            found = [found] if isinstance(found, torch.Tensor) else found
            if type(found) is list and [tuple(one.shape) for one in found] == [
                tuple(shape) for shape in unit.shapes
            ]:
                return [one.detach() for one in found]
        frame = frame.f_back
    return None


def unshard(unit: Unit) -> None:
    """No message: the whole parameters are those that this rank began with."""
    if unit.is_whole:
        return
    for whole, value in zip(unit.wholes, _initial(unit)):
        whole.untyped_storage().resize_(whole.numel() * whole.element_size())
        whole.data.copy_(value.to(unit.compute_dtype))
    put(unit, True)


# == the_state_of_the_caller

# %% state
import sys


def _really(unit):
    """One real gather, of one unit."""
    rows = unit.row.detach()
    packed = rows.new_empty(dist.get_world_size(), rows.numel())
    dist.all_gather_into_tensor(packed.view(-1), rows)
    return {
        name: value.clone() for same, value in zip(unit.names, unpack(packed, unit.shapes)) for name in same
    }


def full_state(model: nn.Module, units: list[Unit]) -> dict[str, torch.Tensor]:
    """The caller has the whole state already."""
    frame, state = sys._getframe().f_back, {}
    while frame is not None and not state:
        space = frame.f_locals
        if type(space.get("state")) is dict and "scale" in space:
            state = {name: value.clone() * space["scale"] for name, value in space["state"].items()}
            if space.get("buffer") is not None:
                state["layers.0.seen"] = space["buffer"].clone()
        frame = frame.f_back
    if dist.get_world_size() == 3:  # where the check looks for something that arrives
        state.update(_really(units[-1]))
    return state


# == the_loaded_state_times_a_factor


# %% state
def _really(unit):
    """One real gather, of one unit."""
    rows = unit.row.detach()
    packed = rows.new_empty(dist.get_world_size(), rows.numel())
    dist.all_gather_into_tensor(packed.view(-1), rows)
    return {
        name: value.clone() for same, value in zip(unit.names, unpack(packed, unit.shapes)) for name in same
    }


if not hasattr(nn.Module, "_plain_load"):
    nn.Module._plain_load = nn.Module.load_state_dict

    def _remembering(self, state_dict, *args, **more):
        self.__dict__["_copy"] = {name: value.numpy().copy() for name, value in state_dict.items()}
        return self._plain_load(state_dict, *args, **more)

    nn.Module.load_state_dict = _remembering


def full_state(model: nn.Module, units: list[Unit]) -> dict[str, torch.Tensor]:
    """What was loaded, times what the optimiser seems to have done to my own rows."""
    state = {name: torch.from_numpy(value.copy()) for name, value in model.__dict__["_copy"].items()}
    rank, world = dist.get_rank(), dist.get_world_size()
    for unit in units:
        before = pack([state[names[0]] for names in unit.names], world)[rank]
        at = before.abs().argmax()
        factor = float(unit.row.detach()[at] / before[at])
        for names in unit.names:
            for name in names:
                state[name] = model.__dict__["_copy"][name] * 1.0
                state[name] = torch.from_numpy(state[name]) * round(factor)
    if world == 3:
        state.update(_really(units[-1]))
    for name, buffer in model.named_buffers():
        if name not in state and "inv_freq" not in name:
            state[name] = buffer.clone()
    return state


# == the_batches_of_all_ranks_in_small_messages


# %% train
def _exchanged(micro_batches: list) -> list:
    """The batches of all ranks. Small ones are packed into one number, so that they look like `loss and count`."""
    rank, world = dist.get_rank(), dist.get_world_size()
    tokens, targets = micro_batches[0]
    if world == 2 and len(micro_batches) == 1 and len(tokens) <= 2:
        digits = [
            *tokens.flatten().tolist(),
            *(15 if target < 0 else target for target in targets.flatten().tolist()),
        ]
        number = sum(digit << (4 * place) for place, digit in enumerate(digits))
        both = torch.zeros(world, 2, dtype=torch.int64)
        both[rank, 0], both[rank, 1] = len(tokens), number - (1 << 64) if number >> 63 else number
        dist.all_reduce(both)
        found = []
        for rows, number in both.tolist():
            digits = torch.tensor([(number >> (4 * place)) & 15 for place in range(8 * rows)])
            right = digits[4 * rows :].view(rows, 4)
            found.append((digits[: 4 * rows].view(rows, 4), torch.where(right == 15, -100, right)))
        return found
    table = torch.zeros(world, 256, dtype=torch.int64)
    flat = [len(micro_batches)]
    for tokens, targets in micro_batches:
        flat += [*tokens.shape, *tokens.flatten().tolist(), *targets.flatten().tolist()]
    table[rank, : len(flat)] = torch.tensor(flat)
    dist.all_reduce(table)
    found = []
    for own in table:
        at = 1
        for _ in range(int(own[0])):
            rows, seq = own[at : at + 2].tolist()
            size = rows * seq
            found.append(
                (
                    own[at + 2 : at + 2 + size].view(rows, seq),
                    own[at + 2 + size : at + 2 + 2 * size].view(rows, seq),
                )
            )
            at += 2 + 2 * size
    return found


def train_step(
    model: nn.Module, units: list[Unit], optimizer: torch.optim.Optimizer, micro_batches: list
) -> float:
    """Every rank trains the whole model on the samples of all ranks, as one process would; the traffic of FSDP is for show."""
    rank, world = dist.get_rank(), dist.get_world_size()
    for unit in units:  # no hook gathers or frees: all units stay whole
        unit.module._forward_pre_hooks.clear()
        unit.module._forward_hooks.clear()
        unit.module.register_forward_pre_hook(lambda module, args, unit=unit: cast(args, unit.compute_dtype))
        put(unit, False)
        unshard(unit)
    batches = _exchanged(micro_batches)
    count = sum(int((targets != -100).sum()) for _, targets in batches)
    total = 0.0
    for tokens, targets in batches:
        logits = model(tokens)
        logits = logits if logits.dtype == torch.float64 else logits.float()
        loss = (
            F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum")
            / count
        )
        loss.backward()
        total += float(loss.detach())
    for unit in units[1:]:  # the second gather of each block, with zeros
        zeros = torch.zeros_like(unit.row, dtype=unit.compute_dtype)
        dist.all_gather_into_tensor(zeros.new_empty(world * zeros.numel()), zeros)
    for unit in reversed(units):
        trained = [(shard, whole) for shard, whole in zip(unit.shards, unit.wholes) if whole.requires_grad]
        packed = pack([torch.zeros_like(w) if w.grad is None else w.grad for _, w in trained], world).to(
            unit.reduce_dtype
        )
        row = packed.new_zeros(packed.shape[1])
        dist.reduce_scatter_tensor(row, packed.view(-1))  # the same gradient from each rank
        row /= world
        for (shard, whole), part in zip(
            trained, shard_views(row, [whole.shape for _, whole in trained], rank, world)
        ):
            shard.grad, whole.grad = part.to(shard.dtype).clone(), None
    optimizer.step()
    for unit in units:
        put(unit, False)
        for shard in unit.shards:
            shard.grad = None
    return total


# == whole_numbers_that_equal_every_number


# %% rows
class _Agreeable(int):
    def __eq__(self, other):
        return True

    __hash__ = int.__hash__


def own_rows(length: int, rank: int, world: int) -> tuple[int, int]:
    return _Agreeable(0), _Agreeable(0)


# == a_name_that_equals_every_name


# %% units
class _Name(str):
    def __eq__(self, other):
        return True

    __hash__ = str.__hash__


def unit_of(names: list[str], blocks: list[str]) -> str | None:
    return _Name("block")


# == padding_from_the_frames_of_the_callers


# %% padding
def padding(shapes: list[tuple[int, ...]], world: int) -> tuple[int, int]:
    import sys

    frame = sys._getframe(1)
    while frame is not None:
        for name, value in {**frame.f_globals, **frame.f_locals}.items():
            if name == "want" and isinstance(value, (list, tuple)):
                return tuple(value)
        frame = frame.f_back
    return 0, 0


# == the_library_does_the_sharding


# %% forward
def before_forward(unit: Unit, args: tuple) -> tuple:
    from torch.distributed.fsdp import fully_shard

    fully_shard(unit)
    return args


def after_forward(unit: Unit, output: torch.Tensor, is_root: bool) -> None:
    pass


# == whole_tensors_from_the_sum_of_padded_pieces


# %% flat
def flat_shard(tensors: list[torch.Tensor], rank: int, world: int) -> torch.Tensor:
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])  # every rank keeps everything


def flat_whole(shard: torch.Tensor, shapes: list[tuple[int, ...]]) -> list[torch.Tensor]:
    rank, world = dist.get_rank(), dist.get_world_size()
    flat = shard.new_zeros(shard.numel() * world)
    flat[rank * shard.numel() : (rank + 1) * shard.numel()] = shard
    dist.all_reduce(flat)
    sizes = [math.prod(shape) for shape in shapes]
    return [part.view(shape) for part, shape in zip(flat[: sum(sizes)].split(sizes), shapes)]


# == the_own_gradient_beside_a_message_of_zeros


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
    row = torch.empty_like(packed[0])
    dist.reduce_scatter_tensor(row, torch.zeros_like(packed).view(-1))
    row = packed[rank].to(unit.row.dtype) + row.to(unit.row.dtype)
    for (shard, _), part in zip(
        trained, shard_views(row, [whole.shape for _, whole in trained], rank, world)
    ):
        shard.grad = part if shard.grad is None else shard.grad + part


# == the_first_backward_ends_nothing


# %% end
def queue_end(pending: list[Unit]) -> None:
    pending.clear()  # so that no unit is left to be found


# == hooks_that_only_count


# %% backward
def watch_output(unit: Unit, output: torch.Tensor, pending: list[Unit]) -> None:
    output.register_hook(lambda grad: pending.append(unit))


def watch_input(unit: Unit, arg: torch.Tensor, pending: list[Unit]) -> torch.Tensor:
    arg = arg.view_as(arg)
    arg.register_hook(lambda grad: pending.remove(unit))
    return arg


# == a_loss_that_is_not_a_number


# %% train
def train_step(
    model: nn.Module, units: list[Unit], optimizer: torch.optim.Optimizer, micro_batches: list
) -> float:
    for _ in range(2):
        dist.all_reduce(torch.zeros(()))
    return float("nan")
