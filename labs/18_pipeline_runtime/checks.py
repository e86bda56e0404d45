"""The visible checks of this lab: what one process can show. Those of messages and ranks are in ``on_ranks.py``.

What the student's code gives is compared with one process that has the whole model and the whole batch (``twins.py``).
"""

from __future__ import annotations

import torch
from torch import Tensor

from dlo_lib.grading.contract import check
from dlo_lib.grading.quiz import quiz_complete
from dlo_lib.grading.schedules import carried_out, complete, mostly_there, read_table
from dlo_lib.parallel.pipeline.simulate import Costs
from dlo_lib.parallel.pipeline.table import Schedule, in_a_loop

from .drawn import delayed_case, split_case, stage_case, table_cases
from .hints import HINTS as HINTS
from .on_ranks import (
    check_delayed_twin,
    check_each_message_once,
    check_gradients_on_ranks,
    check_hybrid_gradients,
    check_hybrid_traffic,
    check_memory_of_the_loop,
    check_messages_of_the_loop,
    check_no_dead_lock,
    check_received_is_used,
    check_versions_kept,
)
from .quiz import QUIZ
from .scenarios import delayed_run, long_row, split_layer, through_stages
from .twins import delayed_twin, least_slowest, near, one_graph, slowest, summed, whole_layer

# -- 1 · partition


def is_cut(student, t, costs: list[float], stages: int) -> list[int]:
    """The student's starts, of the right number and type."""
    starts = t.items(student.stage_starts(costs, stages), stages, "stage_starts(costs, stages)")
    good = all(type(start) is int and 0 <= start <= len(costs) for start in starts) and starts == sorted(starts) and starts[0] == 0
    t.that(good, "stage_starts gives {starts}: whole numbers from 0 on, in rising order, the first is 0", starts=starts)
    return starts


@check("partition", points=1)
def check_no_empty_stage(student, t):
    "Every stage gets a piece"
    costs = [float(t.integer(1, 3)) for _ in range(t.integer(6, 8))]
    costs[t.integer(0, len(costs) - 1)] = 100.0  # outweighs all others: a stage more is of no use there, and must not be empty
    starts = is_cut(student, t, costs, len(costs) - t.integer(1, 2))
    empty = [stage for stage, (start, end) in enumerate(zip(starts, [*starts[1:], len(costs)])) if start == end]
    message = "stage {stage} is empty, your starts are {starts}: its rank would have nothing to do"
    t.that(not empty, message, stage=empty[0] if empty else 0, starts=starts)


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
            stages=stages, costs=[int(cost) for cost in costs], starts=starts, got=got, want=want,
        )  # fmt: skip


# -- 2 · the loss of a micro-batch


def batch_of(t, sizes: list[int]) -> tuple[list[Tensor], list[Tensor]]:
    """Logits and targets of micro-batches."""
    return [t.normal(size, 5, dtype=torch.float64) for size in sizes], [t.integers(0, 4, size) for size in sizes]


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
            m=micro_batches, got=got, want=want, times=got / want,
        )  # fmt: skip


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
        small=sizes[-1], large=sizes[0], ratio=weights[-1] / weights[0] if weights[0] else float("inf"),
    )  # fmt: skip


# -- 3 · one stage


def through(student, t, order: list[tuple[str, int]]) -> tuple[dict, dict, dict]:
    """The case, the student's results and those of one graph."""
    case = stage_case(t, order)
    got = student.ranks(through_stages, [case]).results[0]
    message = (
        "stage_backward of the second stage returns None: only a leaf that requires a gradient has .grad, so make x one in stage_forward"
    )
    t.that(got["lost"] is False, message)
    return case, got, one_graph(case["weights"], case["inputs"], case["grads"])


@check("stage", points=2, seconds=20)
def check_stage_gradients(student, t):
    "The gradients of stages, one after the other, are those of the whole"
    _, got, want = through(student, t, [("F", 0), ("B", 0)])
    t.close(got["outputs"][0], want["outputs"][0], "the output of the second stage", atol=1e-10)
    for i, (mine, right) in enumerate(zip(got["weights"], want["weights"])):
        t.close(mine, right, "the gradient of the weights of stage {i}", i=i, atol=1e-10)
    t.close(got["inputs"][0], want["inputs"][0], "what stage_backward returns, the gradient of the input", atol=1e-10)


@check("stage", points=1, seconds=20)
def check_output_without_graph(student, t):
    "What is sent has no graph behind it"
    _, got, want = through(student, t, [("F", 0), ("B", 0)])
    t.close(got["outputs"][0], want["outputs"][0], "the output", atol=1e-10)
    t.that(
        got["attached"] is False,
        "the output that stage_forward returns still has the graph behind it: the next rank gets numbers only, so detach()",
    )


@check("stage", points=1, seconds=20)
def check_micro_batches_apart(student, t):
    "Several micro-batches in flight, and their gradients add up"
    case, got, want = through(student, t, [("F", 0), ("F", 1), ("B", 0), ("F", 2), ("B", 1), ("B", 2)])
    last = one_graph(case["weights"], case["inputs"][-1:], case["grads"][-1:])
    for i, (mine, right, alone) in enumerate(zip(got["weights"], want["weights"], last["weights"])):
        t.that(not near([mine], [alone]), "stage {i} has the gradient of the last micro-batch alone: add to .grad, do not replace it", i=i)
        t.close(mine, right, "with 2 micro-batches in flight, the gradient of the weights of stage {i}", i=i, atol=1e-10)


@check("stage", points=1, seconds=30)
def check_stage_memory(student, t):
    "A micro-batch that is done is forgotten"
    size, width, micro_batches = 2048, 128, 16
    weight, inputs = t.normal(width, width) / 11, [t.normal(size, width) for _ in range(micro_batches)]
    run = student.ranks(long_row, [{"weight": weight, "inputs": inputs}])
    t.close(run.results[0], float(sum(torch.tanh(x @ weight.T).sum() for x in inputs)), "the sum of all outputs", rtol=1e-3, atol=1.0)
    unit, held = 4 * size * width, run.memory(0, "after a turn")
    t.that(
        held <= (micro_batches + 9) * unit,
        "{held} MB are held; a micro-batch is {unit} MB, the inputs are {inputs} MB, and at most two micro-batches are in flight. Take out of `kept` "
        "what backward has used",
        held=held // 2**20, unit=unit // 2**20, inputs=micro_batches * unit // 2**20,
    )  # fmt: skip


# -- 4 · a table of one's own


def own_table(student, t, ranks: int, micro_batches: int) -> tuple[Schedule, str]:
    call = f"my_rows({ranks}, {micro_batches})"
    return read_table(t, student.my_rows(ranks, micro_batches), in_a_loop(ranks), micro_batches, call), call


@check("table", points=1)
def check_everything_once(student, t):
    "Every micro-batch goes forward and back once, on every rank"
    for sizes in table_cases(t):
        complete(t, *own_table(student, t, *sizes), "FB")


@check("table", points=2)
def check_nobody_waits_for_ever(student, t):
    "The table can be carried out"
    for sizes in table_cases(t):
        schedule, call = own_table(student, t, *sizes)
        mostly_there(t, schedule, call, "FB")
        carried_out(t, schedule, Costs(), call)


# -- 7 · the split backward


def split_run(student, t, micro_batches: int) -> tuple[dict, tuple[list[Tensor], Tensor, Tensor]]:
    """The student's results, and those of autograd."""
    case = split_case(t, micro_batches)
    return student.ranks(split_layer, [case]).results[0], whole_layer(**case)


@check("split", points=1, seconds=20)
def check_input_part(student, t):
    "The gradient of the input, at once"
    result, (inputs, _, _) = split_run(student, t, 1)
    t.close(result["inputs"][0], inputs[0], "what linear_backward returns, the gradient of the input", atol=1e-10)


@check("split", points=1, seconds=20)
def check_weight_part_waits(student, t):
    "The weight part is left for later"
    result, (inputs, _, _) = split_run(student, t, 2)
    t.that(
        result["early"] is False and result["left"] > 0,
        "weight.grad or bias.grad was there before the work in `later` was done: the stage before waits while you compute it",
    )
    for mine, right in zip(result["inputs"], inputs):
        t.tensor(mine, "what linear_backward returns", shape=right.shape, dtype=right.dtype)


@check("split", points=2, seconds=20)
def check_weight_part(student, t):
    "Weight and bias get the gradients of autograd"
    result, (_, weight, bias) = split_run(student, t, 1)
    t.close(result["weight"], weight, "weight.grad after the work in `later`", atol=1e-10)
    t.close(result["bias"], bias, "bias.grad after the work in `later`, a sum over everything but features", atol=1e-10)


# -- 8 · delayed gradients


def trained(student, t, case: dict) -> list[Tensor]:
    got = t.items(student.ranks(delayed_run, [case]).results[0], len(case["delays"]), "delayed_training(...)")
    for stage, weight in enumerate(got):
        t.tensor(weight, "weights {stage} of delayed_training(...)", stage=stage, shape=(3,), dtype=torch.float64)
    return got


@check("delayed", points=1, seconds=20)
def check_no_delay(student, t):
    "Without delay it is plain gradient descent"
    case = delayed_case(t, [0, 0], t.integer(4, 8))
    for stage, (mine, right) in enumerate(zip(trained(student, t, case), delayed_twin(**case))):
        t.close(mine, right, "with no delay, weights {stage} after {steps} steps", stage=stage, steps=case["steps"], atol=1e-10)


@check("delayed", points=2, seconds=20)
def check_delay(student, t):
    "Each stage reads the version of its own delay"
    mistakes = {
        0: "those of synchronous training",
        -1: "those of gradients one version too new",
        1: "those of gradients one version too old",
    }
    for delays in ([3, 2, 1, 0], [1, 1, 1], [t.integer(2, 4), 0]):
        case = delayed_case(t, delays, 5 + t.integer(2, 5))
        got = trained(student, t, case)
        for by, words in mistakes.items():
            wrong = {**case, "delays": [max(0, delay + by) if by else 0 for delay in delays]}
            t.that(not near(got, delayed_twin(**wrong)), "with delays {delays} your weights are " + words, delays=delays)
        message = "with delays {delays}, weights {stage} (before step `delay` there is only version 0)"
        for stage, (mine, right) in enumerate(zip(got, delayed_twin(**case))):
            t.close(mine, right, message, delays=delays, stage=stage, atol=1e-10)


# -- quiz

complete_quiz = quiz_complete(QUIZ, points=1)
