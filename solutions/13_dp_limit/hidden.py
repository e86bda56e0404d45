"""The hidden checks: configurations of other kinds, and the right answers of the quiz. Never released.

Their messages hold no values where a student should read them.
"""

from __future__ import annotations

from dataclasses import replace

from dlo_lib.grading.contract import check
from dlo_lib.grading.quiz import Answer, quiz_right
from dlo_lib.optim import Phase
from dlo_lib.profiling import Part

from .checks import block_growth
from .entries import entry, near
from .on_ranks import found, gradients, same_size
from .peaks import moment, says
from .quiz import QUIZ
from .twins import before_loss, block_case, card, counted, drawn, in_the_step, measured, peak_case, when_largest

# -- 1 · parameters


@check("parameters", points=2)
def check_wide_heads(student, t):
    "Heads that are not hidden / num_heads wide"
    config = drawn(t)
    config = replace(config, num_kv_heads=config.num_heads, head_dim=config.head_dim + 16 * t.integer(1, 3))
    got = entry(t, student.count_parameters(config), "attention", "count_parameters(config)")
    t.that(got == counted(config)["attention"], "The width of the queries is num_heads x head_dim, which need not be hidden.")


# -- 2 · state


@check("state", points=1)
def check_other_optimizers(student, t):
    "The state of SGD, without and with momentum"
    config = drawn(t, num_layers=1)
    for optimizer in ("sgd", "sgd-momentum"):
        got = entry(t, student.state_bytes(config, optimizer, "fused"), "optimizer", "state_bytes(...)")
        want = in_the_step(config, optimizer, "fused")["optimizer"]
        t.that(bool(abs(got - want) <= 1e-3 * want + 2**16), "SGD with momentum keeps one number a parameter, plain SGD none.")


@check("state", points=1)
def check_sgd_in_place(student, t):
    "SGD's step needs no temporaries"
    config = drawn(t, num_layers=1)
    for optimizer, step in (("sgd", "foreach"), ("sgd-momentum", "foreach"), ("sgd", "for-loop")):
        got = entry(t, student.state_bytes(config, optimizer, step), "temporaries", "state_bytes(...)")
        want = in_the_step(config, optimizer, step)["temporaries"]
        t.that(bool(abs(got - want) <= 2**16), "SGD updates in place, in each of the three implementations: the denominator is AdamW's.")


# -- 3 · block


@check("block", points=1)
def check_block_residual(student, t):
    "What a block keeps of the residual's width"
    config, batch, seq = block_case(t)
    got, want = block_growth(student, t, config, batch, seq, hidden=2 * config.hidden)
    t.that(
        near(got, want, 0.03),
        "Each norm keeps two fp32 tensors of width hidden; each of q, k, v, gate and up has a bf16 copy of what it reads.",
    )


@check("block", points=1)
def check_block_keys(student, t):
    "What attention keeps of the keys' width"
    config, batch, seq = block_case(t)
    got, want = block_growth(student, t, config, batch, seq, num_kv_heads=config.num_heads)
    t.that(near(got, want, 0.03), "Keys and values are kept in bf16, both num_kv_heads x head_dim wide.")


@check("block", points=1)
def check_block_tokens(student, t):
    "What a block keeps grows with batch and with seq, linearly"
    config, batch, seq = block_case(t)
    one, more, longer = (
        t.number(student.block_bytes(config, b, s), "block_bytes(...)") for b, s in ((batch, seq), (3 * batch, seq), (batch, 3 * seq))
    )
    t.that(one > 0 and near(more, 3 * one, 1e-3), "Three times the sequences keep three times the bytes.")
    t.that(near(longer, 3 * one, 1e-3), "Three times the tokens keep three times the bytes: flash attention keeps no scores.")


# -- 4 · activations


@check("activations", points=1)
def check_last_norm(student, t):
    "What the norm after the last block keeps"
    # Wide and with several sequences: the rotary positions, which also are beside the blocks, are small then.
    config, batch, seq = drawn(t, num_layers=1, vocab_size=512, hidden=128 * t.integer(4, 6)), t.integer(4, 6), 32 * t.integer(3, 5)
    more = replace(config, num_layers=2)

    def beside_the_blocks(one: float, two: float) -> float:
        return 2 * one - two

    for checkpointing in (False, True):
        got = [
            entry(t, student.activation_bytes(each, batch, seq, checkpointing=checkpointing), "activations", "activation_bytes(...)")
            for each in (config, more)
        ]
        want = [before_loss(measured(each, batch, seq, checkpointing=checkpointing), Part.ACTIVATIONS) for each in (config, more)]
        t.that(
            near(beside_the_blocks(*got), beside_the_blocks(*want), 0.2),
            "The last norm keeps its input and its normalised input in fp32, with and without checkpointing.",
        )


# -- 5 · peak


@check("peak", points=1)
def check_untied(student, t):
    "The last gradient when embeddings are not tied"
    config, batch, seq = peak_case(t, tied_embeddings=False)
    got = moment(student, t, "last gradient", config, batch, seq, step="fused")
    want = when_largest(measured(config, batch, seq, parallel="ddp"), Part.GRADIENTS, Phase.BACKWARD)
    t.that(near(got, want, 0.03), "DDP copies the embedding's gradient into its bucket: one more tensor of its size at that moment.")


@check("peak", points=1)
def check_bucket_copies(student, t):
    "DDP without bucket views, at every moment"
    config, batch, seq = peak_case(t, tied_embeddings=True)
    report = measured(config, batch, seq, parallel="ddp", bucket_view=False)
    wanted = {"loss": report.peak_by_phase[Phase.LOSS], "optimizer step": report.peak_by_phase[Phase.OPTIMIZER]}
    for name, want in wanted.items():
        got = moment(student, t, name, config, batch, seq, step="fused", bucket_view=False)
        with_views = moment(student, t, name, config, batch, seq, step="fused")
        grown = want - measured(config, batch, seq, parallel="ddp").peak_by_phase[Phase.LOSS if name == "loss" else Phase.OPTIMIZER]
        t.that(
            near(got - with_views, grown, 0.03),
            "Without bucket views the buckets are a second copy of all gradients, from the first step to the last.",
        )


@check("peak", points=1)
def check_checkpointed(student, t):
    "Backward has just begun, with checkpointing"
    config, batch, seq = peak_case(t, num_layers=2)
    got = moment(student, t, "loss gradient", config, batch, seq, step="fused", checkpointing=True)
    kept = moment(student, t, "loss", config, batch, seq, step="fused", checkpointing=True)
    report = measured(config, batch, seq, checkpointing=True)
    want = when_largest(report, Part.LOGITS_AND_LOSS, Phase.BACKWARD) - report.peak_by_phase[Phase.LOSS]
    fp32_logits = 4 * batch * seq * config.vocab_size
    t.that(
        bool(abs(got - kept - want) <= 0.05 * fp32_logits),
        "Between the loss and its gradient a checkpointed model drops the bf16 copies of its blocks; only the output projection's stays.",
    )


# -- 6 · fits


@check("fits", points=1)
def check_optimizer_decides(student, t):
    "A step whose peak is the optimiser's"
    config = drawn(t, num_layers=1, vocab_size=2000, tied_embeddings=True)
    report = measured(config, 1, 64, "foreach")
    peak = report.peak_by_phase[Phase.OPTIMIZER]
    backward = report.peak_by_phase[Phase.BACKWARD]
    between = card((peak + backward) / 2, (peak + backward) / 2)
    says(
        student,
        t,
        False,
        "Backward would fit here, the optimiser's step does not: a step needs the largest of its moments.",
        config,
        between,
        1,
        64,
        step="foreach",
    )


@check("fits", points=1)
def check_settings(student, t):
    "The settings are passed on"
    config = drawn(t, vocab_size=2000, num_layers=3, tied_embeddings=True)
    kept, checkpointed = (measured(config, 4, 512, checkpointing=chosen).peak_bytes for chosen in (False, True))
    between = card((kept + checkpointed) / 2, (kept + checkpointed) / 2)
    says(student, t, True, "With checkpointing this step fits.", config, between, 4, 512, step="fused", checkpointing=True)
    says(student, t, False, "Without checkpointing it does not.", config, between, 4, 512, step="fused")


# -- 7 · largest


@check("largest", points=2)
def check_few_questions(student, t):
    "Few questions, also for a large batch"
    for bits in (t.integer(20, 30), t.integer(40, 50)):
        limit = 2**bits + t.integer(1, 2**16)
        got = found(student, t, limit, budget=2 * bits + 12)
        t.that(0.5 < got / limit < 2, "For a limit of millions the answer is far off: double until it does not fit, then halve the gap.")


# -- 8 · ranks


@check("ranks", points=2)
def check_the_limit(student, t):
    "One sequence does not fit: no number of ranks helps"
    config, seq = drawn(t, num_layers=2, tied_embeddings=True), 128
    peak = measured(config, 1, seq).peak_bytes
    for share in (0.9, 0.5, 0.05):
        got = student.ranks_needed(config, card(share * peak, 2 * peak), 2 ** t.integer(2, 8), seq, step="fused")
        t.that(got is None, "One sequence does not fit one GPU. Data parallelism divides only the batch: the answer is None.")


# -- 9 · loss


@check("loss", points=1, seconds=30)
def check_padding(student, t):
    "Ignored targets are not counted"
    ranks, want = gradients(student, t, [t.integer(3, 8)])
    same_size(t, ranks, want, "On one rank with padding the gradient has the wrong size: divide by the valid tokens, not by all.")


@check("loss", points=2, seconds=30)
def check_empty_rank(student, t):
    "A rank without a valid token, three ranks"
    ranks, want = gradients(student, t, t.shuffled([0, 6, 6]))
    message = "On a rank without a valid token the loss is NaN: a mean over nothing is 0 / 0. Use the sum."
    for rank, (got, loss) in enumerate(ranks):
        t.tensor(got, "the gradient on rank {rank}", shape=want.shape, dtype=want.dtype, rank=rank)
        t.tensor(loss, "the loss on rank {rank}", dtype=want.dtype, rank=rank)
        t.that(bool(got.isfinite().all()) and bool(loss.isfinite().all()), message)


# -- quiz

ANSWERS = {
    "q1": Answer("b", "AdamW's foreach step holds the denominators of all parameters on top of the state: 59.8 GiB, backward needs less"),
    "q2": Answer("c", "a rank holds the whole state whatever the number of ranks, and its own sequences are as many as before"),
    "q3": Answer("a", "checkpointing concerns the blocks; the logits come after them"),
    "q4": Answer("d", "one token is 1/20 of its rank's mean, and 1/100 in the others"),
    "q5": Answer("b", "2 + 2 + 12 bytes, and 4 + 4 + 8 bytes"),
    "q6": Answer("c", "gradient_as_bucket_view is False by default: the buckets are a second copy of all gradients"),
}
right = quiz_right(QUIZ, ANSWERS, points=1)
