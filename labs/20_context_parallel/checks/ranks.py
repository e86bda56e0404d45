"""The visible checks of what several ranks compute: results and gradients in float64, and what passes between
them.

Traffic is counted outside the student's process; bytes are exact.
"""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor

from dlo_lib.comm.calls import Call
from dlo_lib.grading.checks.contract import Kind, Run, check
from dlo_lib.labkit.compare import EXACT, double, each_rank, explained, near, same, wrong_if
from dlo_lib.labkit.traffic import passes_at_most, passes_only, uses_what_arrives
from dlo_lib.models.llama import Llama, LlamaConfig

from .blocks import NAMES, pair, same_pair
from .scenarios import exchanged_and_returned, forward, gradients_of, share_of_loss, ulysses_step, whole_step
from .twins import (
    attention,
    block_gradients,
    causal,
    context_loss,
    gradients,
    llama_step,
    mask_mistakes,
    own,
    rectangle,
    wrong_blocks,
)

MESSAGES = (Kind.SEND, Kind.RECV, Kind.RECV_ANY, Kind.ALL_TO_ALL)
"""What a ring may use; an all-to-all can be a shift."""


def contiguous_table(seq: int, world: int) -> Tensor:
    """Rank r has the r-th part of the positions."""
    return torch.arange(seq).reshape(world, -1)


def zigzag_table(seq: int, world: int) -> Tensor:
    """Rank r has an early and a late chunk of the positions."""
    order = sorted(range(seq), key=lambda i: min(i, seq - 1 - i) * 2 * world // seq)
    return torch.tensor(order).view(world, -1).sort(1).values


class Case:
    """q, k, v and a gradient of a whole sequence, the table of positions, and what one process computes."""

    def __init__(self, t, positions: Tensor, heads: int = 2, size: int = 3) -> None:
        self.positions, seq = positions, positions.numel()
        self.whole = [double(t, 1, heads, seq, size) for _ in range(4)]
        mask = causal(torch.arange(seq), torch.arange(seq))
        q, k, v, grad = self.whole
        self.out, self.lse = attention(q, k, v, mask)
        self.gradients = gradients(grad, q, k, v, mask)

    def inputs(self, *names: str) -> list[dict[str, Tensor]]:
        """What each rank gets: its tokens of the tensors with these names, and the table if it is named."""
        of_whole = dict(zip(("q", "k", "v", "grad"), self.whole))
        return [
            {name: self.positions if name == "positions" else own(of_whole[name], row) for name in names}
            for row in self.positions
        ]

    def parts(self, whole: Tensor) -> list[Tensor]:
        """The part of each rank."""
        return [own(whole, row) for row in self.positions]

    @property
    def kv_bytes(self) -> int:
        """Bytes of the keys and values of one rank."""
        return 2 * self.whole[1].nbytes // len(self.positions)


CAUSES = {
    "DEADLOCK": (
        "Every rank shifts in every step, also one that computes nothing: the shift belongs outside of the if"
    ),
    "at non-singleton dimension 2": (
        "The block has the results of the queries `first:` alone: give merge out and lse of these queries"
    ),
    "too many values to unpack (expected 2)": (
        "After the loop, `travelling` should be dk and dv alone: the last message is travelling[2:], and "
        "every rank shifts in every step, also one that computes nothing"
    ),
}
"""What is in the error of a run of the ring, and what is its cause."""


def sent_to(call: Call) -> list[int]:
    """The other ranks to which a message or an all-to-all sends numbers."""
    if call.kind is Kind.SEND:
        return [call.peer]
    own = list(zip(call.members, call.send_splits))
    return [member for member, numbers in own if numbers] if call.kind is Kind.ALL_TO_ALL else []


def sends(run: Run, rank: int) -> list[Call]:
    """The calls by which a rank sends numbers to others."""
    return [call for call in run.calls(rank) if set(sent_to(call)) - {rank}]


def travels(t, run: Run) -> None:
    """Nothing is gathered, and in forward and in backward every rank sends to one neighbour only."""
    message = "rank {rank} uses {kinds}: no rank gathers, blocks travel from neighbour to neighbour"
    passes_only(t, run, MESSAGES, message)
    message = (
        "rank {rank} of {world} sends to the ranks {others}: in a ring a rank sends to one neighbour, "
        "which passes the block on"
    )
    for rank, backward in itertools.product(range(run.world), (False, True)):
        calls = [call for call in sends(run, rank) if call.in_backward == backward]
        others = sorted({to for call in calls for to in sent_to(call)} - {rank})
        neighbours = {(rank + 1) % run.world, (rank - 1) % run.world}
        good = len(others) <= 1 and neighbours.issuperset(others)
        t.that(good, message, rank=rank, world=run.world, others=others)


def ring_traffic(t, run: Run, most: int, why: str) -> None:
    """Every rank sends ``most`` bytes at most."""
    message = "rank {rank} sends {got} bytes, {most} are enough: {why}"
    for rank in range(run.world):
        sent = run.bytes(rank, Kind.SEND) + run.bytes(rank, Kind.ALL_TO_ALL)
        t.that(sent <= most, message, rank=rank, got=sent, most=most, why=why)


# -- ring

OWN_KEYS = (
    "the output of rank {rank} is attention to its keys alone: the blocks of the other ranks are not merged"
)
NAN_OUT = (
    "the output of rank {rank} is NaN: a query that sees no key has the lse -inf, and exp(-inf - -inf) is NaN"
)
FROM_ZERO = "rank {rank} begins with lse 0, as if it had seen a key with the score 0: begin with -inf"


def forward_run(student, t, positions: Tensor) -> tuple[Run, Case]:
    """``ring_forward`` on ranks, with results that are right."""
    case = Case(t, positions)
    run = explained(student, forward, case.inputs("q", "k", "v", "positions"), CAUSES)
    whole = case.whole[:3]
    for rank, (got, out, lse) in enumerate(zip(run.results, case.parts(case.out), case.parts(case.lse))):
        found, row = pair(t, got, "ring_forward"), positions[rank]
        q, k, v = (own(tensor, row) for tensor in whole)
        masks = mask_mistakes(positions, rank)
        mistakes = {message: attention(q, *whole[1:], mask)[0] for message, mask in masks.items()}
        mistakes |= wrong_blocks(*whole, positions, rank)
        mistakes[OWN_KEYS] = attention(q, k, v, causal(row, row))[0]
        mistakes[FROM_ZERO] = out * torch.sigmoid(lse).unsqueeze(-1)
        t.that(not bool(torch.isnan(found[0]).any()), NAN_OUT, rank=rank)
        wrong_if(t, found[0], out, mistakes, rank=rank)
        same_pair(t, found, (out, lse), "ring_forward on rank {rank} of {world}", rank=rank, world=run.world)
    travels(t, run)
    return run, case


@check("ring", points=2, seconds=30)
def check_ring_contiguous(student, t):
    "Contiguous parts, on three ranks"
    forward_run(student, t, contiguous_table(6, 3))


@check("ring", points=1, seconds=30)
def check_ring_computes(student, t):
    "Only the visible part of each block is computed"
    half = 2  # with 1, the masks of all ranks are the same
    _, case = forward_run(student, t, zigzag_table(6 * half, 3))  # a wrong result has its cause there
    early = case.positions[1][:half]  # they see neither the late keys of rank 0 nor those of rank 2
    for rank in (0, 2):
        # 0 · NaN is NaN: a hidden value shows if it is multiplied
        case.whole[2][:, :, case.positions[rank][half:]] = math.nan
    run = explained(student, forward, case.inputs("q", "k", "v", "positions"), CAUSES)
    out, lse = pair(t, run.results[1], "ring_forward")
    t.tensor(out, "out of ring_forward", shape=case.parts(case.out)[1].shape)
    t.tensor(lse, "lse of ring_forward", shape=out.shape[:-1])
    message = (
        "rank 1 computes more than `visible` says: with NaN as the values that its first queries do not "
        "see, their output is NaN. Give block_attention the queries first: and the keys :last"
    )
    t.that(not bool(torch.isnan(out[:, :, :half]).any()), message)
    want = own(case.out, early), own(case.lse, early)
    same_pair(t, (out[:, :, :half], lse[:, :, :half]), want, "the first queries of rank 1")


@check("ring", points=2, seconds=30)
def check_ring_traffic(student, t):
    "Positions with gaps: N - 1 messages, and what arrives is used"
    world = t.integer(3, 4)  # on 2 ranks a ring, an exchange and a gather send the same
    run, case = forward_run(student, t, zigzag_table(2 * world * t.integer(1, 2), world))
    ring_traffic(t, run, (world - 1) * case.kv_bytes, "after the last step no rank needs the block")
    message = (
        "rank {rank} sends {count} messages, {most} are enough on {world} ranks: k and v travel as one "
        "tensor, torch.stack((k, v))"
    )
    for rank in range(world):
        count = len(sends(run, rank))
        t.that(count < world, message, rank=rank, count=count, most=world - 1, world=world)
    rank, kinds = t.integer(0, world - 1), (Kind.RECV, Kind.RECV_ANY, Kind.ALL_TO_ALL)
    kind = next((kind for kind in kinds if run.calls(rank, kind)), Kind.RECV)
    uses_what_arrives(t, run, kind, rank, call=t.integer(0, world - 2))


# -- backward

OF = "{name} on rank {rank} of {world} "
OWN_BLOCK = OF + "has the contribution of its block alone: sum over the steps"
OWN_RANK = OF + "has the contribution of this rank alone: the gradients of a block travel with it"
LAST_BLOCK = OF + (
    "has the contribution of the last block alone: add those of all steps, dq[:, :, first:] += ..."
)
ZERO = OF + "is 0: add to what travels, in place ({name}[:, :, :last] += ...), before the shift"
OF_OTHERS = OF + "is that of the keys of another rank: after N shifts it is at home"


def backward_run(student, t, positions: Tensor) -> tuple[Run, Case]:
    """Ring attention with its backward on ranks; the gradients are right."""
    case = Case(t, positions)
    run = explained(student, gradients_of, case.inputs("q", "k", "v", "grad", "positions"), CAUSES)
    wants, outs = [case.parts(gradient) for gradient in case.gradients], case.parts(case.out)
    for rank, (out, found) in each_rank(t, run, 2, "what the scenario returns"):
        where = {"rank": rank, "world": run.world, **EXACT}
        t.close(out, outs[rank], "out of ring_attention on rank {rank} of {world}", **where)
        found = t.items(found, 3, "what ring_backward returns")
        for name, mine, of_ranks, alone in zip(NAMES, found, wants, terms_of(case, rank, rank)):
            right = of_ranks[rank]
            if name == "dq":
                mistakes = {OWN_BLOCK: alone, LAST_BLOCK: last_term(case, rank)}
            else:
                others = [value for other, value in enumerate(of_ranks) if other != rank]
                mistakes = {OWN_RANK: alone, ZERO: torch.zeros_like(right)}
                mistakes |= {OF_OTHERS + "." * i: value for i, value in enumerate(others)}
            same(t, mine, right, "{name} on rank {rank} of {world}", mistakes, name=name, **where)
    travels(t, run)
    return run, case


def terms_of(case: Case, rank: int, owner: int) -> list[Tensor]:
    """What the block of ``owner`` contributes to dq, dk and dv for the queries of a rank."""
    row, at = case.positions[rank], case.positions[owner]
    q, grad, out, lse = (own(tensor, row) for tensor in (case.whole[0], case.whole[3], case.out, case.lse))
    k, v = (own(tensor, at) for tensor in case.whole[1:3])
    return block_gradients(grad, q, k, v, out, lse, causal(row, at))


def last_term(case: Case, rank: int) -> Tensor:
    """dq of a rank that replaces the contribution of a block by that of the next one."""
    world, dq = len(case.positions), torch.zeros_like(own(case.whole[0], case.positions[rank]))
    for owner in ((rank - step) % world for step in range(world)):
        if part := rectangle(case.positions[rank], case.positions[owner]):
            dq[:, :, part[0] :] = terms_of(case, rank, owner)[0][:, :, part[0] :]
    return dq


@check("backward", points=2, seconds=30)
def check_backward_contiguous(student, t):
    "Contiguous parts, on three ranks"
    backward_run(student, t, contiguous_table(6, 3))


@check("backward", points=3, seconds=30)
def check_backward_traffic(student, t):
    "Positions with gaps: dk and dv travel N times, k and v N - 1 times, and what arrives is used"
    world = t.integer(3, 4)
    run, case = backward_run(student, t, zigzag_table(2 * world * t.integer(1, 2), world))
    why = "k and v travel N - 1 times forward and N - 1 times backward, dk and dv N times"
    ring_traffic(t, run, (3 * world - 2) * case.kv_bytes, why)
    uses_what_arrives(t, run, rank=t.integer(0, world - 1))


# -- loss


CUT_FIRST = (
    "inputs has {count} tokens, one less than the rank has positions: take the inputs at own_positions and "
    "the targets at own_positions + 1, both from the whole sequence"
)
AT_THE_END = (
    "targets are right inside a chunk and wrong at its end: the next token is on another rank, so shift the "
    "whole sequence first"
)
FIRST_ANGLES = (
    "the angles are those of the positions 0 to local - 1: give each token those of its position in the "
    "whole sequence"
)


@check("loss", points=2)
def check_shard_batch(student, t):
    "The tokens, targets and angles of a rank"
    world, local = t.integer(2, 3), 2 * t.integer(2, 3)
    tokens = torch.tensor(t.shuffled(range(2 * (world * local + 1)))).view(2, -1)
    cos, sin = double(t, world * local, 4), double(t, world * local, 4)
    for row in zigzag_table(world * local, world):
        got = student.shard_batch(tokens, cos, sin, row)
        inputs, targets, own_cos, own_sin = t.items(got, 4, "what shard_batch returns")
        want, right = tokens.index_select(1, row), tokens.index_select(1, row + 1)
        cut = type(inputs) is Tensor and inputs.shape == (2, local - 1)
        t.that(not cut, CUT_FIRST, count=local - 1)
        where = {"row": row.tolist(), "next": (row + 1).tolist()}
        t.tensor(inputs, "inputs", shape=want.shape)
        t.that(near(inputs, want), "inputs should be the tokens at positions {row}", **where)
        t.tensor(targets, "targets", shape=right.shape)
        inside = slice(local // 2 - 1)
        t.that(near(targets, right) or not near(targets[:, inside], right[:, inside]), AT_THE_END)
        message = "targets are the inputs: the target of position i is the token i + 1"
        wrong_if(t, targets, right, {message: want})
        t.that(near(targets, right), "targets should be the tokens at positions {next}", **where)
        for name, got, angle in (("cos", own_cos, cos), ("sin", own_sin, sin)):
            want, mistakes = angle.index_select(0, row), {FIRST_ANGLES: angle[:local]}
            same(t, got, want, "{name} of the positions {row}", mistakes, name=name, **where, **EXACT)


MEAN_OF_MEANS = (
    "rank {rank} divides its mean by the number of ranks. That is right only if all ranks have as many valid "
    "tokens: divide the sum of the losses by the number of valid tokens of all ranks (all-reduce)"
)
ALL_TOKENS = "rank {rank} divides by the number of all tokens: targets of -100 do not count"
TIMES_WORLD = (
    "rank {rank} multiplies its share by the number of ranks. DDP and FSDP need that, because they average; "
    "here the shares are summed"
)
BY_WORLD = (
    "rank {rank} divides its share by the number of ranks as well: the number of valid tokens of all ranks "
    "is enough"
)


@check("loss", points=2, seconds=30)
def check_context_loss(student, t):
    "The loss and its gradient, with other numbers of valid tokens on each rank"
    world, local, words = 3, t.integer(3, 5), t.integer(3, 5)
    batch = t.integer(2, 3)
    logits, targets = double(t, batch, world * local, words), t.integers(0, words - 1, batch, world * local)
    parts = contiguous_table(world * local, world)
    targets[:, parts[2]] = -100  # the last rank has no valid token
    targets[t.integer(0, batch - 1), t.integer(0, local - 1)] = -100
    loss, grad = context_loss(logits, targets)
    inputs = [{"logits": logits[:, row].clone(), "targets": targets[:, row].clone()} for row in parts]
    run = student.ranks(share_of_loss, inputs)
    shares, of_all = [], (targets != -100).sum()
    for rank, (share, mine) in each_rank(t, run, 2, "what the scenario returns"):
        row = parts[rank]
        share = t.tensor(share, "context_loss on rank {rank}", shape=(), dtype=loss.dtype, rank=rank)
        if rank < 2:  # the last rank has no valid token, so no mean
            mean, valid = context_loss(logits[:, row], targets[:, row])[0], (targets[:, row] != -100).sum()
            right, total = mean * valid / of_all, mean * valid
            mistakes = {
                "rank {rank} divides by the number of its valid tokens: divide by that of all ranks": mean,
                MEAN_OF_MEANS: mean / world,
                ALL_TOKENS: total / targets.numel(),
                "rank {rank} returns the sum of its losses: divide by the valid tokens of all ranks": total,
                TIMES_WORLD: right * world,
                BY_WORLD: right / world,
                "rank {rank} returns the whole loss: return the sum of the losses of its tokens alone": loss,
            }
            wrong_if(t, share, right, mistakes, rank=rank)
        message = "context_loss on rank {rank} is NaN: a rank may have no valid token"
        t.that(bool(torch.isfinite(share)), message, rank=rank)
        shares.append(share)
        t.that(mine is not None, "context_loss on rank {rank} has no gradient", rank=rank)
        same(t, mine, [grad[:, row]], "the gradient of the logits on rank {rank}", rank=rank, **EXACT)
        calls = run.calls(rank)
        one = len(calls) == 1 and calls[0].payload_bytes <= 8
        message = "rank {rank} makes {count} calls: one all-reduce of one number is enough"
        t.that(one, message, rank=rank, count=len(calls))
    t.close(sum(shares), loss, "the sum of context_loss over the ranks", **EXACT)
    uses_what_arrives(t, run, Kind.ALL_REDUCE, rank=0)


LLAMA = {"vocab_size": 11, "hidden": 8, "intermediate": 12, "num_layers": 2}
LLAMA |= {"num_heads": 2, "num_kv_heads": 2, "head_dim": 4}
LLAMA_WHOLE = (
    "each rank computes the whole sequences: here a rank has the right tokens only at its positions and one "
    "after each, and computes with these alone"
)
LLAMA_MEANS = (
    "the loss of the Llama is the mean of the means of the ranks: they have other numbers of valid tokens, "
    "divide by that of all ranks"
)
LLAMA_SUM = (
    "the loss of the Llama is the sum of the means of the ranks: divide by the number of valid tokens of all "
    "ranks"
)
LLAMA_TIMES = (
    "the loss of the Llama is {world} times too large: return the share of the rank, and do not multiply it "
    "by the number of ranks"
)
LLAMA_BY = (
    "the loss of the Llama is {world} times too small: do not divide the share of the rank by the number of "
    "ranks"
)


LLAMA_CUT = "the Llama learns wrong targets at the end of each chunk: shift the whole sequence first"


def tokens_of_rank(t, tokens: Tensor, positions: Tensor) -> Tensor:
    """Tokens (batch, seq + 1) that are right only where a rank with these positions needs them, as its inputs
    or targets. The others are drawn, so that a rank that computes the whole sequence has another loss."""
    needed = torch.zeros(tokens.shape[1], dtype=torch.bool)
    needed[positions] = needed[positions + 1] = True
    return tokens.where(needed, 1 + (tokens + t.integers(0, 8, *tokens.shape)) % 10)


@check("loss", points=2, seconds=40)
def check_context_model(student, t):
    "A Llama in the zig-zag order, with targets that do not count, has loss and gradients of one process"
    world, seq, padding = 2, 8, 0
    shapes = {name: weight.shape for name, weight in Llama(LlamaConfig(**LLAMA)).named_parameters()}
    state = {name: 0.5 * double(t, *shape) + (len(shape) == 1) for name, shape in shapes.items()}
    tokens, positions = t.integers(1, 10, 2, seq + 1), zigzag_table(seq, world)
    # so the rank with the last chunk has fewer valid targets
    tokens[t.integer(0, 1), -t.integer(1, 2) :] = padding
    loss, logits, grads = llama_step(LLAMA, state, tokens, padding)
    of_ranks = [tokens_of_rank(t, tokens, row) for row in positions]
    labels = tokens.where(tokens != padding, -100)
    targets, cut = labels[:, 1:], labels[:, 1:].clone()
    for row in positions:
        cut[:, row] = labels[:, row].roll(-1, 1)  # the part is cut, then shifted
    means = [float(context_loss(logits[:, row], targets[:, row])[0]) for row in positions]
    mistakes = {
        LLAMA_WHOLE: sum(llama_step(LLAMA, state, own, padding)[0] for own in of_ranks) / world,
        LLAMA_MEANS: sum(means) / world,
        LLAMA_SUM: sum(means),
        LLAMA_TIMES: loss * world,
        LLAMA_BY: loss / world,
        LLAMA_CUT: float(context_loss(logits, cut)[0]),
    }
    fixed = {"sizes": LLAMA, "state": state, "positions": positions, "padding": padding}
    run = student.ranks(whole_step, [fixed | {"tokens": own} for own in of_ranks])
    for rank, (mine, found) in each_rank(t, run, 2, "what context_step returns"):
        mine = float(t.tensor(mine, "the loss of context_step", shape=(), dtype=torch.float64))
        same(
            t, mine, loss, "the loss of the Llama on rank {rank}", mistakes, rtol=1e-6, rank=rank, world=world
        )
        what = "the gradient of {name} on rank {rank}"
        same(t, found, grads, what, rank=rank, rtol=1e-5, atol=1e-7)


# -- ulysses

ROWS_MIXED = (
    "heads_to_sequence on rank {rank} has the right numbers in another order: row j of what arrives is the "
    "j-th group of heads"
)
EVERY_NTH = (
    "heads_to_sequence on rank {rank} has every N-th token: cut the sequence into N parts of neighbours, "
    "part j for rank j"
)


@check("ulysses", points=2, seconds=30)
def check_ulysses_layout(student, t):
    "The way back from a part of the heads to a part of the sequence"
    world = 3
    whole = double(t, t.integer(1, 2), 2 * world, 2 * world, 2)
    sequence, heads = whole.chunk(world, 2), whole.chunk(world, 1)
    run = student.ranks(exchanged_and_returned, [{"x": part.clone()} for part in sequence])
    for rank, (mine, back) in each_rank(t, run, 2, "what the scenario returns"):
        what = "sequence_to_heads on rank {rank}: its heads of the whole sequence"
        t.close(mine, heads[rank], what, rank=rank, **EXACT)
        want = sequence[rank]
        t.tensor(back, "the result of heads_to_sequence", shape=want.shape, dtype=want.dtype)
        wrong_if(t, back, want, {EVERY_NTH: whole[:, :, rank::world]}, rank=rank)
        numbers = near(back.flatten().sort().values, want.flatten().sort().values)
        t.that(near(back, want) or not numbers, ROWS_MIXED, rank=rank)
        t.close(back, want, "heads_to_sequence of sequence_to_heads on rank {rank}", rank=rank, **EXACT)


NOT_BACK = (
    "ulysses_attention on rank {rank} returns a part of the heads of the whole sequence: exchange it back by "
    "heads_to_sequence"
)
NO_GRAPH = "the result of ulysses_attention requires no gradient: use AllToAll.apply, not exchanged"
DIVIDED = (
    "{name} on rank {rank} is too small: an all-to-all only moves numbers, so its backward divides by nothing"
)
NOT_RETURNED = (
    "{name} on rank {rank} is wrong: in the backward of AllToAll each part of the gradient returns to the "
    "rank that sent it"
)


def ulysses_run(student, t, world: int, heads: int) -> tuple[Run, Case]:
    """The all-to-all form on ranks; results and gradients are right."""
    case = Case(t, contiguous_table(2 * world, world), heads=heads)
    run = student.ranks(ulysses_step, case.inputs("q", "k", "v", "grad"))
    everything = torch.ones(2 * world, 2 * world, dtype=torch.bool)
    outs, unmasked = case.parts(case.out), case.parts(attention(*case.whole[:3], everything)[0])
    for rank, (out, found) in each_rank(t, run, 2, "what the scenario returns"):
        right = outs[rank]
        of_heads = (1, heads // world, 2 * world, right.shape[-1])
        t.that(
            type(out) is not Tensor or out.shape != of_heads or out.shape == right.shape, NOT_BACK, rank=rank
        )
        later = {"the queries of rank {rank} see later keys: attention is causal": unmasked[rank]}
        what = "ulysses_attention on rank {rank} of {world}"
        same(t, out, right, what, later, rank=rank, world=world, **EXACT)
        t.that(found is not None, NO_GRAPH)
        for name, mine, whole in zip(NAMES, t.items(found, 3, "the gradients"), case.gradients):
            where, want = {"name": name, "rank": rank}, case.parts(whole)[rank]
            t.that(
                mine is not None,
                "{name} on rank {rank} is missing: use AllToAll.apply, not exchanged",
                **where,
            )
            wrong_if(t, mine, want, {DIVIDED: want / world, DIVIDED + ".": want / world**2}, **where)
            t.that(near(mine, want), NOT_RETURNED, **where)
    message = "rank {rank} uses {kinds}: nothing is gathered, an all-to-all moves each number once"
    passes_only(t, run, [Kind.ALL_TO_ALL], message)
    return run, case


@check("ulysses", points=2, seconds=30)
def check_ulysses_attention(student, t):
    "Attention and its gradients"
    ulysses_run(student, t, 2, 4)


@check("ulysses", points=1, seconds=30)
def check_ulysses_traffic(student, t):
    "Only all-to-alls, of each tensor once, and what arrives is used"
    world, heads = t.choice([(2, 4), (3, 6)])  # those of the other checks: no answer can tell them apart
    run, case = ulysses_run(student, t, world, heads)
    message = (
        "rank {rank} passes {got} bytes to all-to-alls, {want} are enough: q, k, v and the output, forward "
        "and backward"
    )
    passes_at_most(t, run, 4 * case.kv_bytes, message, Kind.ALL_TO_ALL)
    uses_what_arrives(t, run, Kind.ALL_TO_ALL, rank=t.integer(0, world - 1))
