"""A replay sends the messages of a step, without its arithmetic."""

import torch
import torch.distributed as dist

from benchmarks.replay import Replay
from dlo_lib.base.torch_compat import all_gather_single, reduce_scatter_single
from dlo_lib.comm.tracing.recorder import trace_collectives
from dlo_lib.launch import run_ranks

SENT = ((1, 4), (2, 0))  # rows from each rank to each rank


def sizes() -> tuple[list[tuple], list[tuple]]:
    """Return the sizes of the messages of a step, and of its replay."""
    rank = dist.get_rank()
    received = [sizes[rank] for sizes in SENT]

    def step() -> None:
        rows = torch.ones(sum(SENT[rank]), 3)
        dist.all_to_all_single(rows.new_empty(sum(received), 3), rows, received, list(SENT[rank]))
        reduce_scatter_single(torch.empty(7), torch.ones(14))
        all_gather_single(torch.empty(10), torch.ones(5))

    replay = Replay(step)
    found = []
    for run in (step, replay.run):
        with trace_collectives() as trace:
            run()
        calls = [event.call for event in trace.events]
        found.append([(call.payload_bytes, call.send_splits, call.receive_splits) for call in calls])
    return found[0], found[1]


def test_a_replay_has_the_sizes_of_the_step() -> None:
    for rank, (step, replay) in enumerate(run_ranks(sizes, 2)):
        splits = (tuple(3 * rows for rows in SENT[rank]), tuple(3 * sizes[rank] for sizes in SENT))
        assert step == replay
        assert step == [(4 * sum(splits[0]), *splits), (4 * 14, (), ()), (4 * 10, (), ())]
