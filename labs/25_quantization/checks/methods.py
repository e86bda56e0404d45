"""The visible checks of outliers, SmoothQuant, AWQ, GPTQ and training with rounded weights."""

from __future__ import annotations

import torch
from torch import Tensor

from dlo_lib.grading.checks.contract import check, scenario
from dlo_lib.grading.checks.twins import twin
from dlo_lib.labkit.compare import double, wrong_if

from .twins import (
    awq_both,
    awq_errors,
    correlated,
    drawn_outliers,
    gptq_by_inverses,
    restored,
    rounded,
    smoothing,
    ternary_weights,
    with_outliers,
    wrong_factors,
)

FP64 = {"rtol": 1e-8, "atol": 1e-9}

# -- outliers


@check("outliers", points=1)
def check_columns(student, t):
    "The outlier columns"
    for _ in range(2):
        x, columns = drawn_outliers(t, t.integer(3, 6), t.integer(10, 20), t.integer(2, 4))
        quiet = [j for j in range(x.shape[1]) if j not in columns][:3]
        for j, value in zip(quiet, (-9.0, 9.0, 6.0)):  # one token is enough, and a negative value too
            x[t.integer(0, len(x) - 1), j] = value
        want = torch.tensor(sorted([*columns, *quiet]))
        got = student.outlier_columns(x, 6.0)
        t.tensor(got, "outlier_columns(...)", dtype=torch.int64)
        once = torch.tensor([j for j in want.tolist() if bool((x[:, j].abs() >= 6).all())])
        above = (x >= 6).any(0).nonzero().flatten()
        mistakes = {
            "one token above the threshold makes a column an outlier": once,
            "a large negative number is an outlier too": above,
            "a value equal to the threshold is an outlier too": (x.abs() > 6).any(0).nonzero().flatten(),
        }
        wrong_if(t, got, want, mistakes)
        t.equal(got.tolist(), want.tolist(), "outlier_columns(...)")


def same_product(student, t, x: Tensor, w: Tensor, threshold: float) -> None:
    want = with_outliers(x, w, threshold)
    got = student.llm_int8(x, w, threshold)
    wide = w.abs().amax(1, keepdim=True) / 127
    out = (x.abs() >= threshold).any(0)
    whole, kept, inside, both = torch.round(w / wide) * wide, want, want, want
    if not out.all():
        exact, tokens = x[:, out] @ w[:, out].t(), rounded(x, 8)[:, ~out]
        kept = exact + rounded(x[:, ~out], 8) @ whole[:, ~out].t()
        inside = exact + tokens @ rounded(w[:, ~out], 8).t()
        both = exact + tokens @ whole[:, ~out].t()
    mistakes = {
        "nothing is rounded": x @ w.t(),
        "the outliers are rounded with the rest": rounded(x, 8) @ rounded(w, 8).t(),
        "the grid of a row of w covers its outlier columns: take its largest value from the rest": kept,
        "the grid of a token covers its outliers: the largest values are those of the rest": inside,
        "both grids cover the outliers: the largest values are those of the rest": both,
    }
    wrong_if(t, got, want, mistakes, **FP64)
    t.close(got, want, "llm_int8(...) with threshold {threshold}", threshold=threshold, **FP64)


@check("outliers", points=1)
def check_decomposition(student, t):
    "Outlier columns in floating point, the rest in int8"
    for _ in range(2):
        x, columns = drawn_outliers(t, t.integer(3, 6), t.integer(10, 20), t.integer(2, 3))
        w = double(t, t.integer(3, 7), x.shape[1])
        w[:, columns] *= 5
        same_product(student, t, x, w, t.uniform(4, 8))


@check("outliers", points=1)
def check_no_outliers(student, t):
    "Without an outlier each token and each row has one grid"
    x, _ = drawn_outliers(t, t.integer(3, 6), t.integer(10, 20), 1)
    same_product(student, t, x, double(t, t.integer(3, 7), x.shape[1]), 1000.0)


@check("outliers", points=1)
def check_all_outliers(student, t):
    "Every column may be an outlier"
    x = double(t, t.integer(3, 6), t.integer(5, 9)).sign() * t.uniform(7, 30)
    same_product(student, t, x, double(t, t.integer(3, 7), x.shape[1]), 6.0)


# -- smooth


def smooth_case(t, matrices: int) -> dict:
    """A gain, the matrices that read it, and the largest activations with two outliers."""
    inputs = t.integer(6, 12)
    largest = 0.5 + double(t, inputs).abs()
    largest[t.shuffled(list(range(inputs)))[:2]] *= t.uniform(30, 90)
    weights = [double(t, t.integer(3, 7), inputs) * t.uniform(0.7, 1.4) for _ in range(matrices)]
    weights[-1][0] *= 4
    return {"gain": double(t, inputs), "weights": weights, "largest": largest, "a": t.uniform(0.2, 0.8)}


def smoothed(student, t, case: dict) -> tuple[Tensor, list[Tensor]]:
    gain, weights = t.items(student.smooth(**case), 2, "smooth(...)")
    t.tensor(gain, "the new gain", shape=case["gain"].shape, dtype=torch.float64)
    for new, old in zip(t.items(weights, len(case["weights"]), "the new weights"), case["weights"]):
        t.tensor(new, "a new weight", shape=old.shape, dtype=torch.float64)
    return gain, weights


def same_factors(student, t, case: dict) -> None:
    gain, _ = smoothed(student, t, case)
    s = smoothing(case["weights"], case["largest"], case["a"])
    first = smoothing(case["weights"][:1], case["largest"], case["a"])
    mistakes = {
        "the norm is divided by s, and the weights are multiplied": case["gain"] * s,
        "all matrices share s: take the largest weight of all of them": case["gain"] / first,
        "the exponent is not used": case["gain"] / smoothing(case["weights"], case["largest"], 0.5),
        "the exponents are exchanged: a belongs to the activations, 1 - a to the weights": case["gain"]
        / smoothing(case["weights"], case["largest"], 1 - case["a"]),
    }
    wrong_if(t, gain, case["gain"] / s, mistakes, **FP64)
    t.close(gain, case["gain"] / s, "the new gain for a = {a:.2f}", a=case["a"], **FP64)


@check("smooth", points=1)
def check_factors(student, t):
    "The factors, with one matrix and with three that share them"
    for matrices in (1, 3):
        same_factors(student, t, smooth_case(t, matrices))


@check("smooth", points=1)
def check_equal(student, t):
    "The product is unchanged before rounding, and better after it"
    for matrices in (2, 1):
        case = smooth_case(t, matrices) | {"a": 0.5}
        gain, weights = smoothed(student, t, case)
        x = double(t, 40, len(gain)).clamp(-2, 2) / 2
        x = x * case["largest"] / case["gain"]  # the input of the gain
        for new, old in zip(weights, case["weights"]):
            want = (x * case["gain"]) @ old.t()
            t.close((x * gain) @ new.t(), want, "the product with the new gain and a new weight", **FP64)
    plain = rounded(x * case["gain"], 8) @ rounded(old, 8).t() - want
    error = rounded(x * gain, 8) @ rounded(new, 8).t() - want
    ratio = float(error.norm() / plain.norm())
    message = "in int8 the error is {ratio:.2f} times that without smoothing: it should be smaller"
    t.that(ratio < 0.8, message, ratio=ratio)


@check("smooth", points=1)
def check_dead(student, t):
    "Channels without activations, or without weights"
    case = smooth_case(t, 2)
    places = t.shuffled(list(range(len(case["gain"]))))
    case["largest"][places[0]] = 0
    for w in case["weights"]:
        w[:, places[1]] = 0
    gain, weights = smoothed(student, t, case)
    finite = all(bool(torch.isfinite(each).all()) for each in (gain, *weights))
    t.that(finite, "a channel of zeros gives infinity or NaN: raise both maxima to 1e-5")
    want = case["gain"] / smoothing(case["weights"], case["largest"], case["a"])
    t.close(gain, want, "the new gain with channels of zeros", **FP64)


# -- awq


def awq_case(t) -> dict:
    """A layer with salient channels whose best exponent is neither 0 nor 1, and better than the others."""

    def draw() -> dict:
        group = t.choice([8, 12])
        inputs, steps = 2 * group, t.integer(7, 12)
        x, _ = drawn_outliers(t, 30, inputs, 2, t.uniform(6, 30))
        w = double(t, t.integer(8, 12), inputs)
        return {"x": x, "w": w, "bits": t.integer(3, 4), "group": group, "steps": steps}

    def tells(case: dict) -> bool:
        errors, of_weights = awq_both(**case)
        least, second = sorted(errors)[:2]
        if min(of_weights) < of_weights[0]:  # the search for the best weights gives another answer
            return False
        alone, good = second > 1.001 * least, second < 0.5 * errors[0]
        return alone and good and 0 < errors.index(least) < case["steps"]

    return t.draw_until(draw, tells)


def last_case(t) -> dict:
    """A layer whose best exponent is 1: the weights of its salient channels are small."""

    def draw() -> dict:
        group, bits = t.choice([8, 12]), t.integer(3, 4)
        x, columns = drawn_outliers(t, 30, 2 * group, 2, t.uniform(20, 60))
        w = double(t, t.integer(8, 12), 2 * group)
        w[:, columns] /= 100
        return {"x": x, "w": w, "bits": bits, "group": group, "steps": t.integer(4, 8)}

    def tells(case: dict) -> bool:
        errors = awq_errors(**case)
        return errors[-1] < 0.95 * min(errors[:-1])

    return t.draw_until(draw, tells)


def searched(student, t, case: dict) -> tuple[Tensor, float]:
    s, exponent = t.items(student.awq(**case), 2, "awq(...)")
    t.tensor(s, "the factors", shape=(case["x"].shape[1],), dtype=torch.float64)
    t.that(bool((torch.isfinite(s) & (s > 0)).all()), "the factors should be positive")
    return s, t.number(exponent, "the exponent")


@check("awq", points=1, seconds=20)
def check_exponent(student, t):
    "The exponent with the smallest error of the output"
    for case in (awq_case(t), last_case(t)):
        errors = awq_errors(**case)
        _, exponent = searched(student, t, case)
        step = round(exponent * case["steps"])
        best = errors.index(min(errors))
        on_grid = 0 <= step < len(errors) and abs(exponent - step / case["steps"]) < 1e-9
        t.that(on_grid, "the exponent {exponent} is no k / steps", exponent=exponent)
        message = (
            "with the exponent {got:.3f} the error of the output is {times:.2f} times that with {want:.3f}"
        )
        times, want = errors[step] / min(errors), best / case["steps"]
        t.that(step == best, message, got=exponent, times=times, want=want)


@check("awq", points=1, seconds=20)
def check_scales(student, t):
    "The factors are the means to the power of this exponent"
    case = awq_case(t)
    s, exponent = searched(student, t, case)
    t.that(exponent > 0, "not tested yet: the exponent is 0, see the first check")
    want, most = case["x"].abs().mean(0) ** exponent, case["x"].abs().amax(0) ** exponent
    mistakes = {"these are powers of the largest activations: the mean is asked for": most / most[0]}
    wrong_if(t, s / s[0], want / want[0], mistakes, **FP64)
    t.close(s / s[0], want / want[0], "the factors, divided by the first one", **FP64)


@check("awq", points=1, seconds=20)
def check_unseen(student, t):
    "Better than rounding on tokens that were not seen"
    case = awq_case(t)
    s, _ = searched(student, t, case)
    unseen = case["x"][torch.tensor(t.shuffled(list(range(30))))] * (1 + 0.3 * double(t, 30, len(s)))
    w, bits, group = case["w"], case["bits"], case["group"]
    plain = float((unseen @ (rounded(w, bits, group) - w).t()).norm())
    error = float((unseen @ (rounded(w * s, bits, group) / s - w).t()).norm())
    message = "the error of the output is {ratio:.2f} times that of plain rounding: at most 0.9 is asked for"
    t.that(error <= 0.9 * plain, message, ratio=error / plain)


# -- gptq


def gptq_case(t) -> dict:
    inputs = t.integer(12, 24)
    w, damping = double(t, t.integer(4, 8), inputs), t.uniform(0.02, 0.2)
    x = correlated(t, 3 * inputs, inputs) * t.uniform(0.01, 0.03)
    return {"x": x, "w": w, "bits": t.integer(3, 4), "damping": damping}


def wrong_damping(case: dict) -> dict[str, Tensor]:
    """A message for each mistake with the damping → the integers that it gives."""
    part = case["damping"] / float(case["x"].square().sum(0).mean())
    return {
        "the damping is not used": gptq_by_inverses(**case | {"damping": 0.0})[0],
        "damping is a part of the mean of the diagonal": gptq_by_inverses(**case | {"damping": part})[0],
    }


def tells_damping(case: dict) -> bool:
    """Whether each mistake with the damping gives other integers."""
    every = [gptq_by_inverses(**case)[0], *wrong_damping(case).values()]
    return len({tuple(q.flatten().tolist()) for q in every}) == len(every)


def integers_of(student, t, case: dict) -> tuple[Tensor, Tensor]:
    q, scale = t.items(student.gptq(**case), 2, "gptq(...)")
    w, most = case["w"], 2 ** (case["bits"] - 1) - 1
    t.tensor(q, "q", shape=w.shape, dtype=torch.int8)
    want = w.abs().amax(1, keepdim=True) / most
    t.close(scale, want, "the scales, of the weights before any correction", **FP64)
    t.that(int(q.abs().max()) <= most, "an integer is above {most}: clamp it", most=most)
    return q, scale


@check("gptq", points=2, seconds=20)
def check_compensated(student, t):
    "Each error is compensated by the columns that are left"
    for _ in range(2):
        case = t.draw_until(lambda: gptq_case(t), tells_damping)
        q, scale = integers_of(student, t, case)
        want, _ = gptq_by_inverses(**case)
        plain, wrong = torch.round(case["w"] / scale).to(torch.int8), int((q != want).sum())
        t.that(not torch.equal(q, plain), "these are the nearest integers: nothing is compensated")
        wrong_if(t, q, want, wrong_damping(case) | wrong_factors(**case))
        t.that(wrong == 0, "{wrong} of {all} integers are wrong", wrong=wrong, all=want.numel())


@check("gptq", points=1, seconds=20)
def check_better(student, t):
    "Better than rounding on tokens that were not seen"

    def draw() -> tuple[dict, Tensor]:
        case = gptq_case(t)
        inputs = case["w"].shape[1]
        every = correlated(t, 6 * inputs, inputs)
        return case | {"x": every[: 3 * inputs]}, every[3 * inputs :]

    def ratio(case: dict, unseen: Tensor, q: Tensor, scale: Tensor) -> float:
        plain = rounded(case["w"], case["bits"])
        errors = [(unseen @ (new - case["w"]).t()).norm() for new in (restored(q, scale), plain)]
        return float(errors[0] / errors[1])

    def gains(drawn: tuple[dict, Tensor]) -> bool:  # also with mistakes that the first check finds
        case = drawn[0]
        right, scale = gptq_by_inverses(**case)
        every = [right, *wrong_damping(case).values(), list(wrong_factors(**case).values())[1]]
        return max(ratio(*drawn, q, scale) for q in every) < 0.75

    case, unseen = t.draw_until(draw, gains)
    found = ratio(case, unseen, *integers_of(student, t, case))
    message = "the error of the output is {ratio:.2f} times that of plain rounding: at most 0.8 is asked for"
    t.that(found <= 0.8, message, ratio=found)


# -- qat


@scenario
def passed(student, weights, gradients, bits):
    """For each weight its rounded form, and the gradient that passes; bits None: ternary."""
    found = []
    for weight, gradient in zip(weights, gradients):
        latent = weight.clone().requires_grad_()
        new = student.ternary(latent) if bits is None else student.fake_quantize(latent, bits)
        if new.requires_grad:
            new.backward(gradient)
        found.append([new.detach(), torch.zeros_like(weight) if latent.grad is None else latent.grad])
    return found


def passed_by(student, t, weights: list[Tensor], gradients: list[Tensor], bits: int | None) -> list[list]:
    found = student.run(passed, weights=weights, gradients=gradients, bits=bits)
    pairs = [t.items(pair, 2, "the result") for pair in t.items(found, len(weights), "the result")]
    for (new, gradient), weight in zip(pairs, weights):
        t.tensor(new, "the rounded weight", shape=weight.shape, dtype=weight.dtype)
        t.tensor(gradient, "the gradient", shape=weight.shape, dtype=weight.dtype)
    return pairs


def shapes(t) -> list[Tensor]:
    """Weights in fp64, one with a row of zeros."""
    weights = [double(t, t.integer(3, 6), t.integer(4, 9)) * t.uniform(0.1, 5) for _ in range(2)]
    weights[1][0] = 0
    return weights


@check("qat", points=1)
def check_rounded(student, t):
    "The forward rounds to grids for rows"
    for bits in (2, t.integer(3, 8)):
        weights = shapes(t)
        for (new, _), w in zip(passed_by(student, t, weights, shapes_like(t, weights), bits), weights):
            t.close(new, rounded(w, bits), "fake_quantize(w, {bits})", bits=bits, **FP64)


def shapes_like(t, weights: list[Tensor]) -> list[Tensor]:
    """Gradients for weights."""
    return [double(t, *weight.shape) for weight in weights]


@check("qat", points=1)
def check_ternary(student, t):
    "Ternary weights, with one scale"
    weights = [*shapes(t), torch.zeros(2, 3, dtype=torch.float64)]
    for (new, _), w in zip(passed_by(student, t, weights, shapes_like(t, weights), None), weights):
        t.close(new, ternary_weights(w), "ternary(w)", **FP64)


THROUGH_SCALE = (
    "a gradient also flows through the scale: the gradient of w must equal that of the rounded weight"
)


def flows_through_scale(w: Tensor, got: Tensor, want: Tensor, bits: int | None) -> bool:
    """Whether the gradient, or its difference from `want`, is that of the scale alone.

    The scale of a row depends on the largest weight, and that of ternary weights on the signs of all.
    """
    largest = w.abs() == w.abs().amax(1, keepdim=True)
    for part in (got - want, got):
        signed = (part * w.sign())[w != 0]
        alone = part[~largest].abs().amax() if bits else (signed - signed.mean()).abs().amax()
        if float(part.abs().max()) > 1e-6 and float(alone) < 1e-9:
            return True
    return False


@check("qat", points=1)
def check_gradient(student, t):
    "The gradient passes unchanged"
    for bits in (t.integer(2, 5), None):
        weights = shapes(t)
        gradients = shapes_like(t, weights)
        pairs = passed_by(student, t, weights, gradients, bits)
        same = any(torch.equal(new, w) for (new, _), w in zip(pairs, weights))
        t.that(not same, "not tested yet: the weights are not rounded, see the first checks")
        for (_, got), want, w in zip(pairs, gradients, weights):
            t.that(bool(got.any()), "no gradient reaches w: rounding has the gradient 0")
            t.that(not flows_through_scale(w, got, want, bits), THROUGH_SCALE)
            t.close(got, want, "the gradient of w", **FP64)


def loss_of(x: Tensor, y: Tensor, first: Tensor, second: Tensor) -> Tensor:
    return ((x @ first.t()).relu() @ second.t() - y).square().mean() / y.square().mean()


def drawn_network(t, bits: int | None) -> list[Tensor]:
    """Two matrices, and inputs for the training and the test, where the twin's training gains enough."""

    def draw() -> list[Tensor]:
        inputs, hidden, outputs = t.integer(8, 12), t.integer(20, 28), t.integer(3, 5)
        weights = [double(t, hidden, inputs), double(t, outputs, hidden)]
        return [*weights, double(t, 160, inputs), double(t, 160, inputs)]

    def tells(case: list[Tensor]) -> bool:
        after, trained = twin_losses(case, bits)
        return trained <= 0.6 * after

    return t.draw_until(draw, tells)


@twin
def twin_losses(case: list[Tensor], bits: int | None) -> tuple[float, float]:
    """The test loss of the network rounded after its training, and that of the twin trained rounded."""

    def passing(weights: list[Tensor], gradients: list[Tensor]) -> list[list]:
        return [[rounded_by(w, bits), gradient] for w, gradient in zip(weights, gradients)]

    after = loss_of(case[3], case, [rounded_by(w, bits) for w in case[:2]])
    return float(after), trained(case, passing)[0]


def rounded_by(w: Tensor, bits: int | None) -> Tensor:
    return ternary_weights(w) if bits is None else rounded(w, bits)


def loss_of(x: Tensor, case: list[Tensor], weights: list[Tensor]) -> Tensor:
    """The squared error of the network with these weights, relative to the outputs of the case."""
    got, want = ((x @ first.t()).relu() @ second.t() for first, second in (weights, case[:2]))
    return (got - want).square().mean() / want.square().mean()


def trained(case: list[Tensor], passing, steps: int = 40) -> tuple[float, list[Tensor]]:
    """The test loss and the rounded weights after steps of Adam on the weights in floating point.

    `passing(weights, gradients)` gives for each weight its rounded form, and the gradient that passes.
    """
    weights = [w.clone() for w in case[:2]]
    moments = [[torch.zeros_like(w), torch.zeros_like(w)] for w in weights]
    nothing = [torch.zeros_like(w) for w in weights]
    for step in range(1, steps + 1):
        leaves = [new.clone().requires_grad_() for new, _ in passing(weights, nothing)]
        loss_of(case[2], case, leaves).backward()
        passed_on = passing(weights, [leaf.grad for leaf in leaves])
        for w, (_, gradient), (mean, square) in zip(weights, passed_on, moments):
            mean.mul_(0.9).add_(0.1 * gradient)
            square.mul_(0.99).add_(0.01 * gradient.square())
            size = (square / (1 - 0.99**step)).sqrt() + 1e-8
            w -= 0.02 * (1 - step / (steps + 1)) * mean / (1 - 0.9**step) / size
    final = [new for new, _ in passing(weights, nothing)]
    return float(loss_of(case[3], case, final)), final


@check("qat", points=2, seconds=40)
def check_training(student, t):
    "Trained with rounded weights, a network beats one that is rounded afterwards"
    for bits in (2, None):
        case = drawn_network(t, bits)
        loss, final = trained(case, lambda w, gradients, bits=bits: passed_by(student, t, w, gradients, bits))
        for new in final:
            for part in [new] if bits is None else new:
                levels = len((part / new.abs().max() * 1e6).round().unique())
                t.that(levels <= 3, "the trained weights are not rounded")
        name = "ternary weights" if bits is None else f"{bits} bits"
        message = "with {name} the loss is {ratio:.2f} times that of rounding after the training: at most 0.7"
        ratio = loss / twin_losses(case, bits)[0]
        t.that(ratio <= 0.7, message, name=name, ratio=ratio)
