"""The visible checks of grids, groups, calibration and the integer product."""

from __future__ import annotations

import torch
from torch import Tensor

from dlo_lib.grading.checks.contract import check, scenario
from dlo_lib.labkit.compare import double, near, wrong_if

from .twins import absmax_grid, exact, in_groups, percentile, zero_point_grid

# -- grid


def scalar(t, got: object, what: str) -> float:
    """A number, or the value of a tensor without dimensions."""
    if type(got) is Tensor and got.numel() == 1:
        got = got.item()
    return t.number(got, what)


def drawn_numbers(t) -> Tensor:
    """Numbers in fp64 whose middle is not 0."""
    return t.uniform(0.5, 9) * (double(t, t.integer(2, 5), t.integer(3, 9)) + t.choice([-0.8, 0.7]))


def same_integers(t, got: object, want: Tensor, what: str) -> None:
    t.tensor(got, what, shape=want.shape, dtype=torch.int8)
    wrong = int((got != want).sum())
    t.that(
        wrong == 0, "{what}: {wrong} of {all} integers are wrong", what=what, wrong=wrong, all=want.numel()
    )


@check("grid", points=1)
def check_absmax(student, t):
    "An absmax grid, with 2 to 8 bits"
    for bits in (2, t.integer(3, 7), 8):
        x = drawn_numbers(t)
        if bits == 2 and x.max() == x.abs().max():
            x = -x
        want, scale = absmax_grid(x, bits)
        got = t.items(student.absmax(x, bits), 2, "absmax(...)")
        found = scalar(t, got[1], "the scale of absmax")
        signed = scale * (2 ** (bits - 1) - 1)
        mistakes = {
            "the largest integer is 2^(b-1) - 1, and not 2^(b-1)": signed / 2 ** (bits - 1),
            "the scale belongs to the largest absolute value": float(x.max()) / (2 ** (bits - 1) - 1),
        }
        wrong_if(t, found, scale, mistakes)
        t.close(found, scale, "the scale of absmax with {bits} bits", bits=bits)
        same_integers(t, got[0], want, "q of absmax")


def of_zero_point(student, t, x: Tensor, bits: int) -> None:
    want, scale, zero = zero_point_grid(x, bits)
    got = t.items(student.zero_point(x, bits), 3, "zero_point(...)")
    found = scalar(t, got[1], "the scale of zero_point")
    wrong_if(
        t, found, scale, {"the range must contain 0": float(x.max() - x.min()) / (2**bits - 1)}, rtol=1e-9
    )
    t.close(found, scale, "the scale of zero_point with {bits} bits", bits=bits)
    found = scalar(t, got[2], "the zero-point")
    t.that(found == zero, "the zero-point is {found}, expected {zero}", found=found, zero=zero)
    same_integers(t, got[0], want, "q of zero_point")


@check("grid", points=1)
def check_zero_point(student, t):
    "A zero-point grid for numbers of both signs"
    for bits in (2, t.integer(3, 7), 8):
        x = t.draw_until(lambda: drawn_numbers(t), lambda x: bool((x < 0).any() and (x > 0).any()))
        of_zero_point(student, t, x, bits)


@check("grid", points=1)
def check_range(student, t):
    "Zero belongs to the range, also if all numbers have one sign"
    for sign in (1, -1):
        bits = t.integer(3, 8)
        of_zero_point(student, t, sign * (drawn_numbers(t).abs() + t.uniform(2, 6)), bits)


@check("grid", points=1)
def check_constant(student, t):
    "Numbers that are all 0"
    x = torch.zeros(t.integer(2, 9), dtype=torch.float64)
    bits = t.integer(3, 8)
    got = t.items(student.absmax(double(t, 4), bits), 2, "absmax(...)")
    not_zero = type(got[0]) is Tensor and bool(got[0].any())
    t.that(not_zero, "not tested yet: absmax gives no integers, see the first check")
    for name, result in (("absmax", student.absmax(x, bits)), ("zero_point", student.zero_point(x, bits))):
        values = t.items(result, 2 if name == "absmax" else 3, "the result")
        t.close(scalar(t, values[1], "the scale"), 1.0, "the scale of {name} for zeros", name=name)
        zero = 0.0 if name == "absmax" else scalar(t, values[2], "the zero-point")
        t.tensor(values[0], "q of {name}", shape=x.shape, dtype=torch.int8, name=name)
        t.that(bool((values[0] == zero).all()), "zeros come back as other numbers from {name}", name=name)


# -- store


def drawn_weight(t, even: bool = True) -> tuple[Tensor, int]:
    """A weight in fp64 whose groups have different sizes, and the group."""
    group, count = t.choice([4, 6, 10] if even else [3, 5, 7]), t.integer(2, 4)
    w = double(t, t.integer(2, 5), group * count)
    return w * (0.2 + torch.arange(w.shape[1]) // group), group


@check("store", points=1)
def check_groups(student, t):
    "Each group has its scale, also one of zeros"
    for zeros in (False, True):
        (w, group), bits = drawn_weight(t, even=t.choice([True, False])), t.integer(3, 8)
        if zeros:
            w[-1, -group:] = 0
        want, scale = in_groups(w, bits, group)
        got = t.items(student.quantize_groups(w, bits, group), 2, "quantize_groups(...)")
        row = (w.abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1)).expand_as(scale).contiguous()
        wrong_if(t, got[1], scale, {"these are the scales of whole rows": row})
        t.close(got[1], scale, "the scales of groups of {group} with {bits} bits", group=group, bits=bits)
        same_integers(t, got[0], want, "q of quantize_groups")


@scenario
def loaded(student, files):
    """The weights of each file, in a process that knows nothing else."""
    return [student.load4(packed, scale) for packed, scale in files]


def stored_tensors(student, t, w: Tensor, group: int) -> list[Tensor]:
    tensors = t.items(student.store4(w, group), 2, "store4(...)")
    for tensor in tensors:
        t.tensor(tensor, "what store4 returns")
    return tensors


@check("store", points=1)
def check_bytes(student, t):
    "The bytes that are stored"
    w, group = drawn_weight(t)
    w = w.float()
    tensors = stored_tensors(student, t, w, group)
    got, want = sum(each.numel() * each.element_size() for each in tensors), w.numel() // 2
    want += 2 * w.numel() // group
    whole = "the integers are {got} bytes for {weights} weights: store two of them in each byte"
    t.that(tensors[0].nbytes < w.numel(), whole, got=tensors[0].nbytes, weights=w.numel())
    message = "{got} bytes are stored for {weights} weights in groups of {group}: {want} are enough"
    t.that(got <= want, message, got=got, want=want, weights=w.numel(), group=group)
    t.that(bool((tensors[0] != tensors[0].flatten()[0]).any()), "not tested yet: the integers are all equal")


def loads_what_it_stored(student, t, cases: list[tuple[Tensor, int]], many: str, sign: str) -> None:
    """Each weight of the cases (w, group) comes back within half a step."""
    files = [stored_tensors(student, t, w, group) for w, group in cases]
    found = t.items(student.fresh(loaded, files=files), len(cases), "the loaded weights")
    for got, (w, group) in zip(found, cases):
        t.tensor(got, "load4(...)", shape=w.shape, dtype=torch.float32)
        step = in_groups(w, 4, group)[1].repeat_interleave(group, 1)
        close = (got - w).abs() <= 0.51 * step + 1e-6
        bad, negative = int((~close).sum()), int((~close & (w < 0)).sum())
        t.that(not (bad and bad == negative), sign)
        t.that(bad == 0, many)


@check("store", points=1, seconds=20)
def check_load(student, t):
    "What was stored is loaded within half a step, in another process"
    drawn = [drawn_weight(t) for _ in range(2)]
    many = "weights come back with an error above half a step"
    sign = "all wrong weights are negative: 4 bits have a sign too"
    loads_what_it_stored(student, t, [(w.float(), group) for w, group in drawn], many, sign)


# -- calibrate


def same_range(student, t, batches: list[Tensor], p: float, mistakes: dict[str, tuple[float, float]]) -> None:
    want = percentile(batches, p)
    got = t.items(student.calibrate(batches, p), 2, "calibrate(...)")
    got = [scalar(t, found, name) for name, found in zip(("low", "high"), got)]
    for message, wrong in mistakes.items():
        is_wrong = near(got, list(wrong), 1e-5) and not near(list(want), list(wrong), 1e-5)
        t.that(not is_wrong, message)
    for name, found, right in zip(("low", "high"), got, want):
        t.close(found, right, "{name} for p = {p}", name=name, p=p, rtol=1e-5, atol=1e-5)


def drawn_batches(t) -> list[Tensor]:
    """Batches of different shapes, one of them wide."""
    wide, batches = t.integer(0, 2), []
    for number in range(4):
        batch = double(t, t.integer(3, 7), t.integer(5, 9)) + t.uniform(-0.5, 0.5)
        batches.append(batch * (20 if number == wide else 1))
    return [*batches, double(t, t.integer(30, 60))]


@check("calibrate", points=1)
def check_min_max(student, t):
    "Min-max over all batches"
    batches = drawn_batches(t)
    last = batches[-1]
    mistakes = {"this is the range of the last batch": (float(last.min()), float(last.max()))}
    same_range(student, t, batches, 100.0, mistakes)


@check("calibrate", points=1)
def check_percentile(student, t):
    "Percentiles of all numbers together"
    for p in (t.uniform(90, 99), t.uniform(80, 90)):
        batches = drawn_batches(t)
        each = [percentile([batch], p) for batch in batches]
        mean = tuple(sum(values) / len(each) for values in zip(*each))
        mistakes = {
            "this is the mean of the percentiles of the batches": mean,
            "this is min-max: p is not used": percentile(batches, 100.0),
        }
        same_range(student, t, batches, p, mistakes)


# -- product


def same_product(student, t, qx: Tensor, zero: int, qw: Tensor, bias: Tensor) -> None:
    want = exact(qx, zero, qw, bias)
    got = t.tensor(
        student.accumulate(qx, zero, qw, bias), "accumulate(...)", shape=want.shape, dtype=torch.int32
    )
    mistakes = {
        "the bias is missing": exact(qx, zero, qw, torch.zeros_like(bias)),
        "the zero-point is missing": exact(qx, 0, qw, bias),
        "the zero-point is added: qx - zero": exact(qx, -zero, qw, bias),
        "qx - zero does not fit in int8": exact((qx - torch.tensor(zero).to(torch.int8)), 0, qw, bias),
    }
    wrong_if(t, got, want, mistakes)
    wrong = int((got != want).sum())
    message = "{wrong} of {all} sums are wrong, the first by {off}: int32 is exact, float32 is not above 2^24"
    off = int((got.long() - want.long())[got != want][0]) if wrong else 0
    t.that(wrong == 0, message, wrong=wrong, all=want.numel(), off=off)


def odd_sums(t) -> tuple[Tensor, Tensor]:
    """Integers whose sums are odd and above 2^24, so that float32 has none of them."""
    tokens, outputs, inputs = t.integer(2, 4), t.integer(3, 5), t.integer(2400, 3200)
    qx, qw = (t.integers(90, 126, rows, inputs).to(torch.int8) for rows in (tokens, outputs))
    qw |= 1
    qx[:, -1] += (qx.sum(1) % 2 == 0).to(torch.int8)
    qw[1:] *= -1
    return qx, qw


@check("product", points=1, seconds=20)
def check_exact(student, t):
    "Large sums are exact"
    qx, qw = odd_sums(t)
    same_product(student, t, qx, 0, qw, torch.zeros(len(qw), dtype=torch.int32))


@check("product", points=1, seconds=20)
def check_zero(student, t):
    "The zero-point and the bias"
    for zero in (t.integer(20, 127), t.integer(-128, -20)):
        tokens, outputs, inputs = t.integer(2, 4), t.integer(3, 5), t.integer(20, 40)
        qx, qw = (t.integers(-127, 127, rows, inputs).to(torch.int8) for rows in (tokens, outputs))
        bias = t.integers(-30000, 30000, outputs).to(torch.int32)
        same_product(student, t, qx, zero, qw, bias)


def static_case(t, widest: float) -> dict:
    """The arguments of static_linear, with activations up to `widest` of the range."""
    tokens, outputs, inputs = t.integer(2, 4), t.integer(3, 5), t.integer(8, 16)
    scale_x, zero = t.uniform(0.01, 0.1), t.choice([-1, 1]) * t.integer(20, 60)
    x = widest * 60 * scale_x * double(t, tokens, inputs).clamp(-1, 1)
    qw = t.integers(-127, 127, outputs, inputs).to(torch.int8)
    scale_w = 0.01 + double(t, outputs).abs()

    def up(bias: Tensor) -> bool:  # one number at least is rounded away from 0, unlike by truncation
        steps = bias / (scale_x * scale_w)
        return bool((steps.round() != steps.trunc()).any())

    bias = t.draw_until(lambda: 3 * double(t, outputs), up)
    return {"x": x, "scale_x": scale_x, "zero": zero, "qw": qw, "scale_w": scale_w, "bias": bias}


def static_twin(x, scale_x, zero, qw, scale_w, bias, *, limit="clamp", to_grid=torch.round) -> Tensor:
    """The layer with numbers instead of integers."""
    steps = torch.round(x / scale_x)
    if limit == "clamp":
        steps = steps.clamp(-128 - zero, 127 - zero)
    elif limit == "wrap":
        steps = (steps + zero + 128) % 256 - 128 - zero
    grid = scale_x * scale_w
    added = grid * to_grid(bias / grid)
    return (scale_x * steps) @ (qw.double() * scale_w[:, None]).t() + added


def same_static(student, t, case: dict) -> None:
    got = student.static_linear(**case)
    mistakes = {
        "the bias is not rounded to its grid": static_twin(**case, to_grid=torch.clone),
        "the bias is truncated, not rounded": static_twin(**case, to_grid=torch.trunc),
        "numbers outside of the range are not clamped": static_twin(**case, limit=""),
        "clamp to -128…127 before int8: it wraps around": static_twin(**case, limit="wrap"),
    }
    wrong_if(t, got, static_twin(**case), mistakes, rtol=1e-9)
    t.close(got, static_twin(**case), "static_linear(...)", rtol=1e-9, atol=1e-9)


@check("product", points=1)
def check_static(student, t):
    "A layer of integers, with a bias"
    same_static(student, t, static_case(t, 1.0))


@check("product", points=1)
def check_clamped(student, t):
    "Activations outside of the range are clamped"
    same_static(student, t, static_case(t, 6.0))
