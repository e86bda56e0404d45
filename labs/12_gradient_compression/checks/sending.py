"""The visible checks of bytes, of the largest elements, of error feedback and of one bit."""

from __future__ import annotations

import torch
from torch import Tensor

from dlo_lib.grading.checks.contract import Kind, Run, check
from dlo_lib.labkit.compare import every_rank, is_near, near, same, wrong_if
from dlo_lib.labkit.traffic import kinds_of, same_plain, uses_what_arrives

from . import scenarios, twins


def same_on_all(t, run: Run, want: list[Tensor], what: str, known: dict, **options) -> None:
    """Each rank returns the list ``want``. ``known``: a mistake and its list, or a tuple of one per rank."""
    what += " on rank {rank} of {world}"
    each = {name: values if type(values) is tuple else [values] * run.world for name, values in known.items()}
    mistakes = {what + ": " + name: values for name, values in each.items()}
    every_rank(t, run, [want] * run.world, what, mistakes=mistakes, **options)


# -- 1 · bytes


def same_bytes(student, t, scheme: str, message: str, known: dict[str, float] | None = None) -> None:
    """The bytes of a layer on three drawn numbers of ranks. ``known``: a mistake and its factor."""
    for ranks in (2, t.integer(3, 9), t.integer(10, 99)):
        rows, columns, kept = 8 * t.integer(3, 40), 8 * t.integer(41, 90), t.integer(2, 7)
        got = t.number(student.sent_bytes(scheme, rows, columns, ranks, kept), "sent_bytes(...)")
        want = twins.bytes_by_messages(scheme, rows, columns, ranks, kept)
        where = {"scheme": scheme, "ranks": ranks, "rows": rows, "columns": columns, "kept": kept}
        call = '"{scheme}" for {rows} × {columns} on {ranks} ranks, kept = {kept}: '
        mistakes = {call + words: want * factor for words, factor in (known or {}).items()}
        mistakes[call + "that is one half of what is sent"] = want / 2
        words = call + "{got:.1f} bytes, expected {want:.1f}. " + message
        is_near(t, got, want, words, mistakes, atol=0.0, **where)


@check("bytes", points=1)
def check_exact_bytes(student, t):
    "fp32 and fp16: one all-reduce"
    for scheme in ("fp32", "fp16"):
        same_bytes(student, t, scheme, "An all-reduce sends 2 (N - 1) / N of its bytes")


@check("bytes", points=1)
def check_topk_bytes(student, t):
    "Top-k: values and positions of each rank travel to all others"
    message = "Each rank sends its own `kept` pairs of 4 + 8 bytes N - 1 times"
    without = {"the positions travel too, 8 bytes each": 4 / 12, "a position is an int64, 8 bytes": 8 / 12}
    same_bytes(student, t, "top-k", message, without)


@check("bytes", points=1)
def check_onebit_bytes(student, t):
    "One bit: two exchanges, with their scales"
    message = "Each exchange sends (N - 1) / N of elements / 8 bytes, and a scale of 4 bytes N - 1 times"
    same_bytes(student, t, "one-bit", message)


@check("bytes", points=1)
def check_low_rank_bytes(student, t):
    "Low rank: two factors, each in an all-reduce"
    same_bytes(student, t, "low-rank", "The factors have kept × rows and kept × columns numbers of 4 bytes")


# -- 2 · top-k


@check("topk", points=1)
def check_largest(student, t):
    "The largest magnitudes, with their signs and positions"
    for dtype in (torch.float32, torch.float64):
        size = t.integer(12, 40)
        x, k = t.normal(size, dtype=dtype), t.integer(3, 9)
        values, positions = t.items(student.largest(x.clone(), k), 2, "the pair that `largest` returns")
        positions = t.tensor(positions, "the positions", dtype=torch.int64, shape=(k,))
        values = t.tensor(values, "the values", dtype=dtype, shape=(k,))
        found, best, highest = (sorted(by.tolist()) for by in (positions, x.abs().topk(k)[1], x.topk(k)[1]))
        message = "these are the largest elements, not those of the largest magnitude: take |x| to choose"
        wrong_if(t, found, best, {message: highest})
        t.equal(found, best, "the sorted positions of the largest magnitudes")
        magnitudes = {"the values are magnitudes: return the elements with their signs": x[positions].abs()}
        same(t, values, x[positions], "the values at the positions", magnitudes)


def drawn_pairs(t, world: int, size: int, k: int, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    """Pairs of each rank; all ranks share one position."""
    shared = t.integer(0, size - 1)
    pairs = []
    for _ in range(world):
        others = [place for place in t.shuffled(range(size)) if place != shared][: k - 1]
        pairs.append((t.normal(k, dtype=dtype), torch.tensor(t.shuffled([shared, *others]))))
    return pairs


def sparse_run(student, t, world: int, cases: list[tuple[int, int, torch.dtype]]) -> Run:
    """A run with right means; a case is size, k and dtype."""
    sizes, drawn = [case[0] for case in cases], [drawn_pairs(t, world, *case) for case in cases]
    own = [[(*pairs[rank], size) for pairs, size in zip(drawn, sizes)] for rank in range(world)]
    run = student.ranks(scenarios.sparse_means, [{"cases": mine} for mine in own])
    want = [twins.mean_of_pairs(pairs, size) for pairs, size in zip(drawn, sizes)]
    lost = [twins.mean_of_pairs(pairs, size, last_wins=True) for pairs, size in zip(drawn, sizes)]
    known = {
        "that is the sum: divide by the number of ranks": [world * mean for mean in want],
        "where several ranks chose one position, only one of their values counts: add them": lost,
        "those are the elements of this rank: gather those of all ranks": tuple(
            [twins.mean_of_pairs([(values, places)], size) for values, places, size in mine] for mine in own
        ),
    }
    same_on_all(t, run, want, "mean {i}", known)
    return run


@check("topk", points=1, seconds=20)
def check_sparse_mean(student, t):
    "The mean of the pairs of all ranks, in their dtype"
    for world in (1, t.integer(3, 4)):
        cases = [(t.integer(12, 30), t.integer(3, 6), dtype) for dtype in (torch.float32, torch.float64)]
        sparse_run(student, t, world, cases)


def sends_at_most(t, run: Run, most: float, message: str) -> None:
    """No rank sends more bytes than ``most``, whatever collectives it calls, and one rank uses what arrives
    in its last all-gather, or in its last call."""
    words = "rank {rank} of {world} sends {got:.0f} bytes ({kinds}), {most:.0f} are enough: " + message
    for rank in range(run.world):
        where = {"rank": rank, "world": run.world, "most": most, "got": run.ring_bytes(rank)}
        t.that(where["got"] <= most + 1e-6, words, kinds=kinds_of(run, rank) or "no call", **where)
    kind = Kind.ALL_GATHER if run.calls(0, Kind.ALL_GATHER) else None
    uses_what_arrives(t, run, kind, t.integer(0, run.world - 1))


@check("topk", points=2, seconds=20)
def check_sparse_traffic(student, t):
    "Only the pairs travel, 12 bytes for each, N - 1 times"
    world, k = t.integer(3, 4), t.integer(3, 6)
    run = sparse_run(student, t, world, [(t.integer(300, 400), k, torch.float32)])
    sends_at_most(t, run, 12 * k * (world - 1), "gather the values and the positions, not the whole tensors")


# -- 3 · error feedback


class Compression:
    """A compression that the student's process cannot know: another share of each element in each call."""

    def __init__(self, t, size: int, calls: int) -> None:
        self.shares = [torch.tensor([t.uniform(0, 1) for _ in range(size)]) for _ in range(calls)]
        self.arrived: list[Tensor] = []
        self.sent: list[Tensor] = []
        self.asked = t.asked(self.compress, calls=calls, too_many="call `compress` once for each tensor")

    def compress(self, x: Tensor) -> Tensor:
        self.arrived.append(x.clone())
        self.sent.append(self.shares[len(self.sent)] * x)
        return self.sent[-1]


def follows(t, what: Compression, xs: list[Tensor], got: list, whose: str = "") -> None:
    """What arrives at the compression is all of ``xs`` that is not sent yet; ``got`` is what it returned."""
    t.that(len(what.arrived) == len(xs), "`compress` should be called once for each tensor" + whose)
    for i, x in enumerate(xs):
        want = sum(xs[: i + 1]) - sum(what.sent[:i])
        mistakes = {"in call {i} the error of the call before is missing: add it to x" + whose: x}
        if i:
            only_last = x + xs[i - 1] - what.sent[i - 1]
            mistakes |= {
                "in call {i} x is not added: compress x + e" + whose: want - x,
                "the error is subtracted: add what was left out" + whose: 2 * x - want,
                "the error is x - sent, and so loses older errors: it is (x + e) - sent" + whose: only_last,
            }
        same(t, what.arrived[i], want, "what call {i} compresses" + whose, mistakes, 1e-5, i=i)
        same(t, got[i], what.sent[i], "the result of call {i}" + whose, None, 1e-5, i=i)


def fed_by_turns(student, t, objects: int, calls: int) -> tuple[list[Compression], list[Tensor], list, list]:
    """A compression for each object, the tensors, what was sent for each, and the tensors afterwards."""
    size = t.integer(4, 9)
    xs, each = [t.normal(size) for _ in range(calls)], [Compression(t, size, calls) for _ in range(objects)]
    inputs = {"xs": [x.clone() for x in xs], "each": [what.asked for what in each]}
    got, after = t.items(student.run(scenarios.fed, **inputs), 2, "the results")
    return each, xs, t.items(got, calls, "what is sent"), after


@check("feedback", points=2)
def check_feedback(student, t):
    "What is left out is added to the next tensor, for any compression"
    (what,), xs, got, _ = fed_by_turns(student, t, 1, t.integer(4, 6))
    follows(t, what, xs, got)


@check("feedback", points=1)
def check_feedback_argument(student, t):
    "The argument, the results and a state stay unchanged"
    (what,), xs, _, after = fed_by_turns(student, t, 1, 3)
    moved = len(what.arrived) == 3 and not torch.equal(what.arrived[1], xs[1])
    t.that(moved, "not tested yet: no error is added, see the first check")
    same(t, after, xs, "argument {i} after the calls", rtol=0, atol=0)
    xs = [t.normal(xs[0].numel()) for _ in range(3)]
    sent, before, later = t.items(student.run(scenarios.kept, xs=[x.clone() for x in xs]), 3, "the results")
    words = "what was sent for tensor {i} by a compression that returns its argument, after the last call,"
    same(t, sent, xs, words, rtol=1e-5)
    unchanged = not before or near(later, before, 0, 0)
    t.that(unchanged, "a state changes in a later call: the error is changed in place")


@check("feedback", points=1)
def check_feedback_objects(student, t):
    "Each object has its own error"
    each, xs, got, _ = fed_by_turns(student, t, 2, 6)
    for number, what in enumerate(each):
        whose = ". Two objects are used by turns: each has its own error"
        follows(t, what, xs[number::2], got[number::2], whose)


@check("feedback", points=1, seconds=20)
def check_feedback_resumed(student, t):
    "A resumed run continues: the error is in state_dict"
    share, stop, size = t.uniform(0.2, 0.8), t.integer(2, 3), t.integer(4, 9)
    xs = [t.normal(size) for _ in range(5)]
    got, states = [], []
    for some in (xs[:stop], xs[stop:]):
        saved = student.fresh(scenarios.fed_and_saved, xs=some, share=share, states=states)
        sent, state = t.items(saved, 2, "the result")
        got, states = got + t.items(sent, len(some), "what is sent"), [state]
    lost = "the error is lost in state_dict and load_state_dict: the resumed run begins with none"
    want = twins.fed_shares(xs, share)
    known = {lost: want[:stop] + twins.fed_shares(xs[stop:], share)}
    same(t, got, want, "what is sent for tensor {i}, the run was saved and resumed,", known, atol=1e-5)


# -- 4 · one bit


def one_bit_run(student, t, world: int, steps: int, bytes_each: int) -> Run:
    """A run with right means of ``steps`` tensors; each rank's part has ``bytes_each`` bytes of bits."""
    size = 8 * world * bytes_each
    inputs = [[t.normal(size, dtype=torch.float64) for _ in range(steps)] for _ in range(world)]
    run = student.ranks(scenarios.one_bit_means, [{"xs": own} for own in inputs])
    forms = {
        "the second compression, of the mean, has no error feedback": (True, False),
        "the first compression, of the rank's tensor, has no error feedback": (False, True),
        "neither compression has error feedback": (False, False),
    }
    known = {name: twins.one_bit_means(inputs, *form) for name, form in forms.items()}
    known["that is the exact mean: send bits"] = [sum(tensors) / world for tensors in zip(*inputs)]
    same_on_all(t, run, twins.one_bit_means(inputs), "the mean of tensor {i}", known)
    return run


@check("onebit", points=1, seconds=20)
def check_one_bit_mean(student, t):
    "The first mean is that of the signs of all ranks, compressed again"
    for world in (2, t.integer(3, 4)):
        one_bit_run(student, t, world, 1, t.integer(1, 3))


@check("onebit", points=2, seconds=20)
def check_one_bit_feedback(student, t):
    "Both compressions have error feedback"
    one_bit_run(student, t, t.integer(2, 4), t.integer(4, 6), t.integer(1, 3))


@check("onebit", points=1, seconds=20)
def check_one_bit_equal(student, t):
    "All ranks have the same bits"
    run = one_bit_run(student, t, t.integer(3, 4), 3, t.integer(2, 4))
    words = "the means on rank {rank} differ from those of rank 0: decode what all ranks received"
    for rank, got in enumerate(run.results):
        t.that(same_plain(got, run.results[0]), words, rank=rank)


@check("onebit", points=2, seconds=20)
def check_one_bit_traffic(student, t):
    "A 32nd of the bytes of an fp32 all-reduce, and the scales"
    world, steps, each = t.integer(3, 4), 2, t.integer(40, 60)
    run = one_bit_run(student, t, world, steps, each)
    most = steps * 2 * (world - 1) * (each + torch.float64.itemsize)
    words = "the bits of a part go to its rank only, then the bits of its mean to all; two scales of 8 bytes"
    sends_at_most(t, run, most, words)
