"""The measurement of the memory of a training step: `measure_memory` compared with PyTorch's `MemTracker`,
for the same step on fake tensors.

Both find the same peak (``tests/profiling``). ``MemTracker`` runs two steps, because the optimiser state must
exist in the measured step. Ours runs one step, after a warm-up of the optimiser. ``MemTracker`` supports one
device only: the measurement of a step with DDP has no peer, and its time is reported in seconds.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker

from benchmarks.paired import Row, compare, measure, take_turns
from dlo_lib.models import Llama, LlamaConfig, model_config
from dlo_lib.optim import Precision, train_step
from dlo_lib.profiling import measure_memory

SEQ = 2048
WITHOUT_PEER = ("llama-3.2-1b", "llama-3.2-3b", "llama-3.1-8b")  # models that are measured with DDP
ROWS = 1 + len(WITHOUT_PEER)


def mem_tracker_peak(model: str | LlamaConfig, batch: int = 1, seq: int = SEQ) -> int:
    """Return the peak of the second training step (bf16, fused AdamW) in bytes, measured by PyTorch's
    tracker."""
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


def rows(pairs: int = 5) -> Iterator[Row]:
    def ours() -> None:
        measure_memory("llama-3.2-1b", seq=SEQ, parallel="none")

    def peer() -> None:
        mem_tracker_peak("llama-3.2-1b")

    turns = take_turns(ours, peer, pairs, warm_up=1)
    seconds = [statistics.median(turn.wall for turn in measured) for measured in (turns.ours, turns.peer)]
    yield compare(
        "measure_memory, llama-3.2-1b on one device",
        "MemTracker",
        1,
        turns,
        note=f"median {seconds[0]:.1f} s against {seconds[1]:.1f} s",
    )
    for model in WITHOUT_PEER:
        yield _without_peer(model, pairs)


def _without_peer(model: str, repeats: int) -> Row:
    turns = [measure(lambda: measure_memory(model, seq=SEQ, world_size=8)) for _ in range(repeats)]
    wall, cpu = (statistics.median(getattr(turn, clock) for turn in turns) for clock in ("wall", "cpu"))
    return Row(f"measure_memory, {model} under DDP", "–", 8, note=f"median {wall:.1f} s, CPU {cpu:.1f} s")
