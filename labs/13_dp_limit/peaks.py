"""The visible checks of a step's moments, and of what fits: against a measured step."""

from __future__ import annotations

from dlo_lib.grading.contract import check
from dlo_lib.models import LlamaConfig
from dlo_lib.optim import Phase
from dlo_lib.profiling import Part

from .entries import entry, near
from .twins import card, measured, peak_case, when_largest

# -- peak


def moment(student, t, name: str, config: LlamaConfig, batch: int, seq: int, **settings):
    return entry(t, student.step_peak(config, batch, seq, **settings), name, "step_peak(...)")


@check("peak", points=1)
def check_loss(student, t):
    "The moment when the loss has been computed"
    config, batch, seq = peak_case(t)
    got = moment(student, t, "loss", config, batch, seq, step="fused")
    want = measured(config, batch, seq).peak_by_phase[Phase.LOSS]
    t.that(
        near(got, want, 0.02),
        'at "loss" {got:,} bytes are held, measured {want:,}: no gradient yet, but bf16 copies, activations and 2.5 logits',
        got=got,
        want=want,
    )


@check("peak", points=1)
def check_loss_gradient(student, t):
    "The moment when backward has just begun"
    config, batch, seq = peak_case(t)
    got = moment(student, t, "loss gradient", config, batch, seq, step="fused")
    want = when_largest(measured(config, batch, seq), Part.LOGITS_AND_LOSS, Phase.BACKWARD)
    t.that(
        near(got, want, 0.02),
        'at "loss gradient" {got:,} bytes are held, measured {want:,}: three logits now, and still no gradient of a weight',
        got=got,
        want=want,
    )


@check("peak", points=2)
def check_last_gradient(student, t):
    "The moment when backward reaches a tied embedding"
    config, batch, seq = peak_case(t, tied_embeddings=True)
    got = moment(student, t, "last gradient", config, batch, seq, step="fused")
    want = when_largest(measured(config, batch, seq), Part.GRADIENTS, Phase.BACKWARD)
    t.that(
        near(got, want, 0.03),
        'at "last gradient" {got:,} bytes are held, measured {want:,}: a tied embedding has a gradient from each use, and their sum',
        got=got,
        want=want,
    )


@check("peak", points=1)
def check_optimizer_step(student, t):
    "The moment of the optimiser's step"
    config, batch, seq = peak_case(t)
    step = t.choice(["foreach", "for-loop"])
    got = moment(student, t, "optimizer step", config, batch, seq, step=step)
    want = measured(config, batch, seq, step).peak_by_phase[Phase.OPTIMIZER]
    t.that(
        near(got, want, 0.02),
        'at "optimizer step" ({step}) {got:,} bytes are held, measured {want:,}: the state, and the temporaries of the step',
        step=step,
        got=got,
        want=want,
    )


# -- fits


def says(student, t, wanted: bool, message: str, *args, **settings) -> None:
    got = student.fits(*args, **settings)
    t.that(type(got) is bool, "fits(...) should be True or False, not {got}", got=got)
    t.that(got is wanted, message)


@check("fits", points=2)
def check_usable(student, t):
    "Usable memory decides, not the memory on the box"
    config, batch, seq = peak_case(t, tied_embeddings=True)
    peak = measured(config, batch, seq).peak_bytes
    enough, short = card(1.1 * peak, 2 * peak), card(0.9 * peak, 2 * peak)
    says(student, t, True, "This step needs a tenth less than the GPU's usable memory: it fits.", config, enough, batch, seq, step="fused")
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
