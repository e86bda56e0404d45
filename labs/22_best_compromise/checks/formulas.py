"""The visible checks of bubbles, traffic and cuts."""

from __future__ import annotations

from dlo_lib.grading.checks.contract import check
from dlo_lib.labkit.compare import entry, is_near, near

from .twins import drawn_plan, makespan, ring

# -- bubble


def same_bubble(student, t, tp: int, dp: int, micro_batch: int, mistakes: dict, why: str) -> None:
    """``mistakes``: a message for each wrong formula of (p, t, d, b, m)."""
    pp, m = t.integer(2, 6), t.integer(7, 16)
    args = pp * tp * dp, tp, dp, m * dp * micro_batch, micro_batch
    got = t.number(student.bubble(*args), "bubble(...)")
    wrong = {told: formula(pp, tp, dp, micro_batch, m) for told, formula in mistakes.items()}
    message = "bubble{args} is {got:.4f}; simulated, a rank waits for {want:.4f} of its computing time. "
    is_near(t, got, makespan(pp, m) / m - 1, message + why, wrong, args=args)


@check("bubble", points=1)
def check_alone(student, t):
    "A pipeline alone"
    told = "this is a part of the whole step, (p - 1) / (m + p - 1): divide by the computing time"
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
    printed = "this is the formula as it is printed, (n - d) d / B: put m = B / (b d) into (p - 1) / m"
    shared = "each copy has its own part of the batch: m = B / (b d)"
    mistakes = {
        printed: lambda p, tp, d, b, m: (p * d - d) * d / (m * d * b),
        shared: lambda p, tp, d, b, m: (p - 1) / (m * d),
    }
    same_bubble(student, t, 1, t.integer(2, 5), t.integer(2, 4), mistakes, "p = n / (t d), m = B / (b d).")


def asked_size(student, t, sizes: list[int], each: tuple, tells) -> tuple:
    """The student's micro-batch, the steps of the possible ones, p, and the sequences of a copy.

    ``tells(seconds, p, count, steps)``: whether a case tells a mistake.
    """

    def drawn() -> tuple:
        fixed, pp, count = t.uniform(0.2, 3.0), t.integer(2, 8), t.integer(*each)
        seconds = {size: fixed + size * t.uniform(0.9, 1.1) for size in sizes}
        steps = {b: makespan(pp, count // b) * seconds[b] for b in sizes if count % b == 0}
        return seconds, pp, count, steps

    (seconds, pp, count, steps), dp = t.draw_until(drawn, lambda case: tells(*case)), t.integer(2, 3)
    got = t.number(student.best_micro_batch(seconds, pp, dp, dp * count), "best_micro_batch(...)")
    return got, steps, pp, count


@check("bubble", points=1)
def check_best_size(student, t):
    "The best micro-batch is between the smallest and the largest"

    def between(seconds, pp, each, steps) -> bool:
        return min(steps, key=steps.get) not in (1, 16)

    message = "with p = {pp} and B / d = {each}, {want} is the fastest, not {got}: m + p - 1 times its time"
    for _ in range(3):
        got, steps, pp, each = asked_size(student, t, [1, 2, 4, 8, 16], (32, 32), between)
        want = min(steps, key=steps.get)
        t.that(bool(got == want), message, got=got, want=want, pp=pp, each=each)


@check("bubble", points=1)
def check_divides(student, t):
    "A micro-batch must divide the sequences of a copy"

    def tempting(seconds, pp, each, steps) -> bool:
        best = min(seconds, key=lambda size: (each / size + pp - 1) * seconds[size])
        return best not in steps and min(steps, key=steps.get) != max(steps)

    message = "best_micro_batch(...) is {got}, which does not divide the {each} sequences of a copy"
    for _ in range(2):
        got, steps, _, each = asked_size(student, t, [1, 2, 3, 4, 7], (9, 45), tempting)
        t.that(got in steps, message, got=got, each=each)
        good = steps[got] <= min(steps.values()) * (1 + 1e-9)
        t.that(good, "of the possible sizes, {got} is not the fastest", got=got)


# -- traffic


@check("traffic", points=2)
def check_tensor(student, t):
    "Four all-reduces in a block, by a ring"
    message = "tensor_elements{args} is {got:,.0f}, a ring sends {want:,.0f}: 8 b s h (t - 1) / t for a block"
    for _ in range(2):
        b, s, h, tp = t.integer(1, 4), 16 * t.integer(3, 9), 8 * t.integer(3, 9), t.integer(2, 7)
        args = *_, blocks = b, s, h, tp, t.integer(1, 5)
        got = t.number(student.tensor_elements(*args), "tensor_elements(...)")
        want = sum(ring(b * s * h, tp, passes=2) for _ in range(4 * blocks))
        mistakes = {
            "only the forward is counted: backward has two all-reduces in each block too": want / 2,
            "the factor (t - 1) / t is missing": 8 * b * s * h * blocks,
        }
        is_near(t, got, want, message, mistakes, args=args)


@check("traffic", points=1)
def check_cut(student, t):
    "An activation for each cut"
    b, s, h = args = t.integer(2, 5), 16 * t.integer(3, 9), 8 * t.integer(3, 9)
    got = t.number(student.pipeline_elements(*args), "pipeline_elements(...)")
    message = "pipeline_elements{args} is {got:,.0f}: one activation of b s h elements in one direction"
    is_near(t, got, sum(h for _ in range(b) for _ in range(s)), message, args=args)


@check("traffic", points=1)
def check_gradients(student, t):
    "One all-reduce of the gradients"
    message = "data_elements{args} is {got:,.1f}, a ring over {dp} copies sends {want:,.1f}"
    for _ in range(2):
        parameters, dp = args = t.integer(1000, 9000), t.integer(3, 9)
        got = t.number(student.data_elements(*args), "data_elements(...)")
        is_near(t, got, ring(parameters, dp, passes=2), message, args=args, dp=dp)


def sent_in_a_step(student, t, **fixed) -> tuple[dict, dict]:
    """What the student's inner rank sends in a step by form, and what is counted."""
    plan, m = drawn_plan(t, sharded=False, micro_batch=t.integer(2, 3), **fixed), t.integer(3, 9)
    pp, tp, dp, b = (plan[name] for name in ("pp", "tp", "dp", "micro_batch"))
    h, seq, layers = 8 * t.integer(3, 9), 16 * t.integer(2, 6), pp * t.integer(2, 5)
    parameters = pp * tp * t.integer(100, 900)
    got = student.step_elements(plan, h, layers, parameters, m * dp * b, seq)
    blocks = [place for place in range(layers) if place * pp // layers == 0]
    ways = ("forward", "backward") if pp > 1 else ()
    want = {
        "tensor": sum(ring(b * seq * h, tp, 2) for _ in range(m) for _ in blocks for _ in range(4)),
        "pipeline": sum(b * seq * h for _ in range(m) for _ in ways),
        "data": ring(parameters / pp / tp, dp, 2),
    }
    return {name: entry(t, got, name, "step_elements(...)") for name in want}, want


@check("traffic", points=2)
def check_step(student, t):
    "How often each form communicates in a step"
    got, want = sent_in_a_step(student, t)
    why = {
        "tensor": "for each of the m micro-batches, in the L / p blocks of a rank",
        "pipeline": "for each of the m micro-batches, the activation and its gradient",
        "data": "once a step, for 1 / (p t) of the parameters",
    }
    for name, reason in why.items():
        message = 'step_elements(...)["{name}"] is {got:,.0f}, counted {want:,.0f}: {why}'
        is_near(t, got[name], want[name], message, name=name, why=reason)


@check("traffic", points=1)
def check_one_stage(student, t):
    "Without a cut, nothing is sent over one"
    got, want = sent_in_a_step(student, t, pp=1)
    is_near(t, got["data"], want["data"], 'not tested yet: "data" is {got:,.0f}, not {want:,.0f}')
    t.that(got["pipeline"] == want["pipeline"], "a plan with one stage has no cut")


# -- crossing


def crossed(student, t, scatter_gather: bool) -> tuple[int, int, float, float]:
    """The ranks, the elements, and what the student's rank sends between nodes and inside."""
    tp = t.integer(3, 8)
    elements = tp * t.integer(10, 90)
    got = student.crossing(elements, tp, scatter_gather)
    return tp, elements, *(entry(t, got, name, "crossing(...)") for name in ("between", "inside"))


@check("crossing", points=1)
def check_whole(student, t):
    "Without scatter/gather each rank sends the whole activation"
    _, elements, sent, gathered = crossed(student, t, False)
    message = 'a rank sends {got} elements to the next stage, not {want}; "inside" is {gathered}, not 0'
    good = near(sent, ring(2 * elements, 2, 1)) and gathered == 0
    t.that(bool(good), message, got=sent, want=elements, gathered=gathered)


@check("crossing", points=1)
def check_parts(student, t):
    "With scatter/gather each rank sends a part, and all gather"
    tp, elements, *sent = crossed(student, t, True)
    message = (
        'crossing({elements}, {tp}, True)["{name}"] is {got}, not {want:.0f}: 1/t crosses, a ring gathers'
    )
    inside = ring(elements, tp, 1)
    for name, got, want in zip(("between", "inside"), sent, (elements - inside, inside)):
        is_near(t, got, want, message, elements=elements, tp=tp, name=name)


@check("crossing", points=1)
def check_where(student, t):
    "Where it applies"
    degrees = [(pp, tp) for pp in (1, t.integer(2, 9)) for tp in (1, t.integer(2, 8))]
    for pp, tp, sequence in t.shuffled([(*each, sequence) for each in degrees for sequence in (False, True)]):
        got = student.needs_scatter_gather(pp, tp, sequence)
        t.that(type(got) is bool, "needs_scatter_gather(...) should be True or False, not {got}", got=got)
        # ranks that hold the same whole activation, with a cut to send it over
        copies = tp if pp > 1 and not sequence else 1
        why = "each rank would send the same activation" if copies > 1 else "a rank has its part only"
        why = "there is no cut" if pp == 1 else why
        message = "needs_scatter_gather(pp={pp}, tp={tp}, sequence_parallel={sequence}) is {got}: " + why
        t.that(got == (copies > 1), message, pp=pp, tp=tp, sequence=sequence, got=got)
