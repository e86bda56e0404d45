"""Collectives, bytes and memory of tensor parallelism equal the formulas.

Per block and micro-batch, forward and backward together, with t ranks: 4 all-reduces of batch * seq * hidden
elements, so a rank sends 8 * batch * seq * hidden * (t-1)/t elements. Sequence parallelism sends the same in
4 all-gathers and 4 reduce-scatters.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from dlo_lib.comm.tracing.recorder import trace_collectives
from dlo_lib.launch import run_ranks
from dlo_lib.models import Llama, LlamaConfig
from dlo_lib.parallel.tensor import TensorParallel, parallelize_tensor
from dlo_lib.parallel.tensor.layout import ParamCutter
from dlo_lib.parallel.tensor.style import ColumnParallel
from dlo_lib.parallel.tensor.styles import llama_styles
from dlo_lib.parallel.tensor.wrapper import scale_partial_grads

BATCH, SEQ, BYTES = 2, 8, 8
CONFIG = LlamaConfig(
    vocab_size=64, hidden=32, intermediate=48, num_layers=2, num_heads=4, num_kv_heads=4, head_dim=8
)


def build(layers: int, sequence_parallel: bool, async_tp: bool = False) -> TensorParallel:
    config = replace(CONFIG, num_layers=layers)
    model = Llama(config, dtype=torch.float64)
    assert dist.group.WORLD is not None
    layout = parallelize_tensor(
        model,
        dist.group.WORLD,
        llama_styles(config),
        sequence_parallel=sequence_parallel,
        async_tp=async_tp,
    )
    scale_partial_grads(model, layout)
    return TensorParallel(model, layout)


def traffic(layers: int, sequence_parallel: bool, async_tp: bool = False) -> dict[str, tuple[int, float]]:
    """Of each kind of call in one forward and backward: the number of calls, and the bytes sent."""
    model = build(layers, sequence_parallel, async_tp)
    tokens = torch.arange(BATCH * SEQ).view(BATCH, SEQ)
    with trace_collectives() as trace:
        model.summed_cross_entropy(model(tokens), tokens).backward()
    kinds = ("all_reduce", "all_gather", "reduce_scatter", *(("send", "recv") if async_tp else ()))
    found = {kind: (trace.count(kind), trace.ring_bytes(kind)) for kind in kinds}
    assert sum(count for count, _ in found.values()) == trace.count()
    with trace_collectives() as after:
        model.finish_grad_sync()
    assert after.count("all_reduce") == after.count() == int(sequence_parallel)
    if sequence_parallel:  # the weights of the norms, in one message
        share = (dist.get_world_size() - 1) / dist.get_world_size()
        assert after.ring_bytes() == pytest.approx(2 * (2 * layers + 1) * CONFIG.hidden * BYTES * share)
    return found


def both_depths(sequence_parallel: bool) -> tuple[dict[str, tuple[int, float]], dict[str, tuple[int, float]]]:
    return traffic(0, sequence_parallel), traffic(2, sequence_parallel)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_collectives_and_bytes_of_a_block(ranks, sequence_parallel):
    share = (ranks - 1) / ranks
    hidden = BATCH * SEQ * CONFIG.hidden * BYTES
    for ends, whole in run_ranks(both_depths, ranks, sequence_parallel):
        of_blocks = {kind: (whole[kind][0] - ends[kind][0], whole[kind][1] - ends[kind][1]) for kind in whole}
        sent = sum(bytes_sent for _, bytes_sent in of_blocks.values()) / CONFIG.num_layers
        assert sent == pytest.approx(8 * BATCH * SEQ * CONFIG.hidden * share * BYTES)
        counts = {kind: count / CONFIG.num_layers for kind, (count, _) in of_blocks.items()}
        # The embedding in forward, the head in backward, and two numbers per token for the loss
        loss = 2 * BATCH * SEQ * ranks * BYTES * share
        if sequence_parallel:
            assert counts == {"all_reduce": 0, "all_gather": 4, "reduce_scatter": 4}
            assert ends["all_gather"] == (3, pytest.approx(2 * hidden * share + loss))
            assert ends["reduce_scatter"] == (2, pytest.approx(2 * hidden * share))
        else:
            assert counts == {"all_reduce": 4, "all_gather": 0, "reduce_scatter": 0}
            assert ends["all_reduce"] == (2, pytest.approx(4 * hidden * share))
            assert ends["all_gather"] == (1, pytest.approx(loss))


def saved_elements(sequence_parallel: bool) -> tuple[int, int]:
    """The elements of the parameters of this rank, and those that a forward of the blocks saves for backward,
    each storage counted once."""
    model = build(2, sequence_parallel)
    params = list(model.parameters())
    own = {param.untyped_storage().data_ptr() for param in params}
    saved: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_floating_point() and tensor.untyped_storage().data_ptr() not in own:
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes() // BYTES
            kept.append(tensor)
        return tensor

    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(torch.zeros(BATCH, SEQ, dtype=torch.int64))
    return sum(param.numel() for param in params), sum(saved.values())


def test_memory_of_a_rank():
    """The matrices are cut. Of the activations, sequence parallelism cuts those between the pairs too."""
    total = sum(param.numel() for param in Llama(CONFIG).parameters())
    norms = 5 * CONFIG.hidden
    cut, cut_with_sequences = run_ranks(saved_elements, 2, False)[0], run_ranks(saved_elements, 2, True)[0]
    assert cut[0] == cut_with_sequences[0] == (total - norms) // 2 + norms
    # At least the inputs of the 5 norms, and their products with 1/rms, are halved.
    assert cut[1] - cut_with_sequences[1] >= 5 * BATCH * SEQ * CONFIG.hidden // 2


def whole_matrices_that_live() -> list[int]:
    """The number of matrices that are whole when each of four linears is cut."""
    model = nn.Sequential(*[nn.Linear(4, 4, bias=False) for _ in range(4)])
    matrices = [StorageWeakRef(linear.weight.untyped_storage()) for linear in model]
    living = []

    @dataclass(frozen=True)
    class Counted(ColumnParallel):
        def apply(self, cutter: ParamCutter, name: str, module: nn.Module) -> nn.Module:
            living.append(sum(not matrix.expired() for matrix in matrices))
            return super().apply(cutter, name, module)

    assert dist.group.WORLD is not None
    parallelize_tensor(model, dist.group.WORLD, {str(number): Counted() for number in range(4)})
    return living


def test_a_whole_matrix_is_freed_when_it_is_cut():
    assert run_ranks(whole_matrices_that_live, 2)[0] == [4, 3, 2, 1]
