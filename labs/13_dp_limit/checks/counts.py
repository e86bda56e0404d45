"""The visible checks of parameters, state, and activations of a block and a model.

Those of a step's moments are in ``peaks.py``, those of ranks in ``on_ranks.py``. The checks contain no
formula: parameters are counted on a model without storage, bytes are measured on fake tensors, gradients are
those of one process with the whole batch (``twins.py``).
"""

from __future__ import annotations

from dataclasses import replace

from dlo_lib.grading.checks.contract import check
from dlo_lib.labkit.compare import entry, near, wrong_if
from dlo_lib.models import LlamaConfig
from dlo_lib.profiling import Part

from .twins import STATE, before_loss, block_case, counted, drawn, in_the_step, kept_by_a_block, measured

# -- 1 · parameters

READ_BY = {
    "embedding": ("vocab_size", "hidden"),
    "head": ("vocab_size", "hidden", "tied_embeddings"),
    "attention": ("num_layers", "hidden", "num_heads", "num_kv_heads", "head_dim"),
    "mlp": ("num_layers", "hidden", "intermediate"),
    "norms": ("num_layers", "hidden"),
}


def same_part(student, t, config: LlamaConfig, part: str, message: str) -> None:
    got, want = (
        entry(t, student.count_parameters(config), part, "count_parameters(config)"),
        counted(config)[part],
    )
    sizes = {name: getattr(config, name) for name in READ_BY[part]}
    shown = ", ".join(f"{name} {{{name}}}" for name in sizes)
    t.that(
        got == want,
        f'"{{part}}" is {{got:,}}, but the model has {{want:,}} ({shown}). ' + message,
        part=part,
        got=got,
        want=want,
        **sizes,
    )


def two_models(t, part: str, **fixed) -> list[LlamaConfig]:
    """Two drawn configurations with different numbers of parameters in ``part``."""
    return t.draw_until(
        lambda: [drawn(t, **fixed) for _ in range(2)],
        lambda two: counted(two[0])[part] != counted(two[1])[part],
    )


@check("parameters", points=1)
def check_embedding(student, t):
    "The embedding, and an output projection that is not tied"
    for config in two_models(t, "embedding", tied_embeddings=False):
        for part in ("embedding", "head"):
            message = "There is one vector of size hidden for each token of the vocabulary."
            same_part(student, t, config, part, message)


@check("parameters", points=1)
def check_tied(student, t):
    "Tied embeddings are counted once"
    for config in two_models(t, "embedding", tied_embeddings=True):
        for part in ("embedding", "head"):
            message = "A tied output projection is the embedding itself: it adds nothing."
            same_part(student, t, config, part, message)


@check("parameters", points=1)
def check_attention(student, t):
    "Attention with grouped queries"
    message = (
        "Queries have num_heads heads, keys and values num_kv_heads; the output projection reads the "
        "queries' width."
    )
    for config in two_models(t, "attention"):
        same_part(student, t, config, "attention", message)


@check("parameters", points=1)
def check_mlp(student, t):
    "The three matrices of the MLP"
    for config in two_models(t, "mlp"):
        message = "Each block has gate, up and down, between hidden and intermediate."
        same_part(student, t, config, "mlp", message)


@check("parameters", points=1)
def check_norms(student, t):
    "Two norms in each block, and the last one"
    for config in two_models(t, "norms"):
        message = "Each block has two vectors of size hidden, and one more follows the last block."
        same_part(student, t, config, "norms", message)


@check("parameters", points=2)
def check_wide_heads(student, t):
    "Heads that are not hidden / num_heads wide"
    config = drawn(t)
    config = replace(config, num_kv_heads=config.num_heads, head_dim=config.head_dim + 16 * t.integer(1, 3))
    same_part(
        student,
        t,
        config,
        "attention",
        "The width of the queries is num_heads x head_dim, which need not be hidden.",
    )


# -- 2 · state


def same_state(
    student,
    t,
    config: LlamaConfig,
    parts: tuple[str, ...],
    message: str,
    optimizer: str = "adamw",
    step: str = "foreach",
) -> None:
    call = f'state_bytes(config, "{optimizer}", "{step}")'
    got, want = student.state_bytes(config, optimizer, step), in_the_step(config, optimizer, step)
    for part in parts:
        number = entry(t, got, part, call)
        # 64 kB: the optimiser keeps a step counter of 4 bytes for each tensor.
        good = abs(number - want[part]) <= 1e-3 * want[part] + 2**16
        t.that(
            bool(good),
            '{call}["{part}"] is {got:,}, measured {want:,} bytes. ' + message,
            call=call,
            part=part,
            got=number,
            want=want[part],
        )


@check("state", points=2)
def check_sixteen_bytes(student, t):
    "Weights, gradients and AdamW's two moments, in fp32"
    message = (
        "Every number is fp32, 4 bytes: one a parameter for weights and for gradients, two for AdamW's "
        "moments."
    )
    same_state(student, t, drawn(t, num_layers=1), ("weights", "gradients", "optimizer"), message)


@check("state", points=2)
def check_foreach(student, t):
    "The temporaries of a foreach and of a fused step"
    config = drawn(t, num_layers=1)
    same_state(
        student,
        t,
        config,
        ("temporaries",),
        "foreach computes the denominators of all parameters before it uses the first.",
        step="foreach",
    )
    same_state(student, t, config, ("temporaries",), "A fused step allocates nothing.", step="fused")


@check("state", points=1)
def check_for_loop(student, t):
    "The temporaries of a for-loop step"
    message = (
        "Two tensors as large as the largest parameter, the embedding, are in memory at the worst moment."
    )
    same_state(student, t, drawn(t, num_layers=1), ("temporaries",), message, step="for-loop")


@check("state", points=1)
def check_other_optimizers(student, t):
    "The state of SGD, without and with momentum"
    config = drawn(t, num_layers=1)
    for optimizer in ("sgd", "sgd-momentum"):
        same_state(
            student,
            t,
            config,
            ("optimizer",),
            "SGD with momentum keeps one number a parameter, plain SGD none.",
            optimizer,
            "fused",
        )


@check("state", points=1)
def check_sgd_in_place(student, t):
    "SGD's step needs no temporaries"
    config, message = (
        drawn(t, num_layers=1),
        "SGD has no denominator: it updates in place, in each of the three implementations.",
    )
    got = entry(t, student.state_bytes(config, "adamw", "foreach"), "temporaries", "state_bytes(...)")
    t.that(got > 0, "not tested yet: AdamW's step has no temporaries, see the check of a foreach step")
    for optimizer, step in (("sgd", "foreach"), ("sgd-momentum", "for-loop")):
        same_state(student, t, config, ("temporaries",), message, optimizer, step)


# -- 3 · block: the bytes of a block are linear in each size, so each check varies one size and compares the
# growth


def same_growth(student, t, size: str, mistakes: dict[str, float], why: str) -> None:
    """With a larger ``size``, the block keeps as many more bytes a token as measured.

    ``mistakes``: a message for each known wrong number of bytes a token and element, relative to the right
    one.
    """
    config, batch, seq = block_case(t)
    more = replace(
        config, **{size: config.num_heads if size == "num_kv_heads" else 2 * getattr(config, size)}
    )
    width = (getattr(more, size) - getattr(config, size)) * (config.head_dim if "heads" in size else 1)
    got = [
        t.number(student.block_bytes(each, batch, seq), "block_bytes(config, batch, seq)")
        for each in (config, more)
    ]
    each = (got[1] - got[0]) / (batch * seq * width)
    want = (kept_by_a_block(more, batch, seq) - kept_by_a_block(config, batch, seq)) / (batch * seq * width)
    wrong_if(t, each, want, {message: share * want for message, share in mistakes.items()}, rtol=0.05)
    t.that(
        near(each, want, rtol=0.05),
        "your block keeps {each:.1f} bytes a token for each element of width {size}; measured {want:.1f}. "
        + why,
        each=each,
        want=want,
        size=f"{size} x head_dim" if "heads" in size else size,
    )


@check("block", points=2)
def check_block_hidden(student, t):
    "The tensors of width hidden that a block keeps"
    mistakes = {
        "half of what the norms keep is missing: a norm keeps its input and its normalised input, both in "
        "fp32 (4 bytes)": 18 / 26,
        "the bf16 copies of the norms' outputs are not counted: each of q, k, v, gate and up has a copy of "
        "its input": 16 / 26,
        "one bf16 copy of each norm's output is counted: each of q, k, v, gate and up has a copy of its "
        "input": 20 / 26,
    }
    why = (
        "Each of the two norms keeps two fp32 tensors; each of q, k, v, gate and up keeps a bf16 copy of "
        "its input."
    )
    same_growth(student, t, "hidden", mistakes, why)


@check("block", points=2)
def check_block_mlp(student, t):
    "The tensors of width intermediate that the MLP keeps"
    mistakes = {
        "these rows are counted in fp32: under autocast the MLP computes in bf16, 2 bytes": 2.0,
        "three rows of width intermediate are counted, there are four: gate, silu(gate), up, and their "
        "product": 6 / 8,
    }
    same_growth(
        student,
        t,
        "intermediate",
        mistakes,
        "Count the bf16 rows of that width: gate, silu(gate), up, and their product.",
    )


@check("block", points=1)
def check_block_queries(student, t):
    "The tensors of the queries' width that attention keeps"
    mistakes = {
        "one row of that width is counted, there are two: the queries and the output of attention": 0.5
    }
    why = "Two bf16 rows have the width num_heads x head_dim: the queries and the output of attention."
    same_growth(student, t, "num_heads", mistakes, why)


@check("block", points=1)
def check_block_keys(student, t):
    "The tensors of the keys' width that attention keeps"
    mistakes = {
        "one row of the keys' width is counted, there are two: keys and values": 0.5,
        "the rows of keys and values do not depend on num_kv_heads: with grouped queries they are "
        "num_kv_heads x head_dim wide": 0.0,
    }
    same_growth(
        student,
        t,
        "num_kv_heads",
        mistakes,
        "Keys and values are kept in bf16, both num_kv_heads x head_dim wide.",
    )


# -- 4 · activations


@check("activations", points=2)
def check_everything_kept(student, t):
    "What forward keeps without checkpointing"
    config, batch, seq = (
        drawn(t, num_layers=t.integer(4, 6), vocab_size=512),
        t.integer(1, 3),
        32 * t.integer(2, 5),
    )
    got = entry(
        t, student.activation_bytes(config, batch, seq), "activations", "activation_bytes(config, batch, seq)"
    )
    want = before_loss(config, batch, seq)
    message = (
        "activations are {got:,} bytes, measured {want:,}: each of the num_layers blocks keeps block_bytes."
    )
    t.that(near(got, want, rtol=0.15), message, got=got, want=want)


@check("activations", points=1)
def check_checkpointing(student, t):
    "With checkpointing a block keeps its input in fp32"
    config, batch, seq = drawn(t, num_layers=1, vocab_size=512), t.integer(1, 3), 32 * t.integer(2, 5)
    more = replace(config, num_layers=1 + t.integer(1, 2))
    what = "activation_bytes(config, batch, seq, checkpointing=True)"
    got = [
        entry(t, student.activation_bytes(each, batch, seq, checkpointing=True), "activations", what)
        for each in (config, more)
    ]
    want = [before_loss(each, batch, seq, checkpointing=True) for each in (config, more)]
    t.that(
        near(got[1] - got[0], want[1] - want[0], rtol=0.02),
        "additional checkpointed blocks ({blocks}) keep {got} bytes in your count, measured {want}: "
        "each keeps its input, (batch, seq, hidden) in fp32.",
        blocks=more.num_layers - config.num_layers,
        got=got[1] - got[0],
        want=want[1] - want[0],
    )


@check("activations", points=1)
def check_logits(student, t):
    "One tensor of logits in fp32"
    config, batch, seq = drawn(t, num_layers=1), t.integer(1, 3), 32 * t.integer(2, 5)
    for checkpointing in (False, True):
        got = entry(
            t,
            student.activation_bytes(config, batch, seq, checkpointing=checkpointing),
            "logits",
            "activation_bytes(...)",
        )
        peak = measured(config, batch, seq, checkpointing=checkpointing).peak_by_part[Part.LOGITS_AND_LOSS]
        message = "three tensors of your logits have {got:,} bytes, measured {want:,}: logits are in fp32"
        t.that(near(3 * got, peak, rtol=0.05), message, got=3 * got, want=peak)


@check("activations", points=1)
def check_last_norm(student, t):
    "The tensors that the norm after the last block keeps"
    # Wide and with several sequences: the rotary positions, which also are beside the blocks, are small then.
    config, batch, seq = (
        drawn(t, num_layers=1, vocab_size=512, hidden=128 * t.integer(4, 6)),
        t.integer(4, 6),
        32 * t.integer(3, 5),
    )
    more = replace(config, num_layers=2)

    def beside_the_blocks(one: float, two: float) -> float:
        return 2 * one - two

    for checkpointing in (False, True):
        got = [
            entry(
                t,
                student.activation_bytes(each, batch, seq, checkpointing=checkpointing),
                "activations",
                "activation_bytes(...)",
            )
            for each in (config, more)
        ]
        want = [before_loss(each, batch, seq, checkpointing) for each in (config, more)]
        t.that(
            near(beside_the_blocks(*got), beside_the_blocks(*want), rtol=0.2),
            "Beside the blocks you count {got:,} bytes, measured {want:,}. The last norm keeps its input "
            "and its normalised input in fp32, with and without checkpointing.",
            got=beside_the_blocks(*got),
            want=beside_the_blocks(*want),
        )
