"""The hidden checks: cases of other kinds, and the right answers of the quiz. Never released.

Their messages hold no values where a student should read them.
"""

from __future__ import annotations

import torch

from dlo_lib.grading.contract import check, scenario
from dlo_lib.grading.quiz import Answer, quiz_right

from .checks import branches, bucket_case, replicas, run_steps, same_gradients
from .quiz import QUIZ
from .samples import epoch_of, moments_case, predictions, same_moments
from .scenarios import accuracies, averaged, moments


@check("replicate", points=1, seconds=20)
def check_frozen(student, t):
    "Frozen parameters are replicated as well"
    after, before = replicas(student, t, 3, frozen=True)
    for weight, _, _ in after:
        t.that(
            bool(torch.equal(weight, before[0]["weight"])), "A frozen parameter belongs to the model too: a rank had another value of it."
        )


@check("average", points=1, seconds=20)
def check_half_precision(student, t):
    "The sum of large fp16 gradients does not overflow"
    world = 2
    grads = [t.uniform(35000, 50000) + t.normal(6) for _ in range(world)]
    run = student.ranks(averaged, [{"grads": [grad.half()]} for grad in grads])
    for (got,) in run.results:
        t.that(
            bool(torch.isfinite(got).all()),
            "The sum of fp16 gradients exceeds 65,504 on the way to a harmless average: divide before the sum.",
        )
        t.close(got.float(), sum(grads) / world, "the average of fp16 gradients", rtol=2e-3)


@check("buckets", points=1)
def check_exact_fit(student, t):
    "A bucket may be filled to the last byte"
    size, members = 4 * t.integer(2, 9), t.integer(2, 3)
    got = bucket_case(t, student, [size] * (3 * members), members * size)
    t.that(
        [len(bucket) for bucket in got] == [members] * 3,
        "Gradients that fill the limit exactly still belong into the bucket.",
    )


@check("overlap", points=2, seconds=20)
def check_same_order(student, t):
    "All ranks send their buckets in the same order, whatever the order of arrival"
    count = t.integer(4, 6)
    weights = branches(t, count, same_size=True)
    orders = [tuple(range(count)), tuple(reversed(range(count)))]
    run, batches = run_steps(student, t, weights, 2, limit=weights[0].nbytes, steps=1, order=orders)
    same_gradients(t, run, weights, batches)


@check("overlap", points=2, seconds=20)
def check_unused(student, t):
    "A parameter that only some ranks use gets the average with zeros, everywhere"
    count = t.integer(4, 6)
    weights = branches(t, count)
    unused = t.shuffled([(), (0,)])
    run, batches = run_steps(student, t, weights, 2, limit=300, steps=1, unused=unused)
    same_gradients(t, run, weights, batches, unused=unused, hint="Other ranks used it: their average belongs here too.")


@check("sampler", points=1)
def check_fewer_than_ranks(student, t):
    "Fewer samples than ranks"
    length, world = t.integer(2, 3), t.integer(7, 8)
    got = epoch_of(student, t, length, world, 0, t.integer(0, 9))
    t.that(all(len(own) == 1 for own in got), "With fewer samples than ranks every rank still needs one: repeat as often as it takes.")


@scenario
def random_numbers(student, rank, world, length, seed):
    """What the global generator gives after the sampler has been asked, and without it."""
    torch.manual_seed(seed)
    before = torch.rand(3)
    torch.manual_seed(seed)
    student.rank_samples(length, 0, 2, 1, 0)
    return [before, torch.rand(3)]


@check("sampler", points=1, seconds=20)
def check_own_generator(student, t):
    "The random numbers of everybody else stay as they are"
    for want, got in student.ranks(random_numbers, [{"length": t.integer(5, 20), "seed": t.integer(0, 999)}]).results:
        t.that(bool(torch.equal(got, want)), "After rank_samples torch.rand gives other numbers: use a torch.Generator of your own.")


@check("metrics", points=1, seconds=20)
def check_empty_rank(student, t):
    "A rank without samples"
    count = t.integer(6, 11)
    parts, want = predictions(t, t.shuffled([0, count, count]))
    for got in student.ranks(accuracies, parts).results:
        t.close(got, want, "the accuracy where one rank has no sample", atol=1e-5)


@check("moments", points=1, seconds=20)
def check_large_mean(student, t):
    "A mean that is large against the deviation"
    counts = [t.integer(20, 30)]
    parts, samples = moments_case(t, counts, shift=1e4)
    same_moments(t, student.ranks(moments, parts), samples, counts, within=1e-2)


@check("moments", points=1, seconds=20)
def check_rank_without_samples(student, t):
    "A rank without samples has no say"
    counts = t.shuffled([0, 0, t.integer(5, 8)])
    parts, samples = moments_case(t, counts)
    same_moments(t, student.ranks(moments, parts), samples, counts, within=1e-4)


# -- quiz

ANSWERS = {
    "q1": Answer("b", "nothing but gradients is sent after the start; equal steps from equal weights give equal weights"),
    "q2": Answer("d", "a ring all-reduce sends 2 (N - 1) / N times the bytes: 2 x 7 / 8 x 1 GB"),
    "q3": Answer("a", "the n-th all-reduce of one rank meets the n-th of the others, whatever it holds"),
    "q4": Answer("c", "the global batch grows with the number of ranks; nobody changes the learning rate for you"),
    "q5": Answer("b", "a collective waits for all ranks, and the others have left the loop"),
}
right = quiz_right(QUIZ, ANSWERS, points=1)
