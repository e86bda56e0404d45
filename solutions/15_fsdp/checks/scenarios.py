"""Scenarios that run with the student's code on every rank. They contain no expected value."""

# ruff: noqa: F821 - torch, dist and mark are defined where these run

from __future__ import annotations

from dlo_lib.grading.checks.contract import scenario


@scenario
def from_flat(student, rank, world, shard, shapes):
    """``flat_whole`` of this rank's piece."""
    return student.flat_whole(shard, [tuple(shape) for shape in shapes])


@scenario
def kept_by_a_piece(student, rank, world, tensors):
    """This rank's piece, and the bytes of memory that it keeps; True if this memory is that of the tensors."""
    piece = student.flat_shard(tensors, rank, world)
    storage = piece.untyped_storage()
    return piece, storage.nbytes(), storage.data_ptr() in [tensor.untyped_storage().data_ptr() for tensor in tensors]


@scenario
def gathered(student, rank, world, tensors, compute, times, factor):
    """The parameters in their modules after ``unshard``, called ``times`` times, and the row.

    With ``factor``: the unit is freed then, its row is multiplied, as a step of the optimiser changes it, and it is gathered again.
    """
    module = torch.nn.ParameterList([torch.nn.Parameter(tensor) for tensor in tensors])
    names = [[str(i)] for i in range(len(tensors))]
    unit = student.make_unit(module, module, names, None if compute is None else getattr(torch, compute))
    for _ in range(times):
        student.unshard(unit)
    if factor is not None:
        for whole in unit.wholes:
            whole.untyped_storage().resize_(0)
        student.put(unit, False)
        with torch.no_grad():
            unit.row.mul_(factor)
        student.unshard(unit)
    return [parameter.detach() for parameter in module.parameters()], unit.row.detach()


@scenario
def stored(student, rank, world, tensors, compute):
    """The parameters in their modules after ``unshard``, None if one has too little memory; and the bytes of the storage of each."""
    module = torch.nn.ParameterList([torch.nn.Parameter(tensor) for tensor in tensors])
    names = [[str(i)] for i in range(len(tensors))]
    unit = student.make_unit(module, module, names, None if compute is None else getattr(torch, compute))
    own = [whole.untyped_storage()._cdata for whole in unit.wholes]
    student.unshard(unit)
    if [whole.untyped_storage()._cdata for whole in unit.wholes] != own and any(
        whole.untyped_storage().nbytes() != whole.nbytes for whole in unit.wholes
    ):
        return "moved"
    sizes = [parameter.untyped_storage().nbytes() for parameter in module.parameters()]
    enough = all(size >= parameter.nbytes for size, parameter in zip(sizes, module.parameters()))
    return [parameter.detach() for parameter in module.parameters()] if enough else None, sizes


@scenario
def kept_for_backward(student, rank, world, weight, x):
    """A layer whose weight is freed between forward and backward: the gradients of the input and of the whole weight, or a word of the
    error of backward."""
    module = torch.nn.ParameterList([torch.nn.Parameter(weight)])
    unit = student.make_unit(module, module, [["0"]])
    x.requires_grad_()
    own = [whole.untyped_storage()._cdata for whole in unit.wholes]
    student.unshard(unit)
    if [whole.untyped_storage()._cdata for whole in unit.wholes] != own:
        return "moved"
    out = torch.tanh(x @ module[0])
    for whole in unit.wholes:
        whole.untyped_storage().resize_(0)
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
    """The parameters in their modules after ``unshard`` and ``reshard``, None for one without memory; the row; the shapes of the whole ones;
    a word if a whole one or its storage is another than before; and the bytes of the storages that forward used.
    """
    module = torch.nn.ParameterList([torch.nn.Parameter(tensor) for tensor in tensors])
    names = [[str(i)] for i in range(len(tensors))]
    unit = student.make_unit(module, module, names, None if compute is None else getattr(torch, compute))
    student.unshard(unit)
    wholes, storages = list(unit.wholes), [whole.untyped_storage() for whole in unit.wholes]
    student.reshard(unit)
    word = "tensor" if any(now is not whole for now, whole in zip(unit.wholes, wholes)) else ""
    if not word and any(whole.untyped_storage()._cdata != storage._cdata for whole, storage in zip(wholes, storages)):
        word = "storage"
    held = [parameter.detach() if parameter.untyped_storage().nbytes() else None for parameter in module.parameters()]
    return held, unit.row.detach(), [list(whole.shape) for whole in unit.wholes], word, [storage.nbytes() for storage in storages]


@scenario
def large_freed(student, rank, world, seed, width):
    """Memory after a large unit, half of it frozen, was whole; some of its numbers, and the bytes of its storages afterwards."""
    random = torch.Generator().manual_seed(seed)
    module = torch.nn.ParameterList([torch.nn.Parameter(torch.randn(width, width, generator=random)) for _ in range(2)])
    module[1].requires_grad_(False)
    unit = student.make_unit(module, module, [["0"], ["1"]])
    student.unshard(unit)
    whole = [parameter.detach()[0, :4].clone() for parameter in unit.wholes]
    student.reshard(unit)
    sizes = [parameter.untyped_storage().nbytes() for parameter in unit.wholes]
    mark("after reshard")
    return whole, sizes


@scenario
def reduced(student, rank, world, tensors, passes, frozen, compute, reduce):
    """The gradients of the shards after each pass was reduced, the row, and which whole parameters still have a gradient."""
    module = torch.nn.ParameterList([torch.nn.Parameter(tensor, requires_grad=i not in frozen) for i, tensor in enumerate(tensors)])
    names = [[str(i)] for i in range(len(tensors))]
    dtypes = [None if name is None else getattr(torch, name) for name in (compute, reduce)]
    unit = student.make_unit(module, module, names, *dtypes)
    for grads in passes:
        for whole, grad in zip(unit.wholes, grads):
            whole.grad = grad
        try:
            student.reduce_gradients(unit)
        except AttributeError as error:
            if "'NoneType'" in str(error) and any(grad is None for i, grad in enumerate(grads) if i not in frozen):
                raise RuntimeError(
                    f"{error}: the gradient of a trained parameter is None, because this rank did not use it; it counts as zeros"
                ) from None
            raise
    left = [i for i, whole in enumerate(unit.wholes) if whole.grad is not None]
    return [shard.grad for shard in unit.shards], unit.row.detach(), left


@scenario
def large_reduced(student, rank, world, seed, width):
    """Memory after the gradients of a large unit were reduced; the sum of what the rank keeps."""
    random = torch.Generator().manual_seed(seed)
    module = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(width, width))])
    unit = student.make_unit(module, module, [["0"]])
    unit.wholes[0].grad = torch.randn(width, width, generator=random)
    student.reduce_gradients(unit)
    total = unit.shards[0].grad.double().sum().item()
    mark("after reduce")
    return total


@scenario
def cut(student, rank, world, sizes, ties, kind):
    """The units of a Llama some of whose parameters are tied: by the name of each module."""
    from dlo_lib.models import llama

    model = llama.Llama(llama.LlamaConfig(**sizes))
    for first, second in ties:
        owner, _, attribute = second.rpartition(".")
        setattr(model.get_submodule(owner), attribute, model.get_parameter(first))
    known = {id(module): name for name, module in model.named_modules()}
    return [[known.get(id(module)), names] for module, names in student.cut_into_units(model, getattr(llama, kind))]


@scenario
def backward_of_llama(student, rank, world, sizes, state, frozen, batches):
    """The loss of each of this rank's batches, and the gradients of its shards by name."""
    from dlo_lib.models.llama import Block, Llama, LlamaConfig

    model = Llama(LlamaConfig(**sizes), dtype=torch.float64)
    model.load_state_dict(state)
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    units, losses = student.shard_model(model, Block), []
    assert any(getattr(unit, "of_the_library", False) for unit in units) or not any(
        "FSDPModule" in str(type(module).__mro__) for module in model.modules()
    ), "the FSDP of the library was called: in this lab you write it"
    for tokens, targets in batches:
        logits = model(tokens)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)
        torch.autograd.backward(loss)
        losses.append(loss.item())
    return losses, {names[0]: shard.grad for unit in units for names, shard in zip(unit.names, unit.shards)}


@scenario
def prepared(student, rank, world, weight, x, tokens):
    """What ``before_forward`` makes of the inputs of a unit that computes in bf16."""
    module = torch.nn.ParameterList([torch.nn.Parameter(weight)])
    unit = student.make_unit(module, module, [["0"]], torch.bfloat16)
    args = student.before_forward(unit, (x, tokens, None, 2 * x))
    return args if type(args) is tuple else (type(args).__name__,)


@scenario
def layers_in_order(student, rank, world, first, weights, x, compute, reduce, times, factor, parts, drawn):
    """A root and tanh layers, each with an all-reduce while it computes: outputs; the gradients of the shards; with ``parts``, for each
    layer in forward and in backward and for the end, the numbers of the units with memory; the numbers of the units that ``pending`` has in the
    backward of each layer; and whether a whole parameter has another storage than at the beginning.

    ``parts``: of the hooks, which call the functions of the exercises here, so that nothing depends on how a cell has changed ``add_hooks``; or
    None for ``shard_model``. With "forward" only, there is no backward, and the root is asked for once more.
    With ``factor``: no backward; the outputs of ``times`` forwards, before each of which the rows are multiplied.
    With ``drawn``, (seed, width, layers): large matrices and x from the seed; of each output and gradient the mean of squares and the sum.
    Memory is read in the forward of the last layer and in the backward of the first one, after forward and at the end.
    """

    class Marked(torch.autograd.Function):
        @staticmethod
        def forward(ctx, y, number):
            dist.all_reduce(torch.zeros(1))
            ctx.number = number
            look()
            if drawn and number == len(weights) - 1:
                mark("in forward")
            return y.view_as(y)

        @staticmethod
        def backward(ctx, grad):
            dist.all_reduce(torch.zeros(1))
            look()
            if drawn and ctx.number == 0:
                mark("in backward")
            if parts is not None and "backward" in parts:
                begun.append(sorted(units.index(unit) for unit in pending))
            return grad, None

    class Layer(torch.nn.Module):
        def __init__(self, number, weight):
            super().__init__()
            self.number, self.weight = number, torch.nn.Parameter(weight)

        def forward(self, y):
            return torch.tanh(Marked.apply(y @ self.weight, self.number))

    class Layers(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first = torch.nn.Parameter(first)
            self.layers = torch.nn.ModuleList([Layer(number, weight) for number, weight in enumerate(weights)])

        def forward(self, y):
            y = y @ self.first
            for layer in self.layers:
                y = layer(y)
            return y

    def look():
        if parts is not None:
            looked.append([i for i, unit in enumerate(units) if any(whole.untyped_storage().nbytes() for whole in unit.wholes)])

    def hook(unit, name):
        def before(module, args):
            args = own["before_forward"](unit, args)
            if not unit.is_whole:
                raise RuntimeError(f"the forward of {name} begins, but {name} is not whole: before_forward must call unshard(unit)")
            if "backward" in parts and unit is not units[0] and args[0].requires_grad:
                args = (own["watch_input"](unit, args[0], pending),)
                if args[0] is None:
                    raise RuntimeError("watch_input returns None: it must return the input that it watches")
            return args

        def begins(grad):
            if not unit.is_whole:
                text = f"the backward of {name} begins, but {name} is not whole: the hook of watch_output must call unshard(unit)"
                raise RuntimeError(text)

        def ends():
            if pending:
                text = f"backward has ended, and pending still has {len(pending)} units: queue a function that reduces, frees and "
                raise RuntimeError(text + "removes each of them at the end of backward (do not remove from a list while you loop over it)")

        def queue(grad):
            own["queue_end"](pending)
            torch.autograd.Variable._execution_engine.queue_callback(ends)

        def after(module, args, output):
            own["after_forward"](unit, output, unit is units[0])
            if output.requires_grad and "end" in parts and unit is units[0]:
                output.register_hook(queue)
            if output.requires_grad and "backward" in parts:
                own["watch_output"](unit, output, pending)
                output.register_hook(begins)

        unit.module.register_forward_pre_hook(before)
        unit.module.register_forward_hook(after)

    if drawn:
        seed, width, count = drawn
        random = torch.Generator().manual_seed(seed)
        first, *weights = (torch.randn(width, width, generator=random) / width**0.5 for _ in range(count + 1))
        x = torch.randn(2, width, generator=random)
    model, outputs, pending, begun, looked = Layers(), [], [], [], []
    first, weights = None, [None] * len(weights)
    dtypes = [None if name is None else getattr(torch, name) for name in (compute, reduce)]
    if parts is None:
        units = student.shard_model(model, Layer, *dtypes)
    else:
        own = student.add_hooks.__globals__  # where the cells have defined the functions of the exercises
        units = [student.make_unit(model, model, [["first"]], *dtypes)]
        units += [student.make_unit(model, layer, [[f"layers.{i}.weight"]], *dtypes) for i, layer in enumerate(model.layers)]
        for number, unit in enumerate(units):
            hook(unit, f"block {number}" if number else "the root")
    assert any(getattr(unit, "of_the_library", False) for unit in units) or not any(
        "FSDPModule" in str(type(module).__mro__) for module in model.modules()
    ), "the FSDP of the library was called: in this lab you write it"
    storages = [whole.untyped_storage()._cdata for unit in units for whole in (unit.wholes if parts is not None else [])]
    for _ in range(times):
        if factor is None:
            y = model(x)
            mark("after forward")
            if parts == ["forward"]:
                student.unshard(units[0])
            else:
                try:
                    torch.autograd.backward(y.square().mean())
                except RuntimeError as error:
                    if "setStorage" in str(error):
                        raise RuntimeError(
                            "backward needs a weight that is freed already: reduce and free a unit when its backward has ended"
                        ) from None
                    raise
            while pending:
                unit = pending.pop()
                student.reduce_gradients(unit)
                student.reshard(unit)
        else:
            with torch.no_grad():
                for unit in units:
                    unit.row.mul_(factor)
                y = model(x)
        outputs.append(y.detach().square().mean() if drawn else y.detach())
    look()
    moved = storages != [whole.untyped_storage()._cdata for unit in units for whole in (unit.wholes if parts is not None else [])]
    grads = [unit.shards[0].grad for unit in units]
    if drawn:
        grads = [None if grad is None else grad.sum() for grad in grads]
    y = None
    mark("at the end")
    return outputs, grads, looked, begun, moved


@scenario
def whole_state(student, rank, world, sizes, state, frozen, compute, buffer, scale):
    """``full_state`` of a sharded Llama whose shards were multiplied by ``scale``, as a step changes them, and the numbers of the units that
    it leaves whole. With frozen parameters, it was called before the shards changed too.
    """
    from dlo_lib.models.llama import Block, Llama, LlamaConfig

    model = Llama(LlamaConfig(**sizes))
    model.load_state_dict(state)
    if buffer is not None:
        model.layers[0].register_buffer("seen", buffer)
        model.layers[0].register_buffer("scratch", buffer.clone(), persistent=False)
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    units = student.shard_model(model, Block, None if compute is None else getattr(torch, compute))
    if frozen:
        student.full_state(model, units)
    with torch.no_grad():
        for unit in units:
            for shard in unit.shards:
                shard.mul_(scale)
    found = student.full_state(model, units)
    return found, [i for i, unit in enumerate(units) if unit.is_whole or any(whole.untyped_storage().nbytes() for whole in unit.wholes)]


@scenario
def large_state(student, rank, world, seed, width, count, units_at_once):
    """``full_state`` of ``count`` large units, with memory for its result and for ``units_at_once`` packed units: the sum of each weight, or
    "memory" if it needs more."""
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
def trained(student, rank, world, sizes, state, frozen, steps, lr, dtype, compute, reduce, optimizer="AdamW"):
    """The losses of the steps, this rank's rows of the parameters after the last step, and whether a step left a gradient."""
    from dlo_lib.models.llama import Block, Llama, LlamaConfig

    model = Llama(LlamaConfig(**sizes), dtype=getattr(torch, dtype))
    model.load_state_dict(state)
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    units = student.shard_model(model, Block, *(None if name is None else getattr(torch, name) for name in (compute, reduce)))
    optimizer = getattr(torch.optim, optimizer)(student.trained_shards(units), lr=lr)
    losses, left = [], False
    for micro_batches in steps:
        losses.append(student.train_step(model, units, optimizer, micro_batches))
        left = left or any(held.grad is not None for unit in units for held in (*unit.shards, *unit.wholes))
    return losses, {names[0]: shard.detach() for unit in units for names, shard in zip(unit.names, unit.shards)}, left
