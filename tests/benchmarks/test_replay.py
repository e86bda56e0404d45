"""A replay sends the messages of a step, without its arithmetic."""

import torch
import torch.distributed as dist

from benchmarks.replay import Replay
from dlo_lib.comm.tracing.recorder import trace_collectives
from dlo_lib.launch import run_ranks

SENT = ((1, 4), (2, 0))  # rows from each rank to each rank


def splits() -> tuple[list[tuple], list[tuple]]:
    """Return the sizes of the messages of a step, and of its replay."""
    rank = dist.get_rank()
    received = [sizes[rank] for sizes in SENT]

    def step() -> None:
        rows = torch.ones(sum(SENT[rank]), 3)
        dist.all_to_all_single(rows.new_empty(sum(received), 3), rows, received, list(SENT[rank]))

    replay = Replay(step)
    found = []
    for run in (step, replay.run):
        with trace_collectives() as trace:
            run()
        found.append([(event.call.send_splits, event.call.receive_splits) for event in trace.events])
    return found[0], found[1]


def test_a_replay_has_the_unequal_parts_of_an_all_to_all() -> None:
    for rank, (step, replay) in enumerate(run_ranks(splits, 2)):
        assert (
            step
            == replay
            == [(tuple(3 * rows for rows in SENT[rank]), tuple(3 * sizes[rank] for sizes in SENT))]
        )
