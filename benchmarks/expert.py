"""Mixture of experts and expert parallelism: our layer compared with two layers that are made of functions of
PyTorch, over gloo.

    loop        for each expert, the tokens that chose it are found by comparison, and the results are added
    grouped_mm  rows are sorted by expert; ``grouped_mm`` computes all experts

Both have our router and our weights. On several ranks, each rank stores a part of the experts; both sort the
rows, exchange the counts, and send rows and results by the all-to-all of the functional collectives, which
has a backward. On one rank they send nothing. No form has losses or a capacity.

A turn is the forward and backward of one layer, with gradients of the tokens, the router and the experts.
Every rank has other tokens. The floor is our layer in one process with the tokens of all ranks. The limit is
the arithmetic and the messages alone: our experts on the rows that this rank receives, already sorted by
expert; the router with the sort and the weighted sum of the rows, which every form needs; and our messages
alone (``benchmarks.replay``). Memory is measured in separate jobs
(``benchmarks.peaks``).
"""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single_autograd

from benchmarks.paired import (
    Row,
    Turn,
    Turns,
    compare,
    measure,
    median_cpu,
    of_limit,
    ratios,
    rounds_over_ranks,
    take_rounds,
)
from benchmarks.peaks import peaks_in_turns, return_freed_memory
from benchmarks.replay import Replay
from dlo_lib.launch import Explain, run_ranks
from dlo_lib.models.moe import MoELayer
from dlo_lib.models.router import MoEConfig
from dlo_lib.parallel.expert import parallelize_experts


@dataclass(frozen=True)
class Case:
    """The sizes of a layer, and the tokens of a rank."""

    hidden: int
    tokens: int
    config: MoEConfig


CASES = {
    "hidden 256": Case(256, 1024, MoEConfig(8, 2, 256, balance_loss=0.0)),
    "hidden 1024": Case(1024, 256, MoEConfig(8, 2, 512, balance_loss=0.0)),
}
PEERS = ("loop", "grouped_mm")
WORLD_SIZES = (1, 2, 4)
ROWS = len(PEERS) * len(CASES) * len(WORLD_SIZES)
SECONDS = (10.0, 0.5)
MEMORY_STEPS, MEMORY_REPEATS = 3, 2


def rows(pairs: int = 40) -> Iterator[Row]:
    for peer in PEERS:
        for case in CASES:
            for world_size in WORLD_SIZES:
                yield row(peer, case, world_size, pairs)


class Candidate:
    """A layer with its tokens: ours, loop, grouped_mm, alone (one process with the tokens of all ranks),
    experts (our experts on sorted rows, without router and messages), or routing (our layer in one process
    with experts that return their rows)."""

    def __init__(self, case: Case, form: str, ranks: int) -> None:
        torch.manual_seed(0)
        self.form, self.case = form, case
        self.layer = MoELayer(case.config, case.hidden)
        if form == "routing":
            self.layer.experts = _NoExperts()  # type: ignore[assignment]
        elif ranks > 1 and form != "alone":
            parallelize_experts(self.layer)
        seeds = list(range(ranks)) if form == "alone" else [dist.get_rank()]
        self.x = torch.cat([_tokens(case, seed) for seed in seeds]).requires_grad_()
        self.grad = torch.ones_like(self.x)
        if form == "experts":
            self._receive()

    def step(self) -> None:
        forms: dict[str, Callable[[Tensor], Tensor]] = {
            "loop": self._loop,
            "grouped_mm": self._grouped,
            "experts": lambda rows: self.layer.experts(rows, self.segments),
        }
        out = forms.get(self.form, self.layer)(self.x)
        out.backward(self.grad)

    def _receive(self) -> None:
        """Replace the tokens by the rows that this rank's experts receive, sorted by expert."""
        with torch.no_grad():
            order, counts, _ = self._routed(self.x)
            received, send, receive = self._counts(counts)
            rows = self._sent(self.x[order // self.case.config.top_k], receive, send)
        self.segments = [received.sum(0).tolist()]
        self.x = rows.detach().clone().requires_grad_()
        self.grad = torch.ones_like(self.x)

    def _routed(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the choices sorted by expert, the number of choices of each expert, and the weights."""
        experts, weights, _, _ = self.layer.router(x)
        flat = experts.flatten()
        return flat.argsort(stable=True), flat.bincount(minlength=self.case.config.num_experts), weights

    def _counts(self, counts: Tensor) -> tuple[Tensor, list[int], list[int]]:
        """Return the rows from each rank for each of this rank's experts, and the rows to and from each
        rank."""
        ranks = dist.get_world_size()
        received = counts
        if ranks > 1:
            received = torch.empty_like(counts)
            dist.all_to_all_single(received, counts)
        received = received.view(ranks, -1)
        return received, counts.view(ranks, -1).sum(1).tolist(), received.sum(1).tolist()

    def _sent(self, rows: Tensor, receive: list[int], send: list[int]) -> Tensor:
        if dist.get_world_size() == 1:
            return rows
        assert dist.group.WORLD is not None
        sent: Tensor = all_to_all_single_autograd(rows, receive, send, dist.group.WORLD)
        return sent

    def _combined(self, results: Tensor, order: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sum of the rows of each token."""
        weighted = results * weights.flatten()[order].unsqueeze(-1)
        return torch.zeros_like(self.x).index_add(0, order // self.case.config.top_k, weighted)

    def _loop(self, x: Tensor) -> Tensor:
        experts = self.layer.experts
        if dist.get_world_size() == 1:
            chosen, weights, _, _ = self.layer.router(x)
            out = torch.zeros_like(x)
            for one in range(self.case.config.num_experts):
                token, choice = torch.where(chosen == one)
                result = _swiglu(x[token], experts.gate_up[one], experts.down[one])
                out = out.index_add(0, token, result * weights[token, choice].unsqueeze(-1))
            return out
        order, counts, weights = self._routed(x)
        received, send, receive = self._counts(counts)
        rows = self._sent(x[order // self.case.config.top_k], receive, send)
        owner = _owners(received)
        results = torch.zeros_like(rows)
        for one in range(received.shape[1]):
            (place,) = torch.where(owner == one)
            results = results.index_add(
                0, place, _swiglu(rows[place], experts.gate_up[one], experts.down[one])
            )
        return self._combined(self._sent(results, send, receive), order, weights)

    def _grouped(self, x: Tensor) -> Tensor:
        order, counts, weights = self._routed(x)
        received, send, receive = self._counts(counts)
        rows = self._sent(x[order // self.case.config.top_k], receive, send)
        by_expert = _owners(received).argsort(stable=True)
        ends = received.sum(0).cumsum(0).int()
        experts = self.layer.experts
        gate, up = F.grouped_mm(rows[by_expert], experts.gate_up, offs=ends).chunk(2, -1)
        results = F.grouped_mm(F.silu(gate) * up, experts.down, offs=ends)
        back = torch.empty_like(by_expert)
        back[by_expert] = torch.arange(len(back))
        return self._combined(self._sent(results[back], send, receive), order, weights)


class _NoExperts(torch.nn.Module):
    def forward(self, rows: Tensor, segments: object) -> Tensor:
        return rows


def _tokens(case: Case, seed: int) -> Tensor:
    return torch.randn(case.tokens, case.hidden, generator=torch.Generator().manual_seed(seed))


def _owners(received: Tensor) -> Tensor:
    """Return the expert of each received row, for rows sorted by source, then by expert."""
    return torch.arange(received.shape[1]).repeat(len(received)).repeat_interleave(received.flatten())


def _swiglu(rows: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    gate, up = (rows @ gate_up).chunk(2, -1)
    return (F.silu(gate) * up) @ down


def row(peer: str, case: str, world_size: int, pairs: int) -> Row:
    """Measure one comparison."""
    sizes = CASES[case]
    rounds = rounds_over_ranks(run_ranks(_rounds, world_size, sizes, peer, pairs, explain=Explain.OFF))
    turns = Turns(rounds["ours"], rounds["peer"])
    floor, experts, routing, messages, ours, its = (
        median_cpu(rounds[part]) for part in ("alone", "experts", "routing", "messages", "ours", "peer")
    )
    note = f"ours / limit {of_limit(rounds, 'experts', 'routing', 'messages')}; "
    note += f"limit / peer {(experts + routing + messages) / its:.2f}; "
    note += f"ours {1e3 * ours / world_size:.0f} ms per rank, "
    note += f"of which the experts {1e3 * experts / world_size:.0f}, routing {1e3 * routing / world_size:.0f}"
    note += f" and messages {1e3 * messages / world_size:.0f}; " if world_size > 1 else "; "
    repeats = min(MEMORY_REPEATS, -(-pairs // 4))

    def job(wrapper: str) -> list[int]:
        form = "ours" if wrapper == "ours" else peer
        return run_ranks(_peak, world_size, sizes, form, explain=Explain.OFF)

    peaks = peaks_in_turns(job, repeats)
    mine, theirs = (statistics.median(peaks[wrapper]) / 2**20 for wrapper in ("ours", "peer"))
    note += f"peak {mine:.0f} MiB against {theirs:.0f} MiB per rank"
    compared = compare(f"MoE, {case}", peer, world_size, turns, floor_cpu=floor, note=note)
    return replace(compared, memory_ratio=ratios(peaks["ours"], peaks["peer"]))


def _rounds(case: Case, peer: str, pairs: int) -> dict[str, list[Turn]]:
    """Measure ours and the peer; and our experts, our messages, and our layer in one process with the tokens
    of all ranks, each alone. They are in one round, because on a loaded machine what is measured later has
    another load."""
    warnings.simplefilter("ignore", FutureWarning)
    torch.set_num_threads(1)
    ranks = dist.get_world_size()
    ours, other, experts, routing = (
        Candidate(case, form, ranks) for form in ("ours", peer, "experts", "routing")
    )
    alone = Candidate(case, "alone", ranks)
    actions: dict[str, Callable[[], object]] = {
        "ours": ours.step,
        "peer": other.step,
        "experts": experts.step,
        "routing": routing.step,
        "messages": Replay(ours.step).run if ranks > 1 else lambda: None,
        "alone": alone.step if dist.get_rank() == 0 else lambda: None,
    }
    return take_rounds(actions, pairs, between=dist.barrier)


def _peak(case: Case, form: str) -> int:
    """Return the peak memory above the start, in bytes, of several steps in a new process."""
    torch.set_num_threads(1)
    return_freed_memory()

    def train() -> None:
        candidate = Candidate(case, form, dist.get_world_size())
        for _ in range(MEMORY_STEPS):
            candidate.step()

    return measure(train).memory
