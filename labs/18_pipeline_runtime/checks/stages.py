"""The visible checks that need one process. Those of messages and ranks are in ``runs.py``.

The results are compared with one process that has the whole model and the whole batch (``twins.py``).
"""

from __future__ import annotations

import torch
from torch import Tensor

from dlo_lib.grading.checks.contract import check
from dlo_lib.grading.checks.schedules import (
    SLACK,
    carried_out,
    complete,
    holds_no_more,
    mostly_there,
    read_table,
)
from dlo_lib.labkit import UserError
from dlo_lib.labkit.compare import double, near, same, wrong_if
from dlo_lib.labkit.memory import MIB, holds_at_most
from dlo_lib.parallel.pipeline.simulate import Costs, simulate
from dlo_lib.parallel.pipeline.table import Schedule, in_a_loop

from . import twins
from .cases import table_cases
from .scenarios import delayed_run, long_row, split_layer, through_stages, tokens_to_loss
from .twins import IGNORED

# -- 1 · the loss of a micro-batch


def batch_of(t, sizes: list[int]) -> tuple[list[Tensor], list[Tensor]]:
    """Draw logits and targets of micro-batches."""
    return [double(t, size, 5) for size in sizes], [t.integers(0, 4, size) for size in sizes]


def parts(student, t, outputs: list[Tensor], targets: list[Tensor]) -> list[float]:
    """Return the student's part of each micro-batch."""
    got = [student.loss_part(output, target, targets) for output, target in zip(outputs, targets)]
    return [float(t.tensor(part, f"loss_part of micro-batch {i}", shape=())) for i, part in enumerate(got)]


@check("loss", points=2)
def check_equal_parts(student, t):
    "The parts of equal micro-batches add up to the mean of the whole batch"
    for micro_batches in (1, 2, t.integer(3, 6)):
        outputs, targets = batch_of(t, [4] * micro_batches)
        got = sum(parts(student, t, outputs, targets))
        want = twins.summed(torch.cat(outputs), torch.cat(targets)) / (4 * micro_batches)
        message = (
            "with {m} micro-batches the parts add up to {got:g}, which is {times:.2f} times the mean of the "
            "whole batch, {want:g}. Gradients add up over micro-batches, and are not divided afterwards"
        )
        t.that(bool(abs(got - want) < 1e-6), message, m=micro_batches, got=got, want=want, times=got / want)


@check("loss", points=2)
def check_weight_of_a_sample(student, t):
    "Every sample has the same weight, also in a small micro-batch"
    sizes = [6, t.integer(3, 5), t.integer(1, 2)]
    outputs, targets = batch_of(t, sizes)
    got = parts(student, t, outputs, targets)
    weights = [part / twins.summed(*pair) for part, pair in zip(got, zip(outputs, targets))]
    ratio = weights[-1] / weights[0] if weights[0] else float("inf")
    message = (
        "a sample of the micro-batch of {small} has {ratio:.2f} times the weight of one of the micro-batch "
        "of {large}: the mean of means is not the mean"
    )
    t.that(abs(ratio - 1) < 1e-6, message, small=sizes[-1], large=sizes[0], ratio=ratio)


@check("loss", points=1)
def check_padding(student, t):
    "Targets of -100 are not counted"
    outputs, targets = batch_of(t, [t.integer(6, 9)])
    targets[0][: t.integer(2, 4)] = IGNORED
    total, valid = twins.summed(outputs[0], targets[0]), int((targets[0] != IGNORED).sum())
    every, (got,) = len(targets[0]), parts(student, t, outputs, targets)
    message = "{padded} of {every} targets are -100: divide by the number of those that are not"
    wrong_if(t, got, total / valid, {message: total / every}, padded=every - valid, every=every)
    message = "with padding the parts add up to {got:g} instead of {want:g}"
    t.that(bool(abs(got - total / valid) < 1e-6), message, got=got, want=total / valid)


# -- 2 · one stage

ONE = [("F", 0), ("B", 0)]


def through(student, t, order: list[tuple[str, int]] = ONE) -> tuple[dict, dict, dict]:
    """Return the case, the student's results and those of one graph; the outputs are right."""
    widths = [t.integer(3, 7) for _ in range(3)]
    sizes = [t.integer(1, 5) for _ in range(1 + max(i for _, i in order))]
    case = {
        "weights": [double(t, widths[1], widths[0]), double(t, widths[2], widths[1])],
        "inputs": [double(t, size, widths[0]) for size in sizes],
        "grads": [double(t, size, widths[2]) for size in sizes],
    }
    got, want = student.run(through_stages, order=order, **case), twins.one_graph(**case)
    message = (
        "stage_backward of the second stage returns None: only a leaf that requires a gradient gets .grad, "
        "so make x such a leaf in stage_forward"
    )
    t.that(got["lost"] is False, message)
    same(t, got["outputs"], want["outputs"], "output {i} of the second stage", atol=1e-10)
    return case, got, want


@check("stage", points=1, seconds=20)
def check_stage_gradients(student, t):
    "The gradients of two successive stages are those of the whole model"
    _, got, want = through(student, t)
    same(t, got["weights"], want["weights"], "the gradient of the weights of stage {i}", atol=1e-10)
    what = "what stage_backward returns, the gradient of the input"
    same(t, got["inputs"], want["inputs"], what, atol=1e-10)


@check("stage", points=1, seconds=20)
def check_input_unchanged(student, t):
    "The argument x is not changed"
    message = (
        "stage_forward has changed its argument x: requires_grad_() works in place. The tensor belongs to "
        "the caller, so make the leaf from x.detach()"
    )
    t.that(through(student, t)[1]["changed"] is False, message)


@check("stage", points=1, seconds=20)
def check_output_without_graph(student, t):
    "The output that is sent has no graph"
    message = "the output of stage_forward still has its graph: the next rank gets numbers only, so detach()"
    t.that(through(student, t)[1]["attached"] is False, message)


@check("stage", points=1, seconds=20)
def check_micro_batches_apart(student, t):
    "With several micro-batches in flight, their gradients add up"
    case, got, want = through(student, t, [("F", 0), ("F", 1), ("B", 0), ("F", 2), ("B", 1), ("B", 2)])
    last = twins.one_graph(case["weights"], case["inputs"][-1:], case["grads"][-1:])
    message = "stage {i} has only the gradient of the last micro-batch: add to .grad, do not replace it"
    what = "with 2 micro-batches in flight, the gradient of the weights of stage {i}"
    same(t, got["weights"], want["weights"], what, {message: last["weights"]}, atol=1e-10)


@check("stage", points=1, seconds=30)
def check_stage_memory(student, t):
    "A micro-batch is freed after its backward"
    size, width, micro_batches = 2048, 128, 16
    weight, inputs = t.normal(width, width) / 11, [t.normal(size, width) for _ in range(micro_batches)]
    run = student.ranks(long_row, [{"weight": weight, "inputs": inputs}])
    want = float(sum(torch.tanh(x @ weight.T).sum() for x in inputs))
    t.close(run.results[0], want, "the sum of all outputs", rtol=1e-3, atol=1.0)
    message = (
        "{held:.0f} MB are held; a micro-batch has {each} MB, the inputs have {inputs} MB, and at most two "
        "micro-batches are in flight. Take out of `kept` what backward has used"
    )
    unit = 4 * size * width
    shown = {"each": unit // MIB, "inputs": micro_batches * unit // MIB}
    holds_at_most(t, run, "after a turn", (micro_batches + 11) * unit, message, **shown)


@check("stage", points=1, seconds=20)
def check_first_and_last(student, t):
    "The first stage takes tokens, the last one applies the loss"
    tokens, width, size = t.integer(5, 9), t.integer(3, 6), t.integer(2, 5)
    ids, targets = t.integers(0, tokens - 1, size), t.integers(0, width - 1, size)
    case = {"table": double(t, tokens, width), "ids": ids, "targets": targets}
    got, (loss, grad) = student.run(tokens_to_loss, **case), twins.whole_ends(**case)
    message = (
        "stage_forward asks for the gradient of tokens. They are integers, which have none: only a "
        "floating-point x becomes a leaf that requires a gradient"
    )
    t.that(got is not None, message)
    t.close(got[0], loss, "what stage_forward returns with a loss, loss(output)", atol=1e-10)
    t.close(got[1], grad, "the gradient of the embedding, from tokens to loss", atol=1e-10)


# -- 3 · the table


def own_table(student, t, ranks: int, micro_batches: int) -> tuple[Schedule, str]:
    call = f"my_rows({ranks}, {micro_batches})"
    return read_table(t, student.my_rows(ranks, micro_batches), in_a_loop(ranks), micro_batches, call), call


@check("table", points=1)
def check_runs_to_its_end(student, t):
    "Every rank runs one forward and one backward of every micro-batch, and none waits forever"
    for sizes in table_cases(t):
        schedule, call = own_table(student, t, *sizes)
        complete(t, schedule, call, "FB")
        carried_out(t, schedule, Costs(), call)


@check("table", points=1)
def check_in_flight(student, t):
    "Rank r holds at most p - r micro-batches"
    for ranks, micro_batches in table_cases(t):
        schedule, call = own_table(student, t, ranks, micro_batches)
        mostly_there(t, schedule, call, "FB")
        most = [min(micro_batches, ranks - rank) for rank in range(ranks)]
        why = "It begins too many forwards before its first backward: AFAB does, 1F1B does not."
        holds_no_more(t, schedule, most, call, why)


@check("table", points=1)
def check_no_more_bubble(student, t):
    "The bubble is no longer than that of 1F1B"
    for ranks, micro_batches in table_cases(t):
        forward, half = t.uniform(0.5, 1.0), t.uniform(0.5, 1.0)
        schedule, call = own_table(student, t, ranks, micro_batches)
        mostly_there(t, schedule, call, "FB")
        try:
            run = simulate(schedule, Costs(forward, half, half))
        except UserError:
            continue  # the table cannot run: another check reports it
        best = (micro_batches + ranks - 1) * (forward + 2 * half)
        message = (
            "{call} takes {got:.3g}, longer than (m + p - 1)(F + B) = {want:.3g}: a rank begins with too "
            "few forwards, so it waits for the next one before its first backward"
        )
        t.that(bool(run.makespan <= best * (1 + SLACK)), message, call=call, got=run.makespan, want=best)


# -- 9 · the split backward


def split_run(student, t, micro_batches: int) -> tuple[dict, tuple[list[Tensor], Tensor, Tensor]]:
    """Return the student's results for a linear layer and micro-batches of (batch, seq, features), and those
    of autograd."""
    inside, outside, seq = t.integer(3, 7), t.integer(3, 7), t.integer(2, 4)
    sizes = [t.integer(1, 3) for _ in range(micro_batches)]
    xs, grads = ([double(t, size, seq, width) for size in sizes] for width in (inside, outside))
    case = {"xs": xs, "grads": grads, "weight": double(t, outside, inside), "bias": double(t, outside)}
    return student.run(split_layer, **case), twins.whole_layer(**case)


@check("split", points=1, seconds=20)
def check_input_part(student, t):
    "The gradient of the input is returned at once"
    result, (inputs, _, _) = split_run(student, t, 1)
    what = "what linear_backward returns, the gradient of the input"
    same(t, result["inputs"], inputs, what, atol=1e-10)


@check("split", points=1, seconds=20)
def check_weight_part_waits(student, t):
    "The weight part is left for later"
    result, (inputs, _, _) = split_run(student, t, 2)
    message = "weight.grad or bias.grad is set before the work in `later` has run: the stage before waits"
    t.that(result["early"] is False and result["left"] > 0, message)
    for mine, right in zip(result["inputs"], inputs):
        t.tensor(mine, "what linear_backward returns", shape=right.shape, dtype=right.dtype)


@check("split", points=2, seconds=20)
def check_weight_part(student, t):
    "Weight and bias get the gradients of autograd"
    result, (_, weight, bias) = split_run(student, t, 1)
    t.close(result["weight"], weight, "weight.grad after the work in `later`", atol=1e-10)
    t.close(result["bias"], bias, "bias.grad after the work in `later`, a sum over batch and seq", atol=1e-10)


@check("split", points=1, seconds=20)
def check_weight_parts_add_up(student, t):
    "The weight parts of several micro-batches add up"
    result, (_, weight, _) = split_run(student, t, 3)
    message = (
        "after the weight parts of 3 micro-batches, weight.grad is not the sum of theirs: add to .grad, do "
        "not replace it"
    )
    t.that(near(result["weight"], weight), message)


# -- 10 · partition


def is_cut(student, t, costs: list[float], stages: int) -> list[int]:
    """Return the student's starts; check their number and types."""
    starts = t.items(student.stage_starts(costs, stages), stages, "stage_starts(costs, stages)")
    whole = all(type(start) is int and 0 <= start <= len(costs) for start in starts)
    good = whole and starts == sorted(starts) and starts[0] == 0
    message = "stage_starts returns {starts}, not whole numbers in ascending order of which the first is 0"
    t.that(good, message, starts=starts)
    return starts


@check("partition", points=1)
def check_no_empty_stage(student, t):
    "No stage is empty"
    number = t.integer(6, 8)
    # Where the costly piece stands decides which ways to break a tie leave a stage empty.
    for costly in (0, t.integer(1, number - 2), number - 1):
        costs = [float(t.integer(1, 3)) for _ in range(number)]
        costs[costly] = 100.0  # more than all others: a further stage cannot help, and must not be empty
        starts = is_cut(student, t, costs, number - t.integer(1, 2))
        ends = [*starts[1:], number]
        empty = [stage for stage, (start, end) in enumerate(zip(starts, ends)) if start == end]
        message = "stage {stage} is empty, your starts are {starts}: its rank has nothing to compute"
        t.that(not empty, message, stage=empty[0] if empty else 0, starts=starts)


@check("partition", points=2)
def check_balanced(student, t):
    "The slowest stage is as fast as possible"
    for stages in (1, 2, 3, 4):
        costs = [float(cost) for cost in t.integers(1, 9, t.integer(8, 10)).tolist()]
        costs[0], costs[-1] = 0.0, float(t.integer(10, 20))  # an embedding without FLOPs, and a costly head
        starts = is_cut(student, t, costs, stages)
        got, want = twins.slowest(costs, starts), twins.least_by_bisection(costs, stages)
        message = (
            "{stages} stages of {costs} that begin at {starts}: the slowest costs {got:g}, but {want:g} is "
            "possible. Equal numbers of pieces are not equal costs"
        )
        values = {"stages": stages, "costs": [int(cost) for cost in costs], "starts": starts}
        t.that(bool(got <= want + 1e-9), message, **values, got=got, want=want)


@check("partition", points=2, seconds=5)
def check_measured_costs(student, t):
    "Costs in seconds, and too many pieces to try all cuts"
    costs = [t.uniform(0.001, 0.009) for _ in range(t.integer(40, 60))]
    stages = t.integer(5, 8)
    starts = is_cut(student, t, costs, stages)
    got, want = twins.slowest(costs, starts), twins.least_by_bisection(costs, stages)
    values = {"pieces": len(costs), "stages": stages, "got": 1e3 * got, "want": 1e3 * want}
    message = (
        "{pieces} pieces that take some milliseconds, in {stages} stages: your slowest takes {got:.2f} ms, "
        "but {want:.2f} ms is possible. Costs are fractions of a second, so a limit cannot be searched "
        "among whole numbers"
    )
    t.that(bool(got <= want * (1 + 1e-6)), message, **values)


# -- 11 · delayed gradients


def delayed_case(t, delays: list[int], steps: int) -> dict:
    """Draw a training of small weights, with these delays."""
    weights, goals = ([double(t, 3) for _ in range(count)] for count in (len(delays), steps))
    return {"weights": weights, "goals": goals, "lr": t.uniform(0.1, 0.3), "delays": delays, "steps": steps}


@check("delayed", points=1, seconds=20)
def check_no_delay(student, t):
    "Without delay the training is plain gradient descent"
    case = delayed_case(t, [0, 0], t.integer(4, 8))
    got, want = student.run(delayed_run, **case), twins.delayed_twin(**case)
    same(t, got, want, "with no delay, weights {i} after {steps} steps", steps=case["steps"], atol=1e-10)


@check("delayed", points=2, seconds=20)
def check_delay(student, t):
    "Each stage reads the version that its delay gives"
    mistakes = {
        0: "those of synchronous training",
        -1: "those of gradients at one version too new",
        1: "those of gradients at one version too old",
    }
    from_old = (
        "with delays {delays} your step starts from the old weights: the gradient is one of old weights, "
        "but the newest are updated"
    )
    for delays in ([3, 2, 1, 0], [1, 1, 1], [t.integer(2, 4), 0]):
        case = delayed_case(t, delays, 5 + t.integer(2, 5))
        want, known = twins.delayed_twin(**case), {from_old: twins.delayed_twin(**case, from_old=True)}
        for by, words in mistakes.items():
            wrong = {**case, "delays": [max(0, delay + by) if by else 0 for delay in delays]}
            known["with delays {delays} your weights are " + words] = twins.delayed_twin(**wrong)
        got = student.run(delayed_run, **case)
        wrong_if(t, got, want, known, rtol=1e-9, delays=delays)
        what = "with delays {delays}, weights {i} (before step `delay` there is only version 0)"
        same(t, got, want, what, delays=delays, atol=1e-10)
