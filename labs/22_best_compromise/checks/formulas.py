"""The visible checks of bubbles, traffic, cuts and configurations."""

from __future__ import annotations

from dlo_lib.grading.checks.contract import check
from dlo_lib.labkit.compare import entry, near, wrong_if

from .twins import drawn_config, drawn_plan, makespan, ring

# -- bubble


def same_bubble(student, t, tp: int, dp: int, micro_batch: int, mistakes: dict, why: str) -> None:
    """``mistakes``: a message for each wrong formula of (p, t, d, b, m)."""
    pp, m = t.integer(2, 6), t.integer(7, 16)
    args = pp * tp * dp, tp, dp, m * dp * micro_batch, micro_batch
    got = t.number(student.bubble(*args), "bubble(...)")
    want = makespan(pp, m) / m - 1
    wrong = {message: formula(pp, tp, dp, micro_batch, m) for message, formula in mistakes.items()}
    wrong_if(t, got, want, wrong)
    message = (
        "bubble{args} is {got:.4f}; simulated, a rank waits for {want:.4f} of the time in which it computes. "
    )
    t.that(near(got, want, 1e-6), message + why, args=args, got=got, want=want)


@check("bubble", points=1)
def check_alone(student, t):
    "A pipeline alone"
    told = (
        "this is the bubble as a part of the whole step, (p - 1) / (m + p - 1): divide by the computing time"
    )
    mistakes = {told: lambda p, tp, d, b, m: (p - 1) / (m + p - 1)}
    same_bubble(student, t, 1, 1, 1, mistakes, "It is (p - 1) / m.")


@check("bubble", points=1)
def check_with_tensor(student, t):
    "With tensor parallelism, the pipeline is shorter"
    told = "the pipeline is as long as without tensor parallelism: n = p x t x d"
    mistakes = {told: lambda p, tp, d, b, m: (p * tp - 1) / m}
    same_bubble(student, t, t.integer(2, 5), 1, 1, mistakes, "p = n / (t d).")


@check("bubble", points=2)
def check_with_copies(student, t):
    "With copies and larger micro-batches"
    mistakes = {
        "this is the formula as it is printed, (n - d) d / B: put m = B / (b d) into (p - 1) / m": (
            lambda p, tp, d, b, m: (p * d - d) * d / (m * d * b)
        ),
        "each copy has its own part of the batch: m = B / (b d)": lambda p, tp, d, b, m: (p - 1) / (m * d),
    }
    same_bubble(student, t, 1, t.integer(2, 5), t.integer(2, 4), mistakes, "p = n / (t d), m = B / (b d).")


def times_of(t, sizes: list[int]) -> dict[int, float]:
    """Seconds of a micro-batch: a fixed part, and one that grows with its size."""
    fixed = t.uniform(0.2, 3.0)
    return {size: fixed + size * t.uniform(0.9, 1.1) for size in sizes}


@check("bubble", points=1)
def check_best_size(student, t):
    "The best micro-batch is between the smallest and the largest"
    sizes = [1, 2, 4, 8, 16]

    def drawn():
        return times_of(t, sizes), t.integer(4, 8), t.integer(1, 3), 32

    def steps(seconds, pp, dp, each):
        return {size: makespan(pp, each // size) * seconds[size] for size in sizes}

    for _ in range(3):
        case = t.draw_until(drawn, lambda case: min(steps(*case), key=steps(*case).get) in sizes[1:-1])
        seconds, pp, dp, each = case
        got = t.number(student.best_micro_batch(seconds, pp, dp, dp * each), "best_micro_batch(...)")
        step = steps(*case)
        want = min(step, key=step.get)
        message = (
            "best_micro_batch(...) is {got}. With {pp} stages and {each} sequences a copy, a step takes "
            "{least:.2f} s with {want} sequences: m + p - 1 times the time of a micro-batch, m = B / (b d)"
        )
        t.that(bool(got == want), message, got=got, want=want, pp=pp, each=each, least=step[want])


@check("bubble", points=1)
def check_divides(student, t):
    "A micro-batch must divide the sequences of a copy"

    def drawn():
        return times_of(t, [1, 2, 3, 4, 7]), t.integer(2, 4), t.integer(2, 3), t.integer(9, 45)

    def steps(seconds, pp, dp, each):
        return {size: makespan(pp, each // size) * seconds[size] for size in seconds if each % size == 0}

    def tells(case) -> bool:
        seconds, pp, _, each = case
        tempting = min(seconds, key=lambda size: (each / size + pp - 1) * seconds[size])
        possible = steps(*case)
        return tempting not in possible and min(possible, key=possible.get) != max(possible)

    for _ in range(2):
        seconds, pp, dp, each = case = t.draw_until(drawn, tells)
        got = t.number(student.best_micro_batch(seconds, pp, dp, dp * each), "best_micro_batch(...)")
        possible = steps(*case)
        message = "best_micro_batch(...) is {got}, which does not divide the {each} sequences of a copy"
        t.that(got in possible, message, got=got, each=each)
        good = possible[got] <= min(possible.values()) * (1 + 1e-9)
        t.that(good, "of the possible sizes, {got} is not the fastest", got=got)


# -- traffic


@check("traffic", points=2)
def check_tensor(student, t):
    "Four all-reduces in a block, by a ring"
    for _ in range(2):
        b, s, h, tp, blocks = (
            t.integer(1, 4),
            16 * t.integer(3, 9),
            8 * t.integer(3, 9),
            t.integer(2, 7),
            t.integer(1, 5),
        )
        got = t.number(student.tensor_elements(b, s, h, tp, blocks), "tensor_elements(...)")
        want = sum(ring(b * s * h, tp, passes=2) for _ in range(4 * blocks))
        mistakes = {
            "only the forward is counted: backward has two all-reduces in each block too": want / 2,
            "an all-reduce sends 2 (t - 1) / t of its tensor, not (t - 1) / t": want / 2 * (1 + 1e-12),
            "the factor (t - 1) / t is missing": 8 * b * s * h * blocks,
        }
        wrong_if(t, got, want, mistakes)
        message = (
            "tensor_elements{args} is {got:,.0f}, a ring sends {want:,.0f}: 8 b s h (t - 1) / t for a block"
        )
        t.that(near(got, want, 1e-9), message, args=(b, s, h, tp, blocks), got=got, want=want)


@check("traffic", points=1)
def check_cut(student, t):
    "An activation for each cut"
    b, s, h = t.integer(2, 5), 16 * t.integer(3, 9), 8 * t.integer(3, 9)
    got = t.number(student.pipeline_elements(b, s, h), "pipeline_elements(...)")
    want = sum(h for _ in range(b) for _ in range(s))
    message = "pipeline_elements{args} is {got:,.0f}: one activation of b s h elements in one direction"
    t.that(near(got, want, 1e-9), message, args=(b, s, h), got=got)


@check("traffic", points=1)
def check_gradients(student, t):
    "One all-reduce of the gradients"
    for _ in range(2):
        parameters, dp = t.integer(1000, 9000), t.integer(3, 9)
        got = t.number(student.data_elements(parameters, dp), "data_elements(...)")
        message = "data_elements{args} is {got:,.1f}, a ring over {dp} copies sends {want:,.1f}"
        want = ring(parameters, dp, passes=2)
        t.that(near(got, want, 1e-9), message, args=(parameters, dp), got=got, want=want, dp=dp)


def step_case(t, **fixed):
    plan = drawn_plan(t, sharded=False, micro_batch=t.integer(2, 3), **fixed)
    m = t.integer(3, 9)
    layers = plan["pp"] * t.integer(2, 5)
    return (
        plan,
        8 * t.integer(3, 9),
        layers,
        plan["pp"] * plan["tp"] * t.integer(100, 900),
        m,
        16 * t.integer(2, 6),
    )


@check("traffic", points=2)
def check_step(student, t):
    "How often each form communicates in a step"
    plan, h, layers, parameters, m, seq = step_case(t)
    pp, tp, dp, b = (plan[name] for name in ("pp", "tp", "dp", "micro_batch"))
    got = student.step_elements(plan, h, layers, parameters, m * dp * b, seq)
    blocks = [place for place in range(layers) if place * pp // layers == 1]
    want = {
        "tensor": sum(ring(b * seq * h, tp, 2) for _ in range(m) for _ in blocks for _ in range(4)),
        "pipeline": sum(b * seq * h for _ in range(m) for _ in ("forward", "backward")),
        "data": ring(parameters / pp / tp, dp, 2),
    }
    why = {
        "tensor": "for each of the m micro-batches, in the L / p blocks of a rank",
        "pipeline": "for each of the m micro-batches, the activation and its gradient",
        "data": "once a step, for 1 / (p t) of the parameters",
    }
    for name, right in want.items():
        value = entry(t, got, name, "step_elements(...)")
        message = 'step_elements(...)["{name}"] is {value:,.0f}, counted {right:,.0f}: {why}'
        t.that(near(value, right, 1e-9), message, name=name, value=value, right=right, why=why[name])


@check("traffic", points=1)
def check_one_stage(student, t):
    "Without a cut, nothing is sent over one"
    plan, h, layers, parameters, m, seq = step_case(t, pp=1)
    batch = m * plan["dp"] * plan["micro_batch"]
    got = student.step_elements(plan, h, layers, parameters, batch, seq)
    want = ring(parameters / plan["tp"], plan["dp"], 2)
    data = entry(t, got, "data", "step_elements(...)")
    t.that(
        near(data, want, 1e-9), 'not tested yet: "data" is {data:,.0f}, not {want:,.0f}', data=data, want=want
    )
    t.that(bool(entry(t, got, "pipeline", "step_elements(...)") == 0), "a plan with one stage has no cut")


# -- crossing


@check("crossing", points=1)
def check_whole(student, t):
    "Without scatter/gather each rank sends the whole activation"
    tp = t.integer(2, 8)
    elements = tp * t.integer(10, 90)
    got = student.crossing(elements, tp, False)
    sent, gathered = (entry(t, got, name, "crossing(...)") for name in ("between", "inside"))
    message = (
        'a rank sends {sent} elements between the stages, the whole has {elements}; "inside" '
        "is {gathered}, not 0"
    )
    good = near(sent, ring(2 * elements, 2, 1)) and gathered == 0
    t.that(bool(good), message, sent=sent, elements=elements, gathered=gathered)


@check("crossing", points=1)
def check_parts(student, t):
    "With scatter/gather each rank sends a part, and all gather"
    tp = t.integer(3, 8)
    elements = tp * t.integer(10, 90)
    got = student.crossing(elements, tp, True)
    want = {"between": elements - ring(elements, tp, 1), "inside": ring(elements, tp, 1)}
    for name, right in want.items():
        value = entry(t, got, name, "crossing(...)")
        message = (
            'crossing({elements}, {tp}, True)["{name}"] is {value}, counted {right:.0f}: 1/t '
            "crosses, a ring gathers"
        )
        t.that(
            near(value, right, 1e-9), message, elements=elements, tp=tp, name=name, value=value, right=right
        )


@check("crossing", points=1)
def check_where(student, t):
    "Where it applies"
    cases = [
        (pp, tp, sequence)
        for pp in (1, t.integer(2, 9))
        for tp in (1, t.integer(2, 8))
        for sequence in (False, True)
    ]
    for pp, tp, sequence in t.shuffled(cases):
        got = student.needs_scatter_gather(pp, tp, sequence)
        t.that(type(got) is bool, "needs_scatter_gather(...) should be True or False, not {got}", got=got)
        # ranks that hold the same whole activation, with a cut to send it over
        copies = tp if pp > 1 and not sequence else 1
        why = (
            "each rank of the stage would send the same activation"
            if copies > 1
            else "a rank has its part only"
        )
        why = "there is no cut" if pp == 1 else why
        message = "needs_scatter_gather(pp={pp}, tp={tp}, sequence_parallel={sequence}) is {got}: " + why
        t.that(got == (copies > 1), message, pp=pp, tp=tp, sequence=sequence, got=got)
