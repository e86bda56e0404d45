"""The peak of a step counts what lives at the same time; the bytes are those after the last barrier."""

import pytest
import torch
import torch.distributed as dist

from dlo_lib.labkit.measured_step import peak_of_a_step, sent_in_last_step
from dlo_lib.launch import run_ranks

SIZE = 1000  # numbers of 4 bytes


def test_the_peak_is_what_lives_at_the_same_time():
    def build():
        kept = [torch.zeros(SIZE)]

        def step():
            for _ in range(3):
                torch.ones(2 * SIZE)  # one after the other

        return lambda: (step(), kept)

    assert peak_of_a_step(build) == 4 * 3 * SIZE


def test_what_the_first_step_creates_counts_and_what_it_frees_does_not():
    def build():
        state = []

        def step():
            first = torch.zeros(10 * SIZE if not state else SIZE)
            if not state:
                state.append(torch.zeros(SIZE))
            return first

        return step

    assert peak_of_a_step(build) == 4 * 2 * SIZE


def test_saved_activations_and_gradients_count():
    def build():
        weight = torch.ones(SIZE, requires_grad=True)

        def step():
            weight.grad = None
            torch.tanh(weight).sum().backward()

        return step

    # weight, tanh(weight) and the gradient of the weight: the expanded gradient of the sum has one number
    assert 4 * 3 * SIZE <= peak_of_a_step(build) <= 4 * 4 * SIZE + 64


def two_steps():
    rank, other = dist.get_rank(), 1 - dist.get_rank()
    for _ in range(2):
        dist.barrier()
        dist.all_reduce(torch.ones(SIZE))
        if rank == 0:
            dist.send(torch.ones(8), other)
        else:
            dist.recv(torch.ones(8), other)


def test_only_what_is_sent_after_the_last_barrier_counts():
    trace = run_ranks(two_steps, 2, trace=True).trace
    assert trace.ring_bytes(rank=0) == 2 * (4 * SIZE + 32)
    assert [sent_in_last_step(trace, rank) for rank in (0, 1)] == [4 * SIZE + 32, 4 * SIZE]


def test_without_a_barrier_the_last_step_is_not_known():
    run = run_ranks(all_reduce_once, 2, trace=True)
    with pytest.raises(ValueError, match="rank 0 made no barrier"):
        sent_in_last_step(run.trace)


def all_reduce_once():
    dist.all_reduce(torch.ones(1))
