"""The hidden checks: other sizes and edge cases, and the answers of the quiz. Never released.

A student reads a message only if it holds no values.
"""

from __future__ import annotations

from dlo_lib.grading.checks.contract import check
from dlo_lib.grading.checks.quiz import Answer
from dlo_lib.labkit.compare import entry, near

from .checks.counts import same_part
from .checks.on_ranks import found
from .checks.peaks import says
from .checks.twins import block_case, card, drawn, peak_case, sharing

# -- 1 · parameters


@check("parameters", points=1)
def check_one_block(student, t):
    "A model of one block"
    config = drawn(t, num_layers=1)
    for part in ("attention", "mlp", "norms"):
        same_part(student, t, config, part, "With one block there is each matrix once, and three norms.")


# -- 3 · block


@check("block", points=1)
def check_block_tokens(student, t):
    "The bytes of a block grow linearly with batch and with seq"
    config, batch, seq = block_case(t)
    one, more, longer = (
        t.number(student.block_bytes(config, b, s), "block_bytes(...)")
        for b, s in ((batch, seq), (3 * batch, seq), (batch, 3 * seq))
    )
    t.that(
        one > 0 and near(more, 3 * one, rtol=1e-3),
        "For three times the sequences, a block keeps three times the bytes.",
    )
    t.that(
        near(longer, 3 * one, rtol=1e-3),
        "For three times the tokens, a block keeps three times the bytes: flash attention keeps no scores.",
    )


# -- 6 · fits


@check("fits", points=1)
def check_exactly_full(student, t):
    "A step that needs exactly the usable memory"
    config, batch, seq = peak_case(t)
    moments = student.step_peak(config, batch, seq)
    peak = max(
        entry(t, moments, name, "step_peak(...)")
        for name in ("loss", "loss gradient", "last gradient", "optimizer step")
    )
    ordinary = "not tested yet: a step fits half of its memory, see the first check"
    says(student, t, False, ordinary, config, card(peak / 2, peak / 2), batch, seq)
    says(
        student,
        t,
        True,
        "A step that needs exactly usable_bytes fits.",
        config,
        card(peak, 2 * peak),
        batch,
        seq,
    )


# -- 7 · largest


@check("largest", points=1)
def check_few_questions_small(student, t):
    "Few calls of fits, for a small batch"
    for limit in (0, 1, 2 ** t.integer(1, 3)):  # powers of two, so that only the number of calls is new here
        got = found(student, t, limit, budget=9)
        t.that(got == limit, "For a small batch the answer is wrong: begin to double at 1.")


# -- 8 · ranks


@check("ranks", points=1)
def check_one_rank(student, t):
    "A global batch that fits one rank"
    config, seq = drawn(t, num_layers=2, tied_embeddings=True), 384
    gpu_drawn, _ = sharing(t, config, seq, largest=3)
    got = t.number(
        student.ranks_needed(config, gpu_drawn, t.integer(1, 3), seq, step="fused"), "ranks_needed(...)"
    )
    t.that(bool(got == 1), "If the global batch fits one GPU, one rank is enough.")


# -- quiz

ANSWERS = {
    "q1": Answer(
        "b",
        "AdamW's foreach step holds the denominators of all parameters on top of the state: 59.8 GiB, "
        "backward needs less",
    ),
    "q2": Answer(
        "c", "a rank holds the whole state for any number of ranks, and its number of sequences is unchanged"
    ),
    "q3": Answer("a", "checkpointing concerns the blocks; the logits come after them"),
    "q4": Answer("d", "a token is 1/20 of the mean on this rank, and 1/100 on the others"),
    "q5": Answer("b", "2 + 2 + 12 bytes, and 4 + 4 + 8 bytes"),
    "q6": Answer(
        "c", "gradient_as_bucket_view is False by default: the buckets are a second copy of all gradients"
    ),
}
