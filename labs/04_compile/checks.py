"""The visible checks of this lab. What the compiler made of a function comes as data and is run here, on inputs that it has not seen."""

from __future__ import annotations

import torch
from torch import Tensor

from dlo_lib.grading.contract import Wrong, check
from dlo_lib.grading.graphs import Recorded
from dlo_lib.grading.quiz import quiz_complete
from dlo_lib.models.llama import rotation

from .hints import HINTS as HINTS
from .quiz import QUIZ
from .scenarios import (
    compiled_adamw,
    compiled_clip,
    compiled_mean,
    compiled_model,
    compiled_route,
    compiled_twice,
)
from .shared import (
    adamw_case,
    as_cheap,
    as_soon,
    clip_case,
    drawn_counts,
    lengths_recorded,
    listed,
    llama_case,
    mean_case,
    nearest,
    one_graph,
    padded_right,
    the_graph_gives,
)
from .twins import (
    after_adamw,
    block,
    bytes_at_once,
    bytes_one_by_one,
    cheapest_of_all,
    clipped,
    drawn_operations,
    mean_of,
    pooled,
    routed,
)

# -- 1 · traffic


@check("traffic", points=1)
def check_one_by_one(student, t):
    "Bytes moved when each operation runs by itself"
    for _ in range(3):
        operations, sizes, _ = drawn_operations(t)
        itemsize = t.choice((2, 4, 8))
        got = student.eager_bytes(operations, sizes, itemsize)
        t.equal(got, bytes_one_by_one(operations, sizes, itemsize), "eager_bytes of {number} operations (read the operands, write the result)", number=len(operations))  # fmt: skip


@check("traffic", points=2)
def check_at_once(student, t):
    "Bytes moved by one fused kernel"
    for _ in range(3):
        operations, sizes, _ = drawn_operations(t)
        itemsize, outputs = t.choice((2, 4, 8)), [operations[-1][0]]
        got = student.fused_bytes(operations, sizes, outputs, itemsize)
        what = "fused_bytes of {number} operations (each input is read once, what is in between stays in registers)"
        t.equal(got, bytes_at_once(operations, sizes, outputs, itemsize), what, number=len(operations))


# -- 2 · clip


@check("clip", points=2, seconds=30)
def check_clip(student, t):
    "One graph, right on both sides of the limit"
    case = clip_case(t, above=True)
    others = [{"gradient": t.normal(*case["gradient"].shape), "limit": torch.tensor(limit)} for limit in (0.5, 1000.0)]
    for other in others:
        t.close(student.clip(**other), clipped(**other), "clip(gradient, limit={limit:g})", limit=float(other["limit"]))
    recorded = one_graph(t, student.ranks(compiled_clip, [case]), "clip")
    for other in others:
        the_graph_gives(t, recorded, other, clipped(**other), "clip")


# -- 3 · mean


@check("mean", points=2, seconds=30)
def check_mean(student, t):
    "One graph, whatever number of tokens the mask keeps"
    rows, width = t.integer(2, 5), t.integer(4, 9)
    others = [mean_case(t, rows, width) for _ in range(2)]
    for other in others:
        t.close(student.masked_mean(**other), mean_of(**other), "masked_mean of {kept} tokens", kept=int(other["mask"].sum()))
    recorded = one_graph(t, student.ranks(compiled_mean, [mean_case(t, rows, width)]), "masked_mean")
    for other in others:
        the_graph_gives(t, recorded, other, mean_of(**other), "masked_mean")


# -- 4 · route


@check("route", points=3, seconds=30)
def check_route(student, t):
    "One graph, whichever expert each token goes to"
    number, width, out, experts = t.integer(5, 9), t.integer(2, 5), t.integer(2, 5), t.integer(2, 4)
    weights = t.normal(experts, width, out)
    first, *others = [
        {"tokens": t.normal(number, width), "experts": weights, "choice": t.integers(0, experts - 1, number)} for _ in range(3)
    ]
    others.append({**others[0], "choice": torch.full((number,), experts - 1)})  # some experts get nothing
    for other in others:
        t.close(student.route(**other), routed(**other), "route with choice {choice}", choice=other["choice"].tolist(), atol=1e-5)
    recorded = one_graph(t, student.ranks(compiled_route, [first]), "route")
    for other in others:
        the_graph_gives(t, recorded, other, routed(**other), "route")


# -- 5 · state


@check("state", points=3, seconds=30)
def check_blocks_share(student, t):
    "All blocks, at every step, run one graph"
    number, width = t.integer(3, 5), t.integer(3, 6)
    x, weights = t.normal(4, width), [t.normal(width, width) for _ in range(number)]
    run = student.ranks(compiled_twice, [{"x": x, "weights": weights}])
    recorded = Recorded.read(run.results[0])
    message = (
        "{number} blocks, called twice, needed {graphs} graphs: a Python number that differs between blocks, or changes, is a constant "
        "of its graph. One graph does when these numbers are tensors"
    )
    t.that(len(recorded.graphs) == 1, message, number=number, graphs=len(recorded.graphs))
    t.that(len(recorded.calls) == 2 * number, "the graph was run {calls} times, not once in each call", calls=len(recorded.calls))
    other = t.normal(4, width)
    for call, (index, weight) in zip(recorded.calls, [*enumerate(weights)] * 2):
        same = nearest(recorded.replayed(call, {"x": other}), block(other, weight, index))
        t.that(same is not None, "the graph of block {index} has no output of the shape of x", index=index)
        t.close(same, block(other, weight, index), "the output of block {index}", index=index, atol=1e-5)


# -- 6 · dynamic


@check("dynamic", points=2, seconds=30)
def check_one_graph_for_all_lengths(student, t):
    "Four lengths, one graph, which fits a fifth"
    recorded, batch, width = lengths_recorded(student, t)
    message = "four lengths needed {graphs} graphs: the length is to be left open before the first call, and it is dimension 1"
    t.that(len(recorded.graphs) == 1 and bool(recorded.calls), message, graphs=len(recorded.graphs))
    other = t.normal(batch, t.integer(17, 40), width)
    given = {f"x{index}": other for index in range(4)}
    the_graph_gives(t, recorded, given, pooled(other), "the function")


# -- 7 · pad


@check("pad", points=2)
def check_pad(student, t):
    "The smallest bucket that fits, and padding that teaches nothing"
    for _ in range(3):
        first = t.integer(4, 9)
        padded_right(student, t, t.integer(2, first - 1) + t.choice((0, first)), [first, 2 * first, 4 * first])


# -- 8 · buckets


@check("buckets", points=4)
def check_cheapest(student, t):
    "A few lengths: no choice is cheaper"
    for padded in (0.02, 0.3, 1.5):  # from one bucket to many
        counts = drawn_counts(t, 10, 60)
        compile_seconds = t.uniform(2.0, 6.0)
        token_seconds = padded * compile_seconds / (30 * max(counts))
        least = cheapest_of_all(counts, compile_seconds, token_seconds)
        as_cheap(student, t, counts, compile_seconds, token_seconds, least)


# -- 9 · optimizer


@check("optimizer", points=2)
def check_adamw_values(student, t):
    "Five steps with a changing learning rate, as torch takes them"
    settings = {name: t.number(student.get(name.upper()), name.upper()) for name in ("beta1", "beta2", "eps", "decay")}
    parameter = t.normal(t.integer(2, 5), 3)
    gradients, rates = [t.normal(*parameter.shape) for _ in range(5)], [t.uniform(1e-3, 1e-1) for _ in range(5)]
    got, first, second = parameter, torch.zeros_like(parameter), torch.zeros_like(parameter)
    for number, (gradient, rate) in enumerate(zip(gradients, rates), 1):
        taken = student.adamw(got, gradient, first, second, torch.tensor(float(number)), torch.tensor(rate))
        got, first, second = (
            t.tensor(each, "a result of adamw", shape=parameter.shape) for each in t.items(taken, 3, "the results of adamw")
        )
        want = after_adamw(parameter, gradients[:number], rates[:number], settings)
        t.close(got, want, "the parameter after step {number} (weight decay shrinks the parameter itself, it is not in the gradient)", number=number, atol=1e-5)  # fmt: skip


@check("optimizer", points=3, seconds=30)
def check_adamw_graph(student, t):
    "One graph for every step and every learning rate"
    rows, width = t.integer(2, 5), t.integer(2, 5)
    recorded = one_graph(t, student.ranks(compiled_adamw, [{"inputs": adamw_case(t, rows, width)}]), "adamw")
    for _ in range(2):
        other = adamw_case(t, rows, width)
        for each in t.items(student.adamw(**other), 3, "the results of adamw"):
            the_graph_gives(t, recorded, other, t.tensor(each, "a result of adamw"), "adamw")


# -- 10 · blocks


@check("blocks", points=3, seconds=40)
def check_blocks(student, t):
    "One graph, of one block, for all blocks"
    model, case = llama_case(t)
    run = student.ranks(compiled_model, [case])
    got = run.results[0]
    if type(got) is not dict or "logits" not in got:
        raise Wrong("the compiled model gave no logits")
    with torch.no_grad():
        t.close(got["logits"], model(case["tokens"]), "the logits of the compiled model", atol=1e-4)
    recorded, number = Recorded.read(got), case["config"].num_layers
    graphs, calls = len(recorded.graphs), len(recorded.calls)
    t.that(graphs > 0, "nothing was compiled: no call of the model ran a graph")
    deep = "one graph was run {calls} times for {number} blocks: compiled as a whole, the graph holds every block, and grows with the depth"
    t.that(graphs > 1 or calls == number, deep, calls=calls, number=number)
    own = "{number} blocks have {graphs} graphs: with the same code and the same backend object, the second block finds the graph of the first"
    t.that(graphs == 1, own, number=number, graphs=graphs)
    weights = {name: value.detach() for name, value in model.named_parameters()}
    for index, call in enumerate(recorded.calls):
        given = [arg.get("value") for arg in listed(call, "args")]
        hidden = next((arg for arg in given if isinstance(arg, Tensor) and arg.dim() == 3), None)
        t.that(hidden is not None, "the graph of block {index} was not given the hidden state", index=index)
        with torch.no_grad():
            want = model.layers[index](hidden, *rotation(case["config"], hidden.shape[1], hidden))
        same = nearest(recorded.replayed(call, weights), want)
        t.that(same is not None and torch.allclose(same, want, atol=1e-4), "the graph does not compute block {index}", index=index)


# -- 11 · break-even


@check("break_even", points=2)
def check_break_even(student, t):
    "The first step after which compiling has paid"
    for _ in range(4):
        compiled = t.integer(1, 8) / 8
        as_soon(student, t, t.integer(1, 400) / 8, compiled + t.integer(1, 8) / 8, compiled)


@check("break_even", points=2)
def check_best_mode(student, t):
    "The mode that takes least for a number of steps"
    for steps in (1, t.integer(20, 200), 100_000):
        modes = {
            "eager": (0.0, t.uniform(0.9, 1.1)),
            "default": (t.uniform(8, 20), t.uniform(0.6, 0.8)),
            "max-autotune": (t.uniform(90, 200), 0.5),
        }
        modes = {name: modes[name] for name in t.shuffled(list(modes))}
        want = min(modes, key=lambda name: modes[name][0] + steps * modes[name][1])
        got = student.best_mode(modes, steps)
        t.equal(got, want, "best_mode for {steps} steps", steps=steps)


# -- quiz

complete_quiz = quiz_complete(QUIZ, points=1)
