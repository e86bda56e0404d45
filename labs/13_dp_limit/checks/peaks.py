"""The visible checks of a step's moments and of ``fits``, against a measured step."""

from __future__ import annotations

from dlo_lib.grading.checks.contract import check
from dlo_lib.labkit.compare import entry, near, wrong_if
from dlo_lib.models import LlamaConfig
from dlo_lib.optim import Phase
from dlo_lib.profiling import Part

from .twins import card, counted, drawn, measured, peak_case, when_largest

# -- peak


def moment(student, t, name: str, config: LlamaConfig, batch: int, seq: int, **settings):
    return entry(t, student.step_peak(config, batch, seq, **settings), name, "step_peak(...)")


@check("peak", points=1)
def check_loss(student, t):
    "The moment when the loss has been computed"
    config, batch, seq = peak_case(t)
    got = moment(student, t, "loss", config, batch, seq, step="fused")
    want = measured(config, batch, seq).peak_by_phase[Phase.LOSS]
    message = (
        'at "loss" you count {got:,} bytes, measured {want:,}: no gradient yet, but bf16 copies, '
        "activations and 2.5 logits tensors"
    )
    t.that(near(got, want, rtol=0.02), message, got=got, want=want)


@check("peak", points=1)
def check_loss_gradient(student, t):
    "The moment when backward has just begun"
    config, batch, seq = peak_case(t)
    got = moment(student, t, "loss gradient", config, batch, seq, step="fused")
    want = when_largest(measured(config, batch, seq), Part.LOGITS_AND_LOSS, Phase.BACKWARD)
    message = (
        'at "loss gradient" you count {got:,} bytes, measured {want:,}: three logits tensors, and still no '
        "gradient of a weight"
    )
    t.that(near(got, want, rtol=0.02), message, got=got, want=want)


@check("peak", points=2)
def check_last_gradient(student, t):
    "The moment when backward reaches a tied embedding"
    config, batch, seq = peak_case(t, tied_embeddings=True)
    got = moment(student, t, "last gradient", config, batch, seq, step="fused")
    want = when_largest(measured(config, batch, seq), Part.GRADIENTS, Phase.BACKWARD)
    message = (
        'at "last gradient" you count {got:,} bytes, measured {want:,}: a tied embedding has a gradient '
        "from each use, and their sum"
    )
    t.that(near(got, want, rtol=0.03), message, got=got, want=want)


@check("peak", points=1)
def check_optimizer_step(student, t):
    "The moment of the optimiser's step"
    config, batch, seq = peak_case(t)
    for optimizer in ("adamw", t.choice(["sgd", "sgd-momentum"])):
        chosen = {"optimizer": optimizer, "step": t.choice(["foreach", "for-loop"])}
        got = moment(student, t, "optimizer step", config, batch, seq, **chosen)
        want = measured(config, batch, seq, **chosen).peak_by_phase[Phase.OPTIMIZER]
        message = (
            'at "optimizer step" ({optimizer}, {step}) you count {got:,} bytes, measured {want:,}: the state '
            "of this optimiser, and the temporaries of its step"
        )
        t.that(near(got, want, rtol=0.02), message, got=got, want=want, **chosen)


@check("peak", points=1)
def check_untied(student, t):
    "The last gradient with untied embeddings"
    config, batch, seq = peak_case(t, tied_embeddings=False)
    got = moment(student, t, "last gradient", config, batch, seq, step="fused")
    want = when_largest(measured(config, batch, seq, parallel="ddp"), Part.GRADIENTS, Phase.BACKWARD)
    message = (
        'at "last gradient" you count {got:,} bytes, measured {want:,}: DDP copies the gradient of an '
        "untied embedding into its bucket: one more tensor of its size"
    )
    t.that(near(got, want, rtol=0.03), message, got=got, want=want)


@check("peak", points=1)
def check_bucket_copies(student, t):
    "DDP without bucket views, at every moment"
    config, batch, seq = peak_case(t, tied_embeddings=True)
    report = measured(config, batch, seq, parallel="ddp", bucket_view=False)
    wanted = {
        "loss": report.peak_by_phase[Phase.LOSS],
        "optimizer step": report.peak_by_phase[Phase.OPTIMIZER],
    }
    for name, want in wanted.items():
        got = moment(student, t, name, config, batch, seq, step="fused", bucket_view=False)
        with_views = moment(student, t, name, config, batch, seq, step="fused")
        grown = (
            want
            - measured(config, batch, seq, parallel="ddp").peak_by_phase[
                Phase.LOSS if name == "loss" else Phase.OPTIMIZER
            ]
        )
        message = "Without bucket views the buckets are a second copy of all gradients, at every moment."
        t.that(near(got - with_views, grown, rtol=0.03), message)


@check("peak", points=1)
def check_checkpointed(student, t):
    "The loss and its gradient, with checkpointing"
    config, batch, seq = peak_case(t, num_layers=2)
    got = moment(student, t, "loss gradient", config, batch, seq, step="fused", checkpointing=True)
    kept = moment(student, t, "loss", config, batch, seq, step="fused", checkpointing=True)
    report = measured(config, batch, seq, checkpointing=True)
    at_loss = report.peak_by_phase[Phase.LOSS]
    at_gradient = when_largest(report, Part.LOGITS_AND_LOSS, Phase.BACKWARD)
    parts = counted(config)
    of_blocks = 2 * (parts["attention"] + parts["mlp"])  # the bf16 copies
    dropped = (
        'with checkpointing, at "loss" you count {mine:,} bytes, measured {right:,}: all bf16 copies are '
        "still there, because autocast remembers them until its `with` block ends, after the loss"
    )
    wrong_if(t, kept, at_loss, {dropped: at_loss - of_blocks}, rtol=0.008, mine=kept, right=at_loss)
    stayed = (
        'with checkpointing, at "loss gradient" you count {mine:,} bytes, measured {right:,}: a checkpointed '
        "model has dropped the bf16 copies of its blocks after the loss; only that of the output projection "
        "stays"
    )
    wrong_if(t, got, at_gradient, {stayed: at_gradient + of_blocks}, rtol=0.008, mine=got, right=at_gradient)
    fp32_logits = 4 * batch * seq * config.vocab_size
    message = (
        'with checkpointing, your count grows by {got:,} bytes from "loss" to "loss gradient", measured '
        "{want:,}: half a logits tensor more, and the bf16 copies of the blocks less"
    )
    growth, want = got - kept, at_gradient - at_loss
    t.that(bool(abs(growth - want) <= 0.05 * fp32_logits), message, got=growth, want=want)


# -- fits


def says(student, t, wanted: bool, message: str, *args, **settings) -> None:
    got = student.fits(*args, **settings)
    t.that(type(got) is bool, "fits(...) should be True or False, not {got}", got=got)
    t.that(got is wanted, message)


@check("fits", points=2)
def check_usable(student, t):
    "Usable memory decides, not the nominal memory"
    config, batch, seq = peak_case(t, tied_embeddings=True)
    peak = measured(config, batch, seq).peak_bytes
    enough, short = card(1.1 * peak, 2 * peak), card(0.9 * peak, 2 * peak)
    says(
        student,
        t,
        True,
        "This step needs less than the GPU's usable memory: it fits.",
        config,
        enough,
        batch,
        seq,
        step="fused",
    )
    says(
        student,
        t,
        False,
        "This step needs more than usable_bytes, though less than memory_bytes: it does not fit.",
        config,
        short,
        batch,
        seq,
        step="fused",
    )


@check("fits", points=1)
def check_optimizer_decides(student, t):
    "A step with its peak in the optimiser"
    config = drawn(t, num_layers=1, vocab_size=2000, tied_embeddings=True)
    report = measured(config, 1, 64, "foreach")
    peak = report.peak_by_phase[Phase.OPTIMIZER]
    backward = report.peak_by_phase[Phase.BACKWARD]
    between = card((peak + backward) / 2, (peak + backward) / 2)
    ordinary = "not tested yet: a step does not fit twice its memory, see the first check"
    says(student, t, True, ordinary, config, card(2 * peak, 2 * peak), 1, 64, step="foreach")
    says(
        student,
        t,
        False,
        "Backward fits here, but the optimiser's step does not: a step needs the largest of its moments.",
        config,
        between,
        1,
        64,
        step="foreach",
    )


@check("fits", points=1)
def check_settings(student, t):
    "The settings reach step_peak"
    config = drawn(t, vocab_size=2000, num_layers=3, tied_embeddings=True)
    kept, checkpointed = (
        measured(config, 4, 512, checkpointing=chosen).peak_bytes for chosen in (False, True)
    )
    between = card((kept + checkpointed) / 2, (kept + checkpointed) / 2)
    says(
        student,
        t,
        True,
        "With checkpointing this step fits.",
        config,
        between,
        4,
        512,
        step="fused",
        checkpointing=True,
    )
    says(student, t, False, "Without checkpointing it does not.", config, between, 4, 512, step="fused")
