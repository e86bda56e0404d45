"""The memory of a compiled step, and of one with 8-bit products: what the generated code allocates on a CPU,
and what a GPU has allocated."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.profiler import ProfilerActivity, profile

from dlo_lib.base.errors import UserError
from dlo_lib.base.torch_compat import RELEASE
from dlo_lib.models import Llama, LlamaConfig, model_config
from dlo_lib.optim import Precision, train_step
from dlo_lib.parallel.compile import compile_llama, compile_loss
from dlo_lib.parallel.plan import ParallelPlan
from dlo_lib.profiling import MemoryTracker, compiled_memory, measure_memory
from dlo_lib.profiling.compile_time import Backend, usable_backend
from dlo_lib.profiling.measure import record_step
from dlo_lib.profiling.settings import StepSettings

GIB = 2**30
measures_compiled = pytest.mark.skipif(
    RELEASE < compiled_memory.OLDEST,
    reason=f"NOT TESTED HERE: PyTorch {torch.__version__} cannot compile while memory is recorded",
)
TINY = model_config("tiny")
BATCH, SEQ = 8, 256
SMALL = replace(
    model_config("llama-3.2-1b"), hidden=256, intermediate=1024, num_layers=4, num_heads=4, num_kv_heads=4
)


def settings(config: LlamaConfig, batch: int, seq: int, precision: str, **more: bool) -> StepSettings:
    alone = ("none", True, 1, 0, "eager")
    return StepSettings.of(config, batch, seq, precision, False, "adamw", True, *alone, **more)


def allocated_by_inductor(config: LlamaConfig) -> int:
    """Return the peak of the second compiled step on the CPU, from the events of PyTorch's allocator."""
    model = Llama(config)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    tokens = torch.randint(config.vocab_size, (2, BATCH, SEQ))
    compile_llama(model, ParallelPlan(), "inductor")
    loss = compile_loss({}, "inductor")

    def step() -> None:
        train_step(model, optimizer, [(tokens[0], tokens[1])], precision=Precision.BF16, **loss)

    step()
    state = [held for states in optimizer.state.values() for held in states.values()]
    live = sum(tensor.nbytes for tensor in [*model.parameters(), *state, tokens])
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        step()
    events = [event for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"]
    peak = live
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak


@measures_compiled
@pytest.mark.skipif(
    usable_backend(torch.device("cpu")).backend is not Backend.INDUCTOR,
    reason="NOT TESTED HERE: Inductor needs a C++ compiler",
)
@pytest.mark.parametrize(
    ("vocabulary", "error"),
    [(4000, 1e-6), (500, 0.02)],
    ids=["the loss is the peak", "the backward of a block is the peak"],
)
def test_the_peak_is_what_the_generated_code_allocates_on_a_cpu(vocabulary: int, error: float):
    config = replace(SMALL, vocab_size=vocabulary)
    try:
        allocated = allocated_by_inductor(config)
    finally:
        torch.compiler.reset()
    with FakeTensorMode(allow_fallback_kernels=False) as mode:
        report = record_step(settings(config, BATCH, SEQ, "bf16", compile=True), MemoryTracker(mode), None)
    assert report.peak_bytes == pytest.approx(allocated, rel=error)


@measures_compiled
@pytest.mark.parametrize(
    ("batch", "choice", "gib"),
    [
        (2, {"compile": True}, 23.1),
        (8, {"compile": True, "kernels": "fused", "fp8": True}, 30.0),
    ],
    ids=str,
)
def test_the_peak_is_what_a_gpu_has_allocated(batch: int, choice: dict, gib: float):
    """Two of the five peaks of an H200 in ``benchmarks/RESULTS.md``, of 2026-11-27."""
    report = measure_memory("llama-3.2-1b", batch, 2048, parallel="none", **choice)
    assert report.peak_bytes / GIB == pytest.approx(gib, rel=0.02)


@measures_compiled
def test_fake_and_real_tensors_have_the_same_peaks():
    chosen = settings(TINY, 2, 64, "bf16", compile=True)
    real = record_step(chosen, MemoryTracker(), None)
    with FakeTensorMode(allow_fallback_kernels=False) as mode:
        fake = record_step(chosen, MemoryTracker(mode), None)
    assert real.peak_bytes == fake.peak_bytes > 0
    assert real.peak_by_part == fake.peak_by_part
    assert sum(real.at_peak.values()) == real.peak_bytes


EXPERTS = model_config("tiny-moe")
TP = ParallelPlan(tp=2)
PLANS: dict[str, dict] = {
    "ddp": {"world_size": 2},
    "zero2": {"parallel": "zero2", "world_size": 2},
    "fsdp": {"parallel": "fsdp", "world_size": 4, "checkpointing": True},
    "pp": {"parallel": ParallelPlan(pp=2, micro_batches=2), "world_size": 2},
    "cp": {"parallel": ParallelPlan(cp=2), "world_size": 2},
    "experts": {"model": EXPERTS, "parallel": "none"},
}


@measures_compiled
@pytest.mark.parametrize("choice", PLANS.values(), ids=PLANS)
def test_every_plan_that_trains_compiled_is_measured_and_needs_less(choice: dict):
    shape = {"model": TINY, "batch": 2, "seq": 256, **choice}
    eager, compiled = (measure_memory(**shape, compile=compile) for compile in (False, True))
    assert 0.3 * eager.peak_bytes < compiled.peak_bytes < eager.peak_bytes


@measures_compiled
def test_8_bit_products_save_inputs_of_one_byte():
    """The inputs of the products and the copies of the weights have one byte instead of two."""
    config = replace(SMALL, num_layers=2, vocab_size=512)
    tokens = BATCH * SEQ
    inputs = tokens * (3 * config.hidden + config.intermediate)  # of qkv, o, gate and up, down
    bf16, fp8 = (
        measure_memory(config, BATCH, SEQ, parallel="none", kernels="fused", compile=True, fp8=fp8)
        for fp8 in (False, True)
    )
    saved = bf16.peak_bytes - fp8.peak_bytes
    weights = 4 * config.hidden**2 + 3 * config.hidden * config.intermediate
    assert saved >= config.num_layers * (inputs + weights)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"compile": True, "parallel": TP, "world_size": 2}, "compile cannot be used with tp"),
        ({"fp8": True, "parallel": TP, "world_size": 2}, "fp8 cannot be used with tp"),
        ({"fp8": True, "precision": "fp32"}, 'use precision="bf16", or fp8=False'),
        ({"fp8": True, "seq": 65, "batch": 1}, "multiples of 16, and rows of x is 65"),
        ({"compile": "yes"}, "compile is 'yes': it should be True or False"),
    ],
)
def test_what_training_refuses_is_refused(wrong: dict, says: str):
    with pytest.raises(UserError) as error:
        measure_memory(**{"model": "tiny", "seq": 64} | wrong)
    assert says in str(error.value)


def test_an_older_release_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(compiled_memory, "RELEASE", (2, 9))
    with pytest.raises(UserError, match="cannot compile while memory is recorded: use 2.11 or later"):
        measure_memory("tiny", seq=64, parallel="none", compile=True)
