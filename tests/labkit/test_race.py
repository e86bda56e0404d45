"""The training that a check makes of a declared entry."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dlo_lib.base.errors import UserError
from dlo_lib.labkit import race

SMALL = {"layers": [("conv", 4, 3, 2), ("norm",), ("relu",)], "batch": 8, "rate": 0.1}


@pytest.fixture(scope="module")
def data():
    return race.generated(race.LEVEL, train=32, test=20, size=race.SIZE, seed=3)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"layers": []}, "1 to 16 layers"),
        ({"layers": [("norm",)]}, "needs a convolution"),
        ({"layers": [("conv", 4, 2, 1)]}, "odd kernel"),
        ({"layers": [("conv", 65, 3, 1)]}, "64 channels"),
        ({"layers": [("conv", 4, 3, 1), ("dropout",)]}, "layer 1"),
        ({"layers": [("conv", 4, 3, 1), *[("pool",)] * 5]}, "leaves no pixel"),
        ({"layers": "conv"}, "list"),
        ({"layers": [[["conv"], 4, 3, 1]]}, "layer 0"),
        ({"batch": True}, "batch"),
        ({"batch": 1000}, "2 to 256"),
        ({"rate": float("nan")}, "rate"),
        ({"rate": None}, "rate"),
    ],
)
def test_what_cannot_be_built_is_refused_with_its_reason(change, says):
    assert race.refusal(SMALL) == ""
    assert says in race.refusal(SMALL | change)


@pytest.mark.parametrize("entry", [None, [], {"layers": []}])
def test_an_entry_is_a_dict_of_three(entry):
    assert "dict" in race.refusal(entry)


def test_the_first_layer_needs_no_gradient_of_its_input():
    convolution, head = 2 * 8 * 8 * 4 * 3 * 9, 2 * 4 * 10
    counted = race.counted(SMALL["layers"])
    assert counted == {"forward": convolution + head, "backward": convolution + 2 * head}


def test_a_model_that_costs_nothing_gets_no_endless_run():
    entry = SMALL | {"layers": [("conv", 1, 1, 8)], "batch": 2}
    assert race.steps_of(entry) == race.MOST_STEPS
    assert race.steps_of(SMALL, budget=0.0) == 0


@pytest.mark.parametrize("shape", [(4, 3, 3, 3), (10, 4), (5,)])
def test_hidden_coordinates_are_undone(shape):
    value = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    place = race.Coordinates.drawn(value, lambda: 1)
    hidden = place.hidden(value)
    assert hidden.ndim == min(len(shape), 2)
    assert not torch.equal(hidden.flatten(), value.flatten())
    assert torch.equal(place.shown(hidden), value)
    assert hidden.abs().sort().values.flatten().sum() == pytest.approx(value.abs().sum().item(), rel=1e-5)


def run(data, update=race.plain_update, steps: int = 6, entry=SMALL) -> list[Tensor]:
    rules = race.Functions(lambda images, seed: images, F.cross_entropy, update)
    return list(race.trained(entry, data, steps, 5, rules).parameters())


def test_plain_sgd_in_hidden_coordinates_is_plain_sgd(data):
    """The twin takes one step of torch.optim.SGD on the batch and the weights that the run begins with."""
    seen = []

    class Seen(race.Functions):
        def augment(self, images, seed):
            seen.append(images.clone())
            return images

        def slope(self, logits, labels):
            seen.append(labels.clone())
            return super().slope(logits, labels)

    rules = Seen(lambda images, seed: images, F.cross_entropy, race.plain_update)
    (after,) = (race.trained(SMALL, data, 1, 5, rules),)
    before = race.trained(SMALL, data, 0, 5, rules).train()
    optimizer = torch.optim.SGD(before.parameters(), lr=SMALL["rate"])
    F.cross_entropy(before(seen[0]), seen[1]).backward()
    optimizer.step()
    for mine, twin in zip(after.parameters(), before.parameters()):
        torch.testing.assert_close(mine, twin)


def test_a_run_is_the_same_for_the_same_seed_and_leaves_the_global_one(data):
    torch.manual_seed(0)
    first, drawn = run(data), torch.rand(())
    second = run(data)
    torch.manual_seed(0)
    assert torch.equal(drawn, torch.rand(()))
    assert all(torch.equal(a, b) for a, b in zip(first, second))


def test_weights_from_elsewhere_land_in_the_wrong_places(data):
    wanted = run(data, steps=3)

    def replay(gradients, states, step, steps, rate):
        return [-weight.detach().reshape(g.shape) for weight, g in zip(wanted, gradients)], states

    start = run(data, steps=0)
    after = run(data, replay, steps=1)
    moved = [value - begin for value, begin in zip(after, start)]
    assert not torch.allclose(moved[0], wanted[0], atol=0.05)


def test_a_refused_entry_is_not_trained(data):
    with pytest.raises(UserError, match="odd kernel"):
        run(data, entry=SMALL | {"layers": [("conv", 4, 2, 1)]})
