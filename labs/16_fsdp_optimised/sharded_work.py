"""What the demonstrations of this lab run: a stack of layers in shards, the library's FSDP with one thing changed, and counts of what happened.

A unit is one layer tanh(x W). Its forward and backward are written out, so that a step is a list of messages and computations, and nothing else.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dlo_lib.comm.calls import Kind
from dlo_lib.comm.timeline import waits
from dlo_lib.comm.trace import Trace
from dlo_lib.models import Llama, LlamaConfig, model_config
from dlo_lib.models.counts import parameters_by_part
from dlo_lib.models.llama import Block, rotation
from dlo_lib.parallel.fsdp import FSDP
from dlo_lib.parallel.hybrid import hybrid_groups
from dlo_lib.parallel.wire import Collectives

UNITS, WIDTH, ROWS = 6, 512, 768
UNIT_BYTES = 4 * WIDTH * WIDTH
LLAMA = LlamaConfig(512, 128, 384, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=32)
LIBRARY_LAYERS, LIBRARY_WIDTH = 6, 64
MESSAGES = (Kind.ALL_GATHER, Kind.REDUCE_SCATTER, Kind.ALL_REDUCE)

Step = Callable[[list[Tensor], Tensor, Tensor], Any]

# -- a stack of units, by hand


def forward(k: int, weights: Tensor, x: Tensor) -> Tensor:
    """x (ROWS, WIDTH) through unit k, whose weights are (WIDTH * WIDTH,)."""
    return torch.tanh(x @ weights.view(WIDTH, WIDTH))


def backward(k: int, weights: Tensor, x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of x and of the weights."""
    matrix = weights.view(WIDTH, WIDTH)
    inner = grad * (1 - torch.tanh(x @ matrix) ** 2)
    return inner @ matrix.T, (x.T @ inner).flatten()


def simple_step(shards: list[Tensor], x: Tensor, grad: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Gather, wait, compute, free; in backward the same, then average. Right, and never two things at a time."""
    world, inputs, pieces = dist.get_world_size(), [], []

    def gathered(k: int) -> Tensor:
        weights = torch.empty(WIDTH * WIDTH)
        dist.all_gather_into_tensor(weights, shards[k])
        return weights

    for k in range(len(shards)):
        inputs.append(x)
        x = forward(k, gathered(k), x)
    for k in reversed(range(len(shards))):
        grad, whole = backward(k, gathered(k), inputs.pop(), grad)
        piece = torch.empty_like(shards[k])
        dist.reduce_scatter_tensor(piece, whole / world)
        pieces.append(piece)
    return x, pieces[::-1]


def _planned(execute: Callable[..., Any], table: list[tuple[str, int]], shards: list[Tensor], x: Tensor, grad: Tensor) -> Any:
    return execute(table, shards, x, grad, forward, backward)


def planned_step(execute: Callable[..., Any], table: list[tuple[str, int]]) -> Step:
    """A step that carries out ``table``."""
    return partial(_planned, execute, table)


def traced_step(step: Step) -> None:
    """Three steps on this rank, the ranks beginning the last one together: what comes after the last barrier is one warm step."""
    torch.set_num_threads(1)
    random = torch.Generator().manual_seed(dist.get_rank())
    shards = [torch.randn(WIDTH * WIDTH // dist.get_world_size(), generator=random) / WIDTH**0.5 for _ in range(UNITS)]
    x, grad = torch.randn(ROWS, WIDTH, generator=random), torch.randn(ROWS, WIDTH, generator=random)
    for _ in range(3):
        dist.barrier()
        step(shards, x, grad)


def asked_ahead(trace: Trace) -> tuple[int, int]:
    """Gathers of rank 0, and how many of them were issued before something else that came before their wait."""
    events = trace.select(rank=0)
    gathers = trace.select(Kind.ALL_GATHER, rank=0)

    def early(gather: Any) -> bool:
        waited = gather.waited_from
        moments = [event.issued for event in events] + [event.waited_from for event in events if event.waited_from is not None]
        return waited is not None and any(gather.issued < moment < waited for moment in moments)

    return len(gathers), sum(early(gather) for gather in gathers)


def waiting(trace: Trace) -> dict[int, float]:
    """The share of the last step, by rank, in which the process stood still."""
    shares = {}
    for rank in sorted({event.rank for event in trace.events}):
        begin = max(event.waited_until or event.issued for event in trace.select(Kind.BARRIER, rank))
        events = [event for event in trace.select(rank=rank) if event.issued >= begin]
        end = max(event.waited_until or event.issued for event in events)
        shares[rank] = sum(until - since for since, until in waits(events)) / (end - begin)
    return shares


# -- the library's FSDP


class _Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(LIBRARY_WIDTH, LIBRARY_WIDTH, bias=False) for _ in range(LIBRARY_LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def library_units() -> list[int]:
    """Bytes of the units of ``library_step``."""
    return [4 * LIBRARY_WIDTH**2] * LIBRARY_LAYERS


def library_step(keep: int) -> None:
    """Forward and backward with units shared by ``keep`` ranks in between."""
    policy = {dist.get_world_size(): True, 1: False}.get(keep, keep)
    FSDP(_Layers(), reshard_after_forward=policy, wire=Collectives())(torch.randn(4, LIBRARY_WIDTH)).sum().backward()


def hybrid_step(size: int) -> None:
    """Forward and backward with shard groups of ``size`` ranks."""
    groups = hybrid_groups(size)
    FSDP(_Layers(), groups.shards, replicas=groups.replicas, wire=Collectives())(torch.randn(4, LIBRARY_WIDTH)).sum().backward()


def llama_step(checkpointing: bool) -> None:
    """Forward and backward of a small Llama."""
    model = FSDP(Llama(LLAMA, checkpointing=checkpointing), wire=Collectives())
    model(torch.randint(0, LLAMA.vocab_size, (1, 32))).sum().backward()


def links(trace: Trace, per_node: int) -> dict[str, float]:
    """Bytes that stay in a node and that leave it, on a rank in the mean: in a ring each rank sends to the next member."""
    sent = {"inside a node": 0.0, "between nodes": 0.0}
    for event in trace.events:
        if event.call.kind in MESSAGES:
            members = list(event.call.members)
            neighbour = members[(members.index(event.rank) + 1) % len(members)]
            same = neighbour // per_node == event.rank // per_node
            sent["inside a node" if same else "between nodes"] += event.call.ring_bytes
    ranks = len({event.rank for event in trace.events})
    return {where: count / ranks for where, count in sent.items()}


def graphs_under_fsdp(graphs_of: Callable[..., list[int]], compile_blocks: Callable[..., None]) -> tuple[list[int], list[int]]:
    """Operations of each graph of a small Llama in FSDP: compiled as a whole, and block by block."""
    warnings.simplefilter("ignore")  # dynamo names all that it cannot put into a graph: what this counts
    tokens = torch.randint(0, LLAMA.vocab_size, (1, 32))
    whole = graphs_of(FSDP(Llama(LLAMA), wire=Collectives()), tokens)
    torch._dynamo.reset()
    llama, counts = Llama(LLAMA), []
    model = FSDP(llama, wire=Collectives())

    def backend(graph_module: Any, example_inputs: Any) -> Any:
        counts.append(sum(node.op in ("call_function", "call_method", "call_module") for node in graph_module.graph.nodes))
        return graph_module.forward

    compile_blocks(llama.layers, backend)
    model(tokens)
    return whole, counts


# -- sizes


def block_bytes(model: str) -> list[int]:
    """Bytes in bf16 of each block of ``model``."""
    parts, layers = parameters_by_part(model_config(model)), model_config(model).num_layers
    return [2 * (parts["attention"] + parts["mlp"]) // layers] * layers


def wrapping_cases(
    model: str, forward_time: Callable[..., float], gather_cost: Callable[..., tuple[float, float]]
) -> tuple[list[float], dict[str, list[float]], list[float]]:
    """Blocks in a unit (1/7: a matrix of its own), milliseconds of a forward pass for links and tokens, GiB of gathered weights at the peak; 64 ranks."""
    sizes, world = block_bytes(model), 64
    units: dict[float, list[int]] = {1 / 7: [size // 7 for size in sizes for _ in range(7)]}
    for count in range(1, len(sizes) + 1):
        if len(sizes) % count == 0:
            units[count] = [sum(sizes[first : first + count]) for first in range(0, len(sizes), count)]
    counts = list(units)
    times: dict[str, list[float]] = {}
    # A start of 5 microseconds for each of the N - 1 steps of a ring; the slowest link of the ring sets its pace.
    for link, bandwidth in (("25 GB/s a rank", 25e9), ("200 GB/s a rank", 200e9)):
        for tokens in (2048, 16384):
            seconds = tokens / (0.4 * 312e12)  # for a parameter in bf16: 2 bytes, 2 operations, at 40 % of an A100's peak
            times[f"{link}, {tokens} tokens"] = [
                1e3 * forward_time([(size, size * seconds) for size in units[count]], 5e-6 * (world - 1), (world - 1) / world / bandwidth)
                for count in counts
            ]
    return counts, times, [gather_cost(units[count], world, world)[0] / 2**30 for count in counts]


def flops(wrapper: Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]) -> int:
    """FLOPs of matrix products of forward and backward through three Llama blocks, each called by ``wrapper``."""
    from torch.utils.flop_counter import FlopCounterMode

    x = torch.randn(1, 64, LLAMA.hidden, requires_grad=True)
    cos, sin = rotation(LLAMA, 64, x)
    blocks = [Block(LLAMA) for _ in range(3)]
    with FlopCounterMode(display=False) as counter:
        y = x
        for block in blocks:
            y = wrapper(lambda x, block=block: block(x, cos, sin), y)
        y.sum().backward()
    return counter.get_total_flops()


def kept_for_backward(model: str) -> dict[str, float]:
    """Bytes that a block keeps for backward, weights left out, as a multiple of its input's: of a block of 1/8 of the width."""
    full = model_config(model)
    narrow = LlamaConfig(
        64, full.hidden // 8, full.intermediate // 8, 1, max(1, full.num_heads // 8), max(1, full.num_kv_heads // 8), full.head_dim
    )
    block, tokens = Block(narrow, dtype=torch.bfloat16), 128
    weights = {parameter.untyped_storage().data_ptr() for parameter in block.parameters()}
    x = torch.randn(1, tokens, narrow.hidden, dtype=torch.bfloat16, requires_grad=True)
    cos, sin = rotation(narrow, tokens, x)
    found = {}
    # The backend that partitions forward and backward as inductor does, and generates no code: it asks for no C++ compiler.
    for name, compute in (("eager", block), ("compiled", torch.compile(block, backend="aot_eager_decomp_partition"))):
        kept: dict[int, Tensor] = {}

        def pack(tensor: Tensor, kept: dict[int, Tensor] = kept) -> Tensor:
            kept[tensor.untyped_storage().data_ptr()] = tensor
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            y = compute(x, cos, sin)
        held = sum(tensor.untyped_storage().nbytes() for place, tensor in kept.items() if place not in weights)
        found[name] = held / x.nbytes
        del y
    return found


def tiny_updates(host_optimizer: Callable[..., Any], steps: int = 60) -> dict[str, list[float]]:
    """A weight of 1 that small steps should bring down: in bf16 alone, in fp32 alone, and in bf16 with an fp32 master."""

    def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=1e-3)

    kinds = {"bf16": (torch.bfloat16, sgd), "fp32": (torch.float32, sgd), "bf16, master on the host": (torch.bfloat16, None)}
    curves = {}
    for name, (dtype, make) in kinds.items():
        weight = nn.Parameter(torch.ones(1, dtype=dtype))
        optimizer = make([weight]) if make is not None else host_optimizer([weight], sgd)
        curves[name] = [1.0]
        for _ in range(steps):
            weight.grad = torch.ones_like(weight)
            optimizer.step()
            curves[name].append(float(weight.detach()))
    return curves
