"""The visible checks that run on ranks: the step, checkpoints, the optimiser on the host, hybrid sharding."""

# ruff: noqa: F821 - the process that runs scenarios defines mark

from __future__ import annotations

from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from dlo_lib.grading.checks.contract import Kind, Run, Wrong, check, scenario
from dlo_lib.labkit import tr
from dlo_lib.labkit.compare import explained, near, same
from dlo_lib.labkit.memory import MIB, holds_at_most
from dlo_lib.labkit.traffic import uses_what_arrives

from .twins import Table, ahead_of_time, deep_stack, fp32_steps, trained_alone, without_checkpoints

# -- the code that calls the student's functions


@scenario
def gathered(student, rank, world, weights, meet, late, twice, forgotten):
    """Gather a unit; return its weights, whether it is whole, and whether its buffer is gone.

    meet: the ranks meet between start and wait; late: this rank starts only after the meeting; twice: start
    and wait again; forgotten: nothing is started. A freed weight is not returned, because it has no memory to
    read.
    """

    class Part(torch.nn.Module):
        def __init__(self):
            super().__init__()
            for i, weight in enumerate(weights):
                self.register_parameter(f"w{i}", torch.nn.Parameter(weight.clone()))

    meeting = dist.new_group(list(range(world)))
    _, (unit,) = student.make_units(torch.nn.Sequential(Part()), Part)
    for _ in range(2 if twice else 1):
        for _ in range(2 if twice else 1):
            if not late and not forgotten:
                student.start_gather(unit)
        if meet:
            dist.all_reduce(torch.zeros(1), group=meeting)
        if late:
            student.start_gather(unit)
        student.wait_gather(unit)
    weights = [whole.detach().clone() for whole in unit.wholes if whole.untyped_storage().nbytes() > 0]
    return {"weights": weights, "whole": unit.is_whole, "message": unit.message is None}


class Begin(torch.autograd.Function):
    """Return x; the ranks meet in its forward, which is counted."""

    @staticmethod
    def forward(ctx, x, milestones):
        dist.all_reduce(torch.zeros(1), group=milestones)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class End(torch.autograd.Function):
    """Return x; the ranks meet in its backward, where the weights must be whole."""

    @staticmethod
    def forward(ctx, x, weight, milestones):
        ctx.weight, ctx.milestones = weight, milestones
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if ctx.weight[0].untyped_storage().nbytes() == 0:
            raise RuntimeError(
                "a block begins its backward, but its weights are not gathered, or already freed"
            )
        dist.all_reduce(torch.zeros(1), group=ctx.milestones)
        return grad, None, None


class Layer(torch.nn.Module):
    def __init__(self, weight, milestones):
        super().__init__()
        self.shape, self.milestones = weight.shape, milestones
        self.weight = torch.nn.Parameter(weight.clone())

    def forward(self, x):
        if self.weight.shape != self.shape or self.weight.untyped_storage().nbytes() == 0:
            raise RuntimeError(
                "a block begins its forward, but its weights are not gathered, or already freed"
            )
        y = torch.tanh(Begin.apply(x, self.milestones) @ self.weight)
        return End.apply(y, [self.weight], self.milestones)


def messages_by_hand(table, weights, rank, world, milestones):
    """Send the messages of a rank in the order of the table, and meet where it computes."""
    rows = []
    for weight in weights:
        part = torch.nn.functional.pad(weight, (0, 0, 0, -weight.shape[0] % world)).flatten()
        rows.append(part.view(world, -1)[rank].clone())
    for kind, k in table:
        if kind == "gather":
            dist.all_gather_into_tensor(rows[k].new_empty(world * rows[k].numel()), rows[k])
        elif kind == "reduce":
            dist.reduce_scatter_tensor(torch.empty_like(rows[k]), rows[k].new_zeros(world * rows[k].numel()))
        elif kind != "free":
            dist.all_reduce(torch.zeros(1), group=milestones)


@scenario
def trained(student, rank, world, weights, x, grad, reshard, steps, table):
    """Train blocks tanh(x W), sharded by the student; each computation all-reduces one number in a separate
    group. A rank with a table runs its messages by hand, without the student's hooks."""
    milestones = dist.new_group(list(range(world)))
    model = torch.nn.Sequential(*(Layer(weight, milestones) for weight in weights))
    student.shard_fast(model, Layer, reshard)
    if table is not None:
        messages_by_hand(table, weights, rank, world, milestones)
        return []
    outputs = []
    for _ in range(steps):
        y = model(x)
        y.backward(grad)
        outputs.append(y.detach())
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter -= 0.1 * parameter.grad
                parameter.grad = None
    return outputs


@scenario
def checkpointed(student, rank, world, weights, x, grad, seed, drop, refused):
    """Run blocks tanh(dropout(x W) Wᵀ), each in a checkpoint; each computation meets the other ranks, which
    counts it. refused: names of PyTorch."""
    from dlo_lib.grading.checks.own_work import refuse

    refuse(*refused)
    parameters = [torch.nn.Parameter(weight.clone()) for weight in weights]
    x = x.clone().requires_grad_()

    def block(parameter):
        def compute(x):
            if world > 1:
                dist.barrier()
            return torch.tanh(torch.nn.functional.dropout(x @ parameter, drop) @ parameter.T)

        return compute

    torch.manual_seed(seed)
    y = x
    for parameter in parameters:
        y = student.Checkpoint.apply(block(parameter), y)
    between = torch.rand(3)
    y.backward(grad)
    return {
        "output": y.detach(),
        "x": x.grad,
        "weights": [parameter.grad for parameter in parameters],
        "random": torch.cat([between, torch.rand(3)]),
    }


@scenario
def deep_forward(student, rank, world, seed, blocks, rows, width, depth, refused):
    """Mark the memory after the forward of blocks with many layers and few weights."""
    from dlo_lib.grading.checks.own_work import refuse

    refuse(*refused)
    random = torch.Generator().manual_seed(seed)
    weight = torch.nn.Parameter(torch.randn(width, width, generator=random) / width**0.5)
    x = torch.randn(rows, width, generator=random).requires_grad_()

    def compute(x):
        for _ in range(depth):
            x = torch.tanh(x @ weight)
        return x

    y = x
    for _ in range(blocks):
        y = student.Checkpoint.apply(compute, y)
    mark("after forward")
    y.sum().backward()
    return {"output": y.detach()[:, 0].clone(), "x": None if x.grad is None else x.grad[:, 0].clone()}


@scenario
def offloaded(student, rank, world, weights, steps, dtype, lr, damage):
    """Return the parameters after steps, each a list of gradients or None, the memory that they had before,
    and whether a gradient stayed.

    damage: numbers that are added to the parameters before each step, or None. The next step replaces them by
    the masters, unless a master has the memory of its parameter.
    """
    kind = getattr(torch, dtype)
    parameters = [torch.nn.Parameter(weight.to(kind)) for weight in weights]
    memory = [parameter.data.view(-1) for parameter in parameters]

    def make_optimizer(held):
        held = list(held)
        kinds = [str(master.dtype).removeprefix("torch.") for master in held if master.dtype != torch.float32]
        if kinds:
            raise TypeError(f"make_optimizer gets a master that is {kinds[0]}, not float32")
        return torch.optim.AdamW(held, lr=lr, weight_decay=0.1)

    optimizer, stayed = student.HostOptimizer(parameters, make_optimizer), False
    for grads in steps:
        for i, (parameter, grad) in enumerate(zip(parameters, grads)):
            parameter.grad = None if grad is None else grad.to(kind)
            if damage is not None:
                parameter.data += damage[i]
        optimizer.step()
        stayed = stayed or any(parameter.grad is not None for parameter in parameters)
    return {"weights": [parameter.detach() for parameter in parameters], "memory": memory, "stayed": stayed}


@scenario
def hybrid(student, rank, world, gradient, rows, columns):
    """Return the piece of this rank, and the gradient afterwards."""
    row = [dist.new_group(ranks) for ranks in rows][[rank in ranks for ranks in rows].index(True)]
    column = [dist.new_group(ranks) for ranks in columns][[rank in ranks for ranks in columns].index(True)]
    piece = student.hybrid_mean(gradient, row, column)
    return {"piece": piece, "gradient": gradient}


DEADLOCK = "DEADLOCK"  # begins the explanation of ranks that wait for each other

# -- 4 · gather


def gather_case(t, world: int, **chosen: bool) -> list[dict]:
    """Draw the parameters of a unit; their rows need not divide by the number of ranks."""
    options = {"meet": False, "late": False, "twice": False, "forgotten": False, **chosen}
    shapes = (t.integer(2, 7), t.integer(2, 5)), (t.integer(1, 9),)
    weights = [t.normal(*shape, dtype=torch.float64) for shape in shapes]
    return [{"weights": weights, **options} for _ in range(world)]


def right_weights(t, run: Run, case: list[dict]) -> None:
    """Check that the unit is whole on every rank, with the right weights."""
    for rank, got in enumerate(run.results):
        where = {"rank": rank, "world": run.world}
        whole = got["whole"] is True and len(got["weights"]) == len(case[0]["weights"])
        if case[0]["forgotten"]:
            message = (
                "wait_gather without start_gather leaves the unit freed on rank {rank} of {world}: it "
                "starts the gather if none is in transit"
            )
            t.that(whole, message, **where)
        message = "after wait_gather the unit is not whole on rank {rank} of {world}: call fill(unit, buffer)"
        t.that(whole, message, **where)
        right = all(near(mine, want) for mine, want in zip(got["weights"], case[0]["weights"]))
        message = "rank {rank} fills the unit before its message has arrived."
        t.that(right or not run.forgotten_wait(), message, rank=rank)
        for mine, want in zip(got["weights"], case[0]["weights"]):
            t.close(mine, want, "a weight on rank {rank} of {world}", **where)


def same_weights_gathered(student, t, worlds: tuple[int, ...], **chosen: bool) -> Run:
    """Gather on all numbers of ranks; return the last run."""
    for world in worlds:
        case = gather_case(t, world, **chosen)
        run = student.ranks(gathered, case)
        right_weights(t, run, case)
    return run


@check("gather", points=2, seconds=30)
def check_whole(student, t):
    "After wait_gather the weights are those of all ranks, also if start_gather was forgotten"
    run = same_weights_gathered(student, t, (1, 2))
    uses_what_arrives(t, run, Kind.ALL_GATHER, t.integer(0, 1))
    same_weights_gathered(student, t, (2,), forgotten=True)


@check("gather", points=1, seconds=30)
def check_once(student, t):
    "A unit that is whole or in transit is not gathered again"
    case = gather_case(t, 2, twice=True)
    run = student.ranks(gathered, case)
    right_weights(t, run, case)
    message = (
        "rank {rank} ran {count} all-gathers for one unit: start_gather does nothing if unit.is_whole, or if "
        "unit.message is not None"
    )
    one_gather(t, run, message)


def one_gather(t, run: Run, message: str) -> None:
    """Check that each rank gathers once."""
    for rank in range(run.world):
        count = len(run.calls(rank, Kind.ALL_GATHER))
        t.that(count == 1, message, rank=rank, count=count)


@check("gather", points=1, seconds=30)
def check_buffer_freed(student, t):
    "After wait_gather the buffer is not kept"
    case = gather_case(t, 2)
    run = student.ranks(gathered, case)
    message = "after wait_gather unit.message still holds the buffer: set it to None, which frees its memory"
    t.that(all(got["message"] is True for got in run.results), message)
    right_weights(t, run, case)


@check("gather", points=2, seconds=30)
def check_start_does_not_wait(student, t):
    "start_gather starts the message, and does not wait"
    case = gather_case(t, 2)
    first = student.ranks(gathered, case)
    message = "rank {rank} ran {count} all-gathers for one unit: wait_gather starts one if none is in transit"
    one_gather(t, first, message)
    right_weights(t, first, case)
    case = gather_case(t, 2, meet=True)
    case[1]["late"] = True  # rank 1 starts the gather only after it has met rank 0
    try:
        run = student.ranks(gathered, case)
    except Wrong as stuck:
        if DEADLOCK not in str(stuck):
            raise
        said = tr(
            "start_gather waits for its message: use async_op=True, keep the handle in unit.message, and "
            "wait in wait_gather."
        )
        raise Wrong(said, said) from stuck
    right_weights(t, run, case)
    kinds = [call.kind for call in run.calls(0) if call.kind in (Kind.ALL_GATHER, Kind.ALL_REDUCE)]
    message = (
        "start_gather starts no message: rank 0 calls the all-gather only in wait_gather, so nothing is in "
        "transit while a unit computes"
    )
    t.that(kinds == [Kind.ALL_GATHER, Kind.ALL_REDUCE], message)


# -- 5 · prefetch


def training_case(t, world: int, blocks: int, reshard: bool, steps: int = 2) -> list[dict]:
    """Draw blocks tanh(x W) of different sizes."""
    widths = sorted(t.shuffled(range(3, 12))[: blocks + 1])  # the messages of blocks have different sizes
    weights = [t.normal(a, b, dtype=torch.float64) for a, b in pairwise(widths)]
    common = {"weights": weights, "reshard": reshard, "steps": steps, "table": None}
    xs, grads = (
        [t.normal(4, width, dtype=torch.float64) for _ in range(world)] for width in widths[::blocks]
    )
    return [{"x": x, "grad": grad, **common} for x, grad in zip(xs, grads)]


SUMMED = "the output of step {step} is that of gradients that are summed over the ranks, not averaged"
STOPPED = "the output of step {step} is that of step 1: the weights are the same, so no gradient has arrived"


def same_training(student, t, case: list[dict]) -> Run:
    """Train on all ranks; compare the outputs of each step with one process."""
    run, world = student.ranks(trained, case), len(case)
    inputs, grads = ([own[name] for own in case] for name in ("x", "grad"))
    want = trained_alone(case[0]["weights"], inputs, grads, case[0]["steps"])
    summed = trained_alone(case[0]["weights"], inputs, [grad * world for grad in grads], case[0]["steps"])
    for rank, got in enumerate(run.results):
        got = t.items(got, case[0]["steps"], "the outputs on rank {rank}", rank=rank)
        for step, output in enumerate(got):
            where = {"rank": rank, "world": world, "step": step + 1}
            right = near(output, want[step][rank], atol=1e-9)
            if step > 0 and not right:
                message, k = stale_block(actions_of(run, rank, case), len(case[0]["weights"]), step)
                t.that(not message, message, k=k, **where)
            forgotten = run.forgotten_wait()
            message = "step {step} is wrong on rank {rank} of {world}: a message is not waited for."
            if "reduce_scatter" in forgotten:
                message = (
                    "step {step} is wrong on rank {rank} of {world}: a reduction is not waited for; "
                    "end_of_backward calls wait_reduce for each block."
                )
            t.that(right or not forgotten, message, **where)
            known = {SUMMED: summed[step][rank], STOPPED: want[0][rank]} if step > 0 else {}
            what = "the output of step {step} on rank {rank} of {world}"
            same(t, output, want[step][rank], what, known, atol=1e-9, **where)
    return run


def stale_block(table: Table, blocks: int, step: int) -> tuple[str, int]:
    """Return a message on a block that step ``step`` (counted from 0) computes with the weights of an earlier
    step; "" if there is none."""
    computed = [place for place, (kind, _) in enumerate(table) if kind in ("forward", "backward")]
    if len(computed) < 2 * blocks * (step + 1):
        return "", -1
    ended = computed[2 * blocks * step - 1]  # the last backward of the step before
    for k in range(blocks):
        forward = computed[2 * blocks * step + k]
        if ("gather", k) in table[ended:forward]:
            continue
        backward = computed[2 * blocks * step - 1 - k]
        if ("gather", k) in table[backward:ended]:
            message = (
                "block {k} is gathered after its backward, so the next step computes with the weights of "
                "this one: at k = 0 no block precedes"
            )
            return message, k
        message = (
            "step {step} does not gather block {k}: it is still whole, with the weights of the step before, "
            "so after_backward does not free it"
        )
        return message, k
    return "", -1


@check("prefetch", points=3, seconds=40)
def check_same_training(student, t):
    "Two steps of training give what one process gives"
    for world, reshard in ((1, True), (2, True), (2, False)):
        run = same_training(student, t, training_case(t, world, t.integer(2, 4), reshard))
    uses_what_arrives(t, run, Kind.ALL_GATHER, t.integer(0, 1), call=0)


def actions_of(run: Run, rank: int, case: list[dict]) -> Table:
    """Return what a rank did, as a table without ``free``. A milestone is a forward or a backward; a message
    is known by its size."""
    blocks = len(case[0]["weights"])
    world = len(case)
    sizes = [8 * world * -(-weight.shape[0] // world) * weight.shape[1] for weight in case[0]["weights"]]
    step = [("forward", k) for k in range(blocks)] + [("backward", k) for k in reversed(range(blocks))]
    computed = iter(step * case[0]["steps"])
    table: Table = []
    for call in run.calls(rank):
        if call.kind is Kind.ALL_REDUCE:
            table.append(next(computed, ("more", -1)))
        elif call.kind in (Kind.ALL_GATHER, Kind.REDUCE_SCATTER):
            kind = "gather" if call.kind is Kind.ALL_GATHER else "reduce"
            table.append((kind, sizes.index(call.payload_bytes) if call.payload_bytes in sizes else -1))
    return table


def same_order(t, run: Run, case: list[dict], reshard: bool) -> None:
    """Check that every rank follows the plan; the message names the cause of the first difference."""
    blocks = len(case[0]["weights"])
    want = [action for action in ahead_of_time(blocks, reshard) if action[0] != "free"] * case[0]["steps"]
    for rank in range(run.world):
        got = actions_of(run, rank, case)
        message, values = first_difference(got, want, blocks, reshard)
        t.that(got == want, "rank {rank}: " + message, rank=rank, **values)


def first_difference(got: Table, want: Table, blocks: int, reshard: bool) -> tuple[str, dict[str, object]]:
    """Return a message on the first action that differs from the plan, and its values."""
    at = next((i for i, (a, b) in enumerate(zip(got, want)) if a != b), min(len(got), len(want)))
    (kind, k), (did, unit) = (table[at] if at < len(table) else ("nothing more", -1) for table in (want, got))
    computing = [action for action in want[at:] if action[0] in ("forward", "backward")]
    phase, now = computing[0] if computing else ("the end", 0)
    ahead = now + 1 if phase == "forward" else now - 1
    values = {"kind": kind, "k": k, "did": did, "unit": unit, "phase": phase, "now": now, "ahead": ahead}
    return cause_of_difference(got[at:], blocks, reshard, values), values


def cause_of_difference(rest: Table, blocks: int, reshard: bool, found: dict) -> str:
    """Return the cause of the first difference, which ``rest`` begins with; ``found``: names and numbers of
    what is expected there and what was found."""
    kind, k, did, unit, phase, now, ahead = found.values()
    backward = phase == "backward"
    if kind == "reduce":
        return "the reduction of block {k} should start right after its backward"
    if did == "gather":
        if backward and unit == blocks - 1 == now:
            return (
                "block {unit} is gathered again before its backward: after_forward must not free the last "
                "block, because backward begins with it"
            )
        if backward and now == 0 and unit == blocks - 1:
            return (
                "block {unit} is gathered before backward 0: at k = 0 no block precedes, and units[-1] is "
                "the last block"
            )
        if backward and not reshard:
            return (
                "block {unit} is gathered again for backward: with reshard_after_forward=False a block stays "
                "whole until its backward"
            )
        if unit not in (now, ahead):
            return (
                "block {unit} is gathered before {phase} {now}, which is too early: only block {ahead} is "
                "gathered ahead there"
            )
        return "block {unit} is gathered where the plan has {kind} {k}"
    if kind == "gather" and did in ("forward", "backward"):
        until = rest.index(("backward", k)) if ("backward", k) in rest else len(rest)
        if did == "backward" and ("gather", k) not in rest[:until]:
            return (
                "block {k} is not gathered again for backward: it is still whole, so after_forward does not "
                "free it"
            )
        return "{did} {unit} computes before the gather of block {k} starts, so the rank waits for it later"
    return "the plan has {kind} {k} here, the rank does {did} {unit}"


@check("prefetch", points=4, seconds=40)
def check_in_order(student, t):
    "The next block is gathered ahead, no block twice, and each reduction starts at once"
    case = training_case(t, 2, t.integer(3, 5), True)
    same_order(t, same_training(student, t, case), case, True)


@check("prefetch", points=1, seconds=40)
def check_kept(student, t):
    "With reshard_after_forward=False each block is gathered once, while the block before it computes"
    blocks = t.integer(3, 5)
    case = training_case(t, 2, blocks, False)
    run = same_training(student, t, case)
    message = (
        "rank {rank} ran {count} all-gathers in {steps} steps for {blocks} blocks: with "
        "reshard_after_forward=False a block stays whole until the end of its backward"
    )
    steps = case[0]["steps"]
    for rank in range(2):
        count = len(run.calls(rank, Kind.ALL_GATHER))
        t.that(count == blocks * steps, message, rank=rank, count=count, steps=steps, blocks=blocks)
    same_order(t, run, case, False)


def as_late_as_possible(table: Table) -> list[list]:
    """Return the same messages in the same order, each computation before every message that it does not
    need."""
    messages = [action for action in table if action[0] in ("gather", "reduce")]
    late: list[list] = []
    for place, (kind, k) in enumerate(table):
        if kind in ("gather", "reduce"):
            continue
        before = [action for action in table[:place] if action[0] in ("gather", "reduce")]
        needed = max((i + 1 for i, action in enumerate(before) if action == ("gather", k)), default=0)
        sent = sum(action[0] in ("gather", "reduce") for action in late)
        late += [list(action) for action in messages[sent : max(sent, needed)]] + [[kind, k]]
    sent = sum(action[0] in ("gather", "reduce") for action in late)
    return late + [list(action) for action in messages[sent:]]


@check("prefetch", points=2, seconds=40)
def check_messages_travel(student, t):
    "Only the block that computes is waited for"
    case = training_case(t, 2, t.integer(3, 4), True, steps=1)
    table = actions_of(same_training(student, t, case), 1, case)
    # Rank 1 sends the same messages, each after the computing that does not need it.
    case[1]["table"] = as_late_as_possible(table)
    want = trained_alone(case[0]["weights"], [own["x"] for own in case], [own["grad"] for own in case], 1)
    try:
        run = student.ranks(trained, case)
    except Wrong as stuck:
        if DEADLOCK not in str(stuck):
            raise
        said = tr(
            "A rank waits too early for a message: before block k computes, wait for block k only; "
            "a reduction is not waited for in the method that starts it."
        )
        raise Wrong(said, said) from stuck
    t.close(t.items(run.results[0], 1, "the outputs")[0], want[0][0], "the output on rank 0", atol=1e-9)


# -- 6 · checkpoint


CHECKPOINTS_OF_TORCH = [
    "torch.utils.checkpoint.checkpoint",
    "torch.utils.checkpoint.CheckpointFunction",
    "torch.utils.checkpoint._checkpoint_without_reentrant_generator",
]


def checkpoint_case(t, drop: float, blocks: int) -> dict:
    """Draw weights, input and gradient of a few blocks."""
    width = t.integer(3, 7)
    return {
        "weights": [t.normal(width, width + k, dtype=torch.float64) for k in range(blocks)],
        "x": t.normal(5, width, dtype=torch.float64),
        "grad": t.normal(5, width, dtype=torch.float64),
        "seed": t.integer(0, 9999),
        "drop": drop,
    }


def checkpoint_run(student, function, cases: list[dict]) -> Run:
    """Run a scenario; explain the error of autograd if the second computation has no graph."""
    refused = CHECKPOINTS_OF_TORCH if student.is_own("Checkpoint") else []
    try:
        return student.ranks(function, [{**case, "refused": refused} for case in cases])
    except Wrong as error:
        if "does not require grad and does not have a grad_fn" not in str(error):
            raise
        said = tr(
            "The second computation has no graph: autograd runs `backward` without recording, so use "
            "torch.enable_grad() there."
        )
        raise Wrong(said, said) from error


def gradient_of_x(t, got: object, want: Tensor, rtol: float = 1e-4, atol: float = 1e-10) -> None:
    """Compare the gradient of x."""
    message = (
        "x has no gradient: the detached x must require one, and backward returns it as its second value"
    )
    t.that(got is not None, message)
    t.close(got, want, "the gradient of x", rtol=rtol, atol=atol)


def same_inputs(student, t, case: dict, world: int = 1) -> tuple[Run, dict]:
    """Compare output and input gradient with those without checkpoints; return the run and the twin's
    results."""
    run, want = checkpoint_run(student, checkpointed, [case] * world), without_checkpoints(**case)
    for got in run.results:
        t.close(got["output"], want["output"], "the output", atol=1e-10)
        gradient_of_x(t, got["x"], want["x"])
    return run, want


@check("checkpoint", points=2, seconds=20)
def check_same_gradients(student, t):
    "Gradients are those without checkpoints"
    for blocks in (1, t.integer(2, 4)):
        run, want = same_inputs(student, t, checkpoint_case(t, 0.0, blocks))
        grads = t.items(run.results[0]["weights"], blocks, "the gradients")
        message = "the parameters that block {k} uses have no gradient: backward must compute theirs too"
        for k, mine in enumerate(grads):
            t.that(mine is not None, message, k=k)
        same(t, grads, want["weights"], "the gradient of the parameter that block {i} uses", atol=1e-10)


@check("checkpoint", points=2, seconds=20)
def check_dropout(student, t):
    "Backward repeats the dropout of forward"
    case = checkpoint_case(t, 0.5, t.integer(1, 3))
    (got,), want = checkpoint_run(student, checkpointed, [case]).results, without_checkpoints(**case)
    t.close(got["output"], want["output"], "the output with dropout", atol=1e-10)
    message = (
        "without dropout the gradient of x is right, with dropout it is wrong: "
        "the second computation must begin with the random state that forward began with"
    )
    right = near(got["x"], want["x"], atol=1e-10)
    if not right:  # another mistake, if the gradient is wrong without dropout too
        same_inputs(student, t, checkpoint_case(t, 0.0, 1))
    t.that(right, message)


@check("checkpoint", points=2, seconds=30)
def check_blocks_forgotten(student, t):
    "After forward only the inputs of the blocks are in memory"
    case = {"seed": t.integer(0, 999), "blocks": 4, "rows": 2048, "width": 128, "depth": 8}
    run, (output, of_x) = checkpoint_run(student, deep_forward, [case]), deep_stack(**case)
    t.close(run.results[0]["output"], output, "the output of four blocks", rtol=1e-3, atol=1e-4)
    gradient_of_x(t, run.results[0]["x"], of_x, rtol=1e-2, atol=1e-3)
    message = (
        "after forward the process holds {held:.0f} MiB: the five inputs and outputs of blocks have 5 MiB, "
        "all that autograd would keep 32"
    )
    holds_at_most(t, run, "after forward", 14 * MIB, message)


@check("checkpoint", points=1, seconds=20)
def check_random_state(student, t):
    "Backward does not change the state of the random generator"
    case = checkpoint_case(t, 0.5, t.integer(1, 3))  # dropout: each computation changes the state
    (got,), want = checkpoint_run(student, checkpointed, [case]).results, without_checkpoints(**case)
    t.close(got["output"], want["output"], "the output with dropout", atol=1e-10)
    has_run = type(got["x"]) is Tensor and bool(got["x"].abs().sum() > 0)
    t.that(has_run, "not tested yet: backward gives x no gradient, see the first check")
    message = "After backward the random generator does not have the state that it had before."
    t.that(bool(torch.equal(got["random"], want["random"])), message)


@check("checkpoint", points=1, seconds=30)
def check_computed_twice(student, t):
    "Each block is computed twice, no more"
    case = checkpoint_case(t, 0.0, 3)
    run, _ = same_inputs(student, t, case, world=2)
    for rank in range(2):
        count, blocks = len(run.calls(rank, Kind.BARRIER)), len(case["weights"])
        where = {"blocks": blocks, "count": count, "want": 2 * blocks}
        message = (
            "{blocks} blocks are computed {count} times, not {want}: backward computes no block a second "
            "time, so a graph was kept in forward"
        )
        t.that(count >= 2 * blocks, message, **where)
        message = "{blocks} blocks are computed {count} times, not {want}: each costs as much as a forward"
        t.that(count == 2 * blocks, message, **where)


# -- 9 · offload


def offload_case(t, dtype: str, steps: int, without: int | None = None) -> dict:
    """Draw weights around 1, and gradients whose steps are too small for bf16 weights.

    Every second step, from the second on, has no gradient of parameter ``without``.
    """
    weights = [1 + t.uniform(0.0, 0.5) * t.normal(t.integer(3, 6), t.integer(3, 6)).abs() for _ in range(3)]
    grads: list[list] = [[t.normal(*weight.shape).abs() + 0.1 for weight in weights] for _ in range(steps)]
    if without is not None:
        for step in grads[1::2]:
            step[without] = None
    return {"weights": weights, "steps": grads, "dtype": dtype, "lr": 1e-3}


NOT_FP32 = {"not float32": ("a master is not float32: small steps are lost in the dtype of the parameter")}


SHARED = (
    "a master shares the memory of its fp32 parameter on the CPU: what changes the parameter between two "
    "steps must not change the master, so it must be a copy (copy=True)"
)


def same_weights(student, t, case: dict, damage: list[Tensor] | None = None) -> dict:
    """Compare the parameters with those of the twin; return the results of the scenario.

    damage: numbers that are added to the parameters before each step.
    """
    (got,) = explained(student, offloaded, [{**case, "damage": damage}], NOT_FP32).results
    rtol = 2**-8 if case["dtype"] == "bfloat16" else 1e-5
    want, first = fp32_steps(**case), case["steps"][0]
    message = (
        "parameter {i} has not changed: steps smaller than its rounding are lost, unless masters keep them"
    )
    before = [weight.to(want[0].dtype) for weight in case["weights"]]
    what = "parameter {i} after {n} steps"
    for i, (mine, right) in enumerate(zip(t.items(got["weights"], 3, "the parameters"), want)):
        same_place = bool(
            torch.equal(t.tensor(mine, what, i=i, n=len(case["steps"]), dtype=right.dtype), before[i])
        )
        t.that(first[i] is None or not same_place, message, i=i)
    known = {}
    if damage is not None:
        decay = 1 - 0.1 * case["lr"]
        times = sum(decay ** (number + 1) for number in range(len(case["steps"])))
        known[SHARED] = [weight + times * each for weight, each in zip(want, damage)]
    same(t, got["weights"], want, what, known, rtol=rtol, atol=1e-6, n=len(case["steps"]))
    return got


@check("offload", points=2, seconds=20)
def check_masters(student, t):
    "Masters are fp32 copies, in which small steps add up"
    got = same_weights(student, t, offload_case(t, "bfloat16", 30))
    message = "parameters must be updated in place: the units of FSDP hold the same memory"
    t.that(near(got["memory"], [weight.flatten() for weight in got["weights"]], rtol=0, atol=0), message)
    case = offload_case(t, "float32", 2)
    same_weights(student, t, case, [0.1 + t.normal(*weight.shape).abs() / 10 for weight in case["weights"]])


@check("offload", points=1, seconds=20)
def check_gradients_gone(student, t):
    "No gradient stays on the device"
    got = same_weights(student, t, offload_case(t, "float32", 3))
    message = "after step a parameter still has its .grad: the device would hold it until the next step"
    t.that(got["stayed"] is False, message)


@check("offload", points=1, seconds=20)
def check_without_gradient(student, t):
    "A parameter without gradient does not change, also if it had one in the step before"
    same_weights(student, t, offload_case(t, "float32", 4, without=t.integer(0, 2)))


# -- 7 · hybrid


@check("hybrid", points=1)
def check_groups(student, t):
    "Shard groups are the rows of the grid, replica groups its columns"
    for nodes in (1, 2, t.integer(3, 4)):
        size = t.integer(2, 5)
        grid = torch.arange(nodes * size).view(nodes, size)
        got = student.hybrid_groups(nodes * size, size)
        rows, columns = t.items(got, 2, "hybrid_groups(world, shard_size)")
        where = {"world": nodes * size, "size": size}
        t.equal(rows, grid.tolist(), "the shard groups of hybrid_groups({world}, {size})", **where)
        t.equal(columns, grid.T.tolist(), "the replica groups of hybrid_groups({world}, {size})", **where)


def hybrid_case(t, nodes: int, size: int) -> list[dict]:
    """Draw a gradient for each rank, with the groups of all ranks."""
    grid, numel = torch.arange(nodes * size).view(nodes, size), size * t.integer(3, 9)
    groups = {"rows": grid.tolist(), "columns": grid.T.tolist()}
    return [{"gradient": t.normal(numel, dtype=torch.float64), **groups} for _ in range(nodes * size)]


def same_mean(student, t, nodes: int, size: int) -> tuple[Run, list[dict]]:
    """Check that every rank has its piece of the mean over all ranks."""
    case = hybrid_case(t, nodes, size)
    run = student.ranks(hybrid, case)
    grads = torch.stack([own["gradient"] for own in case]).view(nodes, size, size, -1)  # node, rank, piece
    for rank, got in enumerate(run.results):
        node, place = divmod(rank, size)
        want = grads[:, :, place].mean((0, 1))
        mistakes = {
            "rank {rank} has the sum over all ranks: divide by the number of all ranks": nodes * size * want,
            "rank {rank} has the mean over its row only: all-reduce the piece over the replicas": (
                grads[node, :, place].mean(0)
            ),
            "rank {rank} has divided by the ranks of its row only: divide by all ranks": nodes * want,
        }
        what = "the piece on rank {rank} of {nodes} nodes of {size}"
        same(t, got["piece"], want, what, mistakes, rank=rank, nodes=nodes, size=size, atol=1e-10)
    return run, case


@check("hybrid", points=2, seconds=60)
def check_hybrid_mean(student, t):
    "Every rank has its piece of the mean over all ranks"
    for nodes, size in ((2, 2), (1, 2), (2, 1), (3, 2), (2, 3)):
        same_mean(student, t, nodes, size)


@check("hybrid", points=2, seconds=30)
def check_hybrid_traffic(student, t):
    "The large message stays in the node; only the piece leaves it"
    run, case = same_mean(student, t, 2, 2)
    size = case[0]["gradient"].nbytes
    for rank in range(4):
        calls = [call for call in run.calls(rank) if call.kind is not Kind.NEW_GROUP]
        got = [(call.kind.value, call.payload_bytes, list(call.members)) for call in calls]
        row, column = [rank - rank % 2, rank - rank % 2 + 1], [rank % 2, rank % 2 + 2]
        want = [(Kind.REDUCE_SCATTER.value, size, row), (Kind.ALL_REDUCE.value, size // 2, column)]
        message = (
            "rank {rank} ran (call, bytes, members) {got} instead of a reduce-scatter in its row, then an "
            "all-reduce of the piece in its column: {want}"
        )
        t.that(got == want, message, rank=rank, got=got, want=want)
    uses_what_arrives(t, run, Kind.ALL_REDUCE, t.integer(0, 3))


@check("hybrid", points=1, seconds=20)
def check_gradient_stays(student, t):
    "The gradient is not changed"
    run, case = same_mean(student, t, 2, 2)
    for own, got in zip(case, run.results):
        unchanged = bool(torch.equal(t.tensor(got["gradient"], "gradient"), own["gradient"]))
        t.that(unchanged, "hybrid_mean must not change its argument `gradient`.")
