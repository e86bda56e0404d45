"""What runs beside the student's code. No expected value is here."""

from __future__ import annotations

from dlo_lib.grading.checks.contract import scenario


@scenario
def sparse_means(student, rank, world, cases):
    """The mean of each case: values, positions and size."""
    return [student.sparse_mean(values, positions, size) for values, positions, size in cases]


@scenario
def fed(student, xs, each):
    """What is sent for each tensor by objects that get them by turns, one for each compression, and the
    tensors after the calls."""
    objects = [student.ErrorFeedback(compress) for compress in each]
    return [[objects[i % len(objects)](x) for i, x in enumerate(xs)], xs]


@scenario
def kept(student, xs):
    """The results of a compression that returns its argument, read at the end, and the state after the first
    call of another one, read then and at the end."""
    feedback, half = student.ErrorFeedback(lambda x: x), student.ErrorFeedback(lambda x: x / 2)
    sent = [feedback(x) for x in xs]
    half(xs[0])
    state = half.state_dict()
    before = {name: value.clone() if hasattr(value, "clone") else value for name, value in state.items()}
    half(xs[1])
    return [sent, list(before.values()), [state[name] for name in before]]


@scenario
def fed_and_saved(student, xs, share, states=()):
    """What is sent for each tensor after the states are loaded, and the state at the end."""
    feedback = student.ErrorFeedback(lambda x: share * x)
    for state in states:
        feedback.load_state_dict(state)
    return [[feedback(x) for x in xs], feedback.state_dict()]


@scenario
def one_bit_means(student, rank, world, xs):
    """The mean of each tensor."""
    mean = student.OneBitMean()
    return [mean(x) for x in xs]


@scenario
def low_rank_means(student, rank, world, q, gradients):
    """The mean of each gradient, and the arguments after the calls."""
    step = student.PowerSGD(q)
    return [[step(gradient).clone() for gradient in gradients], [q, *gradients]]


@scenario
def adam_steps(student, rank, world, x, gradients, lr, betas, eps, warmup):
    """The parameters before and after each step, and the gradients after the calls."""
    adam = student.OneBitAdam(x, lr, betas, eps, warmup)
    path = [x.clone()]
    for gradient in gradients:
        adam.step(gradient)
        path.append(x.clone())
    return [path, gradients]
