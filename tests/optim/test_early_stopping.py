from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from dlo_lib.base.errors import UserError
from dlo_lib.optim import EarlyStopping


def calls_until_stop(stopping: EarlyStopping, losses: list[float]) -> int | None:
    """The number of the loss at which the training stops."""
    return next((call for call, loss in enumerate(losses) if stopping.stops(loss)), None)


def test_training_stops_after_patience_losses_that_are_not_better():
    assert calls_until_stop(EarlyStopping(patience=2), [3, 2, 2, 1.5, 1.6, 1.5, 1.0]) == 5
    assert calls_until_stop(EarlyStopping(patience=3), [3, 2, 2, 1.5, 1.6, 1.5, 1.0]) is None
    assert calls_until_stop(EarlyStopping(patience=2, threshold=0.5), [3, 2.6, 2.55, 2.4]) == 2
    assert calls_until_stop(EarlyStopping(patience=2), [math.nan, math.inf, 1.0]) == 1
    assert calls_until_stop(EarlyStopping(patience=3), [math.nan, math.inf, 1.0, math.nan]) is None


def test_the_best_weights_return_and_the_state_resumes():
    model = nn.BatchNorm1d(2)
    stopping = EarlyStopping(patience=2, model=model)
    with pytest.raises(UserError, match="no best weights"):
        stopping.restore()
    for call, loss in enumerate([2.0, 1.0, 1.5]):
        nn.init.constant_(model.weight, call)
        model.num_batches_tracked.fill_(call)
        assert not stopping.stops(loss)
    resumed = EarlyStopping(patience=2, model=model)
    resumed.load_state_dict(stopping.state_dict())
    assert resumed.stops(1.0)
    resumed.restore()
    assert (resumed.best, resumed.best_call) == (1.0, 1)
    assert model.weight.tolist() == [1.0, 1.0]
    assert model.num_batches_tracked == 1
    assert torch.equal(stopping.state_dict()["weights"]["weight"], model.weight)


def test_options_without_sense_are_refused():
    for options in ({"patience": 0}, {"threshold": -1.0}):
        with pytest.raises(UserError, match="use at least"):
            EarlyStopping(**options)
