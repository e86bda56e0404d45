"""The parts of a step add up to the step; waits for other ranks count once and
separately from their phase."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from dlo_lib.launch import place, run_ranks
from dlo_lib.optim import Phase
from dlo_lib.train import read_metrics, train
from dlo_lib.train.clock import StepClock

PARTS = ("load", "forward", "backward", "optimizer", "communication")


def test_each_line_has_the_parts_of_its_step(small_run):
    config = small_run(steps=5, log_every=2)
    train(config)
    for line in read_metrics(config.out):
        parts = [getattr(line, f"{part}_seconds") for part in PARTS]
        assert all(part > 0 for part in parts[:4])
        if place().device.type == "cuda":
            assert parts[4] is None, "waits are not seen on a stream"
            assert line.gpu is not None
        else:
            assert parts[4] == 0, "a single rank does not wait"
            assert line.gpu is None


def test_waiting_for_a_slower_rank_counts_as_communication():
    def ranks() -> tuple[float, float, float]:
        clock = StepClock(torch.device("cpu"))
        with clock:
            clock.on_phase(Phase.FORWARD)
            clock.on_phase(Phase.BACKWARD)
            if dist.get_rank() == 1:
                time.sleep(0.5)
            works = [dist.all_reduce(torch.ones(4), async_op=True) for _ in range(3)]
            for work in works:
                work.wait()
            clock.on_phase(Phase.OPTIMIZER)
            clock.on_phase(Phase.END)
        split = clock.split()
        return split.communication, split.backward, split.optimizer

    (waited, computed, _), (waited_late, slept, _) = run_ranks(ranks, 2)
    assert waited > 0.3 > computed + waited_late
    assert slept >= 0.5


def test_phases_that_alternate_are_not_split():
    clock = StepClock(torch.device("cpu"))
    with clock:
        clock.on_phase(Phase.OPTIMIZER)
        clock.on_phase(Phase.END)
    assert clock.split() is None


@pytest.mark.gpu
def test_on_a_gpu_the_parts_are_measured_on_its_stream():
    clock = StepClock(torch.device("cuda"))
    with clock:
        clock.on_phase(Phase.FORWARD)
        matrix = torch.randn(4096, 4096, device="cuda")
        for _ in range(20):
            matrix = (matrix @ matrix).tanh()
        clock.on_phase(Phase.BACKWARD)
        clock.on_phase(Phase.OPTIMIZER)
        clock.on_phase(Phase.END)
    torch.cuda.synchronize()
    split = clock.split()
    assert split.forward > 10 * split.backward
    assert split.communication is None
