"""Asynchronous tensor parallelism computes what the layers of one process compute, sends the bytes of the
plain form in messages of one piece, and computes the products of one piece while another one travels."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from dlo_lib.base.errors import UserError
from dlo_lib.comm.tracing.recorder import trace_collectives
from dlo_lib.launch import run_ranks
from dlo_lib.parallel.plan import ParallelPlan
from dlo_lib.parallel.tensor import RowLinear, TensorParallel, parallelize_tensor
from dlo_lib.parallel.tensor.exchange import TensorGroup
from dlo_lib.parallel.tensor.wrapper import scale_partial_grads
from dlo_lib.profiling.tracker import MemoryTracker
from dlo_lib.train.__main__ import parse
from tests.parallel.tensor.in_flight import matmuls_in_flight
from tests.parallel.tensor.test_layers import BATCH, HIDDEN, SEQ, STYLES, pair
from tests.parallel.tensor.test_traffic import traffic

RANKS = 3
SEQUENCES, LONG = 8, 96
"""The batch and the sequence of the measurement of memory."""
COPIES = 2
"""A send and a receive for each exchange."""


def check_pair(batch: int) -> None:
    """The outputs and gradients of two columns and a row, and the messages in flight at each product."""
    twin, x, grad = pair()
    x = x.detach()[:batch].requires_grad_()
    grad = grad[:batch]
    expected = twin(x)
    (expected.square().sum() + (expected * grad).sum()).backward()
    assert x.grad is not None

    model, _, _ = pair()
    assert dist.group.WORLD is not None
    layout = parallelize_tensor(model, dist.group.WORLD, STYLES, sequence_parallel=True, async_tp=True)
    scale_partial_grads(model, layout)
    spread = TensorParallel(model, layout)
    rows = SEQ // RANKS
    tokens = slice(dist.get_rank() * rows, (dist.get_rank() + 1) * rows)
    mine = x.detach()[:, tokens].clone().requires_grad_()
    with matmuls_in_flight() as forward:
        out = spread(mine)
    torch.testing.assert_close(out, expected[:, tokens], atol=1e-12, rtol=0)
    with matmuls_in_flight() as backward, trace_collectives() as trace:
        (out.square().sum() + (out * grad[:, tokens]).sum()).backward()
    sent = [event.call.payload_bytes for event in trace.select("send")]
    assert sent == [8 * batch * rows * HIDDEN] * 2 * (RANKS - 1)
    assert trace.count() == COPIES * len(sent)
    # Two products of each piece of the columns, during a send and the receives of this exchange and of the
    # next one, which is posted ahead: the last piece has nothing more to send. Then the row: the term of the
    # first piece has nothing to send yet.
    assert forward == [3, 3, 2, 2, 0, 0, 0, 3, 2]
    # The gradient of each piece of the input of the row (3), that of its weight (1), two products of each
    # piece of the input of the columns (6), and the gradients of their weights (2).
    assert backward == [3, 2, 0, 0, 0, 0, 3, 3, 2, 2, 0, 0]
    spread.finish_grad_sync()
    torch.testing.assert_close(mine.grad, x.grad[:, tokens], atol=1e-12, rtol=0)
    for name, param in model.named_parameters():
        whole = twin.get_parameter(name).grad
        assert whole is not None
        torch.testing.assert_close(param.grad, layout.parts[name].of(whole), atol=1e-12, rtol=0)


def check_row_alone() -> None:
    """Uneven pieces are refused before a message is sent."""
    assert dist.group.WORLD is not None
    group = TensorGroup(dist.group.WORLD)
    weight = torch.nn.Parameter(torch.zeros(2, 5))
    row = RowLinear(weight, None, group, sequence_parallel=True, async_tp=True)
    with pytest.raises(
        UserError, match="a sequence of 7 is not a multiple of tp 3: use tp 1 or 7, or sequences of 6 tokens"
    ):
        row(torch.zeros(1, 7, 5))


def check_layers() -> None:
    for batch in (1, BATCH):  # pieces are contiguous in the whole tensor, and not
        check_pair(batch)
    check_row_alone()


def test_products_of_pieces_during_the_messages_of_others():
    run_ranks(check_layers, RANKS)


def memory(async_tp: bool) -> tuple[int, int]:
    """The bytes that forward keeps for backward, and the peak of forward and backward."""
    model, _, _ = pair()
    assert dist.group.WORLD is not None
    parallelize_tensor(model, dist.group.WORLD, STYLES, sequence_parallel=True, async_tp=async_tp)
    mine = torch.randn(SEQUENCES, LONG // RANKS, HIDDEN, dtype=torch.float64, requires_grad=True)
    grad = torch.randn_like(mine)
    with MemoryTracker() as tracker:
        out = model(mine)
        kept = sum(event.bytes for event in tracker.events())
        out.backward(grad)
    return kept, max(itertools.accumulate(event.bytes for event in tracker.events()))


@pytest.fixture
def rank_without_messages() -> Iterator[None]:
    """A rank of a fake group. The threads of gloo would hold a tensor for some time after its message."""
    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("rank_without_messages")
def test_it_needs_the_memory_of_two_pieces_more():
    """Forward keeps the same tensors; at the peak there are at most two pieces more."""
    (kept, peak), (kept_by_async, peak_of_async) = memory(False), memory(True)
    piece = 8 * SEQUENCES * LONG * HIDDEN // RANKS
    print(kept, peak, kept_by_async, peak_of_async, piece)
    assert kept_by_async == kept
    assert peak < peak_of_async <= peak + 2 * piece


def plain_and_async() -> tuple[object, object]:
    return traffic(2, True), traffic(2, True, async_tp=True)


def test_a_model_sends_the_same_bytes_in_messages_of_one_piece():
    ranks, layers = 2, 2
    for plain, cut in run_ranks(plain_and_async, ranks):
        assert sum(sent for _, sent in cut.values()) == pytest.approx(sum(sent for _, sent in plain.values()))
        # Of the head, the input in forward and its gradient in backward are in pieces; the embedding has no
        # product, and the loss has two numbers per token.
        assert cut["send"][0] == cut["recv"][0] == (8 * layers + 2) * (ranks - 1)
        assert cut["all_gather"][0] == 2
        assert cut["reduce_scatter"][0] == 1
        assert cut["all_reduce"][0] == 0


def test_without_sequence_parallelism_it_is_refused():
    with pytest.raises(UserError, match="add sequence_parallel, or leave async_tp out"):
        ParallelPlan(tp=2, async_tp=True)
    with pytest.raises(UserError, match="async-tp needs sequence-parallel: add --sequence-parallel"):
        parse(["--tp", "2", "--async-tp"])
    config = parse(["--tp", "2", "--sequence-parallel", "--async-tp"])
    assert config is not None
    assert config.plan(2, 2) == ParallelPlan(tp=2, sequence_parallel=True, async_tp=True).over(2)
