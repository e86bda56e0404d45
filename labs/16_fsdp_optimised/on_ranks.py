"""The visible checks of what runs on ranks: the step, checkpoints, the optimiser on the host, hybrid sharding."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from dlo_lib.grading.contract import Kind, Run, Wrong, check
from dlo_lib.text import tr

from .scenarios import carried_out, checkpointed, deep_forward, hybrid, offloaded
from .twins import Table, ahead_of_time, deep_stack, fp32_steps, just_in_time, stacked, without_checkpoints

MIB = 2**20

# -- 4 · execute


def stack_case(t, world: int, units: int) -> dict:
    """Weights of different sizes, and what each rank has of them."""
    widths = t.shuffled(range(3, 12))[: units + 1]
    weights = [t.normal(a, b, dtype=torch.float64) for a, b in pairwise(widths)]
    pieces = []
    for weight in weights:
        size = -(-weight.numel() // world)
        pieces.append(torch.nn.functional.pad(weight.flatten(), (0, size * world - weight.numel())).view(world, -1))
    inputs = [t.normal(4, widths[0], dtype=torch.float64) for _ in range(world)]
    grads = [t.normal(4, widths[-1], dtype=torch.float64) for _ in range(world)]
    return {"weights": weights, "pieces": pieces, "inputs": inputs, "grads": grads}


def same_step(student, t, case: dict, tables: list[Table]) -> Run:
    """``execute`` on all ranks, each with its table; outputs and gradients are those of one process."""
    world, weights = len(tables), case["weights"]
    own = [
        {
            "table": tables[rank],
            "shards": [piece[rank].clone() for piece in case["pieces"]],
            "shapes": [list(weight.shape) for weight in weights],
            "x": case["inputs"][rank],
            "grad": case["grads"][rank],
        }
        for rank in range(world)
    ]
    run = student.ranks(carried_out, own)
    outputs, means = stacked(weights, case["inputs"], case["grads"])
    for rank, got in enumerate(run.results):
        t.close(got["output"], outputs[rank], "the output on rank {rank} of {world}", rank=rank, world=world, atol=1e-9)
        t.items(got["grads"], len(weights), "the gradient pieces on rank {rank}", rank=rank)
    for k, mean in enumerate(means):
        size = case["pieces"][k].shape[1]
        pieces = [
            t.tensor(got["grads"][k], "gradient piece {k} on rank {rank}", k=k, rank=r, shape=(size,)) for r, got in enumerate(run.results)
        ]
        together = torch.cat(pieces)[: mean.numel()]
        summed = world > 1 and near(together, mean.flatten() * world)
        t.that(not summed, "the gradients of unit {k} are summed over the ranks, not averaged", k=k)
        t.close(together, mean.flatten(), "the gradient pieces of unit {k} of {world} ranks together", k=k, world=world, atol=1e-9)
    return run


def near(a: Tensor, b: Tensor) -> bool:
    """Equal but for rounding."""
    return a.shape == b.shape and bool(torch.allclose(a.double(), b.double(), rtol=1e-6, atol=1e-9))


@check("execute", points=3, seconds=40)
def check_same_step(student, t):
    "Outputs and averaged gradients are those of one process"
    for world in (1, 2, 3):
        units = t.integer(2, 5)
        same_step(student, t, stack_case(t, world, units), [ahead_of_time(units)] * world)


def on_the_wire(table: Table, sizes: list[int]) -> list[tuple[Kind, int]]:
    """What passes when a table is carried out in its order: kinds and bytes."""
    what = {"gather": Kind.ALL_GATHER, "reduce": Kind.REDUCE_SCATTER, "forward": Kind.ALL_REDUCE, "backward": Kind.ALL_REDUCE}
    return [(what[kind], 4 if kind in ("forward", "backward") else sizes[k]) for kind, k in table if kind != "free"]


def in_order(student, t, table: Table, units: int) -> None:
    """What passes is what the table says, in its order; each computation sends one number, so that its place is seen."""
    case = stack_case(t, 2, units)
    run = same_step(student, t, case, [table] * 2)
    sizes = [piece.nbytes for piece in case["pieces"]]
    want = on_the_wire(table, sizes)
    actions = [action for action in table if action[0] != "free"]
    for rank in range(2):
        got = [(call.kind, call.payload_bytes) for call in run.calls(rank) if call.kind is not Kind.NEW_GROUP]
        first = next((i for i, (a, b) in enumerate(zip(got, want)) if a != b), min(len(got), len(want)))
        said = "{} {}".format(*actions[first]) if first < len(want) else "nothing more"
        did = f"{got[first][0].value} of {got[first][1]} bytes" if first < len(got) else "nothing more"
        message = "rank {rank}: after {first} messages the table says {said} ({bytes} bytes when whole), but what passed is {did}"
        t.that(got == want, message, rank=rank, first=first, said=said, bytes=want[first][1] if first < len(want) else 0, did=did)


@check("execute", points=2, seconds=30)
def check_in_order(student, t):
    "Messages and computations come in the order of the table"
    units = t.integer(3, 6)
    in_order(student, t, ahead_of_time(units), units)


@check("execute", points=2, seconds=30)
def check_messages_travel(student, t):
    "Gathers and reductions travel while units compute"
    units = t.integer(3, 5)
    case, table = stack_case(t, 2, units), ahead_of_time(units)
    same_step(student, t, case, [table, table])
    try:  # rank 1 asks for each unit only when it needs it, and computes first: who waits for a gather too early waits for ever
        same_step(student, t, case, [table, just_in_time(units)])
    except Wrong as stuck:
        told = tr(
            "A message is waited for too early. Gathers and reductions begin with async_op=True; only computing waits, for its own weights."
        )
        raise Wrong(f"{told}\n{stuck}", told) from stuck


# -- 5 · checkpoint


def checkpoint_case(t, drop: float, blocks: int) -> dict:
    """Weights, input and gradient of a few blocks."""
    width = t.integer(3, 7)
    return {
        "weights": [t.normal(width, width + k, dtype=torch.float64) for k in range(blocks)],
        "x": t.normal(5, width, dtype=torch.float64),
        "grad": t.normal(5, width, dtype=torch.float64),
        "seed": t.integer(0, 9999),
        "drop": drop,
    }


def same_inputs(student, t, case: dict, world: int = 1) -> tuple[Run, dict]:
    """Output, and gradient of the first input, are those without checkpoints; the run, and the twin's answer."""
    run, want = student.ranks(checkpointed, [case] * world), without_checkpoints(**case)
    for got in run.results:
        t.close(got["output"], want["output"], "the output", atol=1e-10)
        t.close(got["x"], want["x"], "the gradient of x", atol=1e-10)
    return run, want


@check("checkpoint", points=2, seconds=20)
def check_same_gradients(student, t):
    "Gradients are those without checkpoints"
    for blocks in (1, t.integer(2, 4)):
        run, want = same_inputs(student, t, checkpoint_case(t, 0.0, blocks))
        for k, (mine, right) in enumerate(zip(t.items(run.results[0]["weights"], blocks, "the gradients"), want["weights"])):
            t.that(mine is not None, "the parameters that block {k} uses have no gradient: backward must go through them, too", k=k)
            t.close(mine, right, "the gradient of the parameter that block {k} uses", k=k, atol=1e-10)


@check("checkpoint", points=2, seconds=20)
def check_dropout(student, t):
    "Backward drops what forward has dropped"
    same_inputs(student, t, checkpoint_case(t, 0.5, t.integer(1, 3)))


@check("checkpoint", points=2, seconds=30)
def check_blocks_forgotten(student, t):
    "After forward only the inputs of the blocks are there"
    case = {"seed": t.integer(0, 999), "blocks": 4, "rows": 2048, "width": 128, "depth": 8}
    run, (output, of_x) = student.ranks(deep_forward, [case]), deep_stack(**case)
    t.close(run.results[0]["output"], output, "the output of four blocks", rtol=1e-3, atol=1e-4)
    t.close(run.results[0]["x"], of_x, "the gradient of x", rtol=1e-2, atol=1e-3)
    held, most = run.memory(0, "after forward") / MIB, 14
    message = "after forward the process holds {held:.0f} MiB: five inputs and outputs of blocks are 5 MiB, all that autograd would keep 32"
    t.that(bool(held < most), message, held=held)


# -- 6 · offload


def offload_case(t, dtype: str, steps: int, without: int | None = None) -> dict:
    """Weights around 1 and gradients of steps so small that bf16 weights would not feel them."""
    weights = [1 + t.uniform(0.0, 0.5) * t.normal(t.integer(3, 6), t.integer(3, 6)).abs() for _ in range(3)]
    grads = [[None if i == without else t.normal(*weight.shape).abs() + 0.1 for i, weight in enumerate(weights)] for _ in range(steps)]
    return {"weights": weights, "steps": grads, "dtype": dtype, "lr": 1e-3}


def same_weights(student, t, case: dict) -> dict:
    """The parameters are the twin's; what the scenario returned."""
    (got,) = student.ranks(offloaded, [case]).results
    rtol = 2**-8 if case["dtype"] == "bfloat16" else 1e-5
    for i, (mine, right) in enumerate(zip(t.items(got["weights"], 3, "the parameters"), fp32_steps(**case))):
        mine = t.tensor(mine, "parameter {i}", i=i, dtype=right.dtype)
        unmoved = case["steps"][0][i] is not None and bool(torch.equal(mine, case["weights"][i].to(mine.dtype)))
        t.that(not unmoved, "parameter {i} is where it began: steps smaller than its rounding are lost, unless masters keep them", i=i)
        t.close(mine, right, "parameter {i} after {n} steps", i=i, n=len(case["steps"]), rtol=rtol, atol=1e-6)
    return got


@check("offload", points=2, seconds=20)
def check_masters(student, t):
    "Small steps add up in fp32 masters"
    got = same_weights(student, t, offload_case(t, "bfloat16", 30))
    t.that(not got["moved"], "parameters must be updated in place: others (the units of FSDP) hold the same memory")


@check("offload", points=1, seconds=20)
def check_gradients_gone(student, t):
    "No gradient stays on the device"
    got = same_weights(student, t, offload_case(t, "float32", 3))
    t.that(got["stayed"] is False, "after step a parameter still has its .grad: the device would hold it until the next step")


# -- 7 · hybrid


@check("hybrid", points=1)
def check_groups(student, t):
    "Shard groups are the rows of the grid, replica groups its columns"
    for nodes in (1, 2, t.integer(3, 4)):
        size = t.integer(2, 5)
        grid = torch.arange(nodes * size).view(nodes, size)
        rows, columns = t.items(student.hybrid_groups(nodes * size, size), 2, "hybrid_groups(world, shard_size)")
        where = {"world": nodes * size, "size": size}
        t.equal(rows, grid.tolist(), "the shard groups of hybrid_groups({world}, {size})", **where)
        t.equal(columns, grid.T.tolist(), "the replica groups of hybrid_groups({world}, {size})", **where)


def hybrid_case(t, nodes: int, size: int) -> list[dict]:
    """A gradient for each rank, and the groups of all."""
    grid, numel = torch.arange(nodes * size).view(nodes, size), size * t.integer(3, 9)
    groups = {"rows": grid.tolist(), "columns": grid.T.tolist()}
    return [{"gradient": t.normal(numel, dtype=torch.float64), **groups} for _ in range(nodes * size)]


def same_mean(student, t, nodes: int, size: int) -> tuple[Run, list[dict]]:
    """Every rank has its piece of the mean over all ranks."""
    case = hybrid_case(t, nodes, size)
    run = student.ranks(hybrid, case)
    pieces = torch.stack([own["gradient"] for own in case]).mean(0).view(size, -1)
    for rank, got in enumerate(run.results):
        what = "the piece on rank {rank} of {nodes} nodes of {size}"
        t.close(got["piece"], pieces[rank % size], what, rank=rank, nodes=nodes, size=size, atol=1e-10)
    return run, case


@check("hybrid", points=2, seconds=60)
def check_hybrid_mean(student, t):
    "Every rank has its piece of the mean over all ranks"
    for nodes, size in ((2, 2), (1, 2), (2, 1), (3, 2), (2, 3)):
        same_mean(student, t, nodes, size)


@check("hybrid", points=2, seconds=30)
def check_hybrid_traffic(student, t):
    "The large message stays in the node, the piece leaves it"
    run, case = same_mean(student, t, 2, 2)
    size = case[0]["gradient"].nbytes
    for rank in range(4):
        calls = [call for call in run.calls(rank) if call.kind is not Kind.NEW_GROUP]
        got = [(call.kind.value, call.payload_bytes, list(call.members)) for call in calls]
        row, column = [rank - rank % 2, rank - rank % 2 + 1], [rank % 2, rank % 2 + 2]
        want = [(Kind.REDUCE_SCATTER.value, size, row), (Kind.ALL_REDUCE.value, size // 2, column)]
        message = "rank {rank} did (call, bytes, members) {got}; a reduce-scatter in its row, then an all-reduce of the piece in its column: {want}"
        t.that(got == want, message, rank=rank, got=got, want=want)
