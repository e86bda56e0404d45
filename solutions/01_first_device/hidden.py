"""The hidden checks: other sizes and edge cases, and the right answers of the quiz. Never released."""

from __future__ import annotations

import torch

from dlo_lib.grading.checks.contract import check
from dlo_lib.grading.checks.quiz import Answer
from dlo_lib.labkit.compare import near

from .checks.measuring import batch_of, on_line, search_of, times_of
from .checks.mixed import mastered, masters_case
from .checks.twins import descent16


@check("timed", points=1)
def check_no_warmup(student, t):
    "A device that is busy at the start, without a warm-up"
    found, _, want = times_of(student, t, 0, busy=t.uniform(2.0, 3.0))
    message = "without a warm-up the times are wrong if the device is busy at the start"
    t.that(near(found, want, atol=1e-9), message)


@check("line", points=1)
def check_line_edges(student, t):
    "The order of the points, and a card that is too small"
    measured, fixed, per_sample = on_line(t)
    turned = dict(sorted(measured.items(), reverse=True))
    want = t.integer(20, 60)
    got = batch_of(student, t, turned, fixed + per_sample * (want + 0.5))
    t.that(got == want, "the result depends on the order of the two points")
    got = batch_of(student, t, measured, fixed * 0.5)
    t.that(got == 0, "not even one sample fits, so the result is 0")


@check("search", points=1, seconds=20)
def check_search_edges(student, t):
    "Nothing fits, one fits, and a limit that is no power of two"
    for threshold, limit in ((0, t.integer(5, 90)), (1, t.integer(5, 90)), (t.integer(65, 90), 90)):
        got, _ = search_of(student, t, threshold, limit)
        t.that(got == min(threshold, limit), "the largest batch is wrong if few samples fit, or nearly all")


@check("masters", points=1, seconds=30)
def check_fp16(student, t):
    "Weights in fp16"
    case = masters_case(t, torch.float16)
    weights, *_ = t.items(student.run(mastered, **case), 3, "the result")
    for got, want in zip(t.items(weights, 2, "the weights"), descent16(**case)):
        t.close(got, want, "an fp16 weight", rtol=1.2e-3, atol=0)  # one step of fp16


ANSWERS = {
    "q1": Answer("c", "a call returns when its work is in the queue, so the clock must wait for the device"),
    "q2": Answer("a", "bf16 has the 8 exponent bits of fp32, so its range is nearly the same"),
    "q3": Answer(
        "d", "the gradients have another size for another scale; a norm has to be that of the true gradients"
    ),
    "q4": Answer("b", "an update below half the distance of two neighbouring numbers is rounded away"),
    "q5": Answer(
        "c",
        "weights, gradients and optimiser state do not depend on the batch, activations are proportional to "
        "it",
    ),
}
