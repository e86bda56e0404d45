"""``--batch auto``: few trials, the right batch, a run that is as if there had been none, and its resume."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch

from dlo_lib.base.errors import UserError
from dlo_lib.launch import run_ranks
from dlo_lib.train import TrainConfig, batch_search, newest, read_metrics, train
from dlo_lib.train.__main__ import parse
from dlo_lib.train.batch_search import largest_fitting
from dlo_lib.train.config import Auto


@pytest.mark.parametrize("right", [1, 2, 3, 7, 12, 13, 100, 5000])
@pytest.mark.parametrize("fixed", [0.0, 0.3, 0.95])
@pytest.mark.parametrize(("growth", "cap"), [(2, math.inf), (2, 1.2), (4, 1.01)])
def test_the_search_finds_the_largest_batch_in_few_trials(right, fixed, growth, cap):
    """The memory of a step has a part that does not depend on the batch. Above ``cap``, a GPU is full."""
    per_sequence = (1 - fixed) / (right + 0.5)

    def share(batch: int) -> float:
        needed = fixed + per_sequence * batch
        return math.inf if needed > cap else needed

    found = largest_fitting(share, 1 << 20, growth)
    assert found.batch == right
    assert len(found.trials) <= 4 + math.log(right, growth)
    assert max(found.trials) <= max(growth, right), "the line is right after two trials"


def test_the_search_does_not_need_a_line():
    """Small batches need the memory of the optimiser's step, and a large one has a larger buffer."""

    def share(batch: int) -> float:
        needed = max(0.5, 0.02 * batch + (0.3 if batch > 20 else 0))
        return math.inf if needed > 1.1 else needed

    found = largest_fitting(share, 1 << 20)
    assert found.batch == 35
    assert len(found.trials) <= 9


def test_the_search_ends_at_the_size_of_the_data_and_at_nothing():
    assert largest_fitting(lambda batch: 0.0, 100).batch == 100
    assert largest_fitting(lambda batch: math.inf, 100).batch == 0


SMALLER = {
    "alone": (1, {"model": "tiny-moe", "precision": "fp16", "accumulation": 3}),
    "fsdp": (2, {"parallel": "fsdp", "kernels": "fused"}),
    "pp": (2, {"pp": 2, "accumulation": 2}),
}


def trained_twice(auto: TrainConfig, given: TrainConfig, limits: list[int]) -> tuple[int, int]:
    """Train with a limit of memory for this rank, and again with the batch that was found; return it, and the
    batch in the checkpoint."""
    import torch.distributed as dist

    rank = dist.get_rank() if dist.is_initialized() else 0
    batch_search._free_bytes = lambda device: limits[rank]
    checkpoint = newest(train(auto).out)
    batch = json.loads((auto.out / "config.json").read_text())["batch"]
    train(replace(given, batch=batch))
    return batch, checkpoint.config["batch"]


@pytest.mark.parametrize(("ranks", "options"), SMALLER.values(), ids=SMALLER)
def test_a_run_with_the_batch_found_is_the_run_with_this_batch(small_run, ranks, options):
    """The second rank has less memory than the first."""
    auto = small_run("auto", batch="auto", steps=3, **options)
    given = small_run("given", steps=3, **options)
    found = run_ranks(trained_twice, ranks, auto, given, [12_000_000, 6_000_000], timeout=200)
    assert len({batch for result in found for batch in result}) == 1
    assert found[0][0] > 1
    learned = [[(line.loss, line.grad_norm) for line in read_metrics(c.out)] for c in (auto, given)]
    assert learned[0] == learned[1]


def test_a_resumed_run_has_the_batch_of_its_checkpoint(small_run, monkeypatch, capfd):
    monkeypatch.setattr(batch_search, "_free_bytes", lambda device: 3_000_000)
    first = train(small_run(batch="auto", steps=2))
    batch = newest(first.out).config["batch"]
    monkeypatch.setattr(
        batch_search, "_free_bytes", lambda device: pytest.fail("a resumed run does not search")
    )
    train(small_run(batch="auto", steps=4, resume=True))
    assert json.loads((first.out / "config.json").read_text())["batch"] == batch
    assert capfd.readouterr().out.count(f"batch {batch}: the largest that fits, after ") == 1


def test_a_batch_that_cannot_be_found_is_refused(small_run, monkeypatch):
    assert parse(["--batch", "auto"]).batch is Auto.AUTO
    config = small_run(batch="auto")
    assert config == replace(config, batch=Auto.AUTO)
    if not torch.cuda.is_available():
        with pytest.raises(UserError, match="measures the memory of a GPU: without one, give --batch"):
            train(config)
    monkeypatch.setattr(batch_search, "_free_bytes", lambda device: 1000)
    with pytest.raises(UserError, match="one sequence does not fit"):
        train(small_run("small", batch="auto"))
