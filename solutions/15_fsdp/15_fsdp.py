# %% [markdown] id="title"
# # 15 · Implement FSDP
#
# **What you will do.** Write fully sharded data parallelism yourself: every rank keeps 1/N of parameters, gradients and optimiser state, gathers a block
# just before it computes, and forgets it right after. You begin with one flat buffer, see what it costs, and shard parameter by parameter instead. Then come
# gathering, freeing, reducing, the hooks that do all this at the right moment, mixed precision, and the state dict. In the end you train a Llama with it,
# and it learns what one process with the whole model learns, to the last digits.
#
# You need no GPU: ranks are processes on this machine (gloo), and the 3B model is measured at true size on fake tensors.
#
# Builds on labs 11 (hooks) and 14 (ZeRO). It takes about 90 minutes. Each exercise has a check that answers at once; `lab.hint("name")`
# gives a nudge, then a pointer, then a sketch. If a step stays stuck, `lab.use_reference("name")` lets you go on without its points.
#
# Words: shard (*fragment*), unit (*unité*), to gather (*rassembler*), to free (*libérer*), padding (*remplissage*), hook (*crochet*).

# %% id="setup"
import math
import os
import time
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from dlo_lib.grading import Lab
from dlo_lib.models import Llama, LlamaConfig
from dlo_lib.models.llama import Block

MODEL = os.environ.get("DLO_MODEL", "llama-3.2-3b")
STEPS = int(os.environ.get("DLO_STEPS", 10))  # of the training near the end
LARGEST = int(os.environ.get("DLO_LARGEST", 512))  # ranks of the measurement at true size
WIDTH = int(os.environ.get("DLO_WIDTH", 256))  # of the small model that trains here
PROCESSES = int(os.environ.get("DLO_PROCESSES", 2))  # of the job at the end
lab = Lab(globals())

# %% [markdown] id="why"
# ## Why: how much at once?
#
# Stage 3 of lab 14 gathered each weight alone, twice a step, and threw it away after use. That is one end of a scale. At the other end one gathers the whole model
# at the beginning of a step: few messages, but the memory of the whole model. The cell counts, for the real model: how much is whole at the same
# time, and how many gathers a step makes.

# %% id="show_why" tags=["demo"]
import figures

from dlo_lib.models import model_config

whole_model = Llama(model_config(MODEL), device="meta")  # names and shapes, no memory
weights = [4 * weight.numel() for weight in whole_model.parameters()]
blocks = [sum(4 * weight.numel() for weight in block.parameters()) for block in whole_model.layers]
rest = sum(weights) - sum(blocks)
figures.unit_sizes(
    {
        "each weight alone": (max(weights), 2 * len(weights)),
        "each block": (rest + max(blocks), 2 * len(blocks) + 1),
        "everything": (sum(weights), 1),
    }
)

# %% [markdown] id="why_after"
# A block is the compromise. All that is gathered together is a **unit** (*unité*): one unit for each block, and one, the **root**, for what belongs to no block
# (embedding, last norm, output projection).
#
# ## The idea
#
# A unit is whole only while it computes. The root is needed at both ends of the model, so it stays whole from the beginning of forward to the end of backward.
# A block is gathered for its forward, freed, gathered again for its backward; then its gradients are averaged over the ranks, each rank keeps
# its part, and the block is freed again.

# %% id="show_idea" tags=["demo"]
figures.planned(3)

# %% [markdown] id="formulas"
# With Ψ parameters, N ranks, B_p and B_g the bytes of all parameters and of all gradients (padding counted), f = (N-1)/N:
#
# | | memory at rest (fp32, AdamW) | sent by a rank and step |
# |---|---|---|
# | DDP | 16 Ψ | 2 B_g f |
# | FSDP, blocks freed after forward | 16 Ψ/N | 2 B_p f + B_g f (the root only once: B_p f + B_g f) |
#
# So the price is 1.5 times the bytes of DDP. You will measure both columns with your own code.
#
# ## 1 · One flat buffer
#
# The first FSDP (2021-2023) made one long vector of a unit: flatten every parameter, put them one behind the other, append zeros until N divides the length, cut into N
# equal pieces.
#
# - `flat_shard(tensors, rank, world)`: a **copy** of this rank's piece, one-dimensional.
# - `flat_whole(shard, shapes)`: the list of whole tensors of these shapes, from the pieces of all ranks, with **one** all-gather.

# %% nbgrader={"grade_id": "flat", "solution": true}
def flat_shard(tensors: list[torch.Tensor], rank: int, world: int) -> torch.Tensor:
    """A copy of this rank's piece of all tensors together: (ceil(numbers / world),), padded with zeros at the end."""
    ### BEGIN SOLUTION
    flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
    size = -(-flat.numel() // world)
    return F.pad(flat, (0, size * world - flat.numel()))[rank * size : (rank + 1) * size].clone()
    ### END SOLUTION


def flat_whole(shard: torch.Tensor, shapes: list[tuple[int, ...]]) -> list[torch.Tensor]:
    """The whole tensors, from the pieces of all ranks."""
    ### BEGIN SOLUTION
    flat = shard.new_empty(shard.numel() * dist.get_world_size())
    dist.all_gather_into_tensor(flat, shard)
    sizes = [math.prod(shape) for shape in shapes]
    return [part.view(shape) for part, shape in zip(flat[: sum(sizes)].split(sizes), shapes)]
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_flat", "grade": true, "points": 5}
lab.check("flat")

# %% [markdown] id="flat_after"
# Simple, and nearly no padding. Look at what each rank holds of a small unit: three matrices, their first dimension downwards. A colour is a rank.

# %% id="show_flat" tags=["demo"]
figures.cuts({"q": (6, 8), "k": (3, 8), "up": (10, 8)}, world=4)

# %% [markdown] id="cost_text"
# On the left, a rank's piece begins in the middle of a row of one matrix and ends in the middle of a row of the next. So nobody has a *parameter* any more, only a stretch of
# numbers. An optimiser that looks at matrices (Muon, LAMB, Adafactor) cannot work on it. Frozen and trained parameters cannot share a unit, for a vector has one
# `requires_grad`. A checkpoint must write down which numbers were whose.
#
# On the right, **each parameter is sharded on its first dimension**: rank r has rows r·c to (r+1)·c of each, c = ceil(rows / N). Late ranks get
# fewer rows, or none. That is what PyTorch's `fully_shard` (FSDP2) does, and what you will do from here on. For communication every part is padded to c
# rows. What does that cost?
#
# ## 2 · The cost of padding
#
# Write `padding(shapes, world)`: how many numbers of padding all ranks hold together, first with one flat buffer, then with padded rows. A tensor without dimensions,
# shape `()`, is one row of one number. (`math.prod(shape[:1])` rows of `math.prod(shape[1:])` numbers is right for it, too: the product of nothing is 1.)

# %% nbgrader={"grade_id": "padding", "solution": true}
def padding(shapes: list[tuple[int, ...]], world: int) -> tuple[int, int]:
    """Numbers of padding in all: (in one flat buffer, with each parameter's rows padded)."""
    ### BEGIN SOLUTION
    flat = -sum(math.prod(shape) for shape in shapes) % world
    return flat, sum((-math.prod(shape[:1]) % world) * math.prod(shape[1:]) for shape in shapes)
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_padding", "grade": true, "points": 3}
lab.check("padding")

# %% id="show_padding" tags=["demo"]
shapes = [weight.shape for weight in whole_model.parameters()]
numbers = sum(shape.numel() for shape in shapes)
worlds = [2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1000, 1024]
figures.padding(worlds, [[100 * count / numbers for count in padding(shapes, world)] for world in worlds])

# %% [markdown] id="rows_text"
# On powers of two the rows of this model divide evenly, and up to some hundreds of ranks padding is next to nothing. The peak on the right is the lesson: a matrix of 1024 rows on 1000 ranks has
# two rows each on 512 of them, and 488 ranks hold nothing but padding. Choose ranks that divide the model's sizes, and whole rows cost nothing.
#
# ## 3 · Rows
#
# - `own_rows(length, rank, world)`: which rows of a parameter of `length` rows are this rank's, as (start, stop). With c = ceil(length / world), rank r has rows r·c to
#   (r+1)·c, as far as they exist; both are `length` for a rank without any.
# - `shard_views(row, shapes, rank, world)`: what a rank keeps of a unit is one vector, its **row** of the packed unit: its part of the first parameter padded to c
#   rows, then its part of the second, and so on. Return for each parameter the part that is not padding, as a **view** of shape (own rows, ...). Views, for
#   the optimiser shall update the row through them.

# %% nbgrader={"grade_id": "rows", "solution": true}
def own_rows(length: int, rank: int, world: int) -> tuple[int, int]:
    """Start and stop of this rank's rows."""
    ### BEGIN SOLUTION
    rows = -(-length // world)
    return min(rank * rows, length), min((rank + 1) * rows, length)
    ### END SOLUTION


def shard_views(row: torch.Tensor, shapes: list[tuple[int, ...]], rank: int, world: int) -> list[torch.Tensor]:
    """This rank's part of each parameter, (own rows, ...), as views of its packed row (S,)."""
    ### BEGIN SOLUTION
    views, offset = [], 0
    for shape in shapes:
        length, inner = math.prod(shape[:1]), math.prod(shape[1:])
        start, stop = own_rows(length, rank, world)
        views.append(row[offset : offset + (stop - start) * inner].view(stop - start, *shape[1:]))
        offset += -(-length // world) * inner
    return views
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_rows", "grade": true, "points": 5}
lab.check("rows")

# %% [markdown] id="pack_text"
# ## 4 · Packing
#
# One all-gather brings the rows of all ranks, one behind the other, so the memory is sorted by rank first and by parameter second:
#
# ```
# packed      [ A0 B0 C0 ]      rank 0's row          A    [ A0 A1 A2 ]
# (world, S)  [ A1 B1 C1 ]      rank 1's row          B    [ B0 B1 B2 ]
#             [ A2 B2 C2 ]      rank 2's row          C    [ C0 C1 C2 ]
# ```
#
# - `pack(tensors, world)`: from whole tensors to (world, S), padded with zeros.
# - `unpack(packed, shapes)`: the way back, a list of whole tensors.
#
# The flat buffer needed no such sorting. (This copy is the other half of the price.)

# %% nbgrader={"grade_id": "pack", "solution": true}
def pack(tensors: list[torch.Tensor], world: int) -> torch.Tensor:
    """What each rank keeps of these whole tensors, by rank: (world, S)."""
    ### BEGIN SOLUTION
    parts = []
    for tensor in tensors:
        size = -(-math.prod(tensor.shape[:1]) // world) * math.prod(tensor.shape[1:])
        parts.append(F.pad(tensor.reshape(-1), (0, world * size - tensor.numel())).view(world, size))
    return torch.cat(parts, dim=1)
    ### END SOLUTION


def unpack(packed: torch.Tensor, shapes: list[tuple[int, ...]]) -> list[torch.Tensor]:
    """The whole tensors, from the rows of all ranks (world, S)."""
    ### BEGIN SOLUTION
    tensors, offset = [], 0
    for shape in shapes:
        size = -(-math.prod(shape[:1]) // len(packed)) * math.prod(shape[1:])
        tensors.append(packed[:, offset : offset + size].reshape(-1)[: math.prod(shape)].view(shape))
        offset += size
    return tensors
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_pack", "grade": true, "points": 5}
lab.check("pack")

# %% [markdown] id="unit_text"
# ## 5 · A unit becomes whole
#
# The next cell is given: read it. A `Unit` has two tensors for each parameter. The **shard** is a view of `row`; it is what the optimiser updates. The **whole** one is
# what the module computes with. It is *always the same tensor*, because autograd remembers it between forward and backward. While the unit is freed it has
# a shape, but no memory:
#
# ```python
# whole.untyped_storage().resize_(0)                       # free: the tensor stays, its memory goes
# whole.untyped_storage().resize_(4 * whole.numel())       # memory again, in bytes, with anything in it
# whole.data.copy_(value)                                  # .data: or autograd would say that what it has saved was changed
# ```
#
# Keep this order: whoever copies into a tensor without memory ends the process (*killed by SIGSEGV*).
#
# `put(unit, True)` hangs the whole parameters into the modules, `put(unit, False)` the shards.

# %% id="given_unit"
@dataclass(eq=False)
class Unit:
    """Parameters that are gathered, freed and reduced together."""

    module: nn.Module  # they are needed in its forward and backward
    names: list[list[str]]  # of each parameter all its names in the model: tied ones have several
    places: list[list[tuple[nn.Module, str]]]  # the same, as module and attribute
    shapes: list[tuple[int, ...]]
    row: torch.Tensor  # (S,): what this rank keeps, packed and padded
    shards: list[nn.Parameter]  # its parts, views of row: for the optimiser
    wholes: list[nn.Parameter]  # for the module: always the same tensors, without memory while freed
    compute_dtype: torch.dtype  # of the whole parameters
    reduce_dtype: torch.dtype  # in which gradients are averaged
    is_whole: bool = False
    history: list[tuple[int, bool]] = field(default_factory=list)  # when it became whole and was freed: for the figure at the end


def put(unit: Unit, whole: bool) -> None:
    """Let the modules have the whole parameters, or the shards."""
    for places, parameter in zip(unit.places, unit.wholes if whole else unit.shards):
        for module, attribute in places:
            module._parameters[attribute] = parameter
    unit.is_whole = whole
    unit.history.append((time.monotonic_ns(), whole))


def make_unit(model: nn.Module, module: nn.Module, names: list[list[str]], compute_dtype=None, reduce_dtype=None) -> Unit:
    """Keep this rank's row of the parameters with these names in `model`, and let their modules have the shards.

    Without `compute_dtype` and `reduce_dtype` all is done in the dtype of the parameters.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    parameters = [model.get_parameter(same[0]) for same in names]
    shapes, dtype = [parameter.shape for parameter in parameters], parameters[0].dtype
    row = pack([parameter.detach() for parameter in parameters], world)[rank].clone()
    shards = [nn.Parameter(view) for view in shard_views(row, shapes, rank, world)]
    wholes = [nn.Parameter(torch.empty(shape, dtype=compute_dtype or dtype)) for shape in shapes]
    for parameter, shard, whole in zip(parameters, shards, wholes):
        shard.requires_grad_(parameter.requires_grad)
        whole.requires_grad_(parameter.requires_grad)
        whole.untyped_storage().resize_(0)
    parts = [[name.rpartition(".") for name in same] for same in names]
    places = [[(model.get_submodule(owner), attribute) for owner, _, attribute in same] for same in parts]
    unit = Unit(module, names, places, shapes, row, shards, wholes, compute_dtype or dtype, reduce_dtype or dtype)
    put(unit, False)
    return unit


# %% [markdown] id="unshard_text"
# Write `unshard(unit)`: one all-gather of the rows of all ranks, **in `unit.compute_dtype`** (the row is cast before it is sent: half the bytes for bf16), unpack, fill the
# whole parameters, `put` them. A unit that is whole already is left alone: gathering it twice is the most common waste.

# %% nbgrader={"grade_id": "unshard", "solution": true}
def unshard(unit: Unit) -> None:
    """Make the unit whole, if it is not."""
    ### BEGIN SOLUTION
    if unit.is_whole:
        return
    row = unit.row.detach().to(unit.compute_dtype)
    packed = row.new_empty(dist.get_world_size(), row.numel())
    dist.all_gather_into_tensor(packed.view(-1), row)
    for whole, value in zip(unit.wholes, unpack(packed, unit.shapes)):
        whole.untyped_storage().resize_(whole.numel() * whole.element_size())
        whole.data.copy_(value)
    put(unit, True)
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_unshard", "grade": true, "points": 10}
lab.check("unshard")

# %% [markdown] id="reshard_text"
# ## 6 · And is freed
#
# `reshard(unit)` frees the memory of the whole parameters and lets the modules have the shards. It sends nothing: the rank has kept its row all the time.
# Forget it for one unit, and the memory of DDP is back.

# %% nbgrader={"grade_id": "reshard", "solution": true}
def reshard(unit: Unit) -> None:
    """Free the whole parameters."""
    ### BEGIN SOLUTION
    for whole in unit.wholes:
        whole.untyped_storage().resize_(0)
    put(unit, False)
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_reshard", "grade": true, "points": 4}
lab.check("reshard")

# %% [markdown] id="reduce_text"
# ## 7 · Gradients
#
# After the backward of a unit, its whole parameters have whole gradients, each rank those of its own samples. `reduce_gradients(unit)`:
#
# - takes the trained parameters only (`whole.requires_grad`); a frozen one has no gradient and sends nothing. If none is trained, nothing is sent at all;
# - casts their gradients to `unit.reduce_dtype` and packs them. A gradient that is `None` (a parameter this rank did not use) counts as zeros, or the other
#   ranks would wait for it;
# - one **reduce-scatter** adds up the rows over the ranks and gives each rank its own. An all-reduce would bring whole gradients that nobody needs, for twice the bytes;
# - divides by the number of ranks: data parallelism wants the **average**;
# - adds the result, in the shard's dtype, to `shard.grad` (`None` at first: micro-batches add up), and sets every `whole.grad` to `None`.
#
# The average is `(g0 + g1 + ...) / N`. In bf16 each addition keeps 8 bits. That is why `reduce_dtype` exists: gradients are often summed in fp32 though they were computed in bf16.

# %% nbgrader={"grade_id": "reduce", "solution": true}
def reduce_gradients(unit: Unit) -> None:
    """Average the gradients of the whole parameters over the ranks, and keep this rank's part in the shards."""
    ### BEGIN SOLUTION
    rank, world = dist.get_rank(), dist.get_world_size()
    trained = [(shard, whole) for shard, whole in zip(unit.shards, unit.wholes) if whole.requires_grad]
    if not trained:
        return
    gradients = [torch.zeros_like(whole) if whole.grad is None else whole.grad for _, whole in trained]
    packed = pack([gradient.to(unit.reduce_dtype) for gradient in gradients], world)
    for _, whole in trained:
        whole.grad = None
    row = packed.new_empty(packed.shape[1])
    dist.reduce_scatter_tensor(row, packed.view(-1))
    row = (row / world).to(unit.row.dtype)
    for (shard, _), part in zip(trained, shard_views(row, [whole.shape for _, whole in trained], rank, world)):
        shard.grad = part if shard.grad is None else shard.grad + part
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_reduce", "grade": true, "points": 11}
lab.check("reduce")

# %% [markdown] id="units_text"
# ## 8 · Which parameters are a unit?
#
# Write `cut_into_units(model, kind)`, where `kind` is the type of the blocks. It returns a list of pairs (module, names): first the root with `model` itself, then one pair for each block
# in the order of the model. `names` has a list for each parameter, with **all** its names. The rule:
#
# > a parameter all of whose names lie in one block belongs to this block's unit; all else belongs to the root.
#
# "All else" holds what is outside of blocks, and also weights that are **tied**: to one another across two blocks, or a weight of a block to the output projection. They are
# needed at several places, so they must be whole at all of them. A parameter is in exactly one unit, or it would be gathered twice. A block without
# parameters of its own has no unit. Blocks do not lie in one another.
#
# `model.named_parameters(remove_duplicate=False)` gives tied parameters under each name.

# %% nbgrader={"grade_id": "units", "solution": true}
def cut_into_units(model: nn.Module, kind: type[nn.Module]) -> list[tuple[nn.Module, list[list[str]]]]:
    """The root, then the blocks: each module, and for each of its unit's parameters all names."""
    ### BEGIN SOLUTION
    blocks = [(name + ".", module) for name, module in model.named_modules() if isinstance(module, kind)]
    all_names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        all_names.setdefault(parameter, []).append(name)
    root: list[list[str]] = []
    inside: list[list[list[str]]] = [[] for _ in blocks]
    for names in all_names.values():
        own = [held for (prefix, _), held in zip(blocks, inside) if all(name.startswith(prefix) for name in names)]
        (own[0] if own else root).append(names)
    return [(model, root), *((module, names) for (_, module), names in zip(blocks, inside) if names)]
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_units", "grade": true, "points": 5}
lab.check("units")

# %% [markdown] id="hooks_text"
# ## 9 · The right moment
#
# Now it all becomes FSDP, by hooks. `add_hooks(units)` arranges that from now on, whoever calls the model as usual:
#
# | moment | root | block |
# |---|---|---|
# | **before forward** | unshard | unshard |
# | **after forward** | reshard only if no backward will follow | reshard |
# | **before backward**: the gradient of its *output* is known | unshard (it is whole still) | unshard |
# | **after backward**: the gradient of its *input* is known | reduce and reshard at the very end of backward | reduce and reshard |
#
# The tools:
#
# - `module.register_forward_pre_hook(f)`: `f(module, args)` may return new `args`, a tuple. Here floating-point inputs are cast to `unit.compute_dtype`.
# - `module.register_forward_hook(f)`: `f(module, args, output)`. The modules of this lab return one tensor.
# - `tensor.register_hook(f)`: `f(grad)` is called when the gradient of this tensor is known, if it requires one. Does the output not require a gradient, no backward will come.
# - `torch.autograd.Variable._execution_engine.queue_callback(f)`: called *within* a backward, calls `f()` at its very end. There, do what is left to do for **all** units: the root, and a block whose
#   input requires no gradient (the first one behind a frozen embedding).
#
# One trap. The output of block 1 *is* the input of block 2. Hooks of one tensor are called in the order in which they were registered: "before backward" of block 1 would come
# before "after backward" of block 2, and three units would be whole. So in the pre-hook make the input a tensor of its own, `x = x.view_as(x)`, and register on that.
#
# Blocks get other arguments beside x (Llama's get the cosines of positions): those that require no gradient need no hook.
#
# When a hook is missing, it is torch that complains, far from the cause:
#
# | what you read | what it means |
# |---|---|
# | `mat1 and mat2 shapes cannot be multiplied`, `index out of range` | a module computes with its shard: it was not gathered before its forward |
# | `setStorage: ... out of bounds for storage of size 0` | a weight was freed while it is needed: not gathered again before its backward, or freed too early |
# | `MISMATCH`, or a dead-lock | the ranks gather units in different orders |

# %% nbgrader={"grade_id": "hooks", "solution": true}
def add_hooks(units: list[Unit]) -> None:
    """From now on, units are gathered, freed and reduced by themselves; the first one is the root."""
    ### BEGIN SOLUTION
    root = units[0]
    in_backward: list[Unit] = []

    def before_forward(unit, args):
        unshard(unit)
        return tuple(prepared(unit, arg) for arg in args)

    def prepared(unit, arg):
        if not (isinstance(arg, torch.Tensor) and arg.is_floating_point()):
            return arg
        arg = arg.to(unit.compute_dtype)
        if arg.requires_grad and unit is not root:
            arg = arg.view_as(arg)
            arg.register_hook(lambda grad: after_backward(unit))
        return arg

    def after_forward(unit, output):
        if unit is not root or not output.requires_grad:
            reshard(unit)
        if output.requires_grad:
            output.register_hook(lambda grad: before_backward(unit))

    def before_backward(unit):
        if unit is root:
            torch.autograd.Variable._execution_engine.queue_callback(end_of_backward)
        unshard(unit)
        in_backward.append(unit)

    def after_backward(unit):
        in_backward.remove(unit)
        reduce_gradients(unit)
        reshard(unit)

    def end_of_backward():
        for unit in reversed(in_backward.copy()):
            after_backward(unit)

    for unit in units:
        unit.module.register_forward_pre_hook(lambda module, args, unit=unit: before_forward(unit, args))
        unit.module.register_forward_hook(lambda module, args, output, unit=unit: after_forward(unit, output))
    ### END SOLUTION


# %% id="given_shard_model"
def shard_model(model: nn.Module, kind: type[nn.Module], compute_dtype=None, reduce_dtype=None) -> list[Unit]:
    """FSDP, all of it: `model` keeps its interface. Make the optimiser afterwards, from the shards."""
    units = [make_unit(model, module, names, compute_dtype, reduce_dtype) for module, names in cut_into_units(model, kind)]
    add_hooks(units)
    return units


def trained_shards(units: list[Unit]) -> list[nn.Parameter]:
    """What an optimiser gets."""
    return [shard for unit in units for shard in unit.shards if shard.requires_grad]


# %% nbgrader={"grade_id": "test_hooks", "grade": true, "points": 15}
lab.check("hooks")

# %% [markdown] id="hooks_after"
# Does it look as planned? Two ranks, a Llama of 4 blocks, one step. The upper figure shows what travels, the lower one when each unit of rank 0 is whole, from
# the times that `put` writes down.

# %% id="run_timeline" tags=["demo"]
from dlo_lib.launch import run_ranks

SMALL = LlamaConfig(
    vocab_size=257, hidden=WIDTH, intermediate=11 * WIDTH // 4, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=WIDTH // 4, tied_embeddings=True
)


def one_step() -> list[list[tuple[int, bool]]]:
    """The history of each unit in the second step of two."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Llama(SMALL)
    units = shard_model(model, Block)
    tokens = torch.randint(257, (4, 129), generator=torch.Generator().manual_seed(dist.get_rank()))
    for _ in range(2):
        for unit in units:
            unit.history.clear()
        dist.barrier()
        logits = model(tokens[:, :-1])
        F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
    return [unit.history for unit in units]


ranks = run_ranks(one_step, 2, trace=True)
histories, trace = ranks[0], ranks.trace
begin, end = ((histories[0][i][0] - trace.began) / 1e9 for i in (0, -1))
trace.plot("One step on 2 ranks", begin - 0.002, end + 0.002)

# %% id="show_whole" tags=["demo"]
figures.measured_whole(histories)

# %% [markdown] id="state_text"
# ## 10 · The state dict
#
# A rank's shards are no checkpoint: another number of ranks could not read them. `full_state(model, units)` returns, on every rank, the state as if the model were not sharded: a
# dict from **every name** (tied parameters under each of theirs) to the whole tensor, and the buffers of the model.
#
# Two rules. **One unit at a time**: never more than one unit's worth of packed rows beside the result. **In the dtype of the row**: with mixed precision the whole parameters are
# rounded to bf16, and a checkpoint of those forgets what the optimiser has learnt.

# %% nbgrader={"grade_id": "state", "solution": true}
def full_state(model: nn.Module, units: list[Unit]) -> dict[str, torch.Tensor]:
    """All parameters and buffers by name, whole, as they would be without sharding."""
    ### BEGIN SOLUTION
    state = {name: buffer.clone() for name, buffer in model.named_buffers()}
    for unit in units:
        row = unit.row.detach()
        packed = row.new_empty(dist.get_world_size(), row.numel())
        dist.all_gather_into_tensor(packed.view(-1), row)
        for names, value in zip(unit.names, unpack(packed, unit.shapes)):
            state.update(dict.fromkeys(names, value.clone()))
    return state
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_state", "grade": true, "points": 5}
lab.check("state")

# %% [markdown] id="train_text"
# ## 11 · A training step
#
# The last question uses all that you wrote. `train_step(model, units, optimizer, micro_batches)` is one step on this rank's list of pairs (tokens, targets), and returns the loss as a
# `float`, the same on all ranks. Targets of -100 do not count, and **ranks and micro-batches differ in how many count**. The twin is one process that has the samples of all
# ranks in one batch, so the loss is the mean over *all* targets that count:
#
# > loss = (sum over this rank's targets) × N ÷ (number of targets that count, over all ranks and micro-batches)
#
# The factor N makes up for the average over ranks in `reduce_gradients`; the divisor takes one small all-reduce. Compute the loss of a micro-batch in at least fp32 (`logits.float()`, but let
# float64 be float64). After the step no gradient is left.

# %% nbgrader={"grade_id": "train", "solution": true}
def train_step(model: nn.Module, units: list[Unit], optimizer: torch.optim.Optimizer, micro_batches: list) -> float:
    """One step of the sharded model: the mean loss over the targets of all ranks."""
    ### BEGIN SOLUTION
    world = dist.get_world_size()
    count = torch.tensor(sum(int((targets != -100).sum()) for _, targets in micro_batches))
    dist.all_reduce(count)
    total = torch.zeros((), dtype=torch.float64)
    for tokens, targets in micro_batches:
        logits = model(tokens)
        logits = logits if logits.dtype == torch.float64 else logits.float()
        loss = F.cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=-100, reduction="sum") * world / count
        loss.backward()
        total += loss.detach() / world
    optimizer.step()
    for unit in units:
        for shard in unit.shards:
            shard.grad = None
    dist.all_reduce(total)
    return float(total)
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_train", "grade": true, "points": 10}
lab.check("train")

# %% [markdown] id="measure_text"
# ## 12 · Your FSDP, measured
#
# **Memory.** The tracker of `dlo_lib.profiling` sees every storage of a process. The cell trains the small Llama for two steps on 1, 2 and 4 ranks and looks at what is
# alive when the last backward is over: parameters, gradients, state of AdamW.

# %% id="run_memory" tags=["demo"]
from dlo_lib.profiling import MemoryTracker, Part


def samples(step: int, rank: int, world: int, batch: int = 8) -> list:
    """Sequences that repeat a short pattern: something to learn. All ranks together have the same ones, whatever their number."""
    random = torch.Generator().manual_seed(step)
    tokens = torch.randint(257, (batch, 8), generator=random).repeat(1, 5)[:, :33]
    mine = tokens.chunk(world)[rank]
    return [(mine[:, :-1], mine[:, 1:])]


def at_rest() -> tuple[dict[str, int], int]:
    """Bytes of the state of this rank after backward, by part, and the number of parameters of the whole model."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with MemoryTracker() as tracker:
        model = Llama(SMALL)
        count = sum(parameter.numel() for parameter in model.parameters())
        units = shard_model(model, Block)
        optimizer = torch.optim.AdamW(trained_shards(units), lr=0.003)
        train_step(model, units, optimizer, samples(0, dist.get_rank(), dist.get_world_size()))
        tokens, targets = samples(1, dist.get_rank(), dist.get_world_size())[0]
        F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten()).backward()
        tracker.claim([unit.row for unit in units], Part.WEIGHTS)
        tracker.claim([shard.grad for shard in trained_shards(units)], Part.GRADIENTS)
        tracker.claim([moment for held in optimizer.state.values() for moment in held.values()], Part.OPTIMIZER_STATE)
        tracker.claim([whole for unit in units for whole in unit.wholes], Part.UNITS)
        held = tracker.live_bytes()
    parts = {"weights": Part.WEIGHTS, "gradients": Part.GRADIENTS, "optimizer": Part.OPTIMIZER_STATE, "whole units": Part.UNITS}
    return {name: held[part] for name, part in parts.items()}, count


resting = {world: run_ranks(at_rest, world)[0] for world in (1, 2, 4)}
for world, (held, count) in resting.items():
    formula = 16 * count / world
    print(f"{world} rank(s): {sum(held.values()):10,} bytes held, 16 Ψ/N = {formula:12,.0f}, of whole units {held['whole units']}")
figures.resting({world: held for world, (held, _) in resting.items()}, {world: 16 * count / world for world, (_, count) in resting.items()})

# %% [markdown] id="bytes_text"
# **Bytes.** A step of your FSDP against a step of DDP (an all-reduce of all gradients), as the tracer counts them, on 4 ranks.

# %% id="run_bytes" tags=["demo"]
def sent_by_fsdp(compute_dtype=None) -> None:
    """One forward and backward."""
    torch.manual_seed(0)
    model = Llama(SMALL)
    shard_model(model, Block, compute_dtype)
    tokens, targets = samples(0, dist.get_rank(), dist.get_world_size())[0]
    F.cross_entropy(model(tokens).flatten(0, 1).float(), targets.flatten()).backward()


def padded_bytes(module: nn.Module, world: int) -> int:
    """Bytes of its parameters in fp32, with the padding of your function."""
    held = [tuple(parameter.shape) for parameter in module.parameters()]
    return 4 * (sum(map(math.prod, held)) + padding(held, world)[1])


whole_small = Llama(SMALL, device="meta")
f, in_all, in_blocks = 3 / 4, padded_bytes(whole_small, 4), sum(padded_bytes(block, 4) for block in whole_small.layers)
ddp = 2 * f * sum(4 * weight.numel() for weight in whole_small.parameters())
for name, dtype, share in (("fp32", None, 1), ("gathered in bf16", torch.bfloat16, 0.5)):
    trace = run_ranks(sent_by_fsdp, 4, dtype, trace=True).trace
    gathered, reduced = trace.ring_bytes("all_gather", rank=0), trace.ring_bytes("reduce_scatter", rank=0)
    formula = share * f * (in_all + in_blocks) + f * in_all
    print(f"{name:16}: {gathered + reduced:12,.0f} bytes, formula {formula:12,.0f}, {(gathered + reduced) / ddp:.2f} times DDP")

# %% [markdown] id="bytes_after"
# In fp32 it is a little less than 1.5 times, for the root is gathered once; the larger the share of the blocks, the nearer to 1.5. Gathering in bf16 brings it to about what DDP sends, at no
# loss in the optimiser, which keeps fp32.
#
# **The same training.** One rank has nothing to share: it is the plain model. Three ranks with uneven shards and unequal batches, and four: do they learn the same? In float64, so that only a
# mistake could tell them apart; and once in mixed precision, with fp32 shards.

# %% id="run_training" tags=["demo"]
from dataclasses import replace

SMALLER = replace(SMALL, hidden=WIDTH // 2, intermediate=11 * WIDTH // 8, head_dim=WIDTH // 8)


def train(steps: int, dtype, compute_dtype=None, reduce_dtype=None) -> list[float]:
    """The loss of each step."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Llama(SMALLER, dtype=torch.float32).to(dtype)
    units = shard_model(model, Block, compute_dtype, reduce_dtype)
    optimizer = torch.optim.AdamW(trained_shards(units), lr=0.003)
    return [train_step(model, units, optimizer, samples(0, dist.get_rank(), dist.get_world_size())) for _ in range(steps)]


curves = {f"{world} rank{'s' if world > 1 else ''}": run_ranks(train, world, STEPS, torch.float64)[0] for world in (1, 3, 4)}
curves["4 ranks, bf16, summed in fp32"] = run_ranks(train, 4, STEPS, torch.float32, torch.bfloat16, torch.float32)[0]
apart = max(abs(a - b) for name in ("3 ranks", "4 ranks") for a, b in zip(curves[name], curves["1 rank"]))
print(f"largest difference of a loss to that of one rank, float64: {apart:.1e}")
figures.losses(curves)

# %% [markdown] id="scale_text"
# ## 13 · At scale
#
# The same thing at true size: one step on fake tensors, with the library's FSDP, for one rank of up to 512. What stands above the
# diamonds, 16 Ψ/N, is what FSDP does not divide.

# %% id="show_scale" tags=["demo"]
from dlo_lib.profiling import measure_memory

sizes = [world for world in (8, 64, 512) if world <= LARGEST]
reports = {world: measure_memory(MODEL, 1, 2048, checkpointing=True, parallel="fsdp", world_size=world) for world in sizes}
figures.true_size({world: report.at_peak for world, report in reports.items()}, sum(shape.numel() for shape in shapes))

# %% [markdown] id="scale_lesson"
# One rank alone would need more than 48 GiB. Eight ranks take off most of it; from 64 to 512 little is left to save. What remains is not divided by the number of ranks: the units that are whole, and their whole
# gradients while they are in backward. (The tied embedding is by far the largest.) More ranks then bring speed, not room. (Activation checkpointing is on already; lab 16 is about what comes next:
# prefetch, `reshard_after_forward`, hybrid sharding, `torch.compile`.)
#
# `dlo_lib.train` has FSDP as one word. On a cluster it is a job: `cluster.submit` with `dry_run` shows the script that SLURM would get. Without SLURM the same call, with the *same
# options*, runs here on two processes and a small model.

# %% id="run_at_scale" tags=["demo"]
from dlo_lib import cluster

flags = ["--parallel", "fsdp", "--batch", "2", "--accumulation", "2", "--clip", "1.0"]
large = ["--model", MODEL, "--seq", "2048", "--precision", "bf16", "--steps", "100"]
little = ["--model", "tiny", "--seq", "32", "--steps", "4", "--log-every", "2"]
script = cluster.submit("dlo_lib.train", [*large, *flags], gpus=8, site="jean-zay-a100", account="abc", dry_run=True)
print("For SLURM, on 8 GPUs:", *(line for line in script.splitlines() if line.startswith(("#SBATCH", "srun"))), sep="\n  ")
job = cluster.submit("dlo_lib.train", [*little, *flags], gpus=PROCESSES).wait()
for line in job.metrics():
    print(f"  step {line.step}: loss {line.loss:.3f}, {line.tokens_per_second:,.0f} tokens/s")

# %% [markdown] id="quiz_text"
# ## 14 · Quiz
#
# Answer with the letter, for example `{"q1": "a", ...}`. The check here says whether every question has an answer; right answers count in grading.

# %% id="show_quiz" tags=["demo"]
lab.quiz()

# %% nbgrader={"grade_id": "quiz", "solution": true}
### BEGIN SOLUTION: quiz = {"q1": "", "q2": "", "q3": "", "q4": "", "q5": "", "q6": ""}
quiz = {"q1": "b", "q2": "d", "q3": "a", "q4": "c", "q5": "b", "q6": "a"}
### END SOLUTION

# %% nbgrader={"grade_id": "test_quiz", "grade": true, "points": 7}
lab.check("quiz")

# %% [markdown] id="further"
# ## Go further
#
# - In your timeline the rank stands still at every gather. Gather the next block *while* this one computes (`async_op=True`). How many units are whole then? (Lab 16.)
# - The last block is freed after forward and gathered again at once. Spare that. What does it save for Llama 3.2 3B?
# - With gradient accumulation your FSDP reduces after each micro-batch. Write `no_sync`: what does it cost in memory, what does it save in bytes?
# - Every rank builds the whole model before it forgets most of it. Begin on the `meta` device instead. (`dlo_lib/parallel/deferred_init.py`.)
# - Write `load_full_state`, and continue on 3 ranks what 4 began.
# - Now read `dlo_lib/parallel/fsdp.py` and `unit.py`: where do they differ from yours, and why?
#
# ## References
#
# - Y. Zhao et al., *PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel* (2023), [arXiv:2304.11277](https://arxiv.org/abs/2304.11277)
# - S. Rajbhandari et al., *ZeRO: Memory Optimizations Toward Training Trillion Parameter Models* (2020), [arXiv:1910.02054](https://arxiv.org/abs/1910.02054)
# - PyTorch documentation, [`torch.distributed.fsdp.fully_shard`](https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html)
# - The course this lab follows: IDRIS, *Deep Learning Optimisé – Jean Zay* (DLO-JZ), day 4
