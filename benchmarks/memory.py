"""Measuring a training step's memory: `measure_memory` against PyTorch's `MemTracker`, both over the same step on fake tensors.

Both find the same peak (``tests/profiling``). ``MemTracker`` is given two steps, for the optimiser's state must exist in the one that
counts; ours runs one, after a warm-up of the optimiser alone. It follows one device: the time of a step under DDP has no peer, and is
given in seconds.
"""

from __future__ import annotations

import statistics

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker

from benchmarks.paired import Row, compare, measure, take_turns
from dlo_lib.models import Llama, LlamaConfig, model_config
from dlo_lib.optim import Precision, train_step
from dlo_lib.profiling import measure_memory

SEQ = 2048


def mem_tracker_peak(model: str | LlamaConfig, batch: int = 1, seq: int = SEQ) -> int:
    """The peak of the second training step (bf16, fused AdamW) in bytes, found by PyTorch's tracker."""
    with FakeTensorMode(allow_fallback_kernels=False):
        llama = Llama(model_config(model))
        optimizer = torch.optim.AdamW(llama.parameters(), fused=True)
        tokens = torch.zeros(batch, seq, dtype=torch.int64)
        tracker = MemTracker()
        tracker.track_external(llama, optimizer)
        with tracker:
            for _ in range(2):
                tracker.reset_mod_stats()
                train_step(llama, optimizer, [(tokens, tokens)], precision=Precision.BF16)
    (peak,) = tracker.get_tracker_snapshot("peak").values()
    return peak["Total"]


def rows(pairs: int = 5) -> list[Row]:
    def ours() -> None:
        measure_memory("llama-3.2-1b", seq=SEQ, parallel="none")

    def peer() -> None:
        mem_tracker_peak("llama-3.2-1b")

    turns = take_turns(ours, peer, pairs, warm_up=1)
    seconds = [statistics.median(turn.wall for turn in way) for way in (turns.ours, turns.peer)]
    return [
        compare(
            "measure_memory, llama-3.2-1b on one device",
            "MemTracker",
            1,
            turns,
            note=f"median {seconds[0]:.1f} s against {seconds[1]:.1f} s",
        ),
        *(_ours_alone(model, pairs) for model in ("llama-3.2-1b", "llama-3.2-3b", "llama-3.1-8b")),
    ]


def _ours_alone(model: str, repeats: int) -> Row:
    turns = [measure(lambda: measure_memory(model, seq=SEQ, world_size=8)) for _ in range(repeats)]
    wall, cpu = (statistics.median(getattr(turn, clock) for turn in turns) for clock in ("wall", "cpu"))
    return Row(f"measure_memory, {model} under DDP", "–", 8, note=f"median {wall:.1f} s, CPU {cpu:.1f} s")
