"""The visible checks of this lab: parameters, state, and what a block and a model keep. Those of a step's moments are in ``peaks.py``, of ranks in
``on_ranks.py``.

Nothing here knows a formula: parameters are counted on a model without storage, bytes are measured on fake tensors, gradients are
those of one process with the whole batch (``twins.py``).
"""

from __future__ import annotations

from dataclasses import replace

from dlo_lib.grading.contract import check
from dlo_lib.grading.quiz import quiz_complete
from dlo_lib.models import LlamaConfig
from dlo_lib.profiling import Part

from .entries import entry, near
from .hints import HINTS as HINTS
from .on_ranks import check_exact, check_nothing_fits, check_ranks, check_size, check_weighing
from .peaks import check_last_gradient, check_loss, check_loss_gradient, check_optimizer_step, check_usable
from .quiz import QUIZ
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
    got, want = entry(t, student.count_parameters(config), part, "count_parameters(config)"), counted(config)[part]
    sizes = {name: getattr(config, name) for name in READ_BY[part]}
    shown = ", ".join(f"{name} {{{name}}}" for name in sizes)
    t.that(
        got == want, f'"{{part}}" is {{got:,}}, but the model has {{want:,}} ({shown}). ' + message, part=part, got=got, want=want, **sizes
    )


@check("parameters", points=1)
def check_embedding(student, t):
    "The embedding, and an output projection of its own"
    config = drawn(t, tied_embeddings=False)
    for part in ("embedding", "head"):
        same_part(student, t, config, part, "There is one vector of size hidden for each token of the vocabulary.")


@check("parameters", points=1)
def check_tied(student, t):
    "Tied embeddings are counted once"
    config = drawn(t, tied_embeddings=True)
    for part in ("embedding", "head"):
        same_part(student, t, config, part, "A tied output projection is the embedding itself: it adds nothing.")


@check("parameters", points=1)
def check_attention(student, t):
    "Attention with grouped queries"
    same_part(
        student,
        t,
        drawn(t),
        "attention",
        "Queries have num_heads heads, keys and values num_kv_heads; the output projection reads the queries' width.",
    )


@check("parameters", points=1)
def check_mlp(student, t):
    "The three matrices of the MLP"
    same_part(student, t, drawn(t), "mlp", "Each block has gate, up and down, between hidden and intermediate.")


@check("parameters", points=1)
def check_norms(student, t):
    "Two norms in each block, and the last one"
    same_part(student, t, drawn(t), "norms", "Each block has two vectors of size hidden, and one more follows the last block.")


# -- 2 · state


def same_state(
    student, t, config: LlamaConfig, parts: tuple[str, ...], message: str, optimizer: str = "adamw", step: str = "foreach"
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
    message = "Everything is fp32, 4 bytes a number: one number a parameter for weights and for gradients, two for AdamW's moments."
    same_state(student, t, drawn(t, num_layers=1), ("weights", "gradients", "optimizer"), message)


@check("state", points=2)
def check_foreach(student, t):
    "The temporaries of a foreach and of a fused step"
    config = drawn(t, num_layers=1)
    same_state(
        student, t, config, ("temporaries",), "foreach makes the denominators of all parameters before it uses the first.", step="foreach"
    )
    same_state(student, t, config, ("temporaries",), "A fused step allocates nothing.", step="fused")


@check("state", points=1)
def check_for_loop(student, t):
    "The temporaries of a for-loop step"
    message = "Two tensors as large as the largest parameter, the embedding, live at the worst moment."
    same_state(student, t, drawn(t, num_layers=1), ("temporaries",), message, step="for-loop")


# -- 3 · block: what one block keeps grows linearly with each size, so each size is judged by the growth that it alone brings


def block_growth(student, t, config: LlamaConfig, batch: int, seq: int, **more) -> tuple[float, int]:
    """By how much ``block_bytes`` grows from ``config`` to the one with ``more``: the student's and the measured growth."""
    larger = replace(config, **more)
    got = [t.number(student.block_bytes(each, batch, seq), "block_bytes(config, batch, seq)") for each in (config, larger)]
    return got[1] - got[0], kept_by_a_block(larger, batch, seq) - kept_by_a_block(config, batch, seq)


@check("block", points=2)
def check_block_mlp(student, t):
    "What the MLP keeps of its wide tensors"
    config, batch, seq = block_case(t)
    got, want = block_growth(student, t, config, batch, seq, intermediate=2 * config.intermediate)
    t.that(
        near(got, want, 0.04),
        "With twice the intermediate size your block keeps {got} more bytes a token, measured {want}. Count the bf16 rows of that width: gate, "
        "silu(gate), up, and their product.",
        got=got / (batch * seq),
        want=want / (batch * seq),
    )


@check("block", points=1)
def check_block_queries(student, t):
    "What attention keeps of the queries' width"
    config, batch, seq = block_case(t)
    got, want = block_growth(student, t, config, batch, seq, num_heads=2 * config.num_heads)
    t.that(
        near(got, want, 0.05),
        "With twice the query heads your block keeps {got} more bytes a token, measured {want}. Two bf16 rows have the width num_heads x head_dim: "
        "the queries and the output of attention.",
        got=got / (batch * seq),
        want=want / (batch * seq),
    )


# -- 4 · activations


@check("activations", points=2)
def check_everything_kept(student, t):
    "What forward keeps without checkpointing"
    config, batch, seq = drawn(t, num_layers=t.integer(4, 6), vocab_size=512), t.integer(1, 3), 32 * t.integer(2, 5)
    got = entry(t, student.activation_bytes(config, batch, seq), "activations", "activation_bytes(config, batch, seq)")
    want = before_loss(measured(config, batch, seq), Part.ACTIVATIONS)
    t.that(
        near(got, want, 0.15),
        "activations are {got:,} bytes, measured {want:,}: every block keeps block_bytes, and there are num_layers.",
        got=got,
        want=want,
    )


@check("activations", points=1)
def check_checkpointing(student, t):
    "With checkpointing a block keeps its input in fp32"
    config, batch, seq = drawn(t, num_layers=1, vocab_size=512), t.integer(1, 3), 32 * t.integer(2, 5)
    more = replace(config, num_layers=1 + t.integer(1, 2))
    what = "activation_bytes(config, batch, seq, checkpointing=True)"
    got = [entry(t, student.activation_bytes(each, batch, seq, checkpointing=True), "activations", what) for each in (config, more)]
    want = [before_loss(measured(each, batch, seq, checkpointing=True), Part.ACTIVATIONS) for each in (config, more)]
    t.that(
        near(got[1] - got[0], want[1] - want[0], 0.02),
        "{blocks} more checkpointed blocks keep {got} bytes in your count, measured {want}: each keeps its input, (batch, seq, hidden) in fp32.",
        blocks=more.num_layers - config.num_layers,
        got=got[1] - got[0],
        want=want[1] - want[0],
    )


@check("activations", points=1)
def check_logits(student, t):
    "One tensor of logits in fp32"
    config, batch, seq = drawn(t, num_layers=1), t.integer(1, 3), 32 * t.integer(2, 5)
    for checkpointing in (False, True):
        got = entry(t, student.activation_bytes(config, batch, seq, checkpointing=checkpointing), "logits", "activation_bytes(...)")
        peak = measured(config, batch, seq, checkpointing=checkpointing).peak_by_part[Part.LOGITS_AND_LOSS]
        t.that(
            near(3 * got, peak, 0.05),
            "three tensors of your logits are {got:,} bytes; measured, three of them are {want:,}",
            got=3 * got,
            want=peak,
        )


# -- quiz

complete = quiz_complete(QUIZ, points=1)
