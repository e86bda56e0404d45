"""The visible checks of ``Rule`` and of the update rules: trajectories on drawn parameters, gradients and
options, compared with twins in float64."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dlo_lib.grading.checks.contract import check
from dlo_lib.labkit.compare import explaining, near, same, wrong_if

from .scenarios import (
    adam_steps,
    adamw_steps,
    lamb_steps,
    lars_steps,
    lion_steps,
    momentum_steps,
    muon_steps,
    resumed,
    ruled,
    saved,
)
from .twins import (
    adamw_of,
    directions_of,
    lamb_of,
    lars_of,
    lion_of,
    momentum_of,
    muon_of,
    orthogonal_of,
    rule_of,
)

Twin = Callable[..., dict[str, list[Tensor]]]
COPIED = {"LibraryUsed": "This exercise asks you to write an update rule of a library: do not use it"}
LIBRARY = {
    "torch.optim": ("SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "RMSprop", "Muon"),
    "torch.optim.sgd": ("_single_tensor_sgd", "_multi_tensor_sgd"),
    "torch.optim.adam": ("_single_tensor_adam", "_multi_tensor_adam"),
    "torch.optim._muon": ("_zeropower_via_newtonschulz", "_single_tensor_muon"),
}


@functools.cache
def library() -> list[str]:
    """The classes and functions that an answer of one's own does not use, those that this release has."""
    found = []
    for module, names in LIBRARY.items():
        try:
            holder = importlib.import_module(module)
        except ModuleNotFoundError:  # Muon is new in PyTorch 2.9
            continue
        found += [f"{module}.{name}" for name in names if hasattr(holder, name)]
    return found


def refused(student, name: str) -> list[str]:
    return library() if student.is_own(name) else []


def drawn(t, *shapes: Sequence[int], steps: int) -> tuple[list[Tensor], list[list[Tensor]]]:
    """Parameters of these shapes, and a gradient of each for each step, in float64."""
    starts = [t.normal(*shape).double() for shape in shapes]
    return starts, [[t.normal(*shape).double() for shape in shapes] for _ in range(steps)]


def shape(t, dims: int) -> list[int]:
    return [t.integer(2, 5) for _ in range(dims)]


STEPS = {
    "momentum": momentum_steps,
    "adam": adam_steps,
    "adamw": adamw_steps,
    "lars": lars_steps,
    "lamb": lamb_steps,
    "lion": lion_steps,
    "muon": muon_steps,
}


def steps_of(
    student, t, rule: str, twin: Twin, options: Mapping[str, Any], mistakes: Mapping[str, str], **how: Any
) -> None:
    """The trajectories of two parameters, whose steps alternate, are those of ``twin``.

    ``how``: ``shapes`` and the number of ``steps``; ``zeros``: some weights and gradients are 0; ``also``:
    ways that another check names, which pass here; ``name``: the function that the answer has, if it is not
    ``rule``.
    """
    shapes = how.get("shapes") or [shape(t, t.integer(1, 2)) for _ in range(2)]
    starts, gradients = drawn(t, *shapes, steps=how.get("steps") or t.integer(4, 7))
    if how.get("zeros"):
        starts[0], gradients[0][1] = torch.zeros_like(starts[0]), torch.zeros_like(starts[1])
    close = (1e-3, 1e-4) if rule == "muon" else (1e-5, 1e-6)  # the polynomial stretches small differences
    name = how.get("name", rule)
    case = {"starts": starts, "gradients": gradients, "options": dict(options)}
    with explaining(COPIED | {"ZeroDiv": "A norm can be 0: then the ratio is 1"}):
        result = student.run(STEPS[rule], refused=refused(student, name), **case)
    found, passed = t.items(result, 2, "the result")
    rows = [t.items(row, len(shapes), "the values") for row in t.items(found, len(gradients), "the steps")]
    for number, start in enumerate(starts):
        own = [step[number] for step in gradients]
        known = twin(own, dict(options)) if rule == "adam" else twin(start, own, dict(options))
        got = [t.tensor(row[number], "the value", shape=start.shape) for row in rows]
        right = known.get("right", known.get(""))
        if any(near(got, known[way], *close) for way in how.get("also", ()) if way in known):
            continue
        wrong = {message: known[way] for message, way in mistakes.items()}
        wrong_if(t, got, right, wrong, *close)
        what = {"adam": "the direction of adam_direction in step {i}"}.get(rule, "the value after step {i}")
        for step, (value, want) in enumerate(zip(got, right), 1):
            t.close(value, want, what + " of {name}", rtol=close[0], atol=close[1], i=step, name=name)
    same(t, passed, gradients, "the gradient after {name}, which must not write into it", {}, 0.0, 0.0)


# -- rule

ONE_STATE = "Parameters share one state. Pass the own state of each: self.state[parameter]."
FORGOTTEN = "The state of a parameter is empty again in each step: pass self.state[parameter] itself."
NO_GRADIENT = {"NoneType": "A parameter whose .grad is None has no update in this step: leave it out"}


def rule_case(t, sizes: list[int], steps: int) -> dict[str, Any]:
    starts, gradients = drawn(t, *[[t.integer(2, 5)]] * sum(sizes), steps=steps)
    case = {"starts": starts, "gradients": gradients, "default": t.uniform(0.01, 0.3)}
    return case | {"sizes": sizes, "rates": [None] * len(sizes)}


def rule_rows(student, t, case: dict[str, Any], recording: bool = False) -> list[list[Tensor]]:
    with explaining(COPIED | NO_GRADIENT):
        result = student.run(ruled, refused=refused(student, "Rule"), **case)
    found, records = t.items(result, 2, "the result")
    t.that(
        records is True or not recording,
        "After step() autograd records nothing: use `with torch.no_grad():`.",
    )
    return [
        [t.tensor(value, "a parameter") for value in t.items(row, len(case["starts"]), "the parameters")]
        for row in t.items(found, len(case["gradients"]), "the steps")
    ]


def rule_twin(case: dict[str, Any], rates: list[float | None]) -> dict[str, list[list[Tensor]]]:
    return rule_of(
        case["starts"], case["gradients"], [case["default"] if rate is None else rate for rate in rates]
    )


@check("rule", points=1)
def check_groups(student, t):
    "Each group has its own options, and the default where it has none"
    rates = [t.uniform(0.4, 0.6), *t.shuffled([None, t.uniform(0.7, 0.9)])]
    case = rule_case(t, [1, 1, 1], 1) | {"rates": rates}
    got, want = rule_rows(student, t, case), rule_twin(case, rates)
    default, unmoved = rule_twin(case, [None] * 3)["right"], [case["starts"]]
    mistakes = {
        "Every group has moved with the default of the constructor: pass the group itself.": default,
        "step() has not changed the parameters.": unmoved,
    }
    if near(got, want["one state"], 1e-6):  # the check of the states names it
        return
    same(t, got, want["right"], "a parameter after the step", mistakes)


@check("rule", points=1)
def check_states(student, t):
    "Each parameter keeps its own state between the steps"
    case = rule_case(t, [2, 1], t.integer(3, 5))
    got, want = rule_rows(student, t, case, recording=True), rule_twin(case, [None] * 3)
    same(
        t,
        got,
        want["right"],
        "a parameter after some steps",
        {ONE_STATE: want["one state"], FORGOTTEN: want["forgotten"]},
    )


@check("rule", points=1)
def check_no_gradient(student, t):
    "A parameter without a gradient keeps its value and its state"
    case = rule_case(t, [3], 4)
    first, second = t.shuffled([1, 2])
    case["gradients"][first][0] = case["gradients"][second][t.integer(1, 2)] = None
    case["gradients"][3][0] = torch.zeros_like(case["starts"][0])  # a gradient of zeros is a gradient
    got, want = rule_rows(student, t, case), rule_twin(case, [None] * 3)
    if any(near(got, want[way], 1e-6) for way in ("one state", "forgotten")):
        return
    same(t, got, want["right"], "a parameter, where a gradient is None in one step", {})


@check("rule", points=2, seconds=30)
def check_resume(student, t):
    "A resumed run in another process continues"
    before, after = t.integer(2, 3), t.integer(2, 3)
    case = rule_case(t, [2], before + after)
    gradients, rate = case["gradients"], case["default"]
    why = "The state dict must hold tensors and plain data only: keep the function `update` out "
    why += "of the options"
    cause = {"ickle": why, "local object": why}  # the second in Python 3.13: "Can't get local object"
    with explaining(cause):
        stopped = student.fresh(saved, starts=case["starts"], gradients=gradients[:before], rate=rate)
    values, file = t.items(stopped, 2, "the result")
    t.tensor(file, "the file", dtype=torch.uint8)
    t.items(values, 2, "the parameters")
    with explaining(cause):
        got = student.fresh(
            resumed, starts=values, file=file, gradients=gradients[before:], rate=t.uniform(0.4, 0.9)
        )
    want = rule_twin(case, [None, None])
    restart = rule_of([value.double() for value in values], gradients[before:], [rate, rate])["right"]
    if any(near([values], [want[way][before - 1]], 1e-6) for way in ("one state", "forgotten")):
        return
    message = "After load_state_dict the state is empty: keep it in self.state, which state_dict() saves."
    same(t, got, want["right"][before:], "a parameter after the resume", {message: restart})


# -- momentum, adam, adamw


@check("momentum", points=2)
def check_momentum(student, t):
    "The steps follow the mean of the gradients"
    for _ in range(2):
        options = {"lr": t.uniform(0.05, 0.4), "beta": t.uniform(0.6, 0.95)}
        mistakes = {
            "The gradients are summed: the new gradient has the weight 1 - beta.": "sum",
            "beta and 1 - beta are exchanged: the old mean has the weight beta.": "swapped",
            "The parameter follows the gradient alone: keep the mean in `state`.": "gradient",
            "The mean is corrected as Adam's. This one is not.": "corrected",
        }
        steps_of(student, t, "momentum", momentum_of, options, mistakes)


def adam_options(t, eps: float, **more: float) -> dict[str, Any]:
    return {"betas": (t.uniform(0.6, 0.9), t.uniform(0.92, 0.99)), "eps": eps} | more


RAW, RAW_SQUARES = "nothing corrected", "squares not corrected"


@check("adam", points=2)
def check_direction(student, t):
    "The corrected averages of the gradients and of their squares"
    for _ in range(2):
        mistakes = {
            "The averages start at 0, so the first ones are too small: divide by 1 - beta ** step.": RAW,
            "The average of the squares is not corrected: divide it by 1 - beta2 ** step.": RAW_SQUARES,
            "v is the average of the squares, not the square of an average.": "the squares of a mean",
            "beta1 and beta2 are exchanged.": "swapped",
        }
        steps_of(student, t, "adam", directions_of, adam_options(t, 1e-14), mistakes, name="adam_direction")


@check("adam", points=1)
def check_epsilon(student, t):
    "The constant eps stands beside the root"
    options = adam_options(t, t.uniform(0.05, 0.3))
    mistakes = {"eps is inside the root. It belongs beside it: sqrt(v) + eps.": "inside"}
    also = (RAW, RAW_SQUARES, "the squares of a mean", "swapped")
    steps_of(student, t, "adam", directions_of, options, mistakes, also=also, name="adam_direction")


@check("adamw", points=2)
def check_decoupled(student, t):
    "The decay is separate from the gradient"
    for _ in range(2):
        options = adam_options(
            t, t.uniform(0.05, 0.3), lr=t.uniform(0.05, 0.3), weight_decay=t.uniform(0.1, 0.6)
        )
        mistakes = {
            "The averages see the decay, which is in the gradient: let the weight shrink alone.": "coupled",
            "The weight does not decay: p <- p (1 - lr weight_decay) before the update.": "none",
            "The decay is not multiplied by the learning rate.": "without rate",
            "The update of this step decays too: shrink the weight before the update.": "after",
        }
        steps_of(student, t, "adamw", adamw_of, options, mistakes)


# -- lars, lamb, lion


@check("layers", points=2)
def check_lars(student, t):
    "LARS: the ratio of a layer's weights to its gradient"
    options = {"lr": t.uniform(0.2, 0.9), "weight_decay": t.uniform(0.1, 0.5), "beta": t.uniform(0.5, 0.9)}
    mistakes = {
        "All layers have one rate: multiply gradient and decay by the ratio of the layer.": "ratio 1",
        "The denominator of the ratio is |g| + weight_decay |p|.": "no decay in the norm",
        "The ratio is upside down: large weights allow large steps.": "inverse",
    }
    shapes = [shape(t, 2), shape(t, 4)]
    options["trust"] = t.uniform(0.05, 0.3)
    steps_of(student, t, "lars", lars_of, options, mistakes, shapes=shapes)


@check("layers", points=2)
def check_lamb(student, t):
    "LAMB: the step of a layer is a fraction of its norm"
    options = adam_options(t, 1e-6, lr=t.uniform(0.05, 0.3), weight_decay=t.uniform(0.3, 0.8))
    mistakes = {
        "The update is not rescaled: give it the norm of the weights.": "ratio 1",
        "The decay belongs to the update, before its norm is taken.": "decay outside",
    }
    steps_of(student, t, "lamb", lamb_of, options, mistakes, shapes=[shape(t, 2), shape(t, 4)])


@check("layers", points=1)
def check_vectors(student, t):
    "Vectors are not rescaled"
    message = "A parameter with one dimension has the ratio 1: a bias that starts at 0 could never move."
    lars = {"lr": t.uniform(0.2, 0.9), "weight_decay": t.uniform(0.1, 0.5), "beta": t.uniform(0.5, 0.9)}
    lars["trust"] = t.uniform(0.05, 0.3)
    also = ("ratio 1",)
    shapes = [[t.integer(3, 6)], [t.integer(3, 6)]]
    steps_of(
        student,
        t,
        "lars",
        lars_of,
        lars,
        {message: "rescaled"},
        shapes=shapes,
        also=also,
    )
    lamb = adam_options(t, 1e-6, lr=t.uniform(0.05, 0.3), weight_decay=0.0)
    steps_of(student, t, "lamb", lamb_of, lamb, {message: "rescaled"}, shapes=shapes, also=also)


@check("layers", points=1)
def check_zeros(student, t):
    "A matrix or a gradient of zeros has the ratio 1"
    frozen = "A matrix of zeros never moves: where one of the norms is 0, the ratio is 1."
    lars = {"lr": t.uniform(0.2, 0.9), "weight_decay": 0.0, "beta": t.uniform(0.5, 0.9)}
    lars["trust"] = t.uniform(0.05, 0.3)
    lamb = adam_options(t, 1e-6, lr=t.uniform(0.05, 0.3), weight_decay=t.uniform(0.3, 0.8))
    also = ("ratio 1", "inverse", "decay outside")
    for rule, twin, options in (("lars", lars_of, lars), ("lamb", lamb_of, lamb)):
        shapes = [shape(t, 2), shape(t, 2)]
        steps_of(student, t, rule, twin, options, {frozen: "frozen"}, shapes=shapes, zeros=True, also=also)


@check("lion", points=2)
def check_lion(student, t):
    "Every element moves by the learning rate"
    for _ in range(2):
        options = {"lr": t.uniform(0.05, 0.3), "weight_decay": t.uniform(0.1, 0.6)}
        options["betas"] = (t.uniform(0.8, 0.95), t.uniform(0.4, 0.6))  # far apart, so that all mistakes show
        mistakes = {
            "The weight does not decay by itself, outside of the sign: p (1 - lr weight_decay).": "no decay",
            "The direction is that of the new average: take the old one, with beta1.": "one average",
            "The average moved before the direction: take the old one.": "moved first",
            "beta1 and beta2 are exchanged.": "swapped",
            "The direction is the sign of the gradient alone.": "gradient",
        }
        steps_of(student, t, "lion", lion_of, options, mistakes, steps=t.integer(8, 11))


# -- orthogonal, muon


@check("orthogonal", points=2)
def check_orthogonal(student, t):
    "The singular values move towards 1, the directions stay"
    small, large = t.integer(2, 4), t.integer(5, 8)
    for rows, columns in ((small, large), (large, small)):
        matrix, steps = t.normal(rows, columns).double() * t.uniform(0.5, 20.0), t.integer(3, 5)
        known = orthogonal_of(matrix, steps)
        mistakes = {
            "The matrix is divided by its largest singular value: the text asks for its norm.": known[
                "largest"
            ],
            "This is the exact U V^T: the text asks for steps of the polynomial.": known["exact"],
            "There is one step too few.": known["fewer"],
            "There is one step too many.": known["more"],
        }
        what = "the result for a matrix of {rows} x {columns}"
        got = student.orthogonalised(matrix, steps)
        same(t, got, known["right"], what, mistakes, 1e-3, 1e-4, rows=rows, columns=columns)


@check("orthogonal", points=1)
def check_zero(student, t):
    "A matrix of zeros stays zero"
    rows, columns = t.integer(2, 4), t.integer(3, 6)
    full = student.orthogonalised(t.uniform(5.0, 20.0) * t.normal(rows, columns).double(), 5)
    ordinary = type(full) is Tensor and 0.5 < float(full.norm()) < 1.3 * rows**0.5
    t.that(ordinary, "not tested yet: the result for an ordinary matrix is not right, see the first check")
    got = t.tensor(student.orthogonalised(torch.zeros(rows, columns).double(), 5), "the result")
    message = "For a matrix of zeros the result is not a number: add a small constant to the norm."
    t.that(not bool(got.isnan().any()), message)
    t.close(got, torch.zeros(rows, columns).double(), "the result for zeros")


def muon_options(t) -> dict[str, Any]:
    eps = t.uniform(0.05, 0.3)
    options = adam_options(t, eps, lr=t.uniform(0.05, 0.3), weight_decay=t.uniform(0.1, 0.6))
    return options | {"beta": t.uniform(0.5, 0.9)}


@check("muon", points=2)
def check_muon(student, t):
    "Matrices and convolutions: the orthogonalised momentum, scaled"
    mistakes = {
        "The momentum itself is orthogonalised. Look one step ahead: beta m + (1 - beta) g.": "not ahead",
        "The factor 0.2 sqrt(max(rows, columns)) is missing.": "no scale",
        "The factor takes the larger of rows and columns.": "columns",
        "The gradient alone is orthogonalised: keep the momentum in `state`.": "gradient",
        "The weight does not decay: p <- p (1 - lr weight_decay), as in AdamW.": "no decay",
    }
    shapes = [[t.integer(2, 4), t.integer(5, 7)], [t.integer(5, 7), t.integer(2, 4)]]
    shapes.append([t.integer(3, 5), 2, t.integer(2, 3), 2])
    steps_of(student, t, "muon", muon_of, muon_options(t), mistakes, shapes=shapes)


@check("muon", points=1)
def check_muon_vectors(student, t):
    "Vectors have the update of AdamW"
    shapes = [[t.integer(3, 6)], [t.integer(3, 6)]]
    steps_of(student, t, "muon", adamw_of, muon_options(t), {}, shapes=shapes)
