"""The optimisers of the library, by name. ``train --optimizer``, ``profiling``, ``hpo``, sharding, tests and
labs read this table.

A new optimiser is a file with its class and an entry here. The tests then run it in every implementation and
under every form of distribution that its entry allows, and compare its memory with the entry.

    step = OPTIMIZERS["adamw"].default_step
    optimizer = OPTIMIZERS["adamw"].cls(parameters, **OPTIMIZERS["adamw"].arguments(step, lr=1e-3))
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from dlo_lib.base.errors import unknown_name
from dlo_lib.kernels.adamw import FusedAdamW
from dlo_lib.optim import adamw_8bit, muon, soap
from dlo_lib.optim.adafactor import Adafactor
from dlo_lib.optim.entry import (
    RATE_AND_DECAY,
    STEP_COUNT,
    OptimizerEntry,
    OptimizerState,
    OptimizerStep,
    ShapeBy,
    StateShape,
    StepMemory,
    TrainingForm,
    UpdateReach,
)
from dlo_lib.optim.in_backward import UpdateInBackward
from dlo_lib.optim.lamb import LAMB
from dlo_lib.optim.lars import LARS
from dlo_lib.optim.lion import Lion
from dlo_lib.optim.schedule_free import ScheduleFreeAdamW

_MOMENTS = (STEP_COUNT, OptimizerState("exp_avg"), OptimizerState("exp_avg_sq"))
_MOMENTUM = (OptimizerState("momentum_buffer"),)
_SQUARES = (STEP_COUNT, OptimizerState("square_avg"))
_ADAM_SETTINGS = RATE_AND_DECAY | {"betas", "eps"}
_SGD_SETTINGS = RATE_AND_DECAY | {"momentum"}
_LLAMA_BETAS = {"betas": (0.9, 0.95)}
"""As in the Llama papers."""

_ADAM_STEPS = {
    OptimizerStep.FUSED: StepMemory(unscales=True),
    # sqrt(v) + eps of all parameters
    OptimizerStep.FOREACH: StepMemory(of_all=4),
    # sqrt(v), its quotient, and the denominator of the previous parameter
    OptimizerStep.FOR_LOOP: StepMemory(of_largest=8, of_successive=12),
}
_SGD_STEPS = {
    OptimizerStep.FUSED: StepMemory(unscales=True),
    OptimizerStep.FOREACH: StepMemory(),
    OptimizerStep.FOR_LOOP: StepMemory(),
}
# The look-ahead gradient. The foreach step adds it to the gradients in place.
_NESTEROV_STEPS = _SGD_STEPS | {OptimizerStep.FOR_LOOP: StepMemory(of_largest=4, of_successive=4)}
# The update of Lion, LAMB, LARS and Adafactor.
_UPDATE_STEPS = {
    OptimizerStep.FOREACH: StepMemory(of_all=4),
    OptimizerStep.FOR_LOOP: StepMemory(of_largest=4, of_successive=4),
}

_NOT_TURNED = (
    OptimizerState("step", ShapeBy(lambda shape, embedding: () if embedding or len(shape) < 2 else None)),
    *(
        OptimizerState(name, ShapeBy(lambda shape, embedding: shape if embedding or len(shape) < 2 else None))
        for name in ("exp_avg", "exp_avg_sq")
    ),
)
"""Of Muon: AdamW's states, of parameters that are no matrices, and of embeddings."""

OPTIMIZERS: Mapping[str, OptimizerEntry] = {
    "adamw": OptimizerEntry(
        torch.optim.AdamW, _MOMENTS, _ADAM_STEPS, _ADAM_SETTINGS, _LLAMA_BETAS, kernel=FusedAdamW
    ),
    "adam": OptimizerEntry(torch.optim.Adam, _MOMENTS, _ADAM_STEPS, _ADAM_SETTINGS, _LLAMA_BETAS),
    "sgd": OptimizerEntry(torch.optim.SGD, (), _SGD_STEPS),
    "sgd-momentum": OptimizerEntry(torch.optim.SGD, _MOMENTUM, _SGD_STEPS, _SGD_SETTINGS, {"momentum": 0.9}),
    "sgd-nesterov": OptimizerEntry(
        torch.optim.SGD, _MOMENTUM, _NESTEROV_STEPS, _SGD_SETTINGS, {"momentum": 0.9, "nesterov": True}
    ),
    "rmsprop": OptimizerEntry(
        torch.optim.RMSprop,
        _SQUARES,
        {
            OptimizerStep.FOREACH: StepMemory(of_all=4),
            OptimizerStep.FOR_LOOP: StepMemory(of_largest=4, of_successive=8),
        },
        RATE_AND_DECAY | {"alpha", "eps"},
    ),
    "lion": OptimizerEntry(Lion, (OptimizerState("exp_avg"),), _UPDATE_STEPS, RATE_AND_DECAY | {"betas"}),
    "lamb": OptimizerEntry(LAMB, _MOMENTS, _UPDATE_STEPS, _ADAM_SETTINGS, reach=UpdateReach.NORM),
    "lars": OptimizerEntry(LARS, _MOMENTUM, _UPDATE_STEPS, _SGD_SETTINGS | {"trust"}, reach=UpdateReach.NORM),
    "muon": OptimizerEntry(
        muon.Muon,
        (
            OptimizerState(
                "momentum_buffer",
                ShapeBy(lambda shape, embedding: None if embedding or len(shape) < 2 else shape),
            ),
            *_NOT_TURNED,
        ),
        {
            OptimizerStep.FOREACH: StepMemory(of_shapes=muon.memory_of_foreach),
            OptimizerStep.FOR_LOOP: StepMemory(of_shapes=muon.memory_of_loop),
        },
        RATE_AND_DECAY | {"momentum", "betas", "eps"},
        reach=UpdateReach.MATRIX,
        embeddings={"muon": False},
    ),
    "soap": OptimizerEntry(
        soap.SOAP,
        (
            STEP_COUNT,
            *(OptimizerState(name, ShapeBy(soap.shape_of_average)) for name in ("exp_avg", "exp_avg_sq")),
            *(
                OptimizerState(name, ShapeBy(soap.shape_of_side(number)))
                for number, side in enumerate(soap.SIDES)
                for name in (side, f"{side}_basis")
            ),
        ),
        {OptimizerStep.FOR_LOOP: StepMemory(of_shapes=soap.memory_of_loop)},
        _ADAM_SETTINGS,
        reach=UpdateReach.PARAMETER,
    ),
    "adamw-8bit": OptimizerEntry(
        adamw_8bit.AdamW8bit,
        (
            STEP_COUNT,
            *(
                OptimizerState(name, ShapeBy(adamw_8bit.shape_of_wide_average))
                for name in ("exp_avg", "exp_avg_sq")
            ),
            *(
                OptimizerState(name, ShapeBy(adamw_8bit.shape_of_numbers), torch.uint8)
                for name in ("exp_avg", "exp_avg_sq")
            ),
            *(
                OptimizerState(name, ShapeBy(adamw_8bit.shape_of_scales), torch.float32)
                for name in ("exp_avg_scale", "exp_avg_sq_scale")
            ),
        ),
        {OptimizerStep.FOR_LOOP: StepMemory(of_shapes=adamw_8bit.memory_of_loop)},
        _ADAM_SETTINGS,
        reach=UpdateReach.PARAMETER,
        embeddings={"eight_bits": False},
    ),
    "adafactor": OptimizerEntry(
        Adafactor,
        (
            STEP_COUNT,
            OptimizerState("row_var", StateShape.ROWS),
            OptimizerState("col_var", StateShape.COLUMNS),
            OptimizerState("variance", StateShape.VECTOR),
        ),
        _UPDATE_STEPS,
        RATE_AND_DECAY | {"beta2_decay", "eps", "d"},
        reach=UpdateReach.PARAMETER,
    ),
    "schedule-free": OptimizerEntry(
        ScheduleFreeAdamW,
        (STEP_COUNT, OptimizerState("exp_avg_sq"), OptimizerState("z")),
        _UPDATE_STEPS,
        _ADAM_SETTINGS | {"warmup_steps"},
    ),
    "adamw-in-backward": OptimizerEntry(
        UpdateInBackward,
        _MOMENTS,
        {OptimizerStep.FUSED: StepMemory()},
        _ADAM_SETTINGS,
        _LLAMA_BETAS,
        forms={TrainingForm.ALONE},
        in_backward=True,
    ),
}


def optimizer_entry(name: str) -> OptimizerEntry:
    """Return the entry of ``name``.

    Raises:
        UserError: there is none. The message offers similar names.
    """
    if name not in OPTIMIZERS:
        raise unknown_name("optimizer", name, OPTIMIZERS)
    return OPTIMIZERS[name]


def classes_by_reach(*reaches: UpdateReach) -> frozenset[type[torch.optim.Optimizer]]:
    """Return the classes of the entries with one of ``reaches``, and their kernels, without those that update
    in the backward."""
    entries = [entry for entry in OPTIMIZERS.values() if entry.reach in reaches and not entry.in_backward]
    return frozenset(cls for entry in entries for cls in (entry.cls, entry.kernel) if cls is not None)
