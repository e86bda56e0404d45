"""Hidden checks of quantization: the visible ideas with other sizes; the answers of the quiz."""

from __future__ import annotations

import torch

from dlo_lib.grading.checks.contract import check
from dlo_lib.grading.checks.quiz import Answer
from dlo_lib.labkit.compare import double

from .checks.grids import drawn_numbers, exact, loads_what_it_stored, odd_sums, of_zero_point, scalar
from .checks.methods import FP64, awq_case, searched, smooth_case, smoothed
from .checks.twins import awq_errors, drawn_outliers, percentile, smoothing, with_outliers


@check("grid", points=1)
def check_one_sided(student, t):
    "Positive numbers on a zero-point grid"
    of_zero_point(student, t, drawn_numbers(t).abs() + t.uniform(1, 5), t.integer(4, 8))


@check("store", points=1, seconds=20)
def check_one_row(student, t):
    "A matrix of one row is stored and loaded"
    group = t.choice([4, 8])
    words = "the weights of one row do not come back within half a step"
    w = t.normal(1, group * t.integer(3, 5))
    loads_what_it_stored(student, t, [(w, group)], words, words)


@check("calibrate", points=1)
def check_one_batch(student, t):
    "The percentiles of a single batch"
    batch, p = double(t, t.integer(3, 5), t.integer(2, 4), 3), t.uniform(85, 98)
    got = t.items(student.calibrate([batch], p), 2, "calibrate(...)")
    for found, want in zip(got, percentile([batch], p)):
        found = scalar(t, found, "a percentile of one batch")
        t.close(found, want, "a percentile of one batch", rtol=1e-5, atol=1e-5)


@check("product", points=1, seconds=20)
def check_both_signs(student, t):
    "Large sums with a zero-point"
    (qx, qw), zero = odd_sums(t), t.integer(-128, -100)
    bias = t.integers(-(10**6), 10**6, len(qw)).to(torch.int32)
    got = t.tensor(student.accumulate(qx, zero, qw, bias), "accumulate(...)", dtype=torch.int32)
    t.that(torch.equal(got, exact(qx, zero, qw, bias)), "large sums with a zero-point are not exact")


@check("outliers", points=1)
def check_one_token(student, t):
    "One token with one outlier"
    x, columns = drawn_outliers(t, 1, t.integer(6, 12), 1)
    w = double(t, t.integer(2, 5), x.shape[1])
    w[:, columns] *= 5
    t.close(student.llm_int8(x, w, 6.0), with_outliers(x, w, 6.0), "the product of one token", **FP64)


@check("smooth", points=1)
def check_two_matrices(student, t):
    "The factors of two matrices"
    case = smooth_case(t, 2)
    gain, _ = smoothed(student, t, case)
    want = case["gain"] / smoothing(case["weights"], case["largest"], case["a"])
    t.close(gain, want, "the new gain for two matrices", **FP64)


@check("awq", points=1, seconds=20)
def check_other_layer(student, t):
    "The exponent of another layer"
    case = awq_case(t)
    errors = awq_errors(**case)
    _, exponent = searched(student, t, case)
    best = errors.index(min(errors)) / case["steps"]
    t.that(abs(exponent - best) < 1e-9, "the exponent of another layer is wrong")


# -- quiz

ANSWERS = {
    "q1": Answer("b", "half of the integers would belong to negative numbers that do not occur"),
    "q2": Answer("d", "4 bits are 0.5 bytes, and a scale of 2 bytes for 32 weights adds 0.0625"),
    "q3": Answer("a", "the grid of a token is the one thing that all its channels share"),
    "q4": Answer("c", "with one token a layer reads each weight once, and the product is small"),
}
