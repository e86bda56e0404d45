"""The visible checks of the largest batch, of how many ranks it needs, and of the loss on ranks."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from dlo_lib.grading.contract import check

from .entries import near
from .scenarios import one_gradient, search
from .twins import IGNORED, card, drawn, measured, sharing

# -- largest


def found(student, t, limit: int, budget: int) -> int:
    return t.number(student.ranks(search, [{"limit": limit, "budget": budget}]).results[0], "largest_batch(fits)")


@check("largest", points=2)
def check_exact(student, t):
    "The answer is exact"
    power = 2 ** t.integer(2, 4)
    for limit in (1, power - 1, power, power + 1, t.integer(18, 60)):
        got = found(student, t, limit, budget=200)
        t.that(got == limit, "batches up to {limit} fit, your answer is {got}", limit=limit, got=got)


@check("largest", points=1)
def check_nothing_fits(student, t):
    "Nothing fits: the answer is 0"
    got = found(student, t, 0, budget=200)
    t.that(got == 0, "not even one sequence fits, your answer is {got}: it should be 0", got=got)


# -- ranks


@check("ranks", points=2)
def check_ranks(student, t):
    "As few ranks as the batch allows"
    config, seq, largest = drawn(t, num_layers=2, tied_embeddings=True), 384, t.integer(2, 3)
    gpu_drawn, _ = sharing(t, config, seq, largest)
    for global_batch in (largest * t.integer(3, 9), largest * t.integer(3, 9) + 1):
        got = t.number(student.ranks_needed(config, gpu_drawn, global_batch, seq, step="fused"), "ranks_needed(...)")
        most = -(-global_batch // max(int(got), 1))
        t.that(
            got >= 1 and most <= largest,
            "on {got} ranks a rank has {most} of {all} sequences, but only {largest} fit",
            got=got,
            most=most,
            all=global_batch,
            largest=largest,
        )
        if got > 1:
            fewer = -(-global_batch // (int(got) - 1))
            t.that(
                fewer > largest,
                "{got} ranks for {all} sequences, but one rank less is enough: {largest} fit",
                got=got,
                all=global_batch,
                largest=largest,
            )


# -- loss


def gradients(student, t, valid: list[int], tokens: int = 12):
    """(averaged gradient, loss) of each rank, and the twin's gradient: one process with all tokens. ``valid``: tokens to learn from, by rank."""
    hidden, vocab = t.integer(3, 6), t.integer(5, 9)
    weight, inputs, targets = t.normal(hidden, vocab, dtype=torch.float64), [], []
    for number in valid:
        inputs.append(t.normal(2, tokens // 2, hidden, dtype=torch.float64))
        own = t.integers(0, vocab - 1, tokens)
        own[t.shuffled(range(tokens))[number:]] = IGNORED
        targets.append(own.view(2, tokens // 2))
    run = student.ranks(one_gradient, [{"inputs": x, "targets": y, "weight": weight} for x, y in zip(inputs, targets)])
    alone = weight.clone().requires_grad_()
    F.cross_entropy((torch.cat(inputs) @ alone).flatten(0, 1), torch.cat(targets).flatten(), ignore_index=IGNORED).backward()
    return [t.items(result, 2, "the result of a rank") for result in run.results], alone.grad


def same_direction(t, ranks, want: torch.Tensor, message: str) -> None:
    for rank, (got, _) in enumerate(ranks):
        t.tensor(got, "the gradient on rank {rank}", shape=want.shape, dtype=want.dtype, rank=rank)
        cosine = float(F.cosine_similarity(got.flatten(), want.flatten(), dim=0))
        t.that(cosine > 1 - 1e-10, message)


def same_size(t, ranks, want: torch.Tensor, message: str, **values) -> None:
    for rank, (got, _) in enumerate(ranks):
        t.tensor(got, "the gradient on rank {rank}", shape=want.shape, dtype=want.dtype, rank=rank)
        ratio = float(got.norm() / want.norm())
        t.that(near(ratio, 1.0, 1e-10), message, **values, **({"ratio": ratio} if "{ratio" in message else {}))


@check("loss", points=2, seconds=30)
def check_weighing(student, t):
    "Every token of every rank has the same weight"
    ranks, want = gradients(student, t, t.shuffled([t.integer(2, 4), t.integer(8, 11)]))
    same_direction(
        t,
        ranks,
        want,
        "The averaged gradient points elsewhere than that of the whole batch: a token of a rank with few tokens has another weight than one of a rank with many.",
    )


@check("loss", points=2, seconds=30)
def check_size(student, t):
    "The averaged gradient has the right size"
    ranks, want = gradients(student, t, [12, 12])
    same_size(
        t,
        ranks,
        want,
        "On 2 ranks with equally many tokens the averaged gradient is {ratio:.3g} times that of the whole batch: DDP divides by the number of ranks, once.",
    )
