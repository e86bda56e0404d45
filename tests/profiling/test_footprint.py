"""The formula and the measurement agree for each part, each phase and the sum, within 5 % or 64 MiB."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from dlo_lib.base.errors import UserError
from dlo_lib.models import Llama, LlamaConfig, model_config
from dlo_lib.optim import Phase
from dlo_lib.optim.registry import OPTIMIZERS
from dlo_lib.profiling import OptimizerStep, Part, measure_memory, memory_footprint
from dlo_lib.profiling.sizes import parameter_shapes

MIB = 2**20
LLAMA_1B, LLAMA_3B, LLAMA_8B = (
    model_config(name) for name in ("llama-3.2-1b", "llama-3.2-3b", "llama-3.1-8b")
)
# Fewer blocks: each costs measurement, and the formula is linear in their number.
FEWER_1B, FEWER_3B, FEWER_8B = (replace(config, num_layers=6) for config in (LLAMA_1B, LLAMA_3B, LLAMA_8B))
# Few blocks of full width, with a small vocabulary, so that the blocks dominate.
BLOCKS_3B = replace(LLAMA_3B, num_layers=6, vocab_size=4000)
BLOCKS_8B = replace(LLAMA_8B, num_layers=3, vocab_size=16_000)
UNTIED_1B = replace(LLAMA_1B, num_layers=4, vocab_size=4000, tied_embeddings=False)
NOT_GROUPED = replace(LLAMA_1B, num_layers=4, vocab_size=4000, num_kv_heads=32)
WIDE_MLP = replace(LLAMA_1B, num_layers=3, vocab_size=4000, intermediate=16_384)

STATE_ABOVE_ALL = [
    {"model": "llama-3.2-1b", "parallel": "none"},
    {"model": FEWER_3B, "world_size": 8},
    {"model": FEWER_1B, "batch": 4, "bucket_view": False},
    {"model": "llama-3.2-3b", "batch": 8, "checkpointing": True, "parallel": "none"},
    {"model": FEWER_1B, "seq": 256, "fused": False},
    {"model": FEWER_8B, "batch": 2, "fused": OptimizerStep.FOR_LOOP, "parallel": "none"},
    {"model": FEWER_1B, "optimizer": "sgd-momentum", "fused": False},
    {"model": BLOCKS_3B, "batch": 4, "checkpointing": True},
    {"model": FEWER_1B, "optimizer": "adamw-in-backward", "parallel": "none"},
    {"model": UNTIED_1B, "batch": 8, "checkpointing": True, "precision": "fp32", "seq": 512},
    {"model": replace(LLAMA_8B, num_layers=2), "seq": 512, "bucket_view": False},
]
ACTIVATIONS_ABOVE_HALF = [
    {"model": BLOCKS_3B, "batch": 16},
    {"model": BLOCKS_3B, "batch": 4, "seq": 8192, "fused": OptimizerStep.FOR_LOOP},
    {"model": BLOCKS_3B, "batch": 8, "precision": "fp32"},
    {"model": BLOCKS_3B, "batch": 4, "seq": 4096, "precision": "fp32", "checkpointing": True},
    {"model": BLOCKS_8B, "batch": 16, "optimizer": "sgd", "bucket_view": False},
    {"model": BLOCKS_8B, "batch": 32, "precision": "fp16", "optimizer": "sgd-momentum", "fused": False},
    {"model": UNTIED_1B, "batch": 32, "seq": 1024, "parallel": "none"},
    {"model": UNTIED_1B, "batch": 8, "precision": "fp32", "fused": False},
    {"model": NOT_GROUPED, "batch": 16},
    {"model": NOT_GROUPED, "batch": 16, "precision": "fp32"},
    {"model": WIDE_MLP, "batch": 16, "checkpointing": True, "optimizer": "sgd"},
    {"model": WIDE_MLP, "batch": 16, "fused": OptimizerStep.FOR_LOOP},
    {"model": UNTIED_1B, "batch": 8, "optimizer": "adamw-in-backward", "parallel": "none"},
]


def named(choice: dict) -> str:
    model = choice["model"]
    size = model if isinstance(model, str) else f"{model.num_layers}x{model.hidden}"
    others = {key: getattr(value, "value", value) for key, value in choice.items() if key != "model"}
    return "-".join([size, *(f"{key}={value}" for key, value in others.items())])


def assert_agrees(choice: dict) -> None:
    measured, computed = measure_memory(**choice), memory_footprint(**choice)
    pairs = {"peak": (measured.peak_bytes, computed.peak_bytes)}
    pairs |= {part.value: (measured.peak_by_part[part], computed.peak_by_part[part]) for part in Part}
    phases = measured.peak_by_phase
    pairs |= {phase.value: (phases[phase], computed.peak_by_phase[phase]) for phase in phases}
    different = {
        name: f"measured {found / MIB:.0f} MiB, computed {formula / MIB:.0f} MiB"
        for name, (found, formula) in pairs.items()
        if abs(found - formula) > max(64 * MIB, 0.05 * found)
    }
    assert different == {}


@pytest.mark.parametrize("choice", STATE_ABOVE_ALL, ids=named)
def test_formula_and_measurement_agree_if_the_state_dominates(choice: dict):
    assert_agrees(choice)


@pytest.mark.parametrize("choice", ACTIVATIONS_ABOVE_HALF, ids=named)
def test_formula_and_measurement_agree_if_the_activations_dominate(choice: dict):
    footprint = memory_footprint(**choice)
    assert footprint.at_peak[Part.ACTIVATIONS] > 0.5 * footprint.peak_bytes
    assert_agrees(choice)


ONE_BLOCK = replace(BLOCKS_3B, num_layers=1)


@pytest.mark.parametrize(
    ("optimizer", "step"), [(name, step) for name, entry in OPTIMIZERS.items() for step in entry.steps]
)
def test_the_state_and_the_step_of_every_optimizer_have_the_memory_of_their_entry(
    optimizer: str, step: OptimizerStep
):
    alone = OPTIMIZERS[optimizer].in_backward
    choice: dict = {"model": ONE_BLOCK, "seq": 16, "optimizer": optimizer, "fused": step}
    choice["parallel"] = "none" if alone else "ddp"
    measured, computed = measure_memory(**choice), memory_footprint(**choice)
    for part in (Part.OPTIMIZER_STATE, Part.STEP_TEMPORARIES):
        assert measured.peak_by_part[part] == pytest.approx(computed.peak_by_part[part], rel=0.05, abs=4096)
    assert measured.timeline[Part.STEP_TEMPORARIES][-1] == 0
    assert (Phase.OPTIMIZER in measured.peak_by_phase) != alone


@pytest.mark.parametrize("config", [ONE_BLOCK, UNTIED_1B, model_config("tiny")])
def test_the_shapes_of_the_parameters_are_those_of_the_model(config: LlamaConfig):
    shapes = Counter(tuple(param.shape) for param in Llama(config, device="meta").parameters())
    assert parameter_shapes(config) == shapes


def test_at_least_half_of_the_grid_has_activations_above_half_of_the_peak():
    assert len(ACTIVATIONS_ABOVE_HALF) >= len(STATE_ABOVE_ALL)


def test_every_moment_accounts_for_every_part():
    footprint = memory_footprint("llama-3.2-3b")
    assert {moment.phase for moment in footprint.moments} == set(Phase) - {Phase.CLIP}
    assert all(set(moment.held) == set(Part) for moment in footprint.moments)


def test_the_formula_of_the_docstring_for_a_block():
    """26h + 4q + 4k + 8f bytes per token and block in bf16."""
    two, three = (memory_footprint(replace(LLAMA_3B, num_layers=layers)) for layers in (2, 3))
    block = three.peak_by_part[Part.ACTIVATIONS] - two.peak_by_part[Part.ACTIVATIONS]
    assert block == pytest.approx(2048 * (26 * 3072 + 4 * 3072 + 4 * 1024 + 8 * 8192), rel=0.001)


def test_bad_choices_are_refused_as_by_the_measurement():
    with pytest.raises(UserError, match="did you mean tiny"):
        memory_footprint("tinny")
    with pytest.raises(UserError, match="batch is 0"):
        memory_footprint("tiny", batch=0)
