"""Scenarios that run with the student's code on every rank. They contain no expected value."""

# ruff: noqa: F821 - mark is defined where these run

from __future__ import annotations

import torch
import torch.distributed as dist

from dlo_lib.grading.checks.contract import scenario

# -- one unit


def one_unit(make_unit, tensors, *dtypes, frozen=()):
    """A module that has these parameters, and the unit of all of them. ``dtypes``: by name, or None."""
    module = torch.nn.ParameterList(
        [torch.nn.Parameter(tensor, requires_grad=i not in frozen) for i, tensor in enumerate(tensors)]
    )
    return module, make_unit(module, module, [[str(i)] for i in range(len(tensors))], *dtypes_of(*dtypes))


def dtypes_of(*names):
    """The dtypes with these names, None for None."""
    return [name and getattr(torch, name) for name in names]


def parameters_of(module):
    return [parameter.detach() for parameter in module.parameters()]


def storages(*units):
    """The storages of the whole parameters: backward may need them again, so they must stay the same."""
    return [whole.untyped_storage()._cdata for unit in units for whole in unit.wholes]


def bytes_of(unit):
    """The bytes in memory of each whole parameter."""
    return [whole.untyped_storage().nbytes() for whole in unit.wholes]


def empty(unit):
    """Free the whole parameters, as ``reshard`` should."""
    for whole in unit.wholes:
        whole.untyped_storage().resize_(0)


@scenario
def from_flat(student, rank, world, shard, shapes):
    """``flat_whole`` of this rank's piece."""
    return student.flat_whole(shard, [tuple(shape) for shape in shapes])


@scenario
def kept_by_a_piece(student, rank, world, tensors):
    """This rank's piece, the bytes of memory that it keeps, and whether this memory is that of a tensor."""
    piece = student.flat_shard(tensors, rank, world)
    storage = piece.untyped_storage()
    of_tensors = [tensor.untyped_storage().data_ptr() for tensor in tensors]
    return piece, storage.nbytes(), storage.data_ptr() in of_tensors


@scenario
def gathered(student, rank, world, tensors, compute):
    """The parameters in their modules after ``unshard``, and the row."""
    module, unit = one_unit(student.make_unit, tensors, compute)
    student.unshard(unit)
    return parameters_of(module), unit.row.detach()


@scenario
def gathered_again(student, rank, world, tensors, factor):
    """``gathered`` after ``unshard`` was called twice, the unit was freed, its row multiplied, as a step of
    the optimiser changes it, and ``unshard`` was called again."""
    module, unit = one_unit(student.make_unit, tensors)
    student.unshard(unit)
    student.unshard(unit)
    empty(unit)
    student.put(unit, False)
    with torch.no_grad():
        unit.row.mul_(factor)
    student.unshard(unit)
    return parameters_of(module), unit.row.detach()


@scenario
def stored(student, rank, world, tensors, compute):
    """The parameters in their modules after ``unshard``, None if one has too little memory; and the bytes of
    each. Or "moved", where storages are others than before and of another size."""
    module, unit = one_unit(student.make_unit, tensors, compute)
    before = storages(unit)
    student.unshard(unit)
    if storages(unit) != before and bytes_of(unit) != [whole.nbytes for whole in unit.wholes]:
        return "moved"
    sizes = [parameter.untyped_storage().nbytes() for parameter in module.parameters()]
    enough = all(size >= parameter.nbytes for size, parameter in zip(sizes, module.parameters()))
    return parameters_of(module) if enough else None, sizes


@scenario
def kept_for_backward(student, rank, world, weight, x):
    """A layer whose weight is freed between forward and backward: the gradients of the input and of the whole
    weight, or a word of the error of backward."""
    module, unit = one_unit(student.make_unit, [weight])
    x.requires_grad_()
    before = storages(unit)
    student.unshard(unit)
    if storages(unit) != before:
        return "moved"
    out = torch.tanh(x @ module[0])
    empty(unit)
    student.put(unit, False)
    student.unshard(unit)
    try:
        out.sum().backward()
    except RuntimeError as error:
        for word in ("inplace", "storage"):
            if word in str(error):
                return word
        raise
    return x.grad, unit.wholes[0].grad


@scenario
def freed(student, rank, world, tensors, compute):
    """After ``unshard`` and ``reshard``: the parameters in their modules, None for one without memory; the
    row; the shapes of the whole ones; a word if a whole one or its storage is another than before; and the
    bytes of the storages that forward used."""
    module, unit = one_unit(student.make_unit, tensors, compute)
    student.unshard(unit)
    wholes, used = list(unit.wholes), [whole.untyped_storage() for whole in unit.wholes]
    before = storages(unit)
    student.reshard(unit)
    word = "storage" if storages(unit) != before else ""
    if any(now is not whole for now, whole in zip(unit.wholes, wholes)):
        word = "tensor"
    held = [each.detach() if each.untyped_storage().nbytes() else None for each in module.parameters()]
    shapes = [list(whole.shape) for whole in unit.wholes]
    return held, unit.row.detach(), shapes, word, [storage.nbytes() for storage in used]


@scenario
def large_freed(student, rank, world, seed, width):
    """Memory after a large unit, half of it frozen, was whole; some of its numbers, and the bytes of its
    storages afterwards."""
    random = torch.Generator().manual_seed(seed)
    tensors = [torch.randn(width, width, generator=random) for _ in range(2)]
    _, unit = one_unit(student.make_unit, tensors, frozen=[1])
    del tensors
    student.unshard(unit)
    whole = [parameter.detach()[0, :4].clone() for parameter in unit.wholes]
    student.reshard(unit)
    sizes = bytes_of(unit)
    mark("after reshard")
    return whole, sizes


@scenario
def reduced(student, rank, world, tensors, passes, frozen, compute, reduce):
    """The gradients of the shards after each pass was reduced, the row, and which whole parameters still have
    a gradient."""
    _, unit = one_unit(student.make_unit, tensors, compute, reduce, frozen=frozen)
    for grads in passes:
        for whole, grad in zip(unit.wholes, grads):
            whole.grad = grad
        try:
            student.reduce_gradients(unit)
        except AttributeError as error:
            unused = any(grad is None for i, grad in enumerate(grads) if i not in frozen)
            if "'NoneType'" not in str(error) or not unused:
                raise
            cause = "the gradient of a trained parameter is None, because this rank did not use it"
            raise RuntimeError(f"{error}: {cause}; it counts as zeros") from None
    left = [i for i, whole in enumerate(unit.wholes) if whole.grad is not None]
    return [shard.grad for shard in unit.shards], unit.row.detach(), left


@scenario
def large_reduced(student, rank, world, seed, width):
    """Memory after the gradients of a large unit were reduced; the sum of what the rank keeps."""
    random = torch.Generator().manual_seed(seed)
    _, unit = one_unit(student.make_unit, [torch.zeros(width, width)])
    unit.wholes[0].grad = torch.randn(width, width, generator=random)
    student.reduce_gradients(unit)
    total = unit.shards[0].grad.double().sum().item()
    mark("after reduce")
    return total


@scenario
def prepared(student, rank, world, weight, x, tokens):
    """What ``before_forward`` makes of the inputs of a unit that computes in bf16."""
    _, unit = one_unit(student.make_unit, [weight], "bfloat16")
    args = student.before_forward(unit, (x, tokens, None, 2 * x))
    return args if type(args) is tuple else (type(args).__name__,)


# -- units of layers: a root, which is a matrix, and tanh layers


class Meeting(torch.autograd.Function):
    """Return y. In forward and in backward the ranks meet, so that the order of their calls shows when a
    layer computes, and ``seen`` is called."""

    @staticmethod
    def forward(ctx, y, seen):
        dist.all_reduce(torch.zeros(1))
        ctx.seen = seen
        seen("forward")
        return y.view_as(y)

    @staticmethod
    def backward(ctx, grad):
        dist.all_reduce(torch.zeros(1))
        ctx.seen("backward")
        return grad, None


class Layer(torch.nn.Module):
    def __init__(self, weight, seen):
        super().__init__()
        self.weight, self.seen = torch.nn.Parameter(weight), seen

    def forward(self, y):
        return torch.tanh(Meeting.apply(y @ self.weight, self.seen))


class Layers(torch.nn.Module):
    """``seen(number, when)`` is called while a layer computes."""

    def __init__(self, first, weights, seen):
        super().__init__()
        self.first = torch.nn.Parameter(first)
        self.layers = torch.nn.Sequential(
            *(Layer(weight, lambda when, i=i: seen(i, when)) for i, weight in enumerate(weights))
        )

    def forward(self, y):
        return self.layers(y @ self.first)


def large_layers(seed, width, count, seen):
    """``count`` large layers, and the input; they are made here because they are large."""
    random = torch.Generator().manual_seed(seed)
    first, *weights = (torch.randn(width, width, generator=random) / width**0.5 for _ in range(count + 1))
    return Layers(first, weights, seen), torch.randn(2, width, generator=random)


def units_of(make_unit, model):
    """A unit of the root, and one of each layer."""
    units = [make_unit(model, model, [["first"]])]
    return units + [make_unit(model, layer, [[f"layers.{i}.weight"]]) for i, layer in enumerate(model.layers)]


def hook_up(units, own, parts, pending):
    """Call the functions of the exercises in forward and backward, as ``add_hooks`` does.

    It is done here, so that nothing depends on how a cell has changed ``add_hooks``.

    own: the names of the cells. parts: the exercises whose functions are called.
    """
    for number, unit in enumerate(units):
        hook_unit(unit, f"block {number}" if number else "the root", number == 0, own, parts, pending)


def hook_unit(unit, name, is_root, own, parts, pending):
    def before(module, args):
        args = own["before_forward"](unit, args)
        if not unit.is_whole:
            cure = "before_forward must call unshard(unit)"
            raise RuntimeError(f"the forward of {name} begins, but {name} is not whole: {cure}")
        if "backward" in parts and not is_root and args[0].requires_grad:
            args = (own["watch_input"](unit, args[0], pending),)
            if args[0] is None:
                raise RuntimeError("watch_input returns None: it must return the input that it watches")
        return args

    def begins(grad):
        if not unit.is_whole:
            cure = "the hook of watch_output must call unshard(unit)"
            raise RuntimeError(f"the backward of {name} begins, but {name} is not whole: {cure}")

    def ends():
        if pending:
            raise RuntimeError(
                f"backward has ended, and pending still has {len(pending)} units: queue a function that "
                "reduces, frees and removes each of them at the end of backward (do not remove from a list "
                "while you loop over it)"
            )

    def queue(grad):
        own["queue_end"](pending)
        torch.autograd.Variable._execution_engine.queue_callback(ends)

    def after(module, args, output):
        own["after_forward"](unit, output, is_root)
        if output.requires_grad and "end" in parts and is_root:
            output.register_hook(queue)
        if output.requires_grad and "backward" in parts:
            own["watch_output"](unit, output, pending)
            output.register_hook(begins)

    unit.module.register_forward_pre_hook(before)
    unit.module.register_forward_hook(after)


def backward(y):
    """The backward of a loss; an error that a student could not read gets its cause."""
    try:
        torch.autograd.backward(y.square().mean())
    except RuntimeError as error:
        if "setStorage" in str(error):
            cure = "reduce and free a unit when its backward has ended"
            raise RuntimeError(f"backward needs a weight that is freed already: {cure}") from None
        raise


def refuse_the_library(model, units):
    """The answer may not call the FSDP of the library."""
    of_library = any("FSDPModule" in str(type(module).__mro__) for module in model.modules())
    known = any(getattr(unit, "of_the_library", False) for unit in units)
    assert known or not of_library, "the FSDP of the library was called: in this lab you write it"


def named(numbers):
    """Units in words."""
    return ", ".join(f"block {number}" if number else "the root" for number in numbers) or "no unit"


def only_whole(units, number, when):
    """While a block computes, only the root and this block have memory."""
    held = [i for i, unit in enumerate(units) if any(bytes_of(unit))]
    if held != [0, number]:
        raise RuntimeError(
            f"never freed: in the {when} of block {number} the units with memory are {named(held)}, not the "
            "root and this block only. Free a unit with reshard(unit)"
        )


def only_pending(units, number, pending):
    """In the backward of a block, only the backward of the root and of this block have begun."""
    begun = sorted(units.index(unit) for unit in pending)
    if begun != [0, number]:
        raise RuntimeError(
            f"in the backward of block {number}, pending has {named(begun)}, not the root and this block: "
            "the hook of watch_output appends each unit, and that of watch_input removes it"
        )


@scenario
def hooked(student, rank, world, first, weights, x, parts, times, watched):
    """Steps of layers by hooks, those of the exercises ``parts``. With "forward" only, there is no backward.

    If they are ``watched``, a layer raises an error where a unit has memory too long, which explains the
    mistake. The order of the messages and the memory of large layers prove that units are freed.

    Returns the outputs, the gradients of the shards, the units with memory at the end, and whether a whole
    parameter has another storage than at the beginning.
    """

    def seen(number, when):
        if watched:
            only_whole(units, number + 1, when)
        if watched and when == "backward":
            only_pending(units, number + 1, pending)

    model, outputs, pending = Layers(first, weights, seen), [], []
    units = units_of(student.make_unit, model)
    hook_up(units, student.add_hooks.__globals__, parts, pending)
    before = storages(*units)
    for _ in range(times):
        outputs.append(model(x))
        if "backward" in parts:
            backward(outputs[-1])
        else:
            student.unshard(units[0])
        while pending:
            unit = pending.pop()
            student.reduce_gradients(unit)
            student.reshard(unit)
    left = named([i for i, unit in enumerate(units) if any(bytes_of(unit))])
    grads = [unit.shards[0].grad for unit in units]
    return [y.detach() for y in outputs], grads, left, storages(*units) != before


@scenario
def hooked_without_gradients(student, rank, world, first, weights, x, factors):
    """The outputs of forwards without gradients, before each of which the rows are multiplied."""
    model, outputs = Layers(first, weights, lambda number, when: None), []
    units = units_of(student.make_unit, model)
    hook_up(units, student.add_hooks.__globals__, ["forward"], [])
    with torch.no_grad():
        for factor in factors:
            for unit in units:
                unit.row.mul_(factor)
            outputs.append(model(x))
    return outputs


@scenario
def sharded(student, rank, world, first, weights, x, times, compute=None, reduce=None):
    """Steps of layers by ``shard_model``: the outputs, and the gradients of the shards."""
    model, outputs = Layers(first, weights, lambda number, when: None), []
    units = student.shard_model(model, Layer, *dtypes_of(compute, reduce))
    refuse_the_library(model, units)
    for _ in range(times):
        outputs.append(model(x))
        backward(outputs[-1])
    return [y.detach() for y in outputs], [unit.shards[0].grad for unit in units]


@scenario
def large_hooked(student, rank, world, seed, width, count, parts):
    """A step of large layers by hooks: the mean square of the output, and the sum of each shard's gradient.
    Memory is read in the forward of the last layer, after forward, in the backward of the first one, and at
    the end."""

    def seen(number, when):
        if when == "forward" and number == count - 1:
            mark("in forward")
        if when == "backward" and number == 0:
            mark("in backward")

    pending = []
    model, x = large_layers(seed, width, count, seen)
    units = units_of(student.make_unit, model)
    hook_up(units, student.add_hooks.__globals__, parts, pending)
    y = model(x)
    mark("after forward")
    if "backward" in parts:
        backward(y)
    else:
        student.unshard(units[0])
    while pending:
        unit = pending.pop()
        student.reduce_gradients(unit)
        student.reshard(unit)
    loss, y = y.detach().square().mean(), None
    sums = [None if unit.shards[0].grad is None else unit.shards[0].grad.sum() for unit in units]
    mark("at the end")
    return loss, sums


@scenario
def large_sharded(student, rank, world, seed, width, count):
    """``large_hooked`` by ``shard_model``; memory is read at the end."""
    model, x = large_layers(seed, width, count, lambda number, when: None)
    units = student.shard_model(model, Layer)
    refuse_the_library(model, units)
    y = model(x)
    backward(y)
    loss, y = y.detach().square().mean(), None
    sums = [None if unit.shards[0].grad is None else unit.shards[0].grad.sum() for unit in units]
    mark("at the end")
    return loss, sums


# -- a Llama


def with_state(model, state, frozen):
    """The model with this state, some of whose parameters are frozen."""
    model.load_state_dict(state)
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    return model


def by_name(units, of):
    """What ``of`` returns for each shard, by the first name of its parameter."""
    return {names[0]: of(shard) for unit in units for names, shard in zip(unit.names, unit.shards)}


@scenario
def cut(student, rank, world, sizes, kind):
    """The units of a Llama, each with the name of its module."""
    from dlo_lib.models import llama

    model = llama.Llama(llama.LlamaConfig(**sizes))
    known = {id(module): name for name, module in model.named_modules()}
    units = student.cut_into_units(model, getattr(llama, kind))
    return [[known.get(id(module)), names] for module, names in units]


@scenario
def backward_of_llama(student, rank, world, sizes, state, frozen, batches):
    """The loss of each of this rank's batches, and the gradients of its shards by name."""
    from dlo_lib.models.llama import Block, Llama, LlamaConfig

    model = with_state(Llama(LlamaConfig(**sizes), dtype=torch.float64), state, frozen)
    units, losses = student.shard_model(model, Block), []
    refuse_the_library(model, units)
    for tokens, targets in batches:
        logits = model(tokens).flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, targets.flatten(), ignore_index=-100)
        torch.autograd.backward(loss)
        losses.append(loss.item())
    return losses, by_name(units, lambda shard: shard.grad)


@scenario
def whole_state(student, rank, world, sizes, state, frozen, compute, buffer, scale):
    """``full_state`` of a sharded Llama whose shards were multiplied by ``scale``, as a step changes them,
    and the numbers of the units that it leaves whole. With frozen parameters, it was called before the shards
    changed too."""
    from dlo_lib.models.llama import Block, Llama, LlamaConfig

    model = with_state(Llama(LlamaConfig(**sizes)), state, frozen)
    if buffer is not None:
        model.layers[0].register_buffer("seen", buffer)
        model.layers[0].register_buffer("scratch", buffer.clone(), persistent=False)
    units = student.shard_model(model, Block, *dtypes_of(compute))
    if frozen:
        student.full_state(model, units)
    with torch.no_grad():
        for unit in units:
            for shard in unit.shards:
                shard.mul_(scale)
    found = student.full_state(model, units)
    return found, [i for i, unit in enumerate(units) if unit.is_whole or any(bytes_of(unit))]


@scenario
def large_state(student, rank, world, seed, width, count, units_at_once):
    """``full_state`` of ``count`` large units, with memory for its result and for ``units_at_once`` packed
    units: the sum of each weight, or "memory" if it needs more."""
    import os
    import resource

    random, model, units = torch.Generator().manual_seed(seed), torch.nn.ParameterList(), []
    for number in range(count):
        model.append(torch.nn.Parameter(torch.randn(width, width, generator=random)))
        units.append(student.make_unit(model, model, [[str(number)]]))
    if os.path.exists("/proc/self/status"):  # not on macOS
        with open("/proc/self/status", encoding="ascii", errors="replace") as file:
            now = next(1024 * int(line.split()[1]) for line in file if line.startswith("VmData"))
        most = now + 4 * width * width * (count + units_at_once)
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    try:
        state = student.full_state(model, units)
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, MemoryError) or "allocate memory" in str(error):
            return "memory"
        raise
    return {name: value.sum() for name, value in state.items()}


@scenario
def trained(student, rank, world, sizes, state, frozen, steps, lr, kind, dtype, compute=None, reduce=None):
    """The losses of the steps, this rank's rows of the parameters after the last step, and whether a step
    left a gradient."""
    from dlo_lib.models.llama import Block, Llama, LlamaConfig

    model = with_state(Llama(LlamaConfig(**sizes), dtype=getattr(torch, dtype)), state, frozen)
    units = student.shard_model(model, Block, *dtypes_of(compute, reduce))
    optimizer = getattr(torch.optim, kind)(student.trained_shards(units), lr=lr)
    losses, left = [], False
    for micro_batches in steps:
        losses.append(student.train_step(model, units, optimizer, micro_batches))
        left = left or any(held.grad is not None for unit in units for held in (*unit.shards, *unit.wholes))
    return losses, by_name(units, lambda shard: shard.detach()), left
