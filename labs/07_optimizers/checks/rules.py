"""The visible checks of the update rules: trajectories on drawn parameters, gradients and options, compared
with twins in float64."""

from __future__ import annotations

import contextlib
import functools
import importlib
from typing import Any

import torch
from torch import Tensor

from dlo_lib.grading.checks.contract import check
from dlo_lib.labkit.compare import explaining, near, same, wrong_if

from . import scenarios, twins

CAUSES = {
    "LibraryUsed": "This exercise asks you to write an update rule of a library: do not use it",
    "ZeroDiv": "A norm can be 0: then the ratio is 1",
}
UNMOVED = "The parameter has not changed: move it in place, as `parameter -= ...` does."
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
        with contextlib.suppress(ModuleNotFoundError):  # Muon is new in PyTorch 2.9
            holder = importlib.import_module(module)
            found += [f"{module}.{name}" for name in names if hasattr(holder, name)]
    return found


def shape(t, dims: int) -> list[int]:
    return [t.integer(2, 5) for _ in range(dims)]


RANGES = {"lr": (0.05, 0.3), "weight_decay": (0.1, 0.6), "eps": (0.05, 0.3), "beta": (0.5, 0.9)}
RANGES |= {"trust": (0.05, 0.3)}


def options_of(t, *names: str, **fixed: Any) -> dict[str, Any]:
    """Drawn options of these names, besides those that are ``fixed``."""
    drawn: dict[str, Any] = {name: t.uniform(*RANGES[name]) for name in names if name != "betas"}
    if "betas" in names:
        drawn["betas"] = (t.uniform(0.6, 0.9), t.uniform(0.92, 0.99))
    return drawn | fixed


def steps_of(student, t, rule, twin, options, mistakes, *, shapes=(), steps=0, zeros=False, also=()):
    """The trajectories of parameters, whose steps alternate, are those of ``twin``.

    ``mistakes``: the way of the twin under its message; ``shapes`` and ``steps`` are drawn if there are none;
    ``zeros``: some weights and gradients are 0; ``also``: ways that another check names, which pass here.
    """
    shapes = shapes or [shape(t, t.integer(1, 2)) for _ in range(2)]
    starts = [t.normal(*size).double() for size in shapes]
    gradients = [[t.normal(*size).double() for size in shapes] for _ in range(steps or t.integer(4, 7))]
    if zeros:
        starts[0], gradients[0][1] = torch.zeros_like(starts[0]), torch.zeros_like(starts[1])
    close = (1e-3, 1e-4) if rule == "muon" else (1e-5, 1e-6)  # the polynomial stretches small differences
    case = {"starts": starts, "gradients": gradients, "options": dict(options)}
    with explaining(CAUSES):
        refused = library() if student.is_own(rule) else []
        result = student.run(getattr(scenarios, rule), refused=refused, **case)
    found, passed = t.items(result, 2, "the result")
    rows = [t.items(row, len(shapes), "the values") for row in t.items(found, len(gradients), "the steps")]
    what = "the direction in step {i}" if rule == "adam_direction" else "the value after step {i}"
    for number, start in enumerate(starts):
        known = twin(start, [step[number] for step in gradients], dict(options))
        got = [t.tensor(row[number], "the value", shape=start.shape) for row in rows]
        if any(near(got, known[way], *close) for way in also if way in known):
            continue
        wrong = {message: known[way] for message, way in mistakes.items()} | {UNMOVED: [start] * len(got)}
        wrong_if(t, got, known["right"], wrong, *close)
        for step, (value, want) in enumerate(zip(got, known["right"]), 1):
            t.close(value, want, what + " of {name}", rtol=close[0], atol=close[1], i=step, name=rule)
    same(t, passed, gradients, "the gradient after {name}, which must not write into it", {}, 0.0, 0.0)


# -- momentum, adam, adamw


@check("momentum", points=2)
def check_momentum(student, t):
    "The steps follow the mean of the gradients"
    mistakes = {
        "The gradients are summed: the new gradient has the weight 1 - beta.": "sum",
        "beta and 1 - beta are exchanged: the old mean has the weight beta.": "swapped",
        "The parameter follows the gradient alone: keep the mean in `state`.": "gradient",
        "Each step begins with a mean of 0: keep the new mean in `state`.": "not kept",
        "The mean is corrected as Adam's. This one is not.": "corrected",
    }
    for _ in range(2):
        steps_of(student, t, "momentum", twins.momentum_of, options_of(t, "lr", "beta"), mistakes)


@check("adam", points=2)
def check_direction(student, t):
    "The corrected averages of the gradients and of their squares"
    mistakes = {
        "The averages start at 0, so the first ones are too small: divide by 1 - beta ** step.": "raw",
        "The average of the squares is not corrected: divide it by 1 - beta2 ** step.": "raw squares",
        "v is the average of the squares, not the square of an average.": "the squares of a mean",
        "beta1 and beta2 are exchanged.": "swapped",
        "The number of the step stays at 1: count it in `state`.": "first step",
    }
    for _ in range(2):
        options = options_of(t, "betas", eps=1e-14)
        steps_of(student, t, "adam_direction", twins.directions_of, options, mistakes)


@check("adam", points=1)
def check_epsilon(student, t):
    "The constant eps stands beside the root"
    mistakes = {"eps is inside the root. It belongs beside it: sqrt(v) + eps.": "inside"}
    also = ("raw", "raw squares", "the squares of a mean", "swapped", "first step")
    options = options_of(t, "betas", "eps")
    steps_of(student, t, "adam_direction", twins.directions_of, options, mistakes, also=also)


ADAM = ("lr", "betas", "eps", "weight_decay")


@check("adamw", points=2)
def check_decoupled(student, t):
    "The decay is separate from the gradient"
    mistakes = {
        "The averages see the decay, which is in the gradient: let the weight shrink alone.": "coupled",
        "The weight does not decay: p <- p (1 - lr weight_decay) before the update.": "none",
        "The decay is not multiplied by the learning rate.": "without rate",
        "The update of this step decays too: shrink the weight before the update.": "after",
    }
    for _ in range(2):
        steps_of(student, t, "adamw", twins.adamw_of, options_of(t, *ADAM), mistakes)


# -- lars, lamb, lion


LARS = ("lr", "beta", "trust")
TRUST = "The ratio is 1 there, without the factor `trust`."


@check("layers", points=2)
def check_lars(student, t):
    "LARS: the ratio of a layer's weights to its gradient"
    mistakes = {
        "All layers have one rate: multiply gradient and decay by the ratio of the layer.": "ratio 1",
        "The denominator of the ratio is |g| + weight_decay |p|.": "no decay in the norm",
        "The denominator is a sum of two norms, |g| + weight_decay |p|.": "norm of the sum",
        "The ratio is upside down: large weights allow large steps.": "inverse",
    }
    options, shapes = options_of(t, *LARS, "weight_decay"), [shape(t, 2), shape(t, 4)]
    steps_of(student, t, "lars", twins.lars_of, options, mistakes, shapes=shapes)


@check("layers", points=2)
def check_lamb(student, t):
    "LAMB: the step of a layer is a fraction of its norm"
    mistakes = {
        "The update is not rescaled: give it the norm of the weights.": "ratio 1",
        "The decay belongs to the update, before its norm is taken.": "decay outside",
        "The denominator is the norm of u + weight_decay p, not that of u.": "norm of u",
    }
    options, shapes = options_of(t, *ADAM) | {"eps": 1e-6}, [shape(t, 2), shape(t, 4)]
    steps_of(student, t, "lamb", twins.lamb_of, options, mistakes, shapes=shapes)


@check("layers", points=1)
def check_vectors(student, t):
    "Vectors are not rescaled"
    message = "A parameter with one dimension has the ratio 1: a bias that starts at 0 could never move."
    how = {"shapes": [[t.integer(3, 6)], [t.integer(3, 6)]], "also": ("ratio 1",)}
    lars = options_of(t, *LARS, "weight_decay")
    steps_of(student, t, "lars", twins.lars_of, lars, {message: "rescaled", TRUST: "trust alone"}, **how)
    lamb = options_of(t, "lr", "betas", eps=1e-6, weight_decay=0.0)
    steps_of(student, t, "lamb", twins.lamb_of, lamb, {message: "rescaled"}, **how)


@check("layers", points=1)
def check_zeros(student, t):
    "A matrix or a gradient of zeros has the ratio 1"
    frozen = {"A matrix of zeros never moves: where one of the norms is 0, the ratio is 1.": "frozen"}
    how = {"zeros": True, "also": ("ratio 1", "inverse", "decay outside", "norm of u", "trust alone")}
    lars, lamb = options_of(t, *LARS, weight_decay=0.0), options_of(t, *ADAM) | {"eps": 1e-6}
    for rule, twin, options in (("lars", twins.lars_of, lars), ("lamb", twins.lamb_of, lamb)):
        steps_of(student, t, rule, twin, options, frozen, shapes=[shape(t, 2), shape(t, 2)], **how)


@check("lion", points=2)
def check_lion(student, t):
    "Every element moves by the learning rate"
    mistakes = {
        "The weight does not decay by itself, outside of the sign: p (1 - lr weight_decay).": "no decay",
        "The direction is that of the new average: take the old one, with beta1.": "one average",
        "The average moved before the direction: take the old one.": "moved first",
        "beta1 and beta2 are exchanged.": "swapped",
        "The average takes beta2 after the direction, not beta1 again.": "beta1 twice",
        "The direction is the sign of the gradient alone: keep the new average in `state`.": "gradient",
    }
    for _ in range(2):
        betas = (t.uniform(0.8, 0.95), t.uniform(0.4, 0.6))  # far apart, so that all mistakes show
        options = options_of(t, "lr", "weight_decay", betas=betas)
        steps_of(student, t, "lion", twins.lion_of, options, mistakes, steps=t.integer(8, 11))


# -- orthogonal, muon


@check("orthogonal", points=2)
def check_orthogonal(student, t):
    "The singular values move towards 1, the directions stay"
    small, large = t.integer(2, 4), t.integer(5, 8)
    ways = {
        "The matrix is divided by its largest singular value: the text asks for its norm.": "largest",
        "This is the exact U V^T: the text asks for steps of the polynomial.": "exact",
        "There is one step too few.": "fewer",
        "There is one step too many.": "more",
    }
    what = "the result for a matrix of {rows} x {columns} and {steps} steps"
    for rows, columns, steps in ((small, large, 1), (large, small, t.integer(3, 5))):
        matrix = t.normal(rows, columns).double() * t.uniform(0.5, 20.0)
        known = twins.orthogonal_of(matrix, steps)
        mistakes = {message: known[way] for message, way in ways.items()}
        if steps == 1:
            squared = "A^2 is the product A @ A: `A ** 2` squares the elements."
            mistakes[squared] = twins.squared_elements(matrix)
        got, after = t.items(student.run(scenarios.orthogonal, matrix=matrix, steps=steps), 2, "the result")
        case = {"rows": rows, "columns": columns, "steps": steps}
        same(t, got, known["right"], what, mistakes, 1e-3, 1e-4, **case)
        t.that(near(after, matrix), "The matrix of the caller has changed: return a new one.")


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


@check("muon", points=2)
def check_muon(student, t):
    "Matrices and convolutions: the orthogonalised momentum, scaled"
    mistakes = {
        "The momentum itself is orthogonalised. Look one step ahead: beta m + (1 - beta) g.": "not ahead",
        "The factor 0.2 sqrt(max(rows, columns)) is missing.": "no scale",
        "The factor takes the larger of rows and columns.": "columns",
        "The factor takes rows and columns of the flattened matrix.": "sizes",
        "The gradient alone is orthogonalised: keep the momentum in `state`.": "gradient",
        "The weight does not decay: p <- p (1 - lr weight_decay), as in AdamW.": "no decay",
    }
    shapes = [[t.integer(2, 4), t.integer(5, 7)], [t.integer(5, 7), t.integer(2, 4)]]
    shapes.append([t.integer(3, 5), 2, t.integer(2, 3), 2])
    steps_of(student, t, "muon", twins.muon_of, options_of(t, *ADAM, "beta"), mistakes, shapes=shapes)


@check("muon", points=1)
def check_muon_vectors(student, t):
    "Vectors have the update of AdamW"
    shapes = [[t.integer(3, 6)], [t.integer(3, 6)]]
    steps_of(student, t, "muon", twins.adamw_of, options_of(t, *ADAM, "beta"), {}, shapes=shapes)
