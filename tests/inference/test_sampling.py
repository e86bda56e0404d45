"""The distribution of the next token, and draws that depend on the seed and the number only."""

from __future__ import annotations

import math

import pytest
import torch

from dlo_lib.base.errors import UserError
from dlo_lib.inference import SamplingParams, next_token, probabilities
from dlo_lib.inference.sampling import draw, is_complete, uniform

LOGITS = torch.tensor([0.1, 0.4, 0.2, 0.3], dtype=torch.float64).log()


@pytest.mark.parametrize(
    ("params", "want"),
    [
        (SamplingParams(temperature=1), [0.1, 0.4, 0.2, 0.3]),
        (SamplingParams(temperature=0.5), [1 / 30, 16 / 30, 4 / 30, 9 / 30]),
        (SamplingParams(temperature=1, top_k=2), [0, 4 / 7, 0, 3 / 7]),
        (SamplingParams(temperature=1, top_k=9), [0.1, 0.4, 0.2, 0.3]),
        (SamplingParams(temperature=1, top_p=0.6), [0, 4 / 7, 0, 3 / 7]),
        (SamplingParams(temperature=1, top_p=0.75), [0, 4 / 9, 2 / 9, 3 / 9]),
        (SamplingParams(temperature=1, top_p=0.01), [0, 1, 0, 0]),
        # top-p cuts what top-k has left: 4/7 < 0.6
        (SamplingParams(temperature=1, top_k=2, top_p=0.5), [0, 1, 0, 0]),
        (SamplingParams(temperature=0), [0, 1, 0, 0]),
    ],
)
def test_the_distribution_is_cut_and_scaled(params: SamplingParams, want: list[float]) -> None:
    got = probabilities(torch.stack((LOGITS, LOGITS)), params)
    torch.testing.assert_close(got, torch.tensor([want, want], dtype=torch.float64), rtol=1e-12, atol=1e-12)


def test_of_equal_logits_the_first_are_kept() -> None:
    got = probabilities(torch.zeros(5), SamplingParams(temperature=1, top_k=2))
    assert got.tolist() == [0.5, 0.5, 0, 0, 0]
    assert probabilities(torch.zeros(5), SamplingParams()).tolist() == [1, 0, 0, 0, 0]


def test_a_draw_inverts_the_sum_and_never_takes_an_impossible_token() -> None:
    p = torch.tensor([0.0, 0.25, 0.0, 0.75, 0.0])
    assert [draw(p, u) for u in (0.0, 0.2499, 0.25, 0.9999999999)] == [1, 1, 3, 3]


def test_draws_are_uniform_and_depend_on_seed_and_number() -> None:
    drawn = [uniform(3, number) for number in range(2000)]
    assert drawn == [uniform(3, number) for number in range(2000)]
    assert len(set(drawn)) == 2000
    assert all(0 <= u < 1 for u in drawn)
    assert uniform(4, 0) != drawn[0]
    # Hoeffding: a distance above 0.1 of the distribution function has a probability below 1e-16.
    assert all(abs(sum(u < t for u in drawn) / 2000 - t) < 0.1 for t in (0.1, 0.5, 0.9))
    params = SamplingParams(temperature=1, seed=3)
    assert [next_token(LOGITS, params, n) for n in range(9)] == [draw(LOGITS.exp(), u) for u in drawn[:9]]


def test_a_continuation_ends_at_a_stop_token_or_its_length() -> None:
    params = SamplingParams(max_tokens=3, stop=(7,))
    ends = [is_complete(tokens, params) for tokens in ([], [7], [1, 2], [1, 2, 3])]
    assert ends == [False, True, False, True]


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"top_p": 0},
        {"top_p": 1.1},
        {"top_k": 0},
        {"max_tokens": 0},
    ],
)
def test_values_outside_their_range_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(UserError, match=next(iter(wrong))):
        SamplingParams(**wrong)
