# %% [markdown] id="title"
# # 15 · Implement FSDP
#
# **What you will do.** You write fully sharded data parallelism (FSDP): every rank keeps 1/N of parameters,
# gradients and optimiser state, gathers a block just before it computes, and frees it right after. You write
# gathering, freeing and reducing, and the hooks that call them at the right moment. Then you measure your FSDP:
# memory, bytes, and the losses of a Llama, which are, up to rounding, those of one process with the whole model.
# At the end PyTorch's `fully_shard` passes the same checks.
#
# You need no GPU: ranks are processes on this machine (gloo), and the 3B model is measured at true size on fake tensors.
#
# Builds on labs 11 (hooks) and 14 (ZeRO). You can skip lab 12, which compresses gradients before they are sent. Of lab 13 you
# need one number: with AdamW in fp32 a data-parallel rank holds 16 bytes for each parameter (weight 4, gradient 4, moments 8).
#
# The core exercises, predictions and the quiz take about 80 minutes; with the text and the
# given code plan 100, with the measurements and the last section 2 hours. Four optional exercises take 54 minutes
# more. Each exercise has a check that answers at once; `lab.hint("name")` gives a nudge, then a pointer, then a sketch. If you are stuck,
# `lab.use_reference("name")` lets you continue without its points.
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
GPUS = int(os.environ.get("DLO_GPUS", 2))  # ranks of the small job at the end
SEQ = int(os.environ.get("DLO_SEQ", 2048))  # of the model at true size
REPEATS = int(os.environ.get("DLO_REPEATS", 10))  # of a measured step
lab = Lab(globals())

# %% [markdown] id="why"
# ## Why: how much at once?
#
# Stage 3 of lab 14 gathers each weight alone, twice a step, and frees it after use. This is one extreme. The
# other extreme gathers the whole model at the start of a step: few messages, but the memory of the whole
# model. For the real model, the cell counts how many bytes are whole at the same time, and how many gathers a
# step makes.

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
# A block is the compromise: little more is whole than with each weight alone, for far fewer gathers. (1.5 GiB of the
# first two bars is the embedding, which is one weight.) Parameters that are gathered together are a **unit** (*unité*): one unit for each
# block, and one, the **root**, for the parameters outside the blocks (embedding, last norm, output
# projection).
#
# ## The idea
#
# A unit is whole only while it computes. The root is needed at both ends of the model, so it stays whole from
# the start of forward to the end of backward. A block is gathered for its forward, freed, gathered again for
# its backward; then its gradients are averaged over the ranks, each rank keeps its part, and the block is
# freed again.

# %% id="show_idea" tags=["demo"]
figures.planned(3)

# %% [markdown] id="explore_text"
# Press ▶, or move the slider through the moments of a step, one gather, computation or reduction at a time. How many units
# are whole at the same time, at most? In which moments does a rank hold whole *gradients*?

# %% id="explore_step" tags=["demo"]
from dlo_lib.labkit.explore import explore


def one_moment(moment: int = 0):
    return figures.moment(4, moment)


explore(one_moment, moment=range(31))

# %% [markdown] id="formulas"
# At most two units are whole: the root and one block. Whole gradients exist from the backward of a unit to its reduction.
#
# With $\Psi$ parameters, $N$ ranks, $B_p$ and $B_g$ the bytes of all parameters and of all gradients (padding included),
# $f = \frac{N-1}{N}$:
#
# | | memory at rest (fp32, AdamW) | sent by a rank and step |
# |---|---|---|
# | DDP | $16\Psi$ | $2B_g f$ |
# | FSDP, blocks freed after forward | $16\Psi/N$ | $2B_p f + B_g f$ (the root only once: $B_p f + B_g f$) |
#
# You will measure both columns with your code.

# %% [markdown] id="cuts_text"
# ## 1 · Rows
#
# How is a parameter divided? The first FSDP (2021-2023) made one long vector of a unit and cut it into N equal
# pieces. The figure shows this on the left, for a small unit of three matrices, with the first dimension
# downwards. Each colour is a rank.

# %% id="show_flat" tags=["demo"]
figures.cuts({"q": (6, 8), "k": (3, 8), "up": (10, 8)}, world=4)

# %% [markdown] id="rows_text"
# On the left, a rank's piece begins in the middle of a row of one matrix and ends in the middle of a row of
# the next. A rank no longer has *parameters*, only a range of numbers. An optimiser that needs matrices
# (Muon, LAMB, Adafactor) cannot work on it. Frozen and trained parameters cannot share a unit, because a
# vector has one `requires_grad`. A checkpoint must record which numbers belong to which parameter.
#
# On the right, **each parameter is sharded on its first dimension**. PyTorch's `fully_shard` (FSDP2) does this,
# and so do you. (Optional exercises 9 and 10 build the flat buffer and count what rows cost in padding.)
#
# **Core · 5 min · ●○○**
#
# Write `own_rows(length, rank, world)`: the rows of this rank, of a parameter with `length` rows, as (start,
# stop). With `c = ceil(length / world)`, rank $r$ has rows $rc$ to $(r+1)c$, as far as they exist; both are
# `length` for a rank without any.

# %% nbgrader={"grade_id": "rows", "solution": true}
def own_rows(length: int, rank: int, world: int) -> tuple[int, int]:
    """Return start and stop of this rank's rows."""
    ### BEGIN SOLUTION
    rows = -(-length // world)
    return min(rank * rows, length), min((rank + 1) * rows, length)
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_rows", "grade": true}
lab.check("rows")

# %% [markdown] id="pack_text"
# The rest is given: read the docstrings. Of a unit, a rank keeps one vector, its **row** of the packed unit: its part of
# the first parameter padded to c rows, then its part of the second padded to its c rows, and so on. So a part begins
# at the same place on every rank. Here are two matrices on 2 ranks: A has 5 rows (c = 3), B has 4 (c = 2), and the dots
# are a row of padding.
#
# ```
# packed      [ A0 A1 A2 | B0 B1 ]    rank 0's row         A    [ A0 A1 A2 A3 A4 ]
# (world, S)  [ A3 A4 .. | B2 B3 ]    rank 1's row         B    [ B0 B1 B2 B3 ]
# ```
#
# One all-gather concatenates the rows of all ranks: `packed`. `pack` makes it from whole tensors, `unpack` makes whole
# tensors from it. (This copy is the second cost of rows, beside padding.) `shard_views` cuts one row into this rank's
# parts. They are **views**, because the optimiser updates the row through them.

# %% id="given_pack"
def shard_views(
    row: torch.Tensor, shapes: list[tuple[int, ...]], rank: int, world: int
) -> list[torch.Tensor]:
    """Return this rank's part of each parameter, as views of its packed row (S,).

    The parts have no padding: (own rows, ...).
    """
    views, offset = [], 0
    for shape in shapes:  # a tensor without dimensions, shape (), is one row of one number
        length, inner = math.prod(shape[:1]), math.prod(shape[1:])
        start, stop = own_rows(length, rank, world)
        views.append(row[offset : offset + (stop - start) * inner].view(stop - start, *shape[1:]))
        offset += -(-length // world) * inner
    return views


def pack(tensors: list[torch.Tensor], world: int) -> torch.Tensor:
    """Return the row that each rank keeps of these whole tensors: (world, S)."""
    parts = []
    for tensor in tensors:
        size = -(-math.prod(tensor.shape[:1]) // world) * math.prod(tensor.shape[1:])
        padding = (0, world * size - tensor.numel())
        parts.append(F.pad(tensor.reshape(-1), padding).view(world, size))
    return torch.cat(parts, dim=1)


def unpack(packed: torch.Tensor, shapes: list[tuple[int, ...]]) -> list[torch.Tensor]:
    """Return the whole tensors, from the rows of all ranks (world, S)."""
    tensors, offset = [], 0
    for shape in shapes:
        size = -(-math.prod(shape[:1]) // len(packed)) * math.prod(shape[1:])
        numbers = packed[:, offset : offset + size].reshape(-1)
        tensors.append(numbers[: math.prod(shape)].view(shape))
        offset += size
    return tensors


# %% [markdown] id="unit_text"
# ## 2 · A unit becomes whole
#
# The next cell is given: read it. A `Unit` has two tensors for each parameter. The optimiser updates the
# **shard**, a view of `row`. The module computes with the **whole** one. It is *always the same tensor*,
# because autograd saves it between forward and backward. While the unit is freed, this tensor has a shape but
# no memory:
#
# ```python
# whole.untyped_storage().resize_(0)                                      # free: the tensor stays, its memory is released
# whole.untyped_storage().resize_(whole.numel() * whole.element_size())   # allocate again; in bytes: not every unit is fp32
# whole.data.copy_(value)                                                 # .data: otherwise autograd reports a changed tensor
# ```
#
# Fill this storage; do not give the tensor another one (`whole.data = value`). Keep this order: a copy into a tensor without memory ends the process (*killed by SIGSEGV*).
#
# `put(unit, True)` registers the whole parameters in the modules, `put(unit, False)` the shards.

# %% id="given_unit"
@dataclass(eq=False)
class Unit:
    """Parameters that are gathered, freed and reduced together."""

    module: nn.Module  # its forward and backward need them
    names: list[list[str]]  # all names of each parameter in the model: tied ones have several
    places: list[list[tuple[nn.Module, str]]]  # the same, as module and attribute
    shapes: list[tuple[int, ...]]
    row: torch.Tensor  # (S,): this rank's part, packed and padded
    shards: list[nn.Parameter]  # its parts, views of row: for the optimiser
    wholes: list[nn.Parameter]  # for the module: the same tensors, without memory while freed
    compute_dtype: torch.dtype  # of the whole parameters
    reduce_dtype: torch.dtype  # in which gradients are averaged
    is_whole: bool = False
    # When it became whole and when it was freed, for the figure at the end:
    history: list[tuple[int, bool]] = field(default_factory=list)


def put(unit: Unit, whole: bool) -> None:
    """Register the whole parameters, or the shards, in the modules."""
    for places, parameter in zip(unit.places, unit.wholes if whole else unit.shards):
        for module, attribute in places:
            module._parameters[attribute] = parameter
    unit.is_whole = whole
    unit.history.append((time.monotonic_ns(), whole))


def make_unit(
    model: nn.Module,
    module: nn.Module,
    names: list[list[str]],
    compute_dtype=None,
    reduce_dtype=None,
) -> Unit:
    """Keep this rank's row of the parameters with these names in `model`.

    Registers the shards in the modules of the parameters.
    Without `compute_dtype` and `reduce_dtype`, the dtype of the parameters is used.
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
    places = [
        [(model.get_submodule(owner), attribute) for owner, _, attribute in same] for same in parts
    ]
    dtypes = compute_dtype or dtype, reduce_dtype or dtype
    unit = Unit(module, names, places, shapes, row, shards, wholes, *dtypes)
    put(unit, False)
    return unit


# %% [markdown] id="unshard_text"
# **Core · 12 min · ●●○**
#
# Write `unshard(unit)`: one all-gather of the rows of all ranks, **in `unit.compute_dtype`** (the row is cast
# before it is sent: half the bytes for bf16), unpack, fill the whole parameters, `put` them. If the unit is
# already whole, return at once: gathering it twice is the most common waste. gloo wants the rows one after the other in
# one dimension: `dist.all_gather_into_tensor(packed.view(-1), row)`.

# %% nbgrader={"grade_id": "unshard", "solution": true}
def unshard(unit: Unit) -> None:
    """Gather the unit, unless it is whole."""
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


# %% nbgrader={"grade_id": "test_unshard", "grade": true}
lab.check("unshard")

# %% [markdown] id="reshard_text"
# ## 3 · And is freed
#
# **Core · 4 min · ●○○**
#
# `reshard(unit)` frees the memory of the whole parameters and registers the shards in the modules. It sends
# nothing, because the rank still has its row. A unit that is never resharded keeps its whole weights in
# memory.

# %% nbgrader={"grade_id": "reshard", "solution": true}
def reshard(unit: Unit) -> None:
    """Free the whole parameters and register the shards."""
    ### BEGIN SOLUTION
    for whole in unit.wholes:
        whole.untyped_storage().resize_(0)
    put(unit, False)
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_reshard", "grade": true}
lab.check("reshard")

# %% [markdown] id="reduce_text"
# ## 4 · Gradients
#
# **Core · 15 min · ●●○**
#
# After the backward of a unit, its whole parameters have whole gradients, on each rank from its samples. The first lines of
# `reduce_gradients(unit)` are given: `trained` has the pairs of shard and whole parameter (a frozen parameter has no
# gradient and sends nothing), and `gradients` has zeros for a parameter that this rank did not use, because the other
# ranks wait for it. Continue:
#
# - cast the gradients to `unit.reduce_dtype` and pack them;
# - sum the rows over the ranks with one **reduce-scatter**, `dist.reduce_scatter_tensor(row, packed.view(-1))`, which gives
#   each rank its row. An all-reduce would send twice the bytes, for whole gradients that no rank needs. (PyTorch 2.13
#   calls it `reduce_scatter_single` too, and warns at the older name, which all versions have);
# - divide by the number of ranks, before or after the sum: data parallelism needs the **average**;
# - cut the row with `shard_views`, with the shapes of the trained parameters only. Add each part, in the shard's dtype, to
#   `shard.grad` (`None` at first; micro-batches add up), and set every `whole.grad` to `None`. Afterwards no whole gradient is in memory.
#
# The average is `(g0 + g1 + ...) / N`. In bf16 each addition keeps 8 bits. That is why `reduce_dtype` exists:
# gradients are often summed in fp32 although they were computed in bf16.

# %% nbgrader={"grade_id": "reduce", "solution": true}
def reduce_gradients(unit: Unit) -> None:
    """Average the gradients of the whole parameters over the ranks.

    Keeps this rank's part in the shards.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    pairs = zip(unit.shards, unit.wholes)
    trained = [(shard, whole) for shard, whole in pairs if whole.requires_grad]
    if not trained:
        return
    gradients = [
        torch.zeros_like(whole) if whole.grad is None else whole.grad for _, whole in trained
    ]
    ### BEGIN SOLUTION
    packed = pack([gradient.to(unit.reduce_dtype) for gradient in gradients], world)
    for _, whole in trained:
        whole.grad = None
    row = packed.new_empty(packed.shape[1])
    dist.reduce_scatter_tensor(row, packed.view(-1))
    row = (row / world).to(unit.row.dtype)
    for (shard, _), part in zip(trained, shard_views(row, [whole.shape for _, whole in trained], rank, world)):
        shard.grad = part if shard.grad is None else shard.grad + part
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_reduce", "grade": true}
lab.check("reduce")

# %% [markdown] id="units_text"
# ## 5 · Which parameters are a unit?
#
# **Core · 7 min · ●○○**
#
# A parameter can have several names: it is **tied**. The rule:
#
# > if all names of a parameter are in one block, it belongs to this block's unit; all other parameters
# > belong to the root.
#
# The other parameters are those outside the blocks, and also weights that are tied across two blocks, or
# between a block and the output projection. They are needed in several places, so they must be whole in all
# of them. A parameter is in exactly one unit; otherwise it would be gathered twice.
#
# Write `unit_of(names, blocks)`, the rule for one parameter: its names, such as `["layers.0.mlp.up_proj.weight"]`, and
# the names of the blocks, such as `["layers.0", "layers.1", ...]`. Return the name of the block, or `None` for the root.
# The next cell applies it to all parameters of a model.

# %% nbgrader={"grade_id": "units", "solution": true}
def unit_of(names: list[str], blocks: list[str]) -> str | None:
    """Return the block that has all names of a parameter, or None for the root."""
    ### BEGIN SOLUTION
    for block in blocks:
        if all(name.startswith(block + ".") for name in names):
            return block
    return None
    ### END SOLUTION


# %% id="given_cut_into_units"
def cut_into_units(
    model: nn.Module, kind: type[nn.Module]
) -> list[tuple[nn.Module, list[list[str]]]]:
    """Return the root, then the blocks of this type.

    For each: the module, and all names of each parameter of its unit.
    """
    blocks = {name: module for name, module in model.named_modules() if isinstance(module, kind)}
    all_names: dict[nn.Parameter, list[str]] = {}
    # A tied parameter comes once for each name.
    for name, parameter in model.named_parameters(remove_duplicate=False):
        all_names.setdefault(parameter, []).append(name)
    units: dict[str | None, list[list[str]]] = {None: [], **{name: [] for name in blocks}}
    for names in all_names.values():
        units[unit_of(names, list(blocks))].append(names)
    root = units.pop(None)
    return [(model, root), *((blocks[name], held) for name, held in units.items() if held)]


# %% nbgrader={"grade_id": "test_units", "grade": true}
lab.check("units")

# %% [markdown] id="forward_text"
# ## 6 · The right moment: forward
#
# Hooks turn these functions into FSDP. A normal call of the model then does the following:
#
# | moment | root | block | exercise |
# |---|---|---|---|
# | **before forward** | unshard | unshard | 6 |
# | **after forward** | reshard only if no backward will follow | reshard | 6 |
# | **before backward**: the gradient of its *output* is known | unshard (it is still whole) | unshard | 7 |
# | **after backward**: the gradient of its *input* is known | | reduce and reshard | 7 |
# | **end of backward** | reduce and reshard | what is left | 8 |
#
# The next cell is given. It registers the hooks, and calls the functions that you write in exercises 6, 7 and 8.
# It also checks that a unit is whole when it is needed: otherwise PyTorch reports an error far from the cause,
# such as `mat1 and mat2 shapes cannot be multiplied` or `setStorage: ... out of bounds for storage of size 0`.

# %% id="given_hooks"
def add_hooks(
    units: list[Unit], parts: tuple[str, ...] = ("forward", "backward", "end")
) -> list[Unit]:
    """Make hooks gather, free and reduce the units; the first is the root. Return `pending`."""
    pending: list[Unit] = []  # units whose backward has begun and not ended
    for number, unit in enumerate(units):
        name = f"block {number}" if number else "the root"

        def before(module, args, unit=unit, name=name):
            args = before_forward(unit, args)
            text = f"the forward of {name} begins, but {name} is not whole: "
            needs(unit, text + "before_forward must call unshard(unit)")
            if "backward" in parts and unit is not units[0]:
                args = tuple(
                    watch_input(unit, arg, pending) if needs_gradient(arg) else arg for arg in args
                )
                if any(arg is None for arg in args):
                    text = "watch_input returns None: it must return the input that it watches"
                    raise RuntimeError(text)
            return args

        def after(module, args, output, unit=unit, name=name):
            after_forward(unit, output, unit is units[0])
            if output.requires_grad and "end" in parts and unit is units[0]:
                output.register_hook(lambda grad: end_of_backward(pending))
            if output.requires_grad and "backward" in parts:
                watch_output(unit, output, pending)
                text = (
                    f"the backward of {name} begins, but {name} is not whole: "
                    "the hook of watch_output must call unshard(unit)"
                )
                output.register_hook(lambda grad: needs(unit, text))

        unit.module.register_forward_pre_hook(before)
        unit.module.register_forward_hook(after)
    return pending


def end_of_backward(pending: list[Unit]) -> None:
    """Queue the function of exercise 8, and after it a test.

    The test raises an error if the function has not ended the backward of all units.
    """
    queue_end(pending)

    def nothing_left() -> None:
        if pending:
            raise RuntimeError(
                f"backward has ended, and pending still has {len(pending)} units: "
                "queue a function that reduces, frees and removes each of them at "
                "the end of backward (do not remove from a list while you loop over it)"
            )

    torch.autograd.Variable._execution_engine.queue_callback(nothing_left)


def needs(unit: Unit, text: str) -> None:
    """Raise an error if the unit is not whole."""
    if not unit.is_whole:
        raise RuntimeError(text)


def needs_gradient(arg: object) -> bool:
    """Return whether this input is a tensor that requires a gradient.

    Tokens and cosines of positions do not.
    """
    return isinstance(arg, torch.Tensor) and arg.requires_grad


def cast(args: tuple, dtype: torch.dtype) -> tuple:
    """Return the inputs with floating-point tensors in this dtype.

    Everything else is unchanged: tokens are integers.
    """
    floating = [isinstance(arg, torch.Tensor) and arg.is_floating_point() for arg in args]
    return tuple(arg.to(dtype) if is_floating else arg for arg, is_floating in zip(args, floating))

# %% id="given_shard_model"
def shard_model(
    model: nn.Module, kind: type[nn.Module], compute_dtype=None, reduce_dtype=None
) -> list[Unit]:
    """Apply FSDP; `model` keeps its interface. Make the optimiser afterwards, from the shards."""
    units = [
        make_unit(model, module, names, compute_dtype, reduce_dtype)
        for module, names in cut_into_units(model, kind)
    ]
    add_hooks(units)
    return units


def trained_shards(units: list[Unit]) -> list[nn.Parameter]:
    """Return the parameters for the optimiser."""
    return [shard for unit in units for shard in unit.shards if shard.requires_grad]


# %% [markdown] id="forward_after"
# **Core · 5 min · ●○○**
#
# - `before_forward(unit, args)` gathers the unit and returns its inputs in `unit.compute_dtype`. Use `cast`.
# - `after_forward(unit, output, is_root)` frees the unit. Only the root stays whole, and only if a backward will
#   follow, because it is needed again immediately. If the output requires no gradient, there is no backward.

# %% nbgrader={"grade_id": "forward", "solution": true}
def before_forward(unit: Unit, args: tuple) -> tuple:
    """Gather the unit; return its inputs in the dtype in which it computes."""
    ### BEGIN SOLUTION
    unshard(unit)
    return cast(args, unit.compute_dtype)
    ### END SOLUTION


def after_forward(unit: Unit, output: torch.Tensor, is_root: bool) -> None:
    """Free the unit, except a root whose backward follows."""
    ### BEGIN SOLUTION
    if not is_root or not output.requires_grad:
        reshard(unit)
    ### END SOLUTION

# %% nbgrader={"grade_id": "test_forward", "grade": true}
lab.check("forward")

# %% [markdown] id="backward_text"
# ## 7 · The right moment: backward
#
# **Core · 15 min · ●●●**
#
# `tensor.register_hook(f)` calls `f(grad)` when the gradient of this tensor is known. The list `pending` has the
# units whose backward has begun and not ended; `add_hooks` passes the same list to all calls.
#
# - `watch_output(unit, output, pending)` registers a hook on the output. The hook gathers the unit and appends
#   it to `pending`.
# - `watch_input(unit, arg, pending)` registers a hook on an input. The hook removes the unit from `pending`, reduces its
#   gradients and frees it. (Autograd adds up the gradients of a block's weights before it continues to whatever made the
#   input, so they are complete then.) Return the tensor that has the hook (see the note). `add_hooks` calls this function for the input that requires a gradient; in
#   this lab a block has at most one. A unit without such an input stays in `pending`: exercise 8 ends its backward.
#
# Note: the output of block 1 *is* the input of block 2. Hooks of one tensor are called in the order of their
# registration: "before backward" of block 1 would run before "after backward" of block 2, and three units
# would be whole. So make the input a separate tensor, `arg = arg.view_as(arg)`, register the hook on this one, and
# return this one.

# %% nbgrader={"grade_id": "backward", "solution": true}
def watch_output(unit: Unit, output: torch.Tensor, pending: list[Unit]) -> None:
    """When the gradient of the output is known, gather the unit.

    Notes in `pending` that the backward of the unit has begun.
    """
    ### BEGIN SOLUTION
    def begin(grad):
        unshard(unit)
        pending.append(unit)

    output.register_hook(begin)
    ### END SOLUTION


def watch_input(unit: Unit, arg: torch.Tensor, pending: list[Unit]) -> torch.Tensor:
    """Return the input as a separate tensor.

    When the gradient of this tensor is known, the backward of the unit ends.
    """
    ### BEGIN SOLUTION
    def end(grad):
        pending.remove(unit)
        reduce_gradients(unit)
        reshard(unit)

    arg = arg.view_as(arg)
    arg.register_hook(end)
    return arg
    ### END SOLUTION

# %% nbgrader={"grade_id": "test_backward", "grade": true}
lab.check("backward")

# %% [markdown] id="end_text"
# ## 8 · The end of backward
#
# **Core · 7 min · ●●○**
#
# Some units are still in `pending` when backward has computed everything: the root, whose input is tokens, and a
# block whose input requires no gradient (the first one after a frozen embedding). No hook of a tensor can end
# their backward. PyTorch has a callback for this:
#
# `torch.autograd.Variable._execution_engine.queue_callback(f)`, called *during* backward, runs `f()` at the end of
# this backward.
#
# Write `queue_end(pending)`, which `add_hooks` calls when the backward of the root begins: at the end of backward,
# reduce and free all units that are left in `pending`, and empty the list. (Their order is free: it is the same on all
# ranks.)

# %% nbgrader={"grade_id": "end", "solution": true}
def queue_end(pending: list[Unit]) -> None:
    """At the end of the backward that runs now, reduce and free the units that are left."""
    ### BEGIN SOLUTION
    def end():
        while pending:
            unit = pending.pop()
            reduce_gradients(unit)
            reshard(unit)

    torch.autograd.Variable._execution_engine.queue_callback(end)
    ### END SOLUTION

# %% nbgrader={"grade_id": "test_end", "grade": true}
lab.check("end")

# %% [markdown] id="hooks_after"
# Does the step run as planned? The next cells run one step of a Llama of 4 blocks on two ranks.
#
# **Predict:** how many all-gathers and how many reduce-scatters does a rank make in this step? Replace each `None` by your
# number. The cell is not graded.

# %% id="predict_timeline" tags=["prediction"]
# Of one rank in one step, with 4 blocks
step_guess = {"all-gathers": None, "reduce-scatters": None}

# %% id="run_timeline" tags=["demo", "nbval-check-output"]
from dlo_lib.labkit.predicted_bars import predicted_bars
from dlo_lib.labkit.predictions import compared, require_numbers
from dlo_lib.launch import run_ranks

require_numbers(step_guess)

SMALL = LlamaConfig(
    vocab_size=257, hidden=WIDTH, intermediate=11 * WIDTH // 4, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=WIDTH // 4, tied_embeddings=True
)


def one_step() -> tuple[list[list[tuple[int, bool]]], int]:
    """The history of each unit in the second step of two, and when this step began."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Llama(SMALL)
    units = shard_model(model, Block)
    tokens = torch.randint(257, (4, 129), generator=torch.Generator().manual_seed(dist.get_rank()))
    for _ in range(2):
        for unit in units:
            unit.history.clear()
        dist.barrier()
        began = time.monotonic_ns()
        logits = model(tokens[:, :-1])
        F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
    return [unit.history for unit in units], began


ranks = run_ranks(one_step, 2, trace=True)
(histories, began), trace = ranks[0], ranks.trace
begin, end = ((moment - trace.began) / 1e9 for moment in (began, histories[0][-1][0]))
trace.to_perfetto("trace.json")  # open it at https://ui.perfetto.dev
counted = {name: trace.count(kind, rank=0) // 2 for name, kind in (("all-gathers", "all_gather"), ("reduce-scatters", "reduce_scatter"))}
print(compared(step_guess, counted))
predicted_bars(counted, step_guess, "calls of rank 0 in one step")

# %% [markdown] id="timeline_after"
# The gathers are those of the root, of blocks 1, 2, 3, 4 in forward, and of blocks 4, 3, 2, 1 in backward; each of the
# five units is reduced once. The next figure shows this communication, and the one below it when each unit of rank 0 is
# whole, from the times that `put` records.

# %% id="show_timeline" tags=["demo"]
trace.plot("One step on 2 ranks", begin - 0.002, end + 0.002)

# %% id="show_whole" tags=["demo"]
figures.measured_whole(histories)

# %% [markdown] id="measure_text"
# ## Your FSDP, measured
#
# **Memory.** The tracker of `dlo_lib.profiling` sees every storage of a process. The cell trains the small
# Llama for two steps on 1, 2 and 4 ranks and reads the memory after the last backward: parameters, gradients,
# state of AdamW.
#
# **Predict, then measure.** How many times the bytes of one rank does a rank of 2 and of 4 hold? And how many
# times the bytes of DDP does a step send: in fp32; when units are gathered in bf16 (gradients in fp32); and in fp32
# with 4 micro-batches, where DDP communicates once, after the last? Replace each `None` by your number. The cell is not
# graded.

# %% id="predict_measured" tags=["prediction"]
memory_guess = {"2 ranks": None, "4 ranks": None}  # times the bytes of one rank
# Times the bytes of DDP
bytes_guess = {"fp32": None, "gathered in bf16": None, "fp32, 4 micro-batches": None}

# %% id="run_memory" tags=["demo"]
from dlo_lib.profiling import MemoryTracker, Part

require_numbers(memory_guess)


def one_backward(model: nn.Module, step: int) -> float:
    """Forward and backward of this rank's samples, sequences that repeat a short pattern; return the mean loss of all ranks.

    All ranks together have the same 12 sequences, for 1, 2, 3 and 4 ranks.
    """
    random = torch.Generator().manual_seed(step)
    tokens = torch.randint(257, (12, 8), generator=random).repeat(1, 5)[:, :33].chunk(dist.get_world_size())[dist.get_rank()]
    logits = model(tokens[:, :-1]).flatten(0, 1)
    loss = F.cross_entropy(logits if logits.dtype == torch.float64 else logits.float(), tokens[:, 1:].flatten())
    loss.backward()
    mean = loss.detach().double()
    dist.all_reduce(mean)
    return float(mean) / dist.get_world_size()


def at_rest() -> tuple[dict[str, int], int]:
    """Bytes of the state of this rank after backward, by part, and the number of parameters of the whole model."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with MemoryTracker() as tracker:
        model = Llama(SMALL)
        count = sum(parameter.numel() for parameter in model.parameters())
        units = shard_model(model, Block)
        optimizer = torch.optim.AdamW(trained_shards(units), lr=0.003)
        one_backward(model, 0)
        optimizer.step()
        optimizer.zero_grad()
        one_backward(model, 1)
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
one, *others = (sum(held.values()) for held, _ in resting.values())
print(compared(memory_guess, {f"{world} ranks": held / one for world, held in zip((2, 4), others)}))
formulas = {world: 16 * count / world for world, (_, count) in resting.items()}
figures.resting({world: held for world, (held, _) in resting.items()}, formulas, memory_guess)

# %% [markdown] id="bytes_text"
# **Bytes.** The tracer compares a step of your FSDP with a step of DDP (an all-reduce of all gradients), on 4
# ranks.

# %% id="run_bytes" tags=["demo", "nbval-check-output"]
require_numbers(bytes_guess)
def sent_by_fsdp(compute_dtype=None, micro_batches: int = 1) -> None:
    """Forward and backward of each micro-batch."""
    torch.manual_seed(0)
    model = Llama(SMALL)
    shard_model(model, Block, compute_dtype)
    for number in range(micro_batches):
        one_backward(model, number)


def padded_bytes(module: nn.Module, world: int) -> int:
    """Bytes of its parameters in fp32, packed for all ranks."""
    return 4 * pack(list(module.parameters()), world).numel()


whole_small = Llama(SMALL, device="meta")
f, in_all, in_blocks = 3 / 4, padded_bytes(whole_small, 4), sum(padded_bytes(block, 4) for block in whole_small.layers)
ddp = 2 * f * sum(4 * weight.numel() for weight in whole_small.parameters())
times_ddp = {}
for name, dtype, share, count in (("fp32", None, 1, 1), ("gathered in bf16", torch.bfloat16, 0.5, 1), ("fp32, 4 micro-batches", None, 1, 4)):
    trace = run_ranks(sent_by_fsdp, 4, dtype, count, trace=True).trace
    gathered, reduced = trace.ring_bytes("all_gather", rank=0), trace.ring_bytes("reduce_scatter", rank=0)
    formula = count * (share * f * (in_all + in_blocks) + f * in_all)
    times_ddp[name] = (gathered + reduced) / ddp
    print(f"{name:21}: {gathered + reduced:12,.0f} bytes, formula {formula:12,.0f}")
print(compared(bytes_guess, times_ddp))
predicted_bars(times_ddp, bytes_guess, "times the bytes of DDP")

# %% [markdown] id="bytes_after"
# In fp32 the ratio is a little less than 1.5, because the root is gathered once; it approaches 1.5 as the
# share of the blocks grows. Gathering in bf16 reduces it to about the bytes of DDP, and the optimiser still keeps fp32.
# With micro-batches your FSDP gathers and reduces for each of them, DDP once for all. ("Go further" has the cure.)
#
# **The same training.** One rank is the plain model. The cell compares it with three ranks, which have uneven
# shards, and with four: do they learn the same? They run in float64, so that only a mistake makes a difference,
# and once in mixed precision, with fp32 shards. (About 20 s.)

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
    losses = []
    for _ in range(steps):
        losses.append(one_backward(model, 0))
        optimizer.step()
        optimizer.zero_grad()
    return losses


curves = {f"{world} rank{'s' if world > 1 else ''}": run_ranks(train, world, STEPS, torch.float64)[0] for world in (1, 3, 4)}
curves["4 ranks, bf16, summed in fp32"] = run_ranks(train, 4, STEPS, torch.float32, torch.bfloat16, torch.float32)[0]
apart = max(abs(a - b) for name in ("3 ranks", "4 ranks") for a, b in zip(curves[name], curves["1 rank"]))
print(f"largest difference of a loss to that of one rank, float64: {apart:.1e}")
figures.losses(curves)

# %% [markdown] id="scale_text"
# ## At scale
#
# The next cell runs one step at true size, on fake tensors, with the library's FSDP, for one rank of up
# to 512. The circles are $16\Psi/N$: weights, optimiser state and the rows of the gradients that a rank owns. FSDP does not
# divide what is above them. (About 25 s.)
#
# **Predict:** how many GiB does a rank of 8, of 64 and of 512 hold at the peak? Llama 3.2 3B has 3.2 billion parameters, of
# which 0.39 billion are the embedding; a rank computes one sequence of 2048 tokens with activation checkpointing.

# %% id="predict_scale" tags=["prediction"]
# GiB on one rank, at the peak of a step
peak_guess = {"8 ranks": None, "64 ranks": None, "512 ranks": None}

# %% id="show_scale" tags=["demo", "nbval-check-output"]
from dlo_lib.profiling import measure_memory

require_numbers(peak_guess)
shapes = [weight.shape for weight in whole_model.parameters()]
numbers = sum(shape.numel() for shape in shapes)
sizes = [world for world in (8, 64, 512) if world <= LARGEST]
fsdp = {"checkpointing": True, "parallel": "fsdp"}
reports = {world: measure_memory(MODEL, 1, SEQ, **fsdp, world_size=world) for world in sizes}
peaks = {f"{world} ranks": report.peak_bytes / 2**30 for world, report in reports.items()}
guesses = {name: guess for name, guess in peak_guess.items() if name in peaks}
print(compared(guesses, peaks, "{:.1f} GiB".format))
figures.true_size({world: report.at_peak for world, report in reports.items()}, numbers, guesses)

# %% [markdown] id="scale_lesson"
# One rank alone would need more than 48 GiB ($16\Psi$; it is not in the figure). Eight ranks save most of it; from 64 to 512 ranks there is
# little left to save. The rest is not divided by the number of ranks: the units that are whole, and their
# whole gradients during backward. (The tied embedding is by far the largest.) More ranks then give speed, not
# memory. (Activation checkpointing is already on. Lab 16 continues with prefetch, `reshard_after_forward`,
# hybrid sharding, `torch.compile`.)
#
# In `dlo_lib.train`, FSDP is one option. On a cluster, training is a job: `cluster.submit` with `dry_run`
# returns the script for SLURM. Without SLURM the same call, with the *same options*, runs on this machine,
# here with two processes and a small model.

# %% id="run_at_scale" tags=["demo"]
from dlo_lib import cluster
from dlo_lib.labkit import at_scale

flags = ["--parallel", "fsdp", "--batch", "2", "--accumulation", "2", "--clip", "1.0"]
large = ["--model", MODEL, "--seq", str(SEQ), "--precision", "bf16", "--steps", "100"]
little = ["--model", "tiny", "--seq", "32", "--steps", f"{4 * STEPS}", "--log-every", f"{STEPS}"]
where = {"gpus": 8, "site": "jean-zay-a100", "account": "abc"}
script = cluster.submit("dlo_lib.train", [*large, *flags], **where, dry_run=True)
print("For SLURM, on 8 GPUs:", at_scale.directives(script), sep="\n")
job = cluster.submit("dlo_lib.train", [*little, *flags], gpus=GPUS).wait()
print(at_scale.steps(job))

# %% [markdown] id="flat_text"
# ## Optional exercises
#
# Nothing later needs these four. Choose, or continue with the section on `fully_shard`.
#
# ## 9 · One flat buffer
#
# **Optional · 14 min · ●○○**
#
# The first FSDP made one long vector of a unit: flatten every parameter, concatenate them, append
# zeros until N divides the length, cut into N equal pieces.
#
# - `flat_shard(tensors, rank, world)`: a **copy** of this rank's piece, one-dimensional.
# - `flat_whole(shard, shapes)`: the list of whole tensors of these shapes, from the pieces of all ranks, with **one** all-gather.

# %% nbgrader={"grade_id": "flat", "solution": true}
def flat_shard(tensors: list[torch.Tensor], rank: int, world: int) -> torch.Tensor:
    """Return a copy of this rank's piece of all tensors together: (ceil(numbers / world),).

    The last piece is padded with zeros at the end.
    """
    ### BEGIN SOLUTION
    flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
    size = -(-flat.numel() // world)
    return F.pad(flat, (0, size * world - flat.numel()))[rank * size : (rank + 1) * size].clone()
    ### END SOLUTION


def flat_whole(shard: torch.Tensor, shapes: list[tuple[int, ...]]) -> list[torch.Tensor]:
    """Return the whole tensors, from the pieces of all ranks."""
    ### BEGIN SOLUTION
    flat = shard.new_empty(shard.numel() * dist.get_world_size())
    dist.all_gather_into_tensor(flat, shard)
    sizes = [math.prod(shape) for shape in shapes]
    return [part.view(shape) for part, shape in zip(flat[: sum(sizes)].split(sizes), shapes)]
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_flat", "grade": true}
lab.check("flat")

# %% [markdown] id="padding_text"
# ## 10 · The cost of padding
#
# **Optional · 8 min · ●●○**
#
# The flat buffer is simple and needs almost no padding; with rows, every part is padded to c rows. What does
# that cost? Write `padding(shapes, world)`: the numbers of padding that all ranks hold together, first with one
# flat buffer, then with padded rows. A tensor without dimensions, shape `()`, is one row of one number.

# %% nbgrader={"grade_id": "padding", "solution": true}
def padding(shapes: list[tuple[int, ...]], world: int) -> tuple[int, int]:
    """Return the numbers of padding: (in one flat buffer, with each parameter's rows padded)."""
    ### BEGIN SOLUTION
    flat = -sum(math.prod(shape) for shape in shapes) % world
    return flat, sum((-math.prod(shape[:1]) % world) * math.prod(shape[1:]) for shape in shapes)
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_padding", "grade": true}
lab.check("padding")

# %% id="show_padding" tags=["demo"]
worlds = [2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1000, 1024]
percent = [[100 * count / numbers for count in padding(shapes, world)] for world in worlds]
figures.padding(worlds, percent)

# %% [markdown] id="padding_lesson"
# For powers of two, the rows of this model divide evenly, and up to some hundreds of ranks padding is
# negligible. The peak on the right is different: a matrix of 1024 rows on 1000 ranks has two rows on each of
# 512 ranks, and the other 488 hold only padding. If the number of ranks divides the model's sizes, whole rows
# cost nothing.

# %% [markdown] id="state_text"
# ## 11 · The state dict
#
# **Optional · 12 min · ●●○**
#
# A rank's shards are not a checkpoint, because another number of ranks cannot read them.
# `full_state(model, units)` returns, on every rank, the state of the model without sharding: a dict from
# **every name** (tied parameters under each of their names) to the whole tensor, and the persistent buffers. A
# buffer registered with `persistent=False` does not belong to it: as in `model.state_dict()`, the model computes
# it again.
#
# There are two rules. **One unit at a time**: besides the result, hold the packed rows of at most one unit. (The check
# gives memory for the result and four packed units, because copies and messages need some too.)
# **In the dtype of the row**: with mixed precision the whole parameters are rounded to bf16, and a checkpoint
# of them loses small updates.

# %% nbgrader={"grade_id": "state", "solution": true}
def full_state(model: nn.Module, units: list[Unit]) -> dict[str, torch.Tensor]:
    """Return all parameters and persistent buffers by name, whole, as without sharding."""
    ### BEGIN SOLUTION
    persistent = model.state_dict().keys()
    state = {name: buffer.clone() for name, buffer in model.named_buffers() if name in persistent}
    for unit in units:
        row = unit.row.detach()
        packed = row.new_empty(dist.get_world_size(), row.numel())
        dist.all_gather_into_tensor(packed.view(-1), row)
        for names, value in zip(unit.names, unpack(packed, unit.shapes)):
            state.update(dict.fromkeys(names, value.clone()))
    return state
    ### END SOLUTION


# %% nbgrader={"grade_id": "test_state", "grade": true}
lab.check("state")

# %% [markdown] id="train_text"
# ## 12 · A training step
#
# **Optional · 20 min · ●●●**
#
# This question uses all your functions. `train_step(model, units, optimizer, micro_batches)` runs one
# step on this rank's list of pairs (tokens, targets), and returns the loss as a `float`, the same on all
# ranks. Targets of -100 do not count, and **ranks and micro-batches differ in how many count**. The reference
# is one process with the samples of all ranks in one batch, so the loss is the mean over *all* targets that
# count:
#
# $$\mathrm{loss} = \frac{N \cdot (\text{sum over this rank's targets})}{\text{number of targets that count, over all ranks and micro-batches}}$$
#
# The factor N compensates for the average over ranks in `reduce_gradients`; the divisor takes one small
# all-reduce. Compute the loss of a micro-batch in at least fp32 (`logits.float()`, but keep float64). After
# the step, all gradients are `None`. With mixed precision the optimiser updates the shards in their dtype, so small
# updates are kept.

# %% nbgrader={"grade_id": "train", "solution": true}
def train_step(
    model: nn.Module, units: list[Unit], optimizer: torch.optim.Optimizer, micro_batches: list
) -> float:
    """Run one step of the sharded model; return the mean loss over the targets of all ranks."""
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


# %% nbgrader={"grade_id": "test_train", "grade": true}
lab.check("train")

# %% [markdown] id="standard_text"
# ## The same with what you will use on Monday
#
# PyTorch's `fully_shard` does all of this for one module and its parameters. Call it for each block, then for the
# model. The dict says on which devices the ranks compute: here on the CPU. It passes the checks of exercises 8
# (and 12); `local` shows its shards under the names that the checks read.

# %% id="check_standard" tags=["demo", "read"]
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


def with_fully_shard(model, kind, compute_dtype=None, reduce_dtype=None):
    options = {
        "mesh": init_device_mesh("cpu", (dist.get_world_size(),)),
        "mp_policy": MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=reduce_dtype),
    }
    for module in model.modules():
        if isinstance(module, kind):
            fully_shard(module, **options)
    fully_shard(model, **options)


class Local:
    """The part of a parameter that this rank has, as the checks read it."""

    of_the_library = True

    def __init__(self, names, parameter):
        self.names, self.shards = [names], [self]
        self.parameter, self.requires_grad = parameter, parameter.requires_grad

    def detach(self):
        return self.parameter.detach().to_local()

    @property
    def grad(self):
        return None if self.parameter.grad is None else self.parameter.grad.to_local()


def standard(model, kind, compute_dtype=None, reduce_dtype=None):
    with_fully_shard(model, kind, compute_dtype, reduce_dtype)
    return [Local([name], parameter) for name, parameter in model.named_parameters()]


lab.check("end", instead={"shard_model": standard})

# %% [markdown] id="standard_table_text"
# The table compares both with DDP, for a step of the small Llama on 2 ranks: the shortest forward and backward of
# several, the most memory that the tensors of a rank take in one of them (weights, gradients and activations, no
# optimiser), and the bytes that it sends with ring algorithms.
#
# **Predict:** which share of DDP's memory do both FSDP need, and how many times its bytes do they send?

# %% id="predict_standard" tags=["prediction"]
ratios_guess = {  # DDP is 1
    "yours, memory": None,
    "torch, memory": None,
    "yours, bytes": None,
    "torch, bytes": None,
}

# %% id="show_standard" tags=["demo", "read"]
from torch.nn.parallel import DistributedDataParallel as DDP

from dlo_lib.labkit.measured_step import peak_of_a_step, sent_in_last_step
from dlo_lib.labkit.side_by_side import Form, lines_of, table

require_numbers(ratios_guess)


def step_of(form: str):
    """A model in this form, as a function that runs its forward and backward."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Llama(SMALL)
    model = DDP(model) if form == "DDP" else model
    if form == "yours":
        shard_model(model, Block)
    elif form == "fully_shard":
        with_fully_shard(model, Block)

    def step():
        model.zero_grad()
        one_backward(model, 0)

    return step


def least_seconds(form: str, repeats: int) -> float:
    """The shortest step after the first."""
    step, times = step_of(form), []
    for _ in range(1 + repeats):
        dist.barrier()
        began = time.perf_counter()
        step()
        times.append(time.perf_counter() - began)
    return min(times[1:])


def peak_memory(form: str) -> int:
    """The most bytes of tensors in a step."""
    return peak_of_a_step(lambda: step_of(form))


yours = (own_rows, unshard, reshard, reduce_gradients, unit_of)
yours += (before_forward, after_forward, watch_output, watch_input, queue_end)
given = (shard_views, pack, unpack, put, make_unit, cut_into_units)
given += (add_hooks, end_of_backward, needs_gradient, cast, shard_model)
lines = {"DDP": 1, "yours": lines_of(*yours, *given), "fully_shard": lines_of(with_fully_shard)}
forms = []
for name, count in lines.items():
    run = run_ranks(least_seconds, 2, name, REPEATS, trace=True)
    sent, peak = sent_in_last_step(run.trace), max(run_ranks(peak_memory, 2, name))
    forms.append(Form(name, count, max(run), sent, peak))
print(table(forms, measured="forward and backward"))
ddp, own, standard_form = forms
ratios = {
    f"{name}, {what}": getattr(form, where) / getattr(ddp, where)
    for what, where in (("memory", "memory"), ("bytes", "nbytes"))
    for name, form in (("yours", own), ("torch", standard_form))
}
predicted_bars(ratios, ratios_guess, "times that of DDP")

# %% [markdown] id="standard_lesson"
# The bytes of the two FSDP are equal up to padding. (Those of all forms include the loss, which `one_backward` averages.)
# Both need more than half of DDP's memory, because a whole unit, its whole gradients and the activations are not divided.
#
# `fully_shard` gathers the next block while this one computes and reduces in the background; with two ranks on
# this machine the difference is small or can be reversed, because ranks and communication share the cores. On
# GPUs it is the point, and lab 16 adds it to yours. (The times of this table have not been measured on GPUs yet.) In a job nothing
# else changes:
#
# ```python
# for block in model.layers:
#     fully_shard(block, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
# fully_shard(model)
# optimizer = torch.optim.AdamW(model.parameters())     # after fully_shard: the parameters are shards now
# ```

# %% [markdown] id="quiz_text"
# ## Quiz
#
# **Core · 6 min · ●○○**
#
# Answer with the letter, for example `{"q1": "a", ...}`. The check here tests only that every question has an
# answer; grading counts the right ones.

# %% id="show_quiz" tags=["demo"]
lab.quiz()

# %% nbgrader={"grade_id": "quiz", "solution": true}
### BEGIN SOLUTION: quiz = {"q1": "", "q2": "", "q3": "", "q4": "", "q5": "", "q6": ""}
quiz = {"q1": "b", "q2": "d", "q3": "a", "q4": "c", "q5": "b", "q6": "a"}
### END SOLUTION

# %% nbgrader={"grade_id": "test_quiz", "grade": true}
lab.check("quiz")

# %% [markdown] id="further"
# ## Go further
#
# - In your timeline the rank waits at every gather. Gather the next block *while* this one computes
#   (`async_op=True`). How many units are whole then? (Lab 16.)
# - The last block is freed after forward and gathered again immediately. Avoid this. What does it save for
#   Llama 3.2 3B?
# - With gradient accumulation your FSDP reduces after each micro-batch. Write `no_sync`: what does it cost in memory, what does it save in bytes?
# - Every rank builds the whole model and then frees most of it. Begin on the `meta` device instead.
#   (`dlo_lib/parallel/fsdp/deferred_init.py`.)
# - Write `load_full_state`, and continue a training of 4 ranks on 3 ranks.
# - Read `dlo_lib/parallel/fsdp/fsdp.py` and `param_group.py`: where do they differ from yours, and why?
#
# ## References
#
# - Y. Zhao et al., *PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel* (2023), [arXiv:2304.11277](https://arxiv.org/abs/2304.11277)
# - S. Rajbhandari et al., *ZeRO: Memory Optimizations Toward Training Trillion Parameter Models* (2020), [arXiv:1910.02054](https://arxiv.org/abs/1910.02054)
# - PyTorch documentation, [`torch.distributed.fsdp.fully_shard`](https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html)
# - The course this lab follows: IDRIS, *Deep Learning Optimisé – Jean Zay* (DLO-JZ), day 4
