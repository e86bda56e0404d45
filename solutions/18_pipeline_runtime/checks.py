"""The visible checks of this lab, and the twins they compare with: one process with the whole model and the whole batch.

A table is a list of rows, one for each rank, of cells such as ``1F0``: stage, kind, micro-batch. What a table can do is found by carrying
it out here, without the student's code: with or without a clock, with or without blocking messages.
"""

from __future__ import annotations

import itertools
import math
import re

import torch
from torch import Tensor

from dlo_lib.grading.contract import Kind, Nudge, check, scenario
from dlo_lib.grading.quiz import Question, quiz_complete
from dlo_lib.grading.twins import twin

IGNORED = -100
CELL = re.compile(r"(\d+)(SEND_F|RECV_F|SEND_B|RECV_B|F|B)(\d+)")

# -- 1 · partition


def is_cut(student, t, costs: list[float], stages: int) -> list[int]:
    """The student's starts, of the right number and type."""
    starts = t.items(student.stage_starts(costs, stages), stages, "stage_starts(costs, stages)")
    good = all(type(start) is int and 0 <= start <= len(costs) for start in starts) and starts == sorted(starts) and starts[0] == 0
    t.that(good, "stage_starts gives {starts}: whole numbers from 0 on, in rising order, the first is 0", starts=starts)
    return starts


def slowest(costs: list[float], starts: list[int]) -> float:
    """The cost of the most costly stage."""
    return max(sum(costs[start:end]) for start, end in zip(starts, [*starts[1:], len(costs)]))


@twin
def least_slowest(costs: list[float], stages: int) -> float:
    """By trying every cut."""
    return min(slowest(costs, [0, *inner]) for inner in itertools.combinations(range(1, len(costs)), stages - 1))


@check("partition", points=1)
def check_no_empty_stage(student, t):
    "Every stage gets a piece"
    costs = [float(t.integer(1, 3)) for _ in range(t.integer(6, 8))]
    costs[t.integer(0, len(costs) - 1)] = 100.0  # outweighs all others: a stage more is of no use there, and must not be empty
    stages = len(costs) - t.integer(1, 2)
    starts = is_cut(student, t, costs, stages)
    empty = [stage for stage, (start, end) in enumerate(zip(starts, [*starts[1:], len(costs)])) if start == end]
    t.that(
        not empty,
        "stage {stage} is empty, your starts are {starts}: its rank would have nothing to do",
        stage=str(empty[:1]),
        starts=starts,
    )


@check("partition", points=2)
def check_balanced(student, t):
    "The slowest stage is as fast as can be"
    for stages in (1, 2, 3, 4):
        costs = [float(cost) for cost in t.integers(1, 9, t.integer(8, 10)).tolist()]
        costs[0], costs[-1] = 0.0, float(t.integer(10, 20))  # an embedding that is looked up, a head that is costly
        starts = is_cut(student, t, costs, stages)
        got, want = slowest(costs, starts), least_slowest(costs, stages)
        t.that(
            bool(got <= want + 1e-9),
            "{stages} stages of {costs} that begin at {starts}: the slowest costs {got:g}, but {want:g} is possible. Equal numbers of pieces are "
            "not equal costs",
            stages=stages,
            costs=[int(cost) for cost in costs],
            starts=starts,
            got=got,
            want=want,
        )


# -- 2 · the loss of a micro-batch


def batch_of(t, sizes: list[int], classes: int = 5) -> tuple[list[Tensor], list[Tensor]]:
    """Logits and targets of micro-batches."""
    outputs = [t.normal(size, classes, dtype=torch.float64) for size in sizes]
    return outputs, [t.integers(0, classes - 1, size) for size in sizes]


def summed(output: Tensor, target: Tensor) -> float:
    return float(torch.nn.functional.cross_entropy(output, target, ignore_index=IGNORED, reduction="sum"))


def parts(student, t, outputs: list[Tensor], targets: list[Tensor]) -> list[float]:
    """The student's part of each micro-batch."""
    got = [student.loss_part(output, target, targets) for output, target in zip(outputs, targets)]
    return [float(t.tensor(part, f"loss_part of micro-batch {i}", shape=())) for i, part in enumerate(got)]


@check("loss", points=2)
def check_equal_parts(student, t):
    "The parts of equal micro-batches add up to the mean of the whole batch"
    for micro_batches in (1, 2, t.integer(3, 6)):
        outputs, targets = batch_of(t, [4] * micro_batches)
        got = sum(parts(student, t, outputs, targets))
        want = summed(torch.cat(outputs), torch.cat(targets)) / (4 * micro_batches)
        t.that(
            bool(abs(got - want) < 1e-6),
            "with {m} micro-batches the parts add up to {got:g}, the mean of the whole batch is {want:g}: {times:.2f} times it. Gradients add up "
            "over micro-batches; nobody divides them afterwards",
            m=micro_batches,
            got=got,
            want=want,
            times=got / want,
        )


@check("loss", points=2)
def check_weight_of_a_sample(student, t):
    "Every sample has the same weight, in a small micro-batch too"
    sizes = [6, t.integer(3, 5), t.integer(1, 2)]
    outputs, targets = batch_of(t, sizes)
    weights = [part / summed(output, target) for part, output, target in zip(parts(student, t, outputs, targets), outputs, targets)]
    t.that(
        bool(abs(weights[0] - weights[-1]) < 1e-6 * abs(weights[0])),
        "a sample of the micro-batch of {small} weighs {ratio:.2f} times as much as one of the micro-batch of {large}: the mean of means is not "
        "the mean",
        small=sizes[-1],
        large=sizes[0],
        ratio=weights[-1] / weights[0] if weights[0] else math.inf,
    )


# -- 3 · one stage: forward and backward of a micro-batch


@scenario
def through_stages(student, rank, world, weights, inputs, grads, order):
    """Two stages in one process, micro-batches in ``order``: what each stage gives, and what it leaves in its parameters."""
    stages, kept = [], [{}, {}]
    for weight in weights:
        layer = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype)
        layer.weight.data.copy_(weight)
        stages.append(torch.nn.Sequential(layer, torch.nn.Tanh()))
    outputs, input_grads, attached = {}, {}, False
    for kind, i in order:
        if kind == "F":
            middle = student.stage_forward(stages[0], kept[0], i, inputs[i])
            outputs[i] = student.stage_forward(stages[1], kept[1], i, middle)
            attached = attached or middle.requires_grad or outputs[i].requires_grad
        else:
            grad = student.stage_backward(kept[1], i, grads[i])
            input_grads[i] = student.stage_backward(kept[0], i, grad)
    return {
        "outputs": [outputs[i].detach() for i in range(len(inputs))],
        "inputs": [input_grads[i] for i in range(len(inputs))],
        "weights": [stage[0].weight.grad for stage in stages],
        "attached": attached,
    }


@twin
def one_graph(weights: list[Tensor], inputs: list[Tensor], grads: list[Tensor]) -> dict[str, list[Tensor]]:
    """The same in one piece, by autograd."""
    weights = [weight.clone().requires_grad_() for weight in weights]
    inputs = [x.clone().requires_grad_() for x in inputs]
    outputs = list(inputs)
    for weight in weights:
        outputs = [torch.tanh(y @ weight.T) for y in outputs]
    found = torch.autograd.grad(outputs, [*inputs, *weights], grads)
    return {
        "outputs": [output.detach() for output in outputs],
        "inputs": list(found[: len(inputs)]),
        "weights": list(found[len(inputs) :]),
    }


def stage_case(t, order: list[tuple[str, int]]) -> dict:
    widths = [t.integer(3, 7) for _ in range(3)]
    count = 1 + max(i for _, i in order)
    sizes = [t.integer(1, 5) for _ in range(count)]
    weights = [t.normal(out, size, dtype=torch.float64) for size, out in itertools.pairwise(widths)]
    inputs = [t.normal(size, widths[0], dtype=torch.float64) for size in sizes]
    grads = [t.normal(size, widths[-1], dtype=torch.float64) for size in sizes]
    return {"weights": weights, "inputs": inputs, "grads": grads, "order": order}


@check("stage", points=2, seconds=20)
def check_stage_gradients(student, t):
    "The gradients of stages, one after the other, are those of the whole"
    case = stage_case(t, [("F", 0), ("B", 0)])
    got = student.ranks(through_stages, [case]).results[0]
    want = one_graph(case["weights"], case["inputs"], case["grads"])
    t.close(got["outputs"][0], want["outputs"][0], "the output of the second stage", atol=1e-10)
    for i, (mine, right) in enumerate(zip(got["weights"], want["weights"])):
        t.close(mine, right, "the gradient of the weights of stage {i}", i=i, atol=1e-10)
    t.close(got["inputs"][0], want["inputs"][0], "what stage_backward returns, the gradient of the input", atol=1e-10)


@check("stage", points=1, seconds=20)
def check_output_without_graph(student, t):
    "What is sent has no graph behind it"
    case = stage_case(t, [("F", 0), ("B", 0)])
    got = student.ranks(through_stages, [case]).results[0]
    t.close(got["outputs"][0], one_graph(case["weights"], case["inputs"], case["grads"])["outputs"][0], "the output", atol=1e-10)
    t.that(
        got["attached"] is False,
        "the output that stage_forward returns still has the graph behind it: the next rank gets numbers only, so detach()",
    )


@check("stage", points=1, seconds=20)
def check_micro_batches_apart(student, t):
    "Several micro-batches in flight, and their gradients add up"
    case = stage_case(t, [("F", 0), ("F", 1), ("B", 0), ("F", 2), ("B", 1), ("B", 2)])
    got = student.ranks(through_stages, [case]).results[0]
    want = one_graph(case["weights"], case["inputs"], case["grads"])
    for i, (mine, right) in enumerate(zip(got["weights"], want["weights"])):
        last = one_graph(case["weights"], case["inputs"][-1:], case["grads"][-1:])["weights"][i]
        alone = type(mine) is Tensor and mine.shape == last.shape and bool(torch.allclose(mine, last))
        t.that(not alone, "stage {i} has the gradient of the last micro-batch alone: add to .grad, do not replace it", i=i)
        t.close(mine, right, "with 2 micro-batches in flight, the gradient of the weights of stage {i}", i=i, atol=1e-10)


@scenario
def long_row(student, rank, world, weight, inputs):
    """1F1B's steady turns on one stage, with two micro-batches in flight."""
    layer = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    layer.weight.data.copy_(weight)
    stage, kept, grad, total = torch.nn.Sequential(layer, torch.nn.Tanh()), {}, torch.ones(len(inputs[0]), weight.shape[0]), 0.0
    for i in range(len(inputs) + 1):
        if i < len(inputs):
            total += float(student.stage_forward(stage, kept, i, inputs[i]).sum())
        if i > 0:
            student.stage_backward(kept, i - 1, grad)
        mark("after a turn")  # noqa: F821
    return total, layer.weight.grad


@check("stage", points=1, seconds=30)
def check_stage_memory(student, t):
    "A micro-batch that is done is forgotten"
    size, width, micro_batches = 2048, 128, 16
    weight, inputs = t.normal(width, width) / 11, [t.normal(size, width) for _ in range(micro_batches)]
    run = student.ranks(long_row, [{"weight": weight, "inputs": inputs}])
    want = float(sum(torch.tanh(x @ weight.T).sum() for x in inputs))
    t.close(run.results[0][0], want, "the sum of all outputs", rtol=1e-3, atol=1.0)
    unit, held = 4 * size * width, run.memory(0, "after a turn")
    t.that(
        held <= (micro_batches + 9) * unit,
        "{held} MB are held; a micro-batch is {unit} MB, the inputs are {inputs} MB, and at most two micro-batches are in flight. Take out of `kept` "
        "what backward has used",
        held=held // 2**20, unit=unit // 2**20, inputs=micro_batches * unit // 2**20,
    )  # fmt: skip


# -- 4 · a table of one's own


def parsed(t, rows, ranks: int, what: str, kinds: tuple[str, ...] = ("F", "B")) -> list[list[tuple[str, int]]]:
    """Rows of (kind, micro-batch), each cell on the rank of its stage."""
    found = []
    for rank, row in enumerate(t.items(rows, ranks, what)):
        t.that(type(row) in (list, tuple), "row {rank} of {what} should be a list of cells, not {row}", rank=rank, what=what, row=row)
        cells = []
        for cell in row:
            match = CELL.fullmatch(cell) if type(cell) is str else None
            t.that(match is not None, '{cell} is no cell: write stage, kind and micro-batch, such as "1F0"', cell=cell)
            assert match is not None
            t.that(
                int(match[1]) == rank,
                "rank {rank} has {cell}, but stage {stage} lies on rank {stage}",
                rank=rank,
                cell=cell,
                stage=match[1],
            )
            t.that(match[2] in kinds, "{cell} has no place here, only {kinds}", cell=cell, kinds=", ".join(kinds))
            cells.append((match[2], int(match[3])))
        found.append(cells)
    return found


def carried_out(rows: list[list[tuple[str, int]]], forward: float = 1.0, backward: float = 2.0) -> tuple[float, dict[int, str]]:
    """The time that the table takes, and the cell at which each rank stands that cannot go on."""
    ended: dict[tuple[int, str, int], float] = {}
    last, clock, position = len(rows) - 1, [0.0] * len(rows), [0] * len(rows)
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(rows):
            while position[rank] < len(row):
                kind, i = row[position[rank]]
                needs = [(rank, "F", i)] if kind == "B" else []
                if kind == "F" and rank > 0:
                    needs.append((rank - 1, "F", i))
                if kind == "B" and rank < last:
                    needs.append((rank + 1, "B", i))
                if any(need not in ended for need in needs):
                    break
                start = max([clock[rank], *(ended[need] for need in needs)])
                clock[rank] = ended[rank, kind, i] = start + (forward if kind == "F" else backward)
                position[rank] += 1
                moved = True
    return max(clock), {rank: f"{rank}{row[at][0]}{row[at][1]}" for rank, (row, at) in enumerate(zip(rows, position)) if at < len(row)}


def table_cases(t) -> list[tuple[int, int]]:
    return [(2, t.integer(3, 6)), (3, t.integer(4, 9)), (4, t.integer(5, 12)), (4, 2), (1, 3)]


@check("table", points=1)
def check_everything_once(student, t):
    "Every micro-batch goes forward and back once, on every rank"
    for ranks, micro_batches in table_cases(t):
        rows = parsed(t, student.my_rows(ranks, micro_batches), ranks, f"my_rows({ranks}, {micro_batches})")
        for rank, row in enumerate(rows):
            for kind, word in (("F", "forward"), ("B", "backward")):
                lacking = sorted(set(range(micro_batches)) - {i for k, i in row if k == kind})
                t.that(
                    not lacking,
                    "my_rows({ranks}, {m}): on rank {rank} micro-batch {i} has no {word}. The row ends when the pipeline is empty again (flush)",
                    ranks=ranks, m=micro_batches, rank=rank, i=str(lacking[:1]), word=word,
                )  # fmt: skip
            t.that(
                len(row) == 2 * micro_batches,
                "my_rows({ranks}, {m}): rank {rank} has {n} cells",
                ranks=ranks,
                m=micro_batches,
                rank=rank,
                n=len(row),
            )


@check("table", points=2)
def check_nobody_waits_for_ever(student, t):
    "The table can be carried out"
    for ranks, micro_batches in table_cases(t):
        rows = parsed(t, student.my_rows(ranks, micro_batches), ranks, f"my_rows({ranks}, {micro_batches})")
        _, stuck = carried_out(rows)
        t.that(
            not stuck,
            "my_rows({ranks}, {m}) stops at {cells}: what these cells need is never there. A backward comes after its forward, and after the "
            "backward of the next stage",
            ranks=ranks, m=micro_batches, cells=", ".join(stuck.values()),
        )  # fmt: skip


# -- 5 · the order of messages


def compute_rows(schedule: str, ranks: int, micro_batches: int) -> list[list[str]]:
    """A table without messages. Written with a warm-up depth: all of them (AFAB), or as many as ranks follow (1F1B)."""
    rows = []
    for rank in range(ranks):
        depth = micro_batches if schedule == "afab" else min(micro_batches, ranks - rank)
        order = [("F", i) for i in range(depth)]
        for i in range(micro_batches):
            order.append(("B", i))
            if depth + i < micro_batches:
                order.append(("F", depth + i))
        rows.append([f"{rank}{kind}{i}" for kind, i in order])
    return rows


def messages_of(ranks: int, micro_batches: int, rank: int) -> set[tuple[str, int]]:
    """The messages that ``rank`` takes part in."""
    kinds = {"SEND_F": rank < ranks - 1, "RECV_F": rank > 0, "SEND_B": rank > 0, "RECV_B": rank < ranks - 1}
    return {(kind, i) for kind, there in kinds.items() if there for i in range(micro_batches)}


def blocking(rows: list[list[tuple[str, int]]]) -> dict[int, str]:
    """Carry out sends and receives that wait for each other; the cell at which each rank stands that waits for ever."""
    position = [0] * len(rows)

    def head(rank: int) -> tuple[str, int] | None:
        while position[rank] < len(rows[rank]) and rows[rank][position[rank]][0] in ("F", "B"):
            position[rank] += 1
        return rows[rank][position[rank]] if position[rank] < len(rows[rank]) else None

    moved = True
    while moved:
        moved = False
        for rank in range(len(rows) - 1):
            for one, other, kind in ((rank, rank + 1, "F"), (rank + 1, rank, "B")):
                sent, taken = head(one), head(other)
                if sent is not None and sent[0] == f"SEND_{kind}" and taken == (f"RECV_{kind}", sent[1]):
                    position[one] += 1
                    position[other] += 1
                    moved = True
    return {rank: f"{rank}{at[0]}{at[1]}" for rank in range(len(rows)) if (at := head(rank)) is not None}


EVERY_KIND = ("F", "B", "SEND_F", "RECV_F", "SEND_B", "RECV_B")


def order_cases(t) -> list[list[list[str]]]:
    return [compute_rows(name, ranks, t.integer(1, 6)) for name in ("afab", "1f1b") for ranks in (2, 3, 4)] + [compute_rows("1f1b", 1, 3)]


@check("order", points=2)
def check_each_message_once(student, t):
    "Each message is sent once and received once, where its data is there"
    for rows in order_cases(t):
        ranks, micro_batches = len(rows), len(rows[0]) // 2
        for rank, (row, plain) in enumerate(zip(parsed(t, student.with_messages(rows), ranks, "with_messages(rows)", EVERY_KIND), rows)):
            computed = [f"{rank}{kind}{i}" for kind, i in row if kind in ("F", "B")]
            t.that(
                computed == plain,
                "the computations of rank {rank} are {got}, they were {want}: only add messages",
                rank=rank,
                got=computed,
                want=plain,
            )
            place = {cell: at for at, cell in enumerate(row)}
            passed = [cell for cell in row if cell[0] not in ("F", "B")]
            wanted = messages_of(ranks, micro_batches, rank)
            t.that(
                sorted(passed) == sorted(wanted),
                "rank {rank} of {ranks} has {got} messages, {want} are needed (the first rank receives no activations, the last sends none)",
                rank=rank, ranks=ranks, got=len(passed), want=len(wanted),
            )  # fmt: skip
            for kind, i in wanted:
                compute = place[kind[-1], i]
                right = place[kind, i] > compute if kind.startswith("SEND") else place[kind, i] < compute
                word = "before" if kind.startswith("SEND") else "after"
                t.that(
                    right,
                    "rank {rank}: {message} comes {word} {compute}. Send what has been computed, receive what will be used",
                    rank=rank, message=f"{rank}{kind}{i}", word=word, compute=f"{rank}{kind[-1]}{i}",
                )  # fmt: skip


def any_table(t, ranks: int, micro_batches: int) -> list[list[str]]:
    """A table that can be carried out, without a rule: each time, some rank does something that it can do."""
    rows: list[list[str]] = [[] for _ in range(ranks)]
    forwards, backwards = [0] * ranks, [0] * ranks
    while True:
        able = [(rank, "F") for rank in range(ranks) if forwards[rank] < (forwards[rank - 1] if rank else micro_batches)]
        able += [(rank, "B") for rank in range(ranks) if backwards[rank] < (backwards[rank + 1] if rank < ranks - 1 else forwards[rank])]
        if not able:
            return rows
        rank, kind = t.choice(able)
        count = forwards if kind == "F" else backwards
        rows[rank].append(f"{rank}{kind}{count[rank]}")
        count[rank] += 1


@check("order", points=4)
def check_no_dead_lock(student, t):
    "Blocking messages come through: AFAB, 1F1B, and tables without a pattern"
    for rows in order_cases(t):
        stuck = blocking(parsed(t, student.with_messages(rows), len(rows), "with_messages(rows)", EVERY_KIND))
        t.that(
            not stuck,
            "dead-lock with {ranks} ranks and {m} micro-batches: they stand at {cells}, each waits for the other. Two neighbours must meet their "
            "messages in the same order",
            ranks=len(rows), m=len(rows[0]) // 2, cells=", ".join(stuck.values()),
        )  # fmt: skip
    for _ in range(30):
        rows = any_table(t, t.integer(2, 5), t.integer(3, 6))
        stuck = blocking(parsed(t, student.with_messages(rows), len(rows), "with_messages(rows)", EVERY_KIND))
        t.that(
            not stuck,
            "AFAB and 1F1B come through, but this table dead-locks: {rows}. They stand at {cells}. A rule such as \"odd ranks receive first\" belongs to "
            "one schedule",
            rows=" | ".join(" ".join(row) for row in rows), cells=", ".join(stuck.values()),
        )  # fmt: skip


# -- 6 · the loop


@scenario
def one_step(student, rank, world, rows, weights, inputs, targets, shapes, total):
    """A step of one rank: its row of the table, on a stage of linear layers."""
    torch.set_default_dtype(weights[0][0].dtype)
    layers = []
    for weight, bias in weights:
        layer = torch.nn.Linear(weight.shape[1], weight.shape[0])
        layer.weight.data.copy_(weight)
        layer.bias.data.copy_(bias)
        layers += [layer, torch.nn.Tanh()]
    stage, kept = torch.nn.Sequential(*layers), {}

    def forward(i, x):
        mark("at work")  # noqa: F821
        loss = None
        if rank == world - 1:

            def loss(output):
                return torch.nn.functional.cross_entropy(output, targets[i], reduction="sum") / total

        return student.stage_forward(stage, kept, i, x, loss)

    def backward(i, grad):
        return student.stage_backward(kept, i, grad)

    before, after = (rank - 1 if rank > 0 else None), (rank + 1 if rank < world - 1 else None)
    row = student.with_messages(rows)[rank]
    loss = student.run_row(row, forward, backward, inputs, shapes, before, after)
    return {"loss": float(loss) if rank == world - 1 else None, "grads": [parameter.grad for parameter in stage.parameters()]}


@twin
def whole_step(
    weights: list[list[tuple[Tensor, Tensor]]],
    inputs: list[Tensor],
    targets: list[Tensor],
    at: int = 0,
    input_plus: tuple[int, float] | None = None,
    gradient_plus: tuple[int, float] | None = None,
) -> tuple[float, list[list[Tensor]]]:
    """Loss and gradients by stage of the whole model in one process.

    ``input_plus`` adds to one element of what stage ``at`` receives of micro-batch 0, ``gradient_plus`` to the gradient that it receives.
    """
    own = [[(weight.clone().requires_grad_(), bias.clone().requires_grad_()) for weight, bias in stage] for stage in weights]
    total = sum(len(target) for target in targets)
    loss = torch.zeros((), dtype=inputs[0].dtype)
    for i, (x, target) in enumerate(zip(inputs, targets)):
        for number, stage in enumerate(own):
            if number == at and i == 0 and input_plus is not None:
                x = x + _one(x, *input_plus)
            for weight, bias in stage:
                x = torch.tanh(x @ weight.T + bias)
            if number == at and i == 0 and gradient_plus is not None:
                x.register_hook(lambda grad: grad + _one(grad, *gradient_plus))
        loss = loss + torch.nn.functional.cross_entropy(x, target, reduction="sum") / total
    found = iter(torch.autograd.grad(loss, [tensor for stage in own for pair in stage for tensor in pair]))
    return float(loss.detach()), [[next(found) for _ in range(2 * len(stage))] for stage in own]


def _one(like: Tensor, element: int, by: float) -> Tensor:
    plus = torch.zeros_like(like)
    plus.view(-1)[element] = by
    return plus


def model_of(t, ranks: int, layers: int = 1, dtype: torch.dtype = torch.float64) -> list[list[tuple[Tensor, Tensor]]]:
    """Weights and biases of stages with cuts of different widths."""
    widths = [t.integer(3, 8) for _ in range(ranks * layers + 1)]
    pairs = [(t.normal(out, size, dtype=dtype), t.normal(out, dtype=dtype)) for size, out in itertools.pairwise(widths)]
    return [pairs[rank * layers : (rank + 1) * layers] for rank in range(ranks)]


def samples_of(t, weights: list[list[tuple[Tensor, Tensor]]], sizes: list[int]) -> tuple[list[Tensor], list[Tensor]]:
    """Inputs and targets of micro-batches."""
    first, last = weights[0][0][0], weights[-1][-1][0]
    return [t.normal(size, first.shape[1], dtype=first.dtype) for size in sizes], [t.integers(0, last.shape[0] - 1, size) for size in sizes]


def step(
    student,
    rows: list[list[str]],
    weights: list[list[tuple[Tensor, Tensor]]],
    inputs: list[Tensor],
    targets: list[Tensor],
    nudge: Nudge | None = None,
):
    """The run of a step on as many ranks as there are rows. A rank has its own stage; the first has the inputs, the last the targets."""
    last = len(rows) - 1
    given = [
        {
            "rows": rows,
            "weights": weights[rank],
            "inputs": inputs if rank == 0 else None,
            "targets": targets if rank == last else None,
            "shapes": [(len(x), weights[rank][0][0].shape[1]) for x in inputs],
            "total": sum(len(target) for target in targets),
        }
        for rank in range(len(rows))
    ]
    return student.ranks(one_step, given, nudge)


def same_gradients(t, run, want: list[list[Tensor]], what: str, **values) -> None:
    """Every rank has the gradients of its stage."""
    for rank, result in enumerate(run.results):
        for number, (mine, right) in enumerate(zip(result["grads"], want[rank])):
            t.that(type(mine) is Tensor, "rank {rank}: a parameter has no gradient " + what, rank=rank, **values)
            t.close(mine, right, f"gradient {{number}} of rank {{rank}} {what}", number=number, rank=rank, atol=1e-10, **values)


@check("loop", points=4, seconds=60)
def check_gradients_on_ranks(student, t):
    "The gradients of every rank are those of one process with the whole model"
    for schedule, ranks in (("afab", 2), ("1f1b", 3), ("1f1b", 4), ("1f1b", 1)):
        micro_batches = ranks + t.integer(0, 2)
        weights = model_of(t, ranks)
        inputs, targets = samples_of(t, weights, [t.integer(1, 4) for _ in range(micro_batches)])
        run = step(student, compute_rows(schedule, ranks, micro_batches), weights, inputs, targets)
        _, grads = whole_step(weights, inputs, targets)
        same_gradients(t, run, grads, "({schedule}, {ranks} ranks, {m} micro-batches)", schedule=schedule, ranks=ranks, m=micro_batches)


@check("loop", points=2, seconds=30)
def check_messages_of_the_loop(student, t):
    "Each output and each gradient is sent once; the last rank knows the loss"
    ranks, micro_batches = 3, t.integer(2, 4)
    weights = model_of(t, ranks)
    inputs, targets = samples_of(t, weights, [t.integer(1, 4) for _ in range(micro_batches)])
    run = step(student, compute_rows("1f1b", ranks, micro_batches), weights, inputs, targets)
    loss, _ = whole_step(weights, inputs, targets)
    t.close(run.results[-1]["loss"], loss, "the loss that run_row returns on the last rank, the sum of all parts", rtol=1e-9)
    samples = sum(len(x) for x in inputs)
    for rank in range(ranks):
        sent = run.calls(rank, Kind.SEND)
        wanted = micro_batches * ((rank > 0) + (rank < ranks - 1))
        t.that(
            len(sent) == wanted,
            "rank {rank} sends {got} messages, {want} are enough: shapes are known, so each output and each gradient is one message",
            rank=rank, got=len(sent), want=wanted,
        )  # fmt: skip
        width = (weights[rank][0][0].shape[1] if rank > 0 else 0) + (weights[rank][-1][0].shape[0] if rank < ranks - 1 else 0)
        got, want = run.bytes(rank, Kind.SEND), 8 * samples * width
        t.that(got == want, "rank {rank} sends {got} bytes, its outputs and gradients have {want}", rank=rank, got=got, want=want)


@check("loop", points=2, seconds=30)
def check_received_is_used(student, t):
    "What a rank receives is what it computes with"
    weights = model_of(t, 3)
    inputs, targets = samples_of(t, weights, [t.integer(1, 3)])
    size, element, by = len(inputs[0]), t.integer(0, 2), t.uniform(0.5, 2.0)
    for call, name in enumerate(("input_plus", "gradient_plus")):
        width = weights[1][0][0].shape[1 - call]
        at = element % (size * width)
        run = step(student, compute_rows("1f1b", 3, 1), weights, inputs, targets, Nudge(Kind.RECV, rank=1, call=call, element=at, by=by))
        _, grads = whole_step(weights, inputs, targets, at=1, **{name: (at, by)})
        same_gradients(t, run, grads, "does not follow from what rank 1 received: data that arrives must be used; it")


@check("loop", points=2, seconds=60)
def check_memory_of_the_loop(student, t):
    "What has been used is not kept"
    ranks, micro_batches, size, width = 2, 12, 2048, 128
    weights = [[(t.normal(width, width) / 11, t.normal(width))] for _ in range(ranks)]
    inputs, targets = [t.normal(size, width) for _ in range(micro_batches)], [t.integers(0, width - 1, size) for _ in range(micro_batches)]
    run = step(student, compute_rows("1f1b", ranks, micro_batches), weights, inputs, targets)
    loss, _ = whole_step(weights, inputs, targets)
    t.close(run.results[-1]["loss"], loss, "the loss", rtol=1e-3)
    unit = 4 * size * width
    for rank in range(1, ranks):
        in_flight, held = ranks - rank, run.memory(rank, "at work")
        t.that(
            held <= (4 * in_flight + 5) * unit,
            "rank {rank} holds {held} MB before a forward; a micro-batch is {unit} MB and at most {n} are in flight. Forget what was received when "
            "it has been used, and what was computed when it has been sent",
            rank=rank, held=held // 2**20, unit=unit / 2**20, n=in_flight,
        )  # fmt: skip


# -- 7 · the split backward


@scenario
def split_layer(student, rank, world, xs, grads, weight, bias):
    """The input parts of all micro-batches, then what was left for later."""
    weight, bias = torch.nn.Parameter(weight), torch.nn.Parameter(bias)
    later, inputs = [], []
    with torch.no_grad():
        for x, grad in zip(xs, grads):
            inputs.append(student.linear_backward(grad, x, weight, bias, later))
        early = weight.grad is not None or bias.grad is not None
        left = len(later)
        for work in later:
            work()
    return {"inputs": inputs, "early": early, "left": left, "weight": weight.grad, "bias": bias.grad}


@twin
def whole_layer(xs: list[Tensor], grads: list[Tensor], weight: Tensor, bias: Tensor) -> tuple[list[Tensor], Tensor, Tensor]:
    """The same by autograd: gradients of the inputs, the weight and the bias."""
    weight, bias = weight.clone().requires_grad_(), bias.clone().requires_grad_()
    xs = [x.clone().requires_grad_() for x in xs]
    outputs = [torch.nn.functional.linear(x, weight, bias) for x in xs]
    *inputs, weight_grad, bias_grad = torch.autograd.grad(outputs, [*xs, weight, bias], grads)
    return inputs, weight_grad, bias_grad


def split_case(t, micro_batches: int) -> dict:
    inside, outside, seq = t.integer(3, 7), t.integer(3, 7), t.integer(2, 4)
    sizes = [t.integer(1, 3) for _ in range(micro_batches)]
    xs, grads = ([t.normal(size, seq, width, dtype=torch.float64) for size in sizes] for width in (inside, outside))
    return {
        "xs": xs,
        "grads": grads,
        "weight": t.normal(outside, inside, dtype=torch.float64),
        "bias": t.normal(outside, dtype=torch.float64),
    }


@check("split", points=1, seconds=20)
def check_input_part(student, t):
    "The gradient of the input, at once"
    case = split_case(t, 1)
    result = student.ranks(split_layer, [case]).results[0]
    t.close(result["inputs"][0], whole_layer(**case)[0][0], "what linear_backward returns, the gradient of the input", atol=1e-10)


@check("split", points=1, seconds=20)
def check_weight_part_waits(student, t):
    "The weight part is left for later"
    case = split_case(t, 2)
    result = student.ranks(split_layer, [case]).results[0]
    t.that(
        result["early"] is False and result["left"] > 0,
        "weight.grad or bias.grad was there before the work in `later` was done: the stage before waits while you compute it",
    )
    for mine, right in zip(result["inputs"], whole_layer(**case)[0]):
        t.tensor(mine, "what linear_backward returns", shape=right.shape, dtype=right.dtype)


@check("split", points=2, seconds=20)
def check_weight_part(student, t):
    "Weight and bias get the gradients of autograd"
    case = split_case(t, 1)
    result = student.ranks(split_layer, [case]).results[0]
    _, weight, bias = whole_layer(**case)
    t.close(result["weight"], weight, "weight.grad after the work in `later`", atol=1e-10)
    t.close(result["bias"], bias, "bias.grad after the work in `later`, a sum over everything but features", atol=1e-10)


# -- 8 · delayed gradients


@scenario
def delayed_run(student, rank, world, weights, goals, lr, delays, steps):
    """Training of weights that pull at each other, with one tensor a stage."""

    def gradients_of(weights, step):
        total = sum(weight.sum() for weight in weights)
        return [weight - goals[step] + 0.1 * total for weight in weights]

    return student.delayed_training([weight.clone() for weight in weights], gradients_of, lr, delays, steps)


@twin
def delayed_twin(weights: list[Tensor], goals: list[Tensor], lr: float, delays: list[int], steps: int) -> list[Tensor]:
    """w_s(t+1) = w_s(t) - lr * gradient_s at the versions max(0, t - delay_r) of each stage r, all versions of all stages remembered."""
    versions = [[weight] for weight in weights]
    for now in range(steps):
        used = [stage[now - delay] if now > delay else stage[0] for stage, delay in zip(versions, delays)]
        total = sum(weight.sum() for weight in used)
        for stage, weight in zip(versions, used):
            stage.append(stage[-1] - lr * (weight - goals[now] + 0.1 * total))
    return [stage[-1] for stage in versions]


def delayed_case(t, delays: list[int], steps: int) -> dict:
    weights = [t.normal(3, dtype=torch.float64) for _ in delays]
    return {
        "weights": weights,
        "goals": [t.normal(3, dtype=torch.float64) for _ in range(steps)],
        "lr": t.uniform(0.1, 0.3),
        "delays": delays,
        "steps": steps,
    }


def trained(student, t, case: dict) -> list[Tensor]:
    got = t.items(student.ranks(delayed_run, [case]).results[0], len(case["delays"]), "delayed_training(...)")
    for stage, weight in enumerate(got):
        t.tensor(weight, "weights {stage} of delayed_training(...)", stage=stage, shape=(3,), dtype=torch.float64)
    return got


def near(got: list[Tensor], want: list[Tensor]) -> bool:
    return all(bool(torch.allclose(mine, right, rtol=1e-9, atol=1e-10)) for mine, right in zip(got, want))


@check("delayed", points=1, seconds=20)
def check_no_delay(student, t):
    "Without delay it is plain gradient descent"
    case = delayed_case(t, [0, 0], t.integer(4, 8))
    for stage, (mine, right) in enumerate(zip(trained(student, t, case), delayed_twin(**case))):
        t.close(mine, right, "with no delay, weights {stage} after {steps} steps", stage=stage, steps=case["steps"], atol=1e-10)


@check("delayed", points=2, seconds=20)
def check_delay(student, t):
    "Each stage reads the version of its own delay"
    for delays in ([3, 2, 1, 0], [1, 1, 1], [t.integer(2, 4), 0]):
        case = delayed_case(t, delays, 5 + t.integer(2, 5))
        got = trained(student, t, case)
        t.that(
            not near(got, delayed_twin(**{**case, "delays": [0] * len(delays)})),
            "with delays {delays} these are the weights of synchronous training",
            delays=delays,
        )
        for by, word in ((-1, "one version too new"), (1, "one version too old")):
            other = delayed_twin(**{**case, "delays": [max(0, delay + by) for delay in delays]})
            t.that(not near(got, other), "with delays {delays} your gradients are computed at weights that are " + word, delays=delays)
        for stage, (mine, right) in enumerate(zip(got, delayed_twin(**case))):
            t.close(
                mine,
                right,
                "with delays {delays}, weights {stage} (before step `delay` there is only version 0)",
                delays=delays,
                stage=stage,
                atol=1e-10,
            )


# -- 9 · PipeDream: weight stashing


@scenario
def asynchronous(student, rank, world, rows, weights, inputs, targets, shapes, lr):
    """1F1B without flush: every backward is followed by an update of this rank's stage."""
    torch.set_default_dtype(weights[0][0].dtype)
    layers = []
    for weight, bias in weights:
        layer = torch.nn.Linear(weight.shape[1], weight.shape[0])
        layer.weight.data.copy_(weight)
        layer.bias.data.copy_(bias)
        layers += [layer, torch.nn.Tanh()]
    stage, kept = torch.nn.Sequential(*layers), {}

    def forward(i, x):
        mark("at work")  # noqa: F821
        loss = None
        if rank == world - 1:

            def loss(output):
                return torch.nn.functional.cross_entropy(output, targets[i])

        return student.stash_forward(stage, kept, i, x, loss)

    def backward(i, grad):
        return student.stash_backward(stage, kept, i, grad, lr)

    before, after = (rank - 1 if rank > 0 else None), (rank + 1 if rank < world - 1 else None)
    student.run_row(student.with_messages(rows)[rank], forward, backward, inputs, shapes, before, after)
    return [parameter.detach() for parameter in stage.parameters()]


@twin
def asynchronous_twin(
    weights: list[list[tuple[Tensor, Tensor]]], inputs: list[Tensor], targets: list[Tensor], lr: float, delays: list[int]
) -> list[list[Tensor]]:
    """Training in one process, batch after batch, whose stage s reads weights that are ``delays[s]`` updates old."""
    versions = [[[tensor for pair in stage for tensor in pair]] for stage in weights]
    for now, (x, target) in enumerate(zip(inputs, targets)):
        used = [[tensor.clone().requires_grad_() for tensor in stage[max(0, now - delay)]] for stage, delay in zip(versions, delays)]
        for tensors in used:
            for weight, bias in zip(tensors[::2], tensors[1::2]):
                x = torch.tanh(x @ weight.T + bias)
        found = iter(torch.autograd.grad(torch.nn.functional.cross_entropy(x, target), [tensor for tensors in used for tensor in tensors]))
        for stage in versions:
            stage.append([tensor - lr * next(found) for tensor in stage[-1]])
    return [stage[-1] for stage in versions]


def asynchronously(student, weights, inputs, targets, lr: float):
    """The run of 1F1B without flush over these batches."""
    ranks = len(weights)
    given = [
        {
            "rows": compute_rows("1f1b", ranks, len(inputs)),
            "weights": weights[rank],
            "inputs": inputs if rank == 0 else None,
            "targets": targets if rank == ranks - 1 else None,
            "shapes": [(len(x), weights[rank][0][0].shape[1]) for x in inputs],
            "lr": lr,
        }
        for rank in range(ranks)
    ]
    return student.ranks(asynchronous, given)


def equal_on_all(results: list[list[Tensor]], want: list[list[Tensor]]) -> bool:
    good = all(type(mine) is Tensor and mine.shape == right.shape for got, one in zip(results, want) for mine, right in zip(got, one))
    return good and all(near(got, one) for got, one in zip(results, want))


@check("stash", points=3, seconds=60)
def check_delayed_twin(student, t):
    "Without flush, training is that of the delayed twin, on 1 to 4 ranks"
    for ranks in (1, 2, 3, 4):
        weights = model_of(t, ranks)
        inputs, targets = samples_of(t, weights, [t.integer(2, 4) for _ in range(ranks + t.integer(4, 6))])
        lr = t.uniform(0.2, 0.5)
        results = asynchronously(student, weights, inputs, targets, lr).results
        delays = [ranks - 1 - stage for stage in range(ranks)]
        old = asynchronous_twin(weights, inputs, targets, lr, [delay + 1 for delay in delays])
        t.that(
            not equal_on_all(results, old),
            "{ranks} ranks: the versions are one too old: stash the weights as they are at the forward",
            ranks=ranks,
        )
        if ranks > 1:
            same = asynchronous_twin(weights, inputs, targets, lr, [0] * ranks)
            t.that(not equal_on_all(results, same), "{ranks} ranks: that is synchronous training; without flush it cannot be", ranks=ranks)
        for rank, (got, want) in enumerate(zip(results, asynchronous_twin(weights, inputs, targets, lr, delays))):
            for number, (mine, right) in enumerate(zip(got, want)):
                t.close(
                    mine, right,
                    "parameter {number} of rank {rank} of {ranks} after {n} batches (backward needs the weights that the forward of the same batch has read)",
                    number=number, rank=rank, ranks=ranks, n=len(inputs), atol=1e-10,
                )  # fmt: skip


@check("stash", points=2, seconds=60)
def check_versions_kept(student, t):
    "A version is forgotten when its backward is done"
    ranks, batches, width = 2, 12, 512
    weights = [[(t.normal(width, width) / 23, t.normal(width))] for _ in range(ranks)]
    inputs, targets = [t.normal(2, width) for _ in range(batches)], [t.integers(0, width - 1, 2) for _ in range(batches)]
    run = asynchronously(student, weights, inputs, targets, 0.05)
    want = asynchronous_twin(weights, inputs, targets, 0.05, [1, 0])
    for rank, (got, right) in enumerate(zip(run.results, want)):
        t.tensor(got[0], "the weights of rank {rank}", rank=rank, shape=right[0].shape, dtype=right[0].dtype)
        unit, versions, held = 4 * width * width, ranks - rank, run.memory(rank, "at work")
        t.that(
            held <= (versions + 6) * unit,
            "rank {rank} holds {held} MB; its weights are {unit} MB and it needs at most {n} versions of them: forget one when its backward is done",
            rank=rank, held=held // 2**20, unit=unit // 2**20, n=versions,
        )  # fmt: skip


# -- quiz

QUIZ = {
    "q1": Question(
        "A stage with the embedding and four blocks takes 4 ms, three stages of six blocks 6 ms, the last one with the head 9 ms. How often can a "
        "micro-batch leave the pipeline, at best?",
        {"a": "every 4 ms", "b": "every 6 ms", "c": "every 9 ms", "d": "every 6.2 ms, the mean"},
    ),
    "q2": Question(
        "Each micro-batch computes the mean loss of its own tokens, and nobody divides by their number. With 8 equal micro-batches, the gradient is",
        {"a": "right", "b": "8 times too small", "c": "8 times too large", "d": "√8 times too large"},
    ),
    "q3": Question(
        "Two neighbours both call a blocking send first. Why may this work in a test and hang in training?",
        {
            "a": "small messages may be buffered, so that send returns before anyone receives",
            "b": "training uses more ranks",
            "c": "backward changes the order of sends",
            "d": "GPUs are faster than processors",
        },
    ),
    "q4": Question(
        "Why does splitting the backward shorten the bubble?",
        {
            "a": "it does less work",
            "b": "the stage before waits for the gradient of the input alone; the weight part fills time in which a rank would wait",
            "c": "the weight part needs no memory",
            "d": "gradients of weights are sent earlier",
        },
    ),
    "q5": Question(
        "PipeDream without flush, 4 stages. By how many updates are the weights of the first stage older than the newest ones, in its gradients?",
        {"a": "0", "b": "1", "c": "3", "d": "4"},
    ),
    "q6": Question(
        "What does 2BW change against PipeDream?",
        {
            "a": "it needs no second version of the weights",
            "b": "it flushes the pipeline after each batch",
            "c": "it makes the first stage's delay 0",
            "d": "it adds up the gradients of several micro-batches, so that two versions are enough and every stage has the same delay",
        },
    ),
}
complete = quiz_complete(QUIZ, points=1)

# -- hints

HINTS = {
    "partition": [
        "Suppose you knew the best cut of the first n pieces into k - 1 stages, for every n. How would you cut into k?",
        "least[k][n] = the smallest over j of max(least[k - 1][j], cost of pieces j to n - 1), with j from k - 1 to n - 1, so that no stage is empty.",
        "Keep the best j beside each value. Then walk back from least[stages][len(costs)]: the start of the last stage, of the one before, ...",
    ],
    "loss": [
        "The gradients of the micro-batches are added. So the parts of the loss must add up to the loss of the whole batch.",
        'F.cross_entropy(..., reduction="sum", ignore_index=-100) of this micro-batch, divided by a number that is the same for all of them.',
        "That number is the count of targets that are not -100, over all of `targets`.",
    ],
    "stage": [
        "Backward needs two things from the forward of the same micro-batch: the leaf that the stage read, and the output with its graph.",
        "x = x.detach().requires_grad_(x.is_floating_point()); output = stage(x); keep both under i; return output.detach().",
        "kept.pop(i) gives both back. output.backward(grad) adds to the parameters' .grad and leaves x.grad, which you return.",
    ],
    "table": [
        "How many forwards must the first rank have done before the first gradient can reach it? And the last rank?",
        "Rank r begins with min(m, p - 1 - r) forwards; then it takes turns, one forward, one backward; then come the backwards that are left.",
        "for i in range(m): if i + w < m: forward of i + w; backward of i. Here w is the number of forwards at the beginning.",
    ],
    "order": [
        "Imagine one person who carries out the whole table alone, cell by cell. Whenever a message arises, both ranks note it down at that moment.",
        "Two neighbours then have their messages in the same order. Go round the ranks; a rank does its next cell if what it needs is done.",
        "After a forward on rank r: append the send to the new row of r and the receive to the new row of r + 1, both at once. After a backward: r and r - 1.",
    ],
    "loop": [
        "One loop over the cells, one case for each kind. Four dicts by micro-batch hold what waits: inputs that arrived, outputs to send, gradients both ways.",
        "Receive into torch.empty(shapes[i]); a gradient has the shape of the output it belongs to, so remember that at the forward.",
        "pop() what you use, so that it is forgotten. `before is None` is the first rank: it takes inputs[i]. `after is None` is the last: its output is a part of the loss.",
    ],
    "split": [
        "y = x Wᵀ + b. Which of the three gradients needs the weight, which needs x, and which neither?",
        "dL/dx = grad_y @ weight, now. dL/dW = grad_yᵀ @ x with all dimensions but the last made one (flatten(0, -2)); dL/db is the sum of grad_y.",
        "def work(): ... adds to weight.grad (or sets it where it is None), and the same for the bias; later.append(work); return grad_y @ weight.",
    ],
    "delayed": [
        "Keep every version of the weights: versions[t] is a list with one tensor a stage.",
        "At step t, stage s is read from versions[max(0, t - delays[s])], and the update is made to versions[t].",
        "old = [versions[max(0, t - d)][s] for s, d in enumerate(delays)]; grads = gradients_of(old, t); append [w - lr * g ...] of versions[-1].",
    ],
    "stash": [
        "Only the forward knows which weights it has read. The update must go to the newest weights.",
        "torch.func.functional_call(stage, version, (x,)) runs the stage with other weights: copies that require gradients, made at the forward.",
        "In backward: kept.pop(i), output.backward(grad); the copies have .grad now; parameter -= lr * copy.grad under torch.no_grad(); return x.grad.",
    ],
    "quiz": [
        "Questions 1 and 2: steps 1 and 2. The rhythm is set by whoever is slowest.",
        "Question 3: the dead-lock of step 5. Question 4: step 7.",
        "Questions 5 and 6: the number of forwards with which rank 0 begins, and the table of step 8.",
    ],
}
