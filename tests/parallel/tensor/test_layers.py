"""The layers on ranks compute what the layers of PyTorch compute from whole weights: outputs, gradients of
the input, and each rank's part of the gradients of the weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from dlo_lib.base.errors import UserError
from dlo_lib.comm.tracing.recorder import trace_collectives
from dlo_lib.launch import run_ranks
from dlo_lib.parallel.checkpoint import load_sharded, save_sharded
from dlo_lib.parallel.mesh import ParallelMesh
from dlo_lib.parallel.parallelize import parallelize
from dlo_lib.parallel.plan import ParallelPlan
from dlo_lib.parallel.tensor import parallelize_tensor, vocab_parallel_cross_entropy
from dlo_lib.parallel.tensor.cross_entropy import _CrossEntropy
from dlo_lib.parallel.tensor.exchange import TensorGroup
from dlo_lib.parallel.tensor.style import (
    ColumnParallel,
    RowParallel,
    SharedInput,
    VocabParallel,
    VocabParallelHead,
)
from dlo_lib.parallel.tensor.wrapper import TensorParallel, scale_partial_grads
from tests.parallel.tensor.in_flight import matmuls_in_flight

HIDDEN, WIDE, VOCAB, BATCH, SEQ = 8, 12, 13, 2, 6


class Pair(nn.Module):
    """Two column linears with one input, with biases, and a row linear with a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(HIDDEN, WIDE, dtype=torch.float64) for _ in range(2))
        self.down = nn.Linear(WIDE, HIDDEN, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.sigmoid(self.gate(x)) * self.up(x))


STYLES = {
    "gate": ColumnParallel(),
    "up": ColumnParallel(),
    "down": RowParallel(),
    "": SharedInput(("gate", "up")),
}


def pair() -> tuple[Pair, Tensor, Tensor]:
    torch.manual_seed(3)
    x, grad = torch.randn(2, BATCH, SEQ, HIDDEN, dtype=torch.float64)
    return Pair(), x.requires_grad_(), grad


def check_pair(sequence_parallel: bool) -> None:
    twin, x, grad = pair()
    expected = twin(x)
    expected.backward(grad)
    grad_x, x.grad = x.grad, None
    assert grad_x is not None
    wholes = {name: param.grad for name, param in twin.named_parameters()}

    model, _, _ = pair()
    assert dist.group.WORLD is not None
    layout = parallelize_tensor(model, dist.group.WORLD, STYLES, sequence_parallel=sequence_parallel)
    scale_partial_grads(model, layout)
    spread = TensorParallel(model, layout)
    tokens = slice(None)
    if sequence_parallel:
        rows = SEQ // dist.get_world_size()
        tokens = slice(dist.get_rank() * rows, (dist.get_rank() + 1) * rows)
    mine = x.detach()[:, tokens].clone().requires_grad_()
    out = spread(mine)
    torch.testing.assert_close(out, expected[:, tokens], atol=1e-12, rtol=0)
    out.backward(grad[:, tokens].contiguous())
    spread.finish_grad_sync()
    torch.testing.assert_close(mine.grad, grad_x[:, tokens], atol=1e-12, rtol=0)
    for name, param in model.named_parameters():
        part = layout.parts[name].of(wholes[name])
        torch.testing.assert_close(param.grad, part, atol=1e-12, rtol=0)
    for name, whole in spread.full_state_dict().items():
        assert torch.equal(whole, twin.state_dict()[name])


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_column_and_a_row_linear_are_the_layers_of_one_process(sequence_parallel):
    run_ranks(check_pair, 3, sequence_parallel)


def in_flight_in_backward() -> list[int]:
    """The number of messages in flight at the start of each matrix product of a backward."""
    model, x, grad = pair()
    assert dist.group.WORLD is not None
    parallelize_tensor(model, dist.group.WORLD, STYLES)
    out = model(x)
    with matmuls_in_flight() as found:
        out.backward(grad)
    return found


def test_the_gradients_of_the_weights_are_computed_during_the_all_reduce():
    """Two products for the row linear, two for the input of the columns; then two for their weights, before
    the wait for the all-reduce."""
    for found in run_ranks(in_flight_in_backward, 2):
        assert found == [0, 0, 0, 0, 1, 1]


class Ends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, HIDDEN, padding_idx=9, dtype=torch.float64)
        self.head = nn.Linear(HIDDEN, VOCAB, dtype=torch.float64)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.embedding(tokens)))


def check_ends(smoothing: float) -> None:
    torch.manual_seed(4)
    twin = Ends()
    tokens, targets = torch.randint(VOCAB, (2, BATCH, SEQ))
    tokens[0, 0], targets[0, 1], targets[1, :3] = 9, VOCAB - 1, -100
    options = {"ignore_index": -100, "label_smoothing": smoothing}
    loss = F.cross_entropy(twin(tokens).flatten(0, 1), targets.flatten(), reduction="sum", **options)
    (loss * 0.3).backward()
    torch.manual_seed(4)
    model = Ends()
    assert dist.group.WORLD is not None
    styles = {"embedding": VocabParallel(), "head": VocabParallelHead()}
    layout = parallelize_tensor(model, dist.group.WORLD, styles)
    assert layout.head is not None
    first, vocab = layout.head
    with trace_collectives() as trace:
        logits = model(tokens)
        found = vocab_parallel_cross_entropy(
            logits, targets, first, layout.group, vocab_size=vocab, **options
        )
    assert logits.shape[-1] < VOCAB
    numbers = (3 if smoothing else 2) * BATCH * SEQ
    gathered = [event.call.payload_bytes for event in trace.select("all_gather")]
    assert gathered == [8 * numbers * dist.get_world_size()]
    assert trace.count() == 2, "not one all-reduce of the embedding and one all-gather of the loss"
    torch.testing.assert_close(found, loss, atol=1e-12, rtol=0)
    (found * 0.3).backward()
    for name, param in model.named_parameters():
        whole = twin.get_parameter(name).grad
        assert whole is not None
        torch.testing.assert_close(param.grad, layout.parts[name].of(whole), atol=1e-12, rtol=0)


@pytest.mark.parametrize(("world", "smoothing"), [(2, 0.0), (3, 0.1)])
def test_embedding_and_cross_entropy_of_a_vocabulary_that_does_not_divide(world, smoothing):
    run_ranks(check_ends, world, smoothing)


def check_masked_vocabulary() -> None:
    """Five tokens on four ranks, of which the last has none. Token 1 is masked, and so are all tokens of rank
    1; an ignored row has a logit that is infinite."""
    group = TensorGroup(dist.group.WORLD)
    rows = slice(2 * group.rank, min(2 * group.rank + 2, 5))
    whole = torch.randn(4, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    whole[:, 1] = -torch.inf
    whole[1, 2:4] = -torch.inf
    whole[3, 0] = torch.inf
    whole.requires_grad_()
    targets = torch.tensor([0, 4, 3, -100])
    options = {"vocab_size": 5, "ignore_index": -100}
    loss = F.cross_entropy(whole[:3], targets[:3], reduction="sum")
    (loss * 0.3).backward()
    part = whole.detach()[:, rows].clone().requires_grad_()
    found = vocab_parallel_cross_entropy(part, targets, 2 * group.rank, group, **options)
    (found * 0.3).backward()
    torch.testing.assert_close(found, loss)
    torch.testing.assert_close(part.grad, whole.grad[:, rows])

    empty = torch.empty(2, 0, part.shape[1], dtype=torch.float64, requires_grad=True)
    no_targets = torch.empty(2, 0, dtype=torch.int64)
    none = vocab_parallel_cross_entropy(empty, no_targets, 2 * group.rank, group, **options)
    none.backward()
    assert none.item() == 0
    assert empty.grad.shape == empty.shape

    for wrong in (-1, 5, 100):
        targets[1] = wrong
        with pytest.raises(UserError, match=rf"targets contains {wrong}: it should be 0 to 4, or -100"):
            vocab_parallel_cross_entropy(part, targets, 2 * group.rank, group, **options)
        # as on a GPU, whose values are not read
        assert _CrossEntropy.apply(part, targets, 2 * group.rank, group, 5, -100, 0.0).isnan()
    with pytest.raises(UserError, match=r"targets has shape \(3,\): it should be \(4,\)"):
        vocab_parallel_cross_entropy(part, targets[:3], 2 * group.rank, group, **options)
    with pytest.raises(UserError, match="targets is int32: it should be int64"):
        vocab_parallel_cross_entropy(part, targets.int(), 2 * group.rank, group, **options)


def test_a_masked_vocabulary_has_the_loss_of_the_whole_one():
    run_ranks(check_masked_vocabulary, 4)


def check_refusals() -> None:
    group = dist.group.WORLD
    assert group is not None
    column = ColumnParallel()
    with pytest.raises(UserError, match="tp 4 does not divide 0, which has 6 features: use tp 1, 2, 3 or 6"):
        parallelize_tensor(nn.Sequential(nn.Linear(4, 6)), group, {"0": column})
    with pytest.raises(
        UserError, match="tp 4 does not divide 0, which has 6 units of 8: use tp 1, 2, 3 or 6"
    ):
        parallelize_tensor(nn.Sequential(nn.Linear(48, 4)), group, {"0": RowParallel(6)})
    with pytest.raises(UserError, match="0 has 10 features, which are not 4 equal units"):
        parallelize_tensor(nn.Sequential(nn.Linear(4, 10)), group, {"0": ColumnParallel(4)})
    with pytest.raises(UserError, match=r"no module is named 1.down: did you mean 0.down\?"):
        parallelize_tensor(nn.Sequential(Pair()), group, {"1.down": RowParallel()})
    with pytest.raises(UserError, match="0 is a Tanh: this style needs an nn.Linear"):
        parallelize_tensor(nn.Sequential(nn.Tanh()), group, {"0": column})
    with pytest.raises(UserError, match="gate, up the style ColumnParallel before SharedInput"):
        parallelize_tensor(Pair(), group, {"": SharedInput(("gate", "up"))})
    tied = Ends()
    tied.head.weight = tied.embedding.weight
    with pytest.raises(UserError, match="tied to a parameter that is cut in another way"):
        parallelize_tensor(tied, group, {"embedding": VocabParallel(), "head": RowParallel()})
    with pytest.raises(UserError, match="use a number from 0 to 1"):
        vocab_parallel_cross_entropy(
            torch.zeros(2, 3), torch.zeros(2).long(), 0, TensorGroup(group), vocab_size=12, label_smoothing=2
        )


def test_what_does_not_divide_is_refused_with_the_degrees_that_would():
    run_ranks(check_refusals, 4)


class Fused(nn.Module):
    """Three sections in one matrix, as the queries, keys and values of GPT-2."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 24)
        self.outer = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        first, second, third = self.inner(x).chunk(3, -1)
        return self.outer(first * second + third)


FUSED = {"inner": ColumnParallel(4, sections=3), "outer": RowParallel()}


def check_sections(folder: Path) -> None:
    """The rows of FSDP cross the borders of the sections; a plan of other degrees reads the same values."""
    torch.manual_seed(6)
    twin = Fused()
    x, wholes = torch.randn(3, 5), twin.state_dict()
    shards: ParallelPlan = ParallelPlan(tp=2, dp_shard=2)
    for plan, of_another_seed in ((shards, False), (ParallelPlan(tp=4), True), (shards, True)):
        torch.manual_seed(7 if of_another_seed else 6)
        spread = parallelize(Fused(), plan, ParallelMesh(plan.degrees), styles=FUSED)
        assert isinstance(spread, TensorParallel)
        if of_another_seed:
            load_sharded(folder / "first", spread)
        else:
            save_sharded(folder / "first", spread)
        for shard in spread.shards():
            assert torch.equal(shard.of(wholes[shard.name]), shard.param.detach())
        torch.testing.assert_close(spread(x), twin(x))
        for name, value in spread.full_state_dict().items():
            assert torch.equal(value, wholes[name])
    bias = next(shard for shard in spread.shards() if shard.name == "inner.bias")
    assert len(bias.boxes()) == 2, "12 elements of 3 sections are not cut into pieces of 6"


def test_sections_of_one_matrix_are_cut_separately_and_stored_in_order(tmp_path):
    run_ranks(check_sections, 4, tmp_path)
