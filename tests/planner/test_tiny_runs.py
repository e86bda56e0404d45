"""The tiny trainings follow a scaling law above the entropy, and the budget pays for what was done."""

import pytest

from dlo_lib.base.errors import UserError
from dlo_lib.planner.laws import fit_chinchilla
from dlo_lib.planner.tiny_runs import RunBudget, TinyLanguage


def test_no_model_beats_the_entropy_and_more_tokens_help() -> None:
    language = TinyLanguage(64, seed=3)
    losses = [language.train(12, tokens) for tokens in (4_096, 16_384, 65_536)]
    assert losses[0] > losses[1] > losses[2] > language.entropy


def test_a_law_through_small_runs_predicts_a_larger_one() -> None:
    language = TinyLanguage(96, seed=5)
    runs = []
    for flops, widths in ((1e8, (5, 14)), (2e8, (5, 10, 20)), (4e8, (7, 14, 28))):
        for width in widths:
            tokens = int(flops / language.flops(width, 1))
            runs.append((96 * width, tokens, language.train(width, tokens)))
    law = fit_chinchilla(*zip(*runs))
    width = round(law.best(2e9)[0] / 96)
    tokens = int(2e9 / language.flops(width, 1))
    assert float(law(96 * width, tokens)) == pytest.approx(language.train(width, tokens), rel=0.05)


def test_equal_runs_give_equal_losses_and_other_seeds_others() -> None:
    one, two = TinyLanguage(32, seed=1), TinyLanguage(32, seed=2)
    assert one.train(4, 2_048) == one.train(4, 2_048)
    assert one.train(4, 2_048) != one.train(4, 2_048, seed=1)
    assert one.entropy != two.entropy


def test_a_lost_run_is_refunded_and_an_expensive_one_refused() -> None:
    language = TinyLanguage(32, seed=1)
    cost = language.flops(4, 1_024)
    budget = RunBudget(language, 2.5 * cost, lost=(1,))
    answers = [budget.run(4, 1_024) for _ in range(4)]
    assert [answer["status"] for answer in answers] == ["done", "lost", "done", "refused"]
    assert [answer["left"] / cost for answer in answers] == [1.5, 1.5, 0.5, 0.5]
    assert answers[1]["loss"] is None is answers[3]["loss"]
    assert (len(budget.runs), budget.failed, budget.refused) == (2, [(4, 1_024)], [(4, 1_024)])


def test_a_run_above_its_part_of_the_budget_is_refused() -> None:
    language = TinyLanguage(32, seed=1)
    budget = RunBudget(language, 10 * language.flops(4, 1_024), largest=0.2)
    assert [budget.run(4, tokens)["status"] for tokens in (3_072, 2_048)] == ["refused", "done"]


def test_sizes_that_cannot_be_trained_are_refused_with_a_cure() -> None:
    with pytest.raises(UserError, match="tokens"):
        TinyLanguage(32, seed=1).train(4, 100)
    with pytest.raises(UserError, match="width"):
        RunBudget(TinyLanguage(32, seed=1), 1e9).run(0, 1_000)
    with pytest.raises(UserError, match="vocab_size"):
        TinyLanguage(1, seed=1)
