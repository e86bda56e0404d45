"""What the checks compute themselves: attention head by head, blocks by counting, and exact distributions."""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor

from dlo_lib.grading.checks.twins import twin

THETA = 10_000.0  # as in the first cell


def turned(x: Tensor, first: int) -> Tensor:
    """Rotate x (..., seq, head_dim) as a complex number of each pair, from the position ``first``."""
    half = x.shape[-1] // 2
    speed = torch.tensor([THETA ** (-pair / half) for pair in range(half)], dtype=torch.float64)
    angle = torch.arange(first, first + x.shape[-2], dtype=torch.float64)[:, None] * speed
    pairs = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([pairs.real, pairs.imag], -1)


def one_head(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    weights = scores.masked_fill(~seen, -torch.inf).exp()
    return weights / weights.sum(-1, keepdim=True) @ v


@twin
def attended(
    x: Tensor,
    weights: dict[str, Tensor],
    head_dim: int,
    keys: Tensor,
    values: Tensor,
    mistake: str = "",
) -> tuple[Tensor, Tensor, Tensor]:
    """The output of attention for new tokens after a past, and the keys and values of all tokens."""
    past, new = keys.shape[2], x.shape[1]

    def heads(name: str) -> Tensor:
        return (x @ weights[name].T).unflatten(-1, (-1, head_dim)).transpose(1, 2)

    first = 0 if mistake == "positions" else past
    q, k = turned(heads("q"), first), turned(heads("k"), first)
    keys = torch.cat([keys, heads("k") if mistake == "unturned" else k], 2)
    values = torch.cat([values, heads("v")], 2)
    place = torch.arange(past + new)
    seen = (place[None] <= place[past:, None]) | (mistake == "mask")
    if mistake == "corner":
        seen = place[None] <= torch.arange(new)[:, None]
    count, shared = q.shape[1], keys.shape[1]
    of = [head % shared if mistake == "heads" else head * shared // count for head in range(count)]
    out = [one_head(q[:, head], keys[:, each], values[:, each], seen) for head, each in enumerate(of)]
    return torch.cat(out, -1) @ weights["o"].T, keys, values


@twin
def cost(config: dict, batch: int, new: int, past: int) -> tuple[int, int, int]:
    """FLOPs of weights, FLOPs of attention, and bytes of one sequence's cache, counted token by token."""
    each = 4 * config["layers"] * config["heads"] * config["head_dim"]
    attention = sum(each * (past + place + 1) for place in range(new)) * batch
    a_token = sum(2 * 2 * config["head_dim"] for _ in range(config["layers"] * config["kv_heads"]))
    return 2 * config["weights"] * batch * new, attention, a_token * (past + new)


class Blocks:
    """The sequences of a pool as lists of numbered blocks, which are counted and have no place."""

    def __init__(self, blocks: int, size: int) -> None:
        self.blocks, self.size = blocks, size
        self.tables: dict[int, list[int]] = {}
        self.tokens: dict[int, list[int]] = {}
        self._next = itertools.count()

    def free(self) -> int:
        return self.blocks - len({block for table in self.tables.values() for block in table})

    def needs_block(self, seq: int) -> bool:
        table, length = self.tables.get(seq, []), len(self.tokens.get(seq, []))
        if length % self.size == 0:
            return True
        return sum(table[-1] in other for other in self.tables.values()) > 1

    def append(self, seq: int, token: int) -> bool:
        """Return False if no block is free for the token."""
        needed = self.needs_block(seq)
        if needed and not self.free():
            return False
        table, tokens = self.tables.setdefault(seq, []), self.tokens.setdefault(seq, [])
        if needed:
            if len(tokens) % self.size:
                table.pop()
            table.append(next(self._next))
        tokens.append(token)
        return True

    def fork(self, parent: int, child: int) -> None:
        self.tables[child], self.tokens[child] = list(self.tables[parent]), list(self.tokens[parent])

    def release(self, seq: int) -> None:
        del self.tables[seq], self.tokens[seq]


def blocks_of(tokens: int, size: int) -> int:
    return math.ceil(tokens / size)


def planned(requests: list[dict], free: int, size: int, most: int, eos: int) -> dict[str, list[int]]:
    """The plan of an iteration, by the number of requests that are kept, from the largest that fits."""
    ended = [r for r in requests if eos in r["output"] or len(r["output"]) == r["limit"]]
    rest = [r for r in requests if r not in ended]
    running = sum(r["blocks"] > 0 for r in rest)
    have = free + sum(r["blocks"] for r in ended + rest)

    def fits(count: int) -> bool:
        return have >= sum(blocks_of(r["prompt"] + len(r["output"]), size) for r in rest[:count])

    kept = next(count for count in range(running, -1, -1) if fits(count))
    if kept == running:
        while kept < min(most, len(rest)) and fits(kept + 1):
            kept += 1
    names = [r["id"] for r in rest]
    return {"finish": [r["id"] for r in ended], "preempt": names[kept:running], "run": names[:kept]}


def early(requests: list[dict], free: int, size: int, eos: int = -1) -> list[int]:
    """The requests that run, sorted, if the new token has a place at once; empty if that is no mistake."""
    longer = [r | {"prompt": r["prompt"] + 1} for r in requests]
    wrong, right = (planned(each, free, size, len(requests), eos)["run"] for each in (longer, requests))
    return sorted(wrong) if wrong != right else []


@twin
def outcomes(p: Tensor, q: Tensor, drafted: list[int], mistake: str = "") -> dict[tuple[int, ...], float]:
    """The exact probability of each answer of ``verify`` for these drafted tokens."""
    found: dict[tuple[int, ...], float] = {}
    reached = 1.0
    for place, token in enumerate(drafted):
        wanted, offered = float(p[place, token]), float(q[place, token])
        accepted = {"always": 1.0, "p": wanted, "swapped": min(1.0, offered / max(wanted, 1e-12))}.get(
            mistake, min(1.0, wanted / offered)
        )
        rest = p[place] if mistake == "from p" else (p[place] - q[place]).clamp(min=0)
        if mistake == "from q":
            rest = q[place]
        for other, share in enumerate((rest / max(float(rest.sum()), 1e-300)).tolist()):
            answer = (*drafted[:place], other)
            found[answer] = found.get(answer, 0.0) + reached * (1 - accepted) * share
        reached *= accepted
    for other, share in enumerate(p[-1].tolist()):
        found[(*drafted, other)] = reached * share
    return found


def chances(t, *shape: int) -> Tensor:
    """Draw rows of probabilities in float64."""
    return (1.2 * t.normal(*shape, dtype=torch.float64)).softmax(-1)


def reach(count: int, categories: int) -> float:
    """The distance that a right answer's frequency in ``count`` runs exceeds with probability < 1e-7
    (Hoeffding, over all categories)."""
    return math.sqrt(math.log(2 * categories / 1e-7) / (2 * count))
