"""The visible checks of this lab. The compiled graphs of a function arrive as data and run here, on new
inputs."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from dlo_lib.grading.checks.contract import Wrong, check
from dlo_lib.grading.checks.graphs import Recorded
from dlo_lib.labkit.compare import near
from dlo_lib.models.llama import rotation

from . import cases, scenarios, twins
from .cases import as_cheap, as_soon, lengths_recorded, llama_case, one_graph, padded_right, the_graph_gives

# -- 1 · traffic


ONE_GRAPH = {
    "clip": scenarios.compiled_clip,
    "masked_mean": scenarios.compiled_mean,
    "route": scenarios.compiled_route,
    "adamw": scenarios.compiled_adamw,
}


def one_graph_gives(student, t, call: str, inputs: dict[str, Tensor], others: list[tuple]) -> None:
    """One graph, made with ``inputs``, gives the results of ``others``, pairs of inputs and result."""
    recorded = one_graph(t, student.ranks(ONE_GRAPH[call], [{"inputs": inputs}]), call)
    for other, want in others:
        the_graph_gives(t, recorded, other, want, call)


@check("traffic", points=1)
def check_one_by_one(student, t):
    "Bytes moved when each operation runs separately"
    for _ in range(3):
        operations, sizes, _ = twins.drawn_operations(t)
        case = operations, sizes, t.choice((2, 4, 8))
        got, want = student.eager_bytes(*case), twins.bytes_one_by_one(*case)
        what = "eager_bytes of {number} operations (read the operands, write the result)"
        t.equal(got, want, what, number=len(operations))


@check("traffic", points=2)
def check_at_once(student, t):
    "Bytes moved by one fused kernel"
    what = "fused_bytes of {number} operations (each input is read once, other results stay in registers)"
    for _ in range(3):
        operations, sizes, _ = twins.drawn_operations(t)
        case = operations, sizes, [operations[-1][0]], t.choice((2, 4, 8))
        t.equal(student.fused_bytes(*case), twins.bytes_at_once(*case), what, number=len(operations))


@check("traffic", points=1)
def check_an_operand_twice(student, t):
    "An operand that an operation uses twice is read once"
    operations = [("sum", ["x", "y"]), ("square", ["sum", "sum"])]
    sizes = dict.fromkeys(("x", "y", "sum", "square"), t.integer(10, 99))
    got = t.number(student.eager_bytes(operations, sizes, 4), "eager_bytes")
    t.that(bool(got == twins.bytes_one_by_one(operations, sizes, 4)), "x * x reads x once: it is one tensor.")


@check("traffic", points=1)
def check_kept_results(student, t):
    "Each of `outputs` is written, also one that backward needs; an input that no operation uses is not read"
    operations, outputs = [("a", ["x", "bias"]), ("b", ["a", "y"]), ("c", ["b", "a"])], ["a", "c"]
    rows, width = t.integer(3, 30), t.integer(3, 30)
    sizes = dict.fromkeys(("x", "y", "a", "b", "c"), rows * width)
    sizes |= {"bias": width, "unused": t.integer(5, 50)}
    got = t.number(student.fused_bytes(operations, sizes, outputs, 4), "fused_bytes")
    message = "A kernel writes each of `outputs` once, and reads only inputs that some operation uses."
    t.that(bool(got == twins.bytes_at_once(operations, sizes, outputs, 4)), message)


# -- 2 · clip


@check("clip", points=2, seconds=30)
def check_clip(student, t):
    "One graph, right on both sides of the limit"
    case, others = cases.clip_case(t, above=True), []
    for limit in (0.5, 1000.0):
        other = {"gradient": t.normal(*case["gradient"].shape), "limit": torch.tensor(limit)}
        want = twins.clipped(**other)
        t.close(student.clip(**other), want, "clip(gradient, limit={limit:g})", limit=limit)
        others.append((other, want))
    one_graph_gives(student, t, "clip", case, others)


@check("clip", points=1)
def check_clip_zeros(student, t):
    "A gradient of zeros stays unchanged"
    large = {"gradient": 3 + t.normal(3, 3).abs(), "limit": torch.tensor(1.0)}
    got = t.tensor(student.clip(**large), "clip(...)", shape=(3, 3))
    message = "not tested yet: a gradient above the limit stays unchanged too, see the first check"
    t.that(not torch.equal(got, large["gradient"]), message)
    case = {"gradient": torch.zeros(t.integer(2, 5), 3), "limit": torch.tensor(t.uniform(0.1, 2.0))}
    what = "the gradient of zeros (its norm of 0 is in a denominator)"
    t.close(student.clip(**case), twins.clipped(**case), what)


# -- 3 · mean


@check("mean", points=2, seconds=30)
def check_mean(student, t):
    "One graph for any number of true elements in the mask"
    rows, width = t.integer(2, 5), t.integer(4, 9)
    others = []
    for other in [cases.mean_case(t, rows, width) for _ in range(2)]:
        want, kept = twins.mean_of(**other), int(other["mask"].sum())
        t.close(student.masked_mean(**other), want, "masked_mean of {kept} tokens", kept=kept)
        others.append((other, want))
    one_graph_gives(student, t, "masked_mean", cases.mean_case(t, rows, width), others)


@check("mean", points=1)
def check_mean_of_nothing(student, t):
    "A mask that is false everywhere gives 0"
    case = cases.mean_case(t, 3, 5)
    some = near(student.masked_mean(**case), twins.mean_of(**case), rtol=1e-4, atol=1e-6)
    t.that(some, "not tested yet: the mean of some tokens is wrong, see the first check")
    case["mask"] = torch.zeros_like(case["mask"])
    t.close(student.masked_mean(**case), twins.mean_of(**case), "the mean of zero tokens")


@check("mean", points=1)
def check_mean_of_infinite(student, t):
    "A masked loss may be infinite"
    case = cases.mean_case(t, 3, 6)
    case["mask"][1, 2] = False
    case["losses"][1, 2] = float("inf")
    message = "the mean if a masked loss is infinite (infinity times 0 is NaN: select, do not multiply)"
    t.close(student.masked_mean(**case), twins.mean_of(**case), message)


# -- 4 · route


@check("route", points=3, seconds=30)
def check_route(student, t):
    "One graph for any choice of experts"
    number, width, out, experts = t.integer(5, 9), t.integer(2, 5), t.integer(2, 5), t.integer(2, 4)
    weights = t.normal(experts, width, out)
    first, *drawn = [
        {"tokens": t.normal(number, width), "experts": weights, "choice": t.integers(0, experts - 1, number)}
        for _ in range(3)
    ]
    drawn.append({**drawn[0], "choice": torch.full((number,), experts - 1)})  # some experts have no tokens
    others = []
    for other in drawn:
        want, choice = twins.routed(**other), other["choice"].tolist()
        t.close(student.route(**other), want, "route with choice {choice}", choice=choice, atol=1e-5)
        others.append((other, want))
    one_graph_gives(student, t, "route", first, others)


@check("route", points=2, seconds=30)
def check_route_bytes(student, t):
    "No weight matrix is copied for each token"
    number, width, out, experts = t.integer(30, 50), t.integer(12, 16), t.integer(12, 16), t.integer(2, 3)
    case = {"tokens": t.normal(number, width), "experts": t.normal(experts, width, out)}
    case["choice"] = t.integers(0, experts - 1, number)
    t.close(student.route(**case), twins.routed(**case), "route of {number} tokens", number=number, atol=1e-5)
    recorded = Recorded.read(student.ranks(scenarios.compiled_route, [{"inputs": case}]).results[0])
    largest = cases.largest_tensor(recorded, case)
    most = max(experts * width * out, number * experts * max(width, out))
    message = (
        "{number} tokens, {experts} experts of {width} x {out}: the graph makes a tensor of {largest} "
        "elements, {most} are enough. An index such as experts[choice] copies one matrix per token: "
        "multiply first, then choose among the results."
    )
    sizes = {"number": number, "experts": experts, "width": width, "out": out}
    t.that(bool(largest <= most), message, **sizes, largest=largest, most=most)


# -- options


@check("options", points=2, seconds=30)
def check_why_broken(student, t):
    "The reason of a break, None for one graph, and other errors are raised"
    x = t.normal(t.integer(2, 5), 3)
    found = student.ranks(scenarios.asked_why, [{"x": x}]).results[0]
    t.that(type(found) is dict, "the result is not a dict")
    message = "a function without a break: why_broken returned {got}, expected None"
    t.that(found.get("whole") is None, message, got=found.get("whole"))
    same_reason(t, found.get("branch"), "an `if` on a tensor")
    same_reason(t, found.get("broken"), "a call of graph_break()")
    same_reason(t, found.get("sized"), "a size that depends on values")
    message = "two different breaks have the same reason: return the text of the error"
    t.that(found.get("branch") != found.get("broken"), message)
    message = (
        "A product with wrong shapes was reported as a break, {got}: catch only Unsupported and UserError."
    )
    t.that(type(found.get("shapes")) is dict, message, got=found.get("shapes"))


@check("options", points=1)
def check_environment(student, t):
    "TORCH_LOGS has the names that are wanted, and no others"
    names = ("graph_breaks", "recompiles", "output_code")
    for wanted in t.shuffled(list(itertools.product((False, True), repeat=3))):
        got = student.job_environment(*wanted)
        want = {name for name, is_wanted in zip(names, wanted) if is_wanted}
        t.that(type(got) is dict, "job_environment(...) should be a dict")
        if not want:
            t.that(not got, "Nothing is to be logged: the dict should be empty, not {got}", got=got)
            continue
        text = got.get("TORCH_LOGS")
        message = "job_environment(...) is {got}: one variable, TORCH_LOGS, with text"
        t.that(type(text) is str and len(got) == 1, message, got=got)
        message = (
            "job_environment{wanted} is {got}: TORCH_LOGS needs {want}, separated by commas without spaces"
        )
        t.that(sorted(text.split(",")) == sorted(want), message, wanted=wanted, got=got, want=sorted(want))


@check("options", points=2)
def check_mode(student, t):
    "The mode for each situation"
    for gpu, fixed, launches, patient in t.shuffled(list(itertools.product((False, True), repeat=4))):
        got = student.mode_for(gpu, fixed, launches, patient)
        call = f"mode_for(gpu={gpu}, fixed_shapes={fixed}, launches_limit={launches}, patient={patient})"
        message = "{call} returned {got}: return one of the four modes"
        t.that(type(got) is str and got in cases.MODES, message, call=call, got=got)
        with_graphs = got in ("reduce-overhead", "max-autotune")
        t.that(not with_graphs or gpu, "{call} returned {got}: CUDA graphs need a GPU.", call=call, got=got)
        message = "{call} returned {got}: CUDA graphs need fixed shapes."
        t.that(not with_graphs or fixed, message, call=call, got=got)
        message = "{call} returned {got}: only with patience a mode may take minutes, and then it should."
        t.that(got.startswith("max") is patient, message, call=call, got=got)
        needed = gpu and fixed and (launches or patient)
        want = cases.MODES[2 * patient + needed]
        message = (
            "{call} returned {got}, expected {want}: on a GPU with fixed shapes, CUDA graphs are used with "
            "patience always, without patience only if launches are the limit"
        )
        t.that(with_graphs is needed, message, call=call, got=got, want=want)


# -- 5 · state


def same_reason(t, got: object, what: str) -> None:
    """The reason of a break is a line of text."""
    message = "a function with {what}: why_broken raised {got}: catch both Unsupported and UserError."
    t.that(type(got) is not dict, message, what=what, got=got.get("raised") if type(got) is dict else "")
    message = "a function with {what}: why_broken returned None. Is fullgraph=True set?"
    t.that(got is not None, message, what=what)
    message = "a function with {what}: return the first line of the error as text, not {got}"
    t.that(type(got) is str and bool(got.strip()), message, what=what, got=got)
    t.that("\n" not in got, "why_broken returned several lines: return the first line of the error")


@check("state", points=3, seconds=30)
def check_blocks_share(student, t):
    "All blocks run one graph at every step"
    number, width = t.integer(3, 5), t.integer(3, 6)
    x, weights = t.normal(4, width), [t.normal(width, width) for _ in range(number)]
    (result,) = student.ranks(scenarios.compiled_twice, [{"x": x, "weights": weights}]).results
    recorded = Recorded.read(result)
    plain = (
        "`calls` is a Python number that changes with each call, a constant of its graph. Make it a buffer"
    )
    differs = "a Python number that differs between blocks is a constant of its graph. Make it a tensor"
    why = plain if type(result) is dict and result.get("plain") is True else differs
    message = "{number} blocks, called twice, needed {graphs} graphs: " + why
    t.that(len(recorded.graphs) == 1, message, number=number, graphs=len(recorded.graphs))
    message = "the graph ran {calls} times, not once per call"
    t.that(len(recorded.calls) == 2 * number, message, calls=len(recorded.calls))
    other = t.normal(4, width)
    for call, (index, weight) in zip(recorded.calls, [*enumerate(weights)] * 2):
        want = twins.block(other, weight, index)
        output = cases.nearest(recorded.replayed(call, {"x": other}), want)
        t.that(output is not None, "the graph of block {index} has no output of the shape of x", index=index)
        t.close(output, want, "the output of block {index}", index=index, atol=1e-5)


@check("state", points=1, seconds=30)
def check_calls_are_counted(student, t):
    "Each block still counts its calls"
    width, number = t.integer(3, 6), t.integer(2, 3)
    case = {"x": t.normal(4, width), "weights": [t.normal(width, width) for _ in range(number)]}
    (got,) = student.ranks(scenarios.compiled_twice, [case]).results
    counted = got.get("counted") if type(got) is dict else None
    message = "After two calls `calls` should be 2: a graph can change a buffer in place."
    t.that(counted == [2] * number, message)


# -- 6 · dynamic


@check("dynamic", points=2, seconds=30)
def check_one_graph_for_all_lengths(student, t):
    "One graph for four lengths, which also fits a fifth"
    recorded, batch, width = lengths_recorded(student, t)
    message = "four lengths needed {graphs} graphs: mark dimension 1 as dynamic before the first call"
    t.that(len(recorded.graphs) == 1 and bool(recorded.calls), message, graphs=len(recorded.graphs))
    other = t.normal(batch, t.integer(17, 40), width)
    given = {f"x{index}": other for index in range(4)}
    the_graph_gives(t, recorded, given, twins.pooled(other), "the function")


@check("dynamic", points=1, seconds=30)
def check_only_the_length(student, t):
    "The batch size stays a constant"
    recorded, _, _ = lengths_recorded(student, t)
    message = "not tested yet: the length is not dynamic from the first call, see the first check"
    t.that(len(recorded.graphs) == 1, message)
    opened = [given.get("size") for graph in recorded.graphs for given in cases.listed(graph, "inputs")]
    dims = {size[1] for size in opened if type(size) is list and len(size) == 2 and type(size[1]) is int}
    message = "Mark only the dimension that changes: the compiler can use the sizes that are constant."
    t.that(dims <= {1}, message)


# -- 7 · pad


@check("pad", points=2)
def check_pad(student, t):
    "The smallest bucket that fits, and padding that the loss ignores"
    for _ in range(3):
        first = t.integer(4, 9)
        length = t.integer(2, first - 1) + t.choice((0, first))
        padded_right(student, t, length, [first, 2 * first, 4 * first])


@check("pad", points=1)
def check_pad_edges(student, t):
    "A length that equals a bucket, and unsorted buckets"
    first = t.integer(4, 9)
    buckets = [4 * first, first, 2 * first]
    for length in buckets:
        padded_right(student, t, length, buckets)


# -- 8 · buckets


@check("buckets", points=4)
def check_cheapest(student, t):
    "Few lengths: no other choice is cheaper"
    for padded in (0.02, 0.3, 1.5):  # from one bucket to many
        counts, compile_seconds = cases.drawn_counts(t, 10, 60), t.uniform(2.0, 6.0)
        case = counts, compile_seconds, padded * compile_seconds / (30 * max(counts))
        as_cheap(student, t, case, twins.cheapest_of_all(*case))
    case = cases.misleading_counts(t, twins.added_one_by_one, twins.removed_one_by_one)
    as_cheap(student, t, case, twins.cheapest(*case))


@check("buckets", points=2, seconds=20)
def check_cheapest_of_many(student, t):
    "Many lengths, and a compilation that costs nothing"
    case = cases.drawn_counts(t, 60, 400), 0.0, t.uniform(1e-4, 1e-3)
    as_cheap(student, t, case, twins.cheapest(*case))


# -- 9 · optimizer


@check("optimizer", points=2)
def check_adamw_values(student, t):
    "Five steps with a changing learning rate, with the same values as torch"
    constants = ("beta1", "beta2", "eps", "decay")
    settings = {name: t.number(student.get(name.upper()), name.upper()) for name in constants}
    parameter = t.normal(t.integer(2, 5), 3)
    gradients, rates = (
        [t.normal(*parameter.shape) for _ in range(5)],
        [t.uniform(1e-3, 1e-1) for _ in range(5)],
    )
    what = "the parameter after step {number} (weight decay shrinks the parameter itself, not the gradient)"
    got, first, second = parameter, torch.zeros_like(parameter), torch.zeros_like(parameter)
    for number, (gradient, rate) in enumerate(zip(gradients, rates), 1):
        taken = student.adamw(got, gradient, first, second, torch.tensor(float(number)), torch.tensor(rate))
        got, first, second = taken = t.items(taken, 3, "the results of adamw")
        for each in taken:
            t.tensor(each, "a result of adamw", shape=parameter.shape)
        want = twins.after_adamw(parameter, gradients[:number], rates[:number], settings)
        t.close(got, want, what, number=number, atol=1e-5)


@check("optimizer", points=3, seconds=30)
def check_adamw_graph(student, t):
    "One graph for every step and every learning rate"
    rows, width = t.integer(2, 5), t.integer(2, 5)
    first, *drawn = [cases.adamw_case(t, rows, width) for _ in range(3)]
    others = []
    for other in drawn:
        results = t.items(student.adamw(**other), 3, "the results of adamw")
        others += [(other, t.tensor(each, "a result of adamw")) for each in results]
    one_graph_gives(student, t, "adamw", first, others)


# -- 10 · blocks


@check("blocks", points=3, seconds=40)
def check_blocks(student, t):
    "One graph of one block, for all blocks"
    model, case = llama_case(t)
    run = student.ranks(scenarios.compiled_model, [case])
    got = run.results[0]
    if type(got) is not dict or "logits" not in got:
        raise Wrong("the compiled model returned no logits")
    with torch.no_grad():
        t.close(got["logits"], model(case["tokens"]), "the logits of the compiled model", atol=1e-4)
    recorded, number = Recorded.read(got), case["config"].num_layers
    graphs, calls = len(recorded.graphs), len(recorded.calls)
    t.that(graphs > 0, "nothing is compiled: no call of the model ran a graph")
    deep = (
        "one graph ran {calls} times for {number} blocks: compiled as a whole, the graph holds every block "
        "and grows with the depth"
    )
    t.that(graphs > 1 or calls == number, deep, calls=calls, number=number)
    own = (
        "{number} blocks have {graphs} graphs: with the same code and the same backend object, the second "
        "block finds the graph of the first"
    )
    t.that(graphs == 1, own, number=number, graphs=graphs)
    weights = {name: value.detach() for name, value in model.named_parameters()}
    for index, call in enumerate(recorded.calls):
        given = [arg.get("value") for arg in cases.listed(call, "args")]
        hidden = next((arg for arg in given if isinstance(arg, Tensor) and arg.dim() == 3), None)
        t.that(hidden is not None, "the graph of block {index} did not receive the hidden state", index=index)
        with torch.no_grad():
            want = model.layers[index](hidden, *rotation(case["config"], hidden.shape[1], hidden))
        same = cases.nearest(recorded.replayed(call, weights), want)
        message = "the graph does not compute block {index}"
        t.that(same is not None and torch.allclose(same, want, atol=1e-4), message, index=index)


@check("blocks", points=1, seconds=40)
def check_names_stay(student, t):
    "A checkpoint still fits"
    model, case = llama_case(t)
    got = student.ranks(scenarios.compiled_model, [case]).results[0]
    message = "not tested yet: nothing is compiled, no call of the model ran a graph"
    t.that(len(Recorded.read(got).graphs) > 0, message)
    names = got.get("names") if type(got) is dict else None
    message = "After compiling, the parameters have other names: a module that wraps a block adds a prefix."
    t.that(names == list(model.state_dict()), message)


# -- 11 · break-even


@check("break_even", points=2)
def check_break_even(student, t):
    "The first step after which compiling has paid"
    for _ in range(4):
        compiled = t.integer(1, 8) / 8
        as_soon(student, t, t.integer(1, 400) / 8, compiled + t.integer(1, 8) / 8, compiled)


@check("break_even", points=2)
def check_best_mode(student, t):
    "The mode with the shortest total time for a number of steps"
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


@check("break_even", points=1)
def check_never(student, t):
    "A step that is not faster: None; a compilation that costs nothing: 0"
    step = t.integer(1, 8) / 8
    as_soon(student, t, t.integer(1, 9) / 8, step, step)
    as_soon(student, t, t.integer(1, 9) / 8, step, step + 0.125)
    for compiled in (step, step + 0.125, step + 0.25):
        as_soon(student, t, 0.0, step + 0.125, compiled)
