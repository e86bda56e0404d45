"""The hidden checks: ends of schedules, empty phases, what a model keeps beside its weights, a resume, and the right answers. Never released."""

from __future__ import annotations

import torch

from dlo_lib.grading.contract import check, scenario
from dlo_lib.grading.quiz import Answer, quiz_right
from dlo_lib.optim.schedules import Cosine

from .checks import cycle_of, followed, rows, same_factors, suggested, warmed, wsd_of
from .quiz import QUIZ
from .twins import valley

# -- 2 · range_test


@scenario
def tested_with_norm(student, rank, world, batches, rates, training):
    """The running mean and the mode of a model after a range test."""
    net = torch.nn.Sequential(torch.nn.BatchNorm1d(batches[0].shape[1]), torch.nn.Linear(batches[0].shape[1], 1))
    net.train(training)
    before = net[0].running_mean.clone()
    losses = student.range_test(net, lambda model, x: model(x).square().mean(), batches, rates)
    return [len(losses), before, net[0].running_mean, net.training]


@check("range_test", points=1, seconds=30)
def check_buffers_back(student, t):
    "Running means and the mode are what they were"
    width, count = t.integer(2, 5), t.integer(3, 5)
    batches = [t.normal(t.integer(4, 7), width) + 2 for _ in range(count)]
    for training in (True, False):
        case = {"batches": batches, "rates": [0.01 * 2**k for k in range(count)], "training": training}
        _, before, after, mode = t.items(student.ranks(tested_with_norm, [case]).results[0], 4, "the result")
        t.close(after, before, "the running mean of a batch norm after the test; parameters are not all that a model holds", rtol=0)
        t.that(mode is training, "the model should be in training mode afterwards if it was before, and in evaluation mode if it was")


# -- 4 · suggest


@check("suggest", points=1)
def check_steepest_before_bottom(student, t):
    "A fall behind the bottom does not count"
    for _ in range(2):
        rates, losses, _, bottom = valley(t)
        got = suggested(student, t, rates, losses, "steepest")
        lesson = "Where the loss has broken it may fall again for a moment: look for the steepest place before the bottom only."
        t.that(bool(got <= rates[bottom] * 1.01), lesson)


# -- 5 to 9 · ends


@check("decay", points=1)
def check_cosine_after_end(student, t):
    "After its end the cosine does not rise again"
    steps, final = t.integer(4, 12), t.uniform(0.05, 0.3)
    lesson = "A run that goes on a little longer stays at `final`."
    which = range(steps + 1, 3 * steps)
    same_factors(t, lambda s: student.cosine_factor(s, steps, final), Cosine(steps, final), which, "the factor of step {step}", lesson)


@check("warmup", points=1)
def check_no_warm_up(student, t):
    "No warm-up at all"
    steps = t.integer(4, 12)
    warmed(student, t, 0, steps, range(steps + 1), "With `warm` = 0 the first step has factor 1.")


@check("one_cycle", points=1)
def check_cycle_end(student, t):
    "The momentum comes back, and both stay at their end"
    lesson = "Momentum: back at `high` in the last step. After the last step nothing moves."
    cycle_of(student, t, 1, lambda top, steps: range(steps - 1, steps + 5), lesson)
    cycle_of(student, t, 0, lambda top, steps: range(steps, steps + 5), lesson)


@check("wsd", points=1)
def check_empty_phases(student, t):
    "Phases of no steps"
    lesson = "A phase may have no steps: then the next one begins at once."
    stable, decay = t.integer(3, 6), t.integer(3, 6)
    wsd_of(student, t, (0, stable, decay), range(stable), lesson)
    warm = t.integer(2, 4)
    wsd_of(student, t, (warm, stable, 0), range(warm, warm + stable + 3), lesson)
    wsd_of(student, t, (warm, 0, decay), (warm, warm + decay), lesson)


# -- 10 · follow


@scenario
def resumed(student, rank, world, table, peaks, before, after):
    """A run that stops after some steps; a new optimiser and a new follower go on from the saved state: the rates from there on."""

    def fresh():
        groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": peak} for peak in peaks]
        optimizer = torch.optim.SGD(groups, lr=1.0)
        return optimizer, student.Follow(optimizer, lambda step: table[step])

    _, first = fresh()
    for _ in range(before):
        first.step()
    optimizer, second = fresh()
    second.load_state_dict(first.state_dict())
    seen = [[group["lr"] for group in optimizer.param_groups]]
    for _ in range(after):
        second.step()
        seen.append([group["lr"] for group in optimizer.param_groups])
    return seen


@check("follow", points=2, seconds=30)
def check_resume(student, t):
    "A resumed run has the right rate from its first step on"
    before, after, peaks = t.integer(2, 4), t.integer(2, 4), [t.uniform(0.01, 0.5) for _ in range(2)]
    table = [t.uniform(0.2, 0.9) for _ in range(before + after + 1)]
    case = {"table": table, "peaks": peaks, "before": before, "after": after}
    for step, row in enumerate(rows(t, student.ranks(resumed, [case]).results[0], after + 1, 2), before):
        for got, peak in zip(row, peaks):
            t.that(
                bool(abs(got - peak * table[step]) < 1e-6),
                "After load_state_dict the next optimiser step must have the rate that it would have had without the stop.",
            )


# -- quiz

ANSWERS = {
    "q1": Answer("b", "early gradients are large and point every way; Adam's second moments know too few of them"),
    "q2": Answer("c", "rates that differ by a factor matter, rates that differ by a sum do not"),
    "q3": Answer("d", "one can stop, or decay, or go on, without having planned it"),
    "q4": Answer("a", "large rates regularise by themselves; both at once would be too much noise"),
    "q5": Answer("b", "a snapshot taken where the rate is high is a bad model"),
}
right = quiz_right(QUIZ, ANSWERS, points=1)
