"""The hidden checks: edges, larger sizes, and the right answers of the quiz. Never released.

Their messages hold no values where a student should read them.
"""

from __future__ import annotations

import torch

from dlo_lib.grading.contract import check
from dlo_lib.grading.quiz import Answer, quiz_right

from .quiz import QUIZ
from .scenarios import compiled_model, compiled_twice
from .shared import as_cheap, as_soon, drawn_counts, lengths_recorded, listed, llama_case, mean_case, padded_right
from .twins import bytes_at_once, bytes_one_by_one, cheapest, clipped, mean_of

# -- 1 · traffic


@check("traffic", points=1)
def check_an_operand_twice(student, t):
    "An operand that an operation uses twice is read once"
    operations = [("sum", ["x", "y"]), ("square", ["sum", "sum"])]
    sizes = dict.fromkeys(("x", "y", "sum", "square"), t.integer(10, 99))
    got = t.number(student.eager_bytes(operations, sizes, 4), "eager_bytes")
    t.that(bool(got == bytes_one_by_one(operations, sizes, 4)), "x * x reads x once: it is one tensor.")


@check("traffic", points=1)
def check_kept_results(student, t):
    "A result that is kept for backward is written, even where it is in between"
    operations, outputs = [("a", ["x", "bias"]), ("b", ["a", "y"]), ("c", ["b", "a"])], ["a", "c"]
    rows, width = t.integer(3, 30), t.integer(3, 30)
    sizes = dict.fromkeys(("x", "y", "a", "b", "c"), rows * width) | {"bias": width, "unused": t.integer(5, 50)}
    got = t.number(student.fused_bytes(operations, sizes, outputs, 4), "fused_bytes")
    message = "A kernel writes every tensor that is asked for, each once, and reads only inputs that some operation uses."
    t.that(bool(got == bytes_at_once(operations, sizes, outputs, 4)), message)


# -- 2, 3 · clip and mean


@check("clip", points=1)
def check_clip_zeros(student, t):
    "A gradient of zeros stays what it is"
    case = {"gradient": torch.zeros(t.integer(2, 5), 3), "limit": torch.tensor(t.uniform(0.1, 2.0))}
    t.close(student.clip(**case), clipped(**case), "the gradient of zeros (a norm of 0 is in a denominator)")


@check("mean", points=1)
def check_mean_of_nothing(student, t):
    "A mask that keeps nothing gives 0"
    case = mean_case(t, 3, 5)
    case["mask"] = torch.zeros_like(case["mask"])
    t.close(student.masked_mean(**case), mean_of(**case), "the mean of no token")


@check("mean", points=1)
def check_mean_of_infinite(student, t):
    "What is masked out may be infinite"
    case = mean_case(t, 3, 6)
    case["mask"][1, 2] = False
    case["losses"][1, 2] = float("inf")
    message = "the mean where a masked loss is infinite (infinity times 0 is no number: choose, do not multiply)"
    t.close(student.masked_mean(**case), mean_of(**case), message)


# -- 5, 6 · state and dynamic


@check("state", points=1, seconds=30)
def check_calls_are_counted(student, t):
    "Each block still counts its calls"
    width, number = t.integer(3, 6), t.integer(2, 3)
    case = {"x": t.normal(4, width), "weights": [t.normal(width, width) for _ in range(number)]}
    got = student.ranks(compiled_twice, [case]).results[0]
    counted = got.get("counted") if type(got) is dict else None
    t.that(counted == [2] * number, "Twice called, `calls` should be 2: what a graph changes in a buffer stays changed.")


@check("dynamic", points=1, seconds=30)
def check_only_the_length(student, t):
    "The batch stays a constant"
    recorded, _, _ = lengths_recorded(student, t)
    opened = [given.get("size") for graph in recorded.graphs for given in listed(graph, "inputs")]
    dims = {size[1] for size in opened if type(size) is list and len(size) == 2 and type(size[1]) is int}
    t.that(dims <= {1}, "Leave open what changes, and no more: what is constant the compiler can use.")


# -- 7, 8 · pad and buckets


@check("pad", points=1)
def check_pad_edges(student, t):
    "A length that is a bucket, and buckets in any order"
    first = t.integer(4, 9)
    buckets = [4 * first, first, 2 * first]
    for length in buckets:
        padded_right(student, t, length, buckets)


@check("buckets", points=2, seconds=20)
def check_cheapest_of_many(student, t):
    "Many lengths, and compiling that costs nothing"
    counts, token_seconds = drawn_counts(t, 60, 400), t.uniform(1e-4, 1e-3)
    as_cheap(student, t, counts, 0.0, token_seconds, cheapest(counts, 0.0, token_seconds))


# -- 10, 11 · blocks and break-even


@check("blocks", points=1, seconds=40)
def check_names_stay(student, t):
    "A checkpoint still fits"
    model, case = llama_case(t)
    got = student.ranks(compiled_model, [case]).results[0]
    names = got.get("names") if type(got) is dict else None
    t.that(names == list(model.state_dict()), "Compiled, the parameters have other names: a module that wraps a block adds its own.")


@check("break_even", points=1)
def check_never(student, t):
    "Not faster, and for free"
    step = t.integer(1, 8) / 8
    as_soon(student, t, t.integer(1, 9) / 8, step, step)
    as_soon(student, t, t.integer(1, 9) / 8, step, step + 0.125)
    as_soon(student, t, 0.0, step + 0.125, step)


# -- quiz

ANSWERS = {
    "q1": Answer("b", "the arithmetic is the same; what is saved are the trips of intermediate results to memory"),
    "q2": Answer("a", "Amdahl's law: what fusion saves is part of the other 5 %"),
    "q3": Answer("d", "a break costs what could have been fused across it, and the way through Python; the result is the same"),
    "q4": Answer("c", "the first size is a constant; when it changes, the next graph leaves it open"),
    "q5": Answer("a", "past recompile_limit the function runs eagerly for inputs that no graph fits: watch the warnings"),
    "q6": Answer("b", "0 and 1 are specialised, since broadcasting makes them behave differently"),
    "q7": Answer("d", "equal blocks share one graph; the price is fusion across block boundaries, of which there is little"),
    "q8": Answer("b", "each start finds the graphs of the last one; 4 minutes in each hour are a fifteenth of the budget"),
}
right = quiz_right(QUIZ, ANSWERS, points=1)
