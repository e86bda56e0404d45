"""Speculative decoding keeps the target's distribution: exactly by enumeration, and for whole models."""

from __future__ import annotations

import itertools
from collections import Counter
from fractions import Fraction

import pytest
import torch

from dlo_lib.base.errors import UserError
from dlo_lib.inference import (
    SamplingParams,
    expected_tokens,
    generate_plain,
    generate_speculative,
    judge,
    probabilities,
)
from dlo_lib.inference.speculative import residual
from tests.inference.models import SIZES, model, prompts

# In twelfths. Ratios and residuals are multiples of 1/12 too, so 12 equidistant numbers stand for all draws.
P = [[3, 3, 6], [4, 2, 6], [1, 8, 3]]
Q = [[6, 4, 2], [4, 2, 6]]


def twelfths(rows: list[list[int]]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64) / 12


@pytest.mark.parametrize("second", [[4, 2, 6], [2, 4, 6], [12, 0, 0]])
def test_the_distribution_of_the_tokens_is_exactly_the_targets(second: list[int]) -> None:
    target, draft = twelfths(P), twelfths([Q[0], second])
    numbers = [(k + 0.5) / 12 for k in range(12)]
    seen: Counter[tuple[int, ...]] = Counter()
    for proposed in itertools.product(range(3), repeat=2):
        weight = Q[0][proposed[0]] * second[proposed[1]]
        if not weight:
            continue
        for first, other, last in itertools.product(numbers, repeat=3):
            tokens, accepted = judge(target, draft, proposed, [first, other], last)
            assert len(tokens) == accepted + 1
            seen[tuple(tokens)] += weight
    total = 12**5
    for token in range(3):
        share = sum(count for tokens, count in seen.items() if tokens[0] == token)
        assert Fraction(share, total) == Fraction(P[0][token], 12)
        # The next token is the target's, if the first one was a proposal that was accepted.
        kept = Fraction(min(P[0][token], Q[0][token]), 12)
        for following in range(3):
            share = sum(count for tokens, count in seen.items() if tokens[:2] == (token, following))
            assert Fraction(share, total) == kept * Fraction(P[1][following], 12)
            for bonus in range(3):
                both = kept * Fraction(min(P[1][following], second[following]), 12)
                share = seen[token, following, bonus]
                assert Fraction(share, total) == both * Fraction(P[2][bonus], 12)


def test_the_residual_is_what_the_draft_lacks() -> None:
    p, q = twelfths([P[0], Q[0]])
    assert residual(p, q).tolist() == [0, 0, 1]
    assert residual(p, p).tolist() == p.tolist()


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("gamma", [1, 3, 20])
def test_greedy_tokens_are_the_targets(name: str, gamma: int) -> None:
    target, draft = model(name), model("mqa", seed=1)
    for prompt in prompts(5)[:3]:
        plain = generate_plain(target, prompt, SamplingParams(max_tokens=11))
        for stop in ((), (plain[0],), (plain[6],)):
            params = SamplingParams(max_tokens=11, stop=stop)
            got = generate_speculative(target, draft, prompt, params, gamma)
            assert list(got.tokens) == generate_plain(target, prompt, params)
            assert 0 <= got.accepted <= got.proposed
            assert got.target_calls <= len(got.tokens)


@pytest.mark.parametrize("temperature", [0, 1.3])
def test_a_draft_that_is_the_target_is_always_accepted(temperature: float) -> None:
    net = model()
    params = SamplingParams(temperature=temperature, max_tokens=12, seed=2)
    got = generate_speculative(net, net, [1, 2, 3], params, 3)
    assert (got.target_calls, got.draft_calls) == (3, 9)
    assert got.accepted == got.proposed == 9
    last = generate_speculative(net, net, [1, 2, 3], SamplingParams(max_tokens=1), 3)
    assert (last.target_calls, last.draft_calls) == (1, 0)


def test_drawn_tokens_have_the_targets_distribution() -> None:
    target, draft = (model("mqa", seed=seed, vocab_size=3) for seed in (3, 4))
    base = SamplingParams(temperature=1.0, max_tokens=2)
    want = {}
    other = {}
    for net, into in ((target, want), (draft, other)):
        net.requires_grad_(False)
        first = probabilities(net(torch.tensor([[1, 2]]))[0, -1], base)
        for a in range(3):
            second = probabilities(net(torch.tensor([[1, 2, a]]))[0, -1], base)
            for b in range(3):
                into[a, b] = float(first[a] * second[b])
    assert max(abs(want[pair] - other[pair]) for pair in want) > 0.25  # the draft's tokens would fail
    draws = 700
    seen = Counter(
        generate_speculative(
            target, draft, [1, 2], SamplingParams(temperature=1.0, max_tokens=2, seed=seed), 2
        ).tokens
        for seed in range(draws)
    )
    # Hoeffding for 9 pairs: 18 exp(-2 · 700 · 0.12²) = 3e-8
    for pair, share in want.items():
        assert abs(seen[pair] / draws - share) < 0.12


def test_the_mean_number_of_tokens_is_the_papers_formula() -> None:
    assert expected_tokens(0.8, 4) == pytest.approx((1 - 0.8**5) / (1 - 0.8))
    assert (expected_tokens(1, 4), expected_tokens(0, 4)) == (5, 1)


def test_models_and_numbers_that_do_not_fit_are_refused() -> None:
    net = model()
    with pytest.raises(UserError, match="same vocabulary"):
        generate_speculative(net, model(vocab_size=24), [1], SamplingParams(), 2)
    with pytest.raises(UserError, match="gamma"):
        generate_speculative(net, net, [1], SamplingParams(), 0)
    with pytest.raises(UserError, match="8 positions"):
        generate_speculative(net, model(max_positions=8), [1], SamplingParams(), 2)
