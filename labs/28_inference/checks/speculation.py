"""The visible checks of speculative decoding."""

from __future__ import annotations

import math
from collections import Counter

import torch
from torch import Tensor

from dlo_lib.grading.checks.contract import check, scenario

from .twins import chances, outcomes, reach

# -- verify

RUNS = 1000


@scenario
def verified(student, p, q, drafted, seed, runs):
    generator = torch.Generator().manual_seed(seed)
    return [student.verify(p, q, drafted, generator) for _ in range(runs)]


def lists(t, got: object, runs: int, longest: int, vocab: int) -> list[tuple[int, ...]]:
    """The answers of verify: each a list of one to ``longest`` tokens."""
    found = []
    for answer in t.items(got, runs, "the list of answers"):
        good = type(answer) in (list, tuple) and 1 <= len(answer) <= longest
        t.that(
            good and all(type(token) is int and 0 <= token < vocab for token in answer),
            "verify(...) should be a list of 1 to {longest} ints, int(token), not {got}",
            longest=longest,
            got=answer,
        )
        found.append(tuple(answer))
    return found


def sampled(student, t, p: Tensor, q: Tensor, drafted: list[int]) -> list[tuple[int, ...]]:
    seed = t.integer(1, 10**6)
    got = student.run(verified, p=p, q=q, drafted=drafted, seed=seed, runs=RUNS)
    return lists(t, got, RUNS, len(drafted) + 1, p.shape[1])


def lengths_of(found: dict[tuple[int, ...], float], drafted: list[int]) -> list[float]:
    """The probability of each number of accepted tokens."""
    shares = [0.0] * (len(drafted) + 1)
    for answer, share in found.items():
        shares[len(answer) - 1] += share
    return shares


def far(one: list[float], other: list[float], least: float) -> bool:
    return max(abs(a - b) for a, b in zip(one, other)) > least


@check("verify", points=2, seconds=20)
def check_accepted(student, t):
    "A drafted token is accepted with probability min(1, p / q)"
    size, gamma = t.integer(4, 6), t.integer(2, 3)

    def draw() -> tuple[Tensor, Tensor, list[int]]:
        p, q = chances(t, gamma + 1, size), chances(t, gamma, size)
        return p, q, [t.integer(0, size - 1) for _ in range(gamma)]

    def tells(case: tuple[Tensor, Tensor, list[int]]) -> bool:
        right = lengths_of(outcomes(*case), case[2])
        wrong = [lengths_of(outcomes(*case, mistake=name), case[2]) for name in ("always", "p", "swapped")]
        return min(right) > 0.08 and all(far(right, each, 0.2) for each in wrong)

    case = t.draw_until(draw, tells)
    answers = sampled(student, t, *case)
    counts = Counter(len(answer) - 1 for answer in answers)
    words = "just {count} drafted tokens are accepted in {got:.1%} of the runs, {want:.1%} is right"
    for count, want in enumerate(lengths_of(outcomes(*case), case[2])):
        got = counts[count] / RUNS
        t.that(abs(got - want) <= reach(RUNS, gamma + 1), words, count=count, got=got, want=want)
    kept = all(list(answer[:-1]) == case[2][: len(answer) - 1] for answer in answers)
    t.that(kept, "the tokens before the last one of an answer are the drafted ones")


@check("verify", points=2, seconds=20)
def check_rejected(student, t):
    "After a rejection the token has the distribution max(0, p - q), divided by its sum"
    size = t.integer(4, 6)

    def draw() -> tuple[Tensor, Tensor, list[int]]:
        q = chances(t, 2, size)
        return torch.cat([q[:1], chances(t, 2, size)]), q, [t.integer(0, size - 1) for _ in range(2)]

    def last(case: tuple[Tensor, Tensor, list[int]], mistake: str = "") -> list[float]:
        """Of a rejection of the second token; the first is always accepted."""
        found = outcomes(*case, mistake=mistake)
        shares = [found[(case[2][0], token)] for token in range(size)]
        return [share / sum(shares) for share in shares]

    def tells(case: tuple[Tensor, Tensor, list[int]]) -> bool:
        if not 0.6 < lengths_of(outcomes(*case), case[2])[1] < 0.8:
            return False
        return all(far(last(case), last(case, mistake), 0.25) for mistake in ("from p", "from q"))

    case = t.draw_until(draw, tells)
    answers = [answer for answer in sampled(student, t, *case) if len(answer) == 2]
    few = "not tested yet: {count} of {runs} runs reject the second token, see the first check"
    t.that(len(answers) > RUNS // 3, few, count=len(answers), runs=RUNS)
    counts = Counter(answer[1] for answer in answers)
    words = "after a rejection token {token} follows in {got:.1%} of the runs, max(0, p - q) gives {want:.1%}"
    for token, want in enumerate(last(case)):
        got = counts[token] / len(answers)
        t.that(abs(got - want) <= reach(len(answers), size), words, token=token, got=got, want=want)


@check("verify", points=1, seconds=20)
def check_bonus(student, t):
    "If all are accepted, one more token follows, from the last row of p"
    size, gamma = t.integer(4, 6), t.integer(2, 3)
    q = chances(t, gamma, size)
    drafted = [t.integer(0, size - 1) for _ in range(gamma)]
    p = torch.cat([q, chances(t, 1, size)])
    answers = sampled(student, t, p, q, drafted)
    short = sum(len(answer) <= gamma for answer in answers)
    words = "p equals q, so all {gamma} tokens are accepted and one more follows: {short} answers are shorter"
    t.that(short == 0, words, gamma=gamma, short=short)
    counts = Counter(answer[-1] for answer in answers)
    words = "the token after all accepted ones is {token} in {got:.1%} of the runs, p has {want:.1%}"
    for token, want in enumerate(p[-1].tolist()):
        got = counts[token] / RUNS
        t.that(abs(got - want) <= reach(RUNS, size), words, token=token, got=got, want=want)


@check("verify", points=1)
def check_certain(student, t):
    "Greedy models: the text is the target's, whatever the draft"
    size, gamma = t.integer(5, 8), t.integer(3, 5)
    for agree in (0, t.integer(1, gamma - 1), gamma):
        wanted = [t.integer(0, size - 1) for _ in range(gamma + 1)]
        drafted = [token if place != agree else (token + 1) % size for place, token in enumerate(wanted[:-1])]
        p, q = (torch.eye(size, dtype=torch.float64)[torch.tensor(each)] for each in (wanted, drafted))
        seed = t.integer(1, 10**6)
        got = student.run(verified, p=p, q=q, drafted=drafted, seed=seed, runs=2)
        for answer in lists(t, got, 2, gamma + 1, size):
            words = "verify(...) of greedy models is {got}, expected {want}"
            words += ": no token follows the first rejection" * (len(answer) > agree + 1)
            right = list(answer) == wanted[: agree + 1]
            t.that(right, words, got=list(answer), want=wanted[: agree + 1])


# -- speculate


def text_of(t, length: int, size: int) -> list[int]:
    return [t.integer(0, size - 1) for _ in range(length)]


class Models:
    """A greedy target that writes a drawn text, and a draft that is wrong at some of its places."""

    def __init__(self, t, count: int, gamma: int, every: int) -> None:
        self.size = t.integer(5, 9)
        self.prompt, self.gamma = text_of(t, t.integer(2, 5), self.size), gamma
        self.text = text_of(t, count + gamma + 2, self.size)
        shift = t.integer(0, every - 1)
        self.bad = {place for place in range(count + gamma + 2) if place % every == shift}
        self.after = t.integer(1, self.size - 1)
        limit = 4 * count + 4
        self.target = t.asked(self._target, limit, too_many="the target is called more than {calls} times")
        self.draft = t.asked(
            self._draft, limit * gamma, too_many="the draft is called more than {calls} times"
        )

    def _next(self, tokens: list[int]) -> int:
        """The token that follows; after another text than the target's, one that depends on it."""
        own = tokens[len(self.prompt) :]
        if len(own) < len(self.text) and own == self.text[: len(own)]:
            return self.text[len(own)]
        return (sum(own) + self.after) % self.size

    def _row(self, token: int) -> list[float]:
        return [float(token == each) for each in range(self.size)]

    def _target(self, tokens: list[int], rows: int) -> Tensor:
        tokens, rows = list(tokens), int(rows)
        ends = range(len(tokens) - rows + 1, len(tokens) + 1)
        return torch.tensor([self._row(self._next(tokens[:end])) for end in ends], dtype=torch.float64)

    def _draft(self, tokens: list[int]) -> Tensor:
        wrong = len(tokens) - len(self.prompt) in self.bad
        token = (self._next(list(tokens)) + (self.after if wrong else 0)) % self.size
        return torch.tensor(self._row(token), dtype=torch.float64)

    def rounds(self, count: int) -> tuple[int, int]:
        """The calls of the target that are enough, and the tokens that they give."""
        done = calls = 0
        while done < count:
            accepted = 0
            while accepted < self.gamma and done + accepted not in self.bad:
                accepted += 1
            done, calls = done + accepted + 1, calls + 1
        return calls, done


def spoken(student, t, models: Models, count: int) -> list[object]:
    got = student.speculate(
        models.prompt, models.draft, models.target, models.gamma, count, t.integer(1, 10**6)
    )
    return t.items(got, count, "speculate(...)")


@check("speculate", points=1)
def check_text(student, t):
    "Greedy models: exactly `count` tokens, and they are the target's"
    for every in (1, t.integer(3, 6)):
        count, gamma = t.integer(9, 16), t.integer(2, 5)

        def tells(models: Models, every: int = every, count: int = count) -> bool:
            return every == 1 or models.rounds(count)[1] > count  # the last round gives too many

        models = t.draw_until(lambda e=every, c=count, g=gamma: Models(t, c, g, e), tells)
        got = spoken(student, t, models, count)
        t.equal(got, models.text[:count], "the text")


@check("speculate", points=2)
def check_calls(student, t):
    "The draft saves calls of the target: one call checks all drafted tokens"
    for _ in range(2):
        count, gamma = t.integer(20, 30), t.integer(3, 5)
        models = Models(t, count, gamma, t.integer(4, 7))
        got = spoken(student, t, models, count)
        t.that(got == models.text[:count], "not tested yet: the text is wrong, see the first check")
        most, drafts, calls = models.rounds(count)[0], models.draft.count, models.target.count
        words = "{calls} calls of the target for {count} tokens: with this draft {most} are enough. "
        words += "Does the draft see the tokens that it has just drafted?"
        t.that(calls <= most, words, calls=calls, count=count, most=most)
        words = "{drafts} calls of the draft: {gamma} for each call of the target are enough"
        t.that(drafts <= gamma * calls, words, drafts=drafts, gamma=gamma)


@scenario
def repeated(student, p, prompt, gamma, count, seed, others):
    """The text for each state of PyTorch's own generator, and the caller's list afterwards."""
    told = []
    for other in others:
        torch.manual_seed(other)
        given = list(prompt)
        calls = (lambda tokens: p), (lambda tokens, rows: p.repeat(rows, 1))
        told.append([student.speculate(given, *calls, gamma, count, seed), given])
    return told


@check("speculate", points=1, seconds=20)
def check_generator(student, t):
    "One generator with this seed makes all draws of a text, and the prompt stays as it is"
    size, gamma = t.integer(50, 60), t.integer(3, 4)
    p = torch.full((size,), 1 / size, dtype=torch.float64)  # of both models: every token is accepted
    prompt, n = text_of(t, t.integer(2, 4), size), gamma + 1
    seed, others = t.integer(1, 10**6), [t.integer(1, 10**6) for _ in range(3)]
    got = student.run(repeated, p=p, prompt=prompt, gamma=gamma, count=4 * n, seed=seed, others=others)
    told = [t.items(each, 2, "an answer") for each in t.items(got, 3, "the list of answers")]
    texts = [t.items(text, 4 * n, "speculate(...)") for text, _ in told]
    for _, given in told:
        t.equal(given, prompt, "the list `prompt` of the caller after speculate(...)")
    words = "the same seed gives different texts: draw *all* tokens with the generator, also the drafted ones"
    t.that(texts[0] == texts[1] == texts[2], words)
    words = "each call of the target gives the same tokens: make the generator once, before the loop"
    t.that(texts[0][:n] != texts[0][n : 2 * n], words)


TEXTS = 250


@check("speculate", points=1, seconds=30)
def check_sampled(student, t):
    "Sampled models: two tokens have the distribution of the target"
    size = 3
    first = t.integer(0, size - 1)

    def tells(rows: list[Tensor]) -> bool:
        """The draft writes other texts than the target, which often writes several."""
        target, draft = (each[first, :, None] * each for each in rows)
        return float(rows[0].max()) < 0.8 and float((target - draft).abs().max()) > 0.36

    p, q = t.draw_until(lambda: [chances(t, size, size), chances(t, size, size)], tells)
    target = t.asked(lambda tokens, rows: p[torch.tensor(tokens[len(tokens) - rows :])], TEXTS * 8)
    draft = t.asked(lambda tokens: q[tokens[-1]], TEXTS * 16)
    counts: Counter[tuple] = Counter()
    for seed in range(TEXTS):
        got = t.items(student.speculate([first], draft, target, 2, 2, seed), 2, "speculate(...)")
        right = all(type(token) is int for token in got)
        t.that(right, "speculate(...) should be ints, int(token), not {got}", got=got)
        counts[tuple(got)] += 1
    words = "the text {text} is written in {got:.1%} of {runs} runs, the target writes it in {want:.1%}"
    most = math.sqrt(math.log(2 * size**2 / 1e-7) / (2 * TEXTS))
    for one in range(size):
        for two in range(size):
            got, want = counts[(one, two)] / TEXTS, float(p[first, one] * p[one, two])
            t.that(abs(got - want) <= most, words, text=[one, two], got=got, want=want, runs=TEXTS)
