"""The visible checks of the largest batch, of how many ranks it needs, and of the loss on ranks."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from dlo_lib.grading.checks.contract import check
from dlo_lib.labkit.compare import near
from dlo_lib.labkit.traffic import uses_what_arrives

from .scenarios import one_gradient
from .twins import IGNORED, card, drawn, gradient_of_all, measured, sharing

# -- largest


CALLED = "fits was called more than {calls} times: double until it does not fit, then halve the gap"


def found(student, t, limit: int, budget: int) -> int:
    """The largest batch that the student finds with ``budget`` questions, which this check answers."""

    def fits(batch):
        message = "fits was called with {batch}: call it with integers from 1 upwards"
        t.that(type(batch) is int and batch >= 1, message, batch=batch)
        return batch <= limit

    got = student.largest_batch(t.asked(fits, calls=budget, too_many=CALLED))
    return t.number(got, "largest_batch(fits)")


@check("largest", points=2)
def check_exact(student, t):
    "The answer is exact"
    limits = [*range(1, 71), t.integer(71, 150)]
    for limit in limits:
        got = found(student, t, limit, budget=200)
        if got < limit:
            message = (
                "batches up to {limit} fit, but your answer is {got}. Keep the largest batch known to fit "
                "and the smallest known *not* to fit: one of them moves to the middle itself, not beside "
                "it, until the two are neighbours"
            )
        else:
            message = (
                "batches up to {limit} fit, but your answer is {got}, which does not fit: return the "
                "largest batch known to fit"
            )
        t.that(got == limit, message, limit=limit, got=got)


@check("largest", points=1)
def check_nothing_fits(student, t):
    "Nothing fits: the answer is 0"
    some = found(student, t, t.integer(20, 60), budget=200)
    t.that(some > 0, "not tested yet: the answer is 0 where batches fit, see the first check")
    got = found(student, t, 0, budget=200)
    t.that(got == 0, "not even one sequence fits, but your answer is {got}: it should be 0", got=got)


@check("largest", points=2)
def check_few_questions(student, t):
    "Few calls of fits, also for a large batch"
    for bits in (t.integer(20, 30), t.integer(40, 50)):
        limit = 2**bits + t.integer(1, 2**16)
        got = found(student, t, limit, budget=2 * bits + 12)
        message = "For a large limit the answer is far off: double until it does not fit, then halve the gap."
        t.that(0.5 < got / limit < 2, message)


# -- ranks


@check("ranks", points=2)
def check_ranks(student, t):
    "The fewest ranks that hold the batch"
    config, seq = drawn(t, num_layers=2, tied_embeddings=True), 384
    for more, checkpointing in zip((0, 1), t.shuffled([False, True])):
        largest, settings = t.integer(2, 3), {"step": "fused", "checkpointing": checkpointing}
        gpu_drawn, _ = sharing(t, config, seq, largest, **settings)
        global_batch = largest * t.integer(3, 9) + more
        needed = student.ranks_needed(config, gpu_drawn, global_batch, seq, **settings)
        got = t.number(needed, "ranks_needed(...)")
        values = {"got": got, "all": global_batch, "largest": largest, "checkpointing": checkpointing}
        most = -(-global_batch // max(int(got), 1))
        message = (
            "your answer is {got}: a rank then has {most} of {all} sequences, but only {largest} fit "
            "(checkpointing={checkpointing})"
        )
        t.that(got >= 1 and most <= largest, message, most=most, **values)
        if got > 1:
            fewer = -(-global_batch // (int(got) - 1))
            message = (
                "your answer is {got} for {all} sequences, but one rank less is enough: {largest} fit on a "
                "rank (checkpointing={checkpointing})"
            )
            t.that(fewer > largest, message, **values)


@check("ranks", points=2)
def check_the_limit(student, t):
    "One sequence does not fit: no number of ranks helps"
    config, seq = drawn(t, num_layers=2, tied_embeddings=True), 128
    peak = measured(config, 1, seq).peak_bytes
    got = student.ranks_needed(config, card(1.5 * peak, 2 * peak), 4, seq, step="fused")
    t.that(
        type(got) is int,
        "not tested yet: a batch of which one sequence fits needs a number of ranks, see the first check",
    )
    for share in (0.9, 0.5, 0.05):
        got = student.ranks_needed(
            config, card(share * peak, 2 * peak), 2 ** t.integer(2, 8), seq, step="fused"
        )
        t.that(
            got is None,
            "One sequence does not fit one GPU. Data parallelism divides only the batch: the answer is None.",
        )


# -- loss


def gradients(student, t, valid: list[int], tokens: int = 12):
    """(averaged gradient, loss) of each rank, the twin's gradient, and the run. ``valid``: valid tokens of
    each rank."""
    hidden, vocab, batch = t.integer(3, 6), t.integer(5, 9), t.choice((1, 2, 3))
    weight, inputs, targets = t.normal(hidden, vocab, dtype=torch.float64), [], []
    for number in valid:
        inputs.append(t.normal(batch, tokens // batch, hidden, dtype=torch.float64))
        own = t.integers(0, vocab - 1, tokens)
        own[t.shuffled(range(tokens))[number:]] = IGNORED
        targets.append(own.view(batch, tokens // batch))
    run = student.ranks(
        one_gradient, [{"inputs": x, "targets": y, "weight": weight} for x, y in zip(inputs, targets)]
    )
    ranks = [t.items(result, 2, "the result of a rank") for result in run.results]
    return ranks, gradient_of_all(weight, inputs, targets), run


def same_direction(t, ranks, want: torch.Tensor, message: str) -> None:
    for rank, (got, _) in enumerate(ranks):
        t.tensor(got, "the gradient on rank {rank}", shape=want.shape, dtype=want.dtype, rank=rank)
        cosine = float(F.cosine_similarity(got.flatten(), want.flatten(), dim=0))
        t.that(cosine > 1 - 1e-10, message)


def same_size(t, ranks, want: torch.Tensor, message: str, **values) -> None:
    for rank, (got, _) in enumerate(ranks):
        t.tensor(got, "the gradient on rank {rank}", shape=want.shape, dtype=want.dtype, rank=rank)
        ratio = float(got.norm() / want.norm())
        t.that(
            near(ratio, 1.0, rtol=1e-10),
            message,
            **values,
            **({"ratio": ratio} if "{ratio" in message else {}),
        )


@check("loss", points=2, seconds=30)
def check_weighing(student, t):
    "Every token of every rank has the same weight"
    ranks, want, run = gradients(student, t, t.shuffled([t.integer(2, 4), t.integer(8, 11)]))
    same_direction(
        t,
        ranks,
        want,
        "The averaged gradient has another direction than that of the whole batch: a token on a rank with "
        "few tokens has another weight than a token on a rank with many.",
    )
    rank = t.integer(0, 1)
    first = next((call.kind for call in run.calls(rank) if call.payload_bytes), None)
    # the last call is the average, which the check itself takes
    uses_what_arrives(t, run, first, rank, call=0)


@check("loss", points=2, seconds=30)
def check_size(student, t):
    "The averaged gradient has the right size"
    ranks, want, _ = gradients(student, t, [12, 12])
    same_size(
        t,
        ranks,
        want,
        "On 2 ranks with the same number of tokens, the averaged gradient is {ratio:.3g} times that of the "
        "whole batch: DDP divides by the number of ranks, once.",
    )


@check("loss", points=1, seconds=30)
def check_padding(student, t):
    "Ignored targets are not counted"
    ranks, want, _ = gradients(student, t, [t.integer(3, 8)])
    same_size(
        t,
        ranks,
        want,
        "On one rank with padding the gradient has the wrong size: divide by the valid tokens, not by all.",
    )


@check("loss", points=2, seconds=30)
def check_empty_rank(student, t):
    "A rank without a valid token, three ranks"
    ranks, want, _ = gradients(student, t, t.shuffled([0, 6, t.integer(4, 9)]))
    message = "On a rank without a valid token the loss is NaN: a mean over nothing is 0 / 0. Use the sum."
    for rank, (got, loss) in enumerate(ranks):
        t.tensor(got, "the gradient on rank {rank}", shape=want.shape, dtype=want.dtype, rank=rank)
        t.tensor(loss, "the loss on rank {rank}", dtype=want.dtype, rank=rank)
        t.that(bool(got.isfinite().all()) and bool(loss.isfinite().all()), message)
