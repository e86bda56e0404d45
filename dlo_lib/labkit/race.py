"""A race of small models within a budget: an entry is declared, and the judge trains it.

An *entry* is data: ``{"layers": [...], "batch": 16, "rate": 0.1}``. A layer is one of
    ("conv", channels, kernel, stride)   without bias, padded with kernel // 2 zeros
    ("norm",)  batch norm                ("relu",)                ("pool",)  maximum of 2 x 2
and a mean over the pixels and a linear layer to 10 classes follow. :func:`trained` builds the model and makes
each forward and backward itself. The *rules* of the entry, functions of the student, get and return tensors:
the augmentation sees images, the loss sees logits and labels, the update sees gradients. So a pass cannot be
made without being counted, and the test images reach none of these functions.

The update gets each gradient as a matrix whose rows and columns are shuffled and change their sign by
:class:`Coordinates`, which only the judge knows, and its result is shuffled back. SGD, Adam, Lion and Muon do
the same in any such coordinates. An update that carries weights trained elsewhere does not.

Budget: FLOPs of forward and backward of all images, counted by ``torch.utils.flop_counter``.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dlo_lib.base.errors import UserError
from dlo_lib.base.text import tr
from dlo_lib.data.images import ImageData
from dlo_lib.data.images_generated import Level, generated

BUDGET = 5e8
"""FLOPs of one run."""
LEVEL = Level(spread=4.0, noise=1.2)
"""Of the images: no model can expect more than 97.6 %."""
TRAIN, TEST = 512, 500
CLASSES, CHANNELS, SIZE = 10, 3, 16
MOST_STEPS, MOST_LAYERS, MOST_CHANNELS, MOST_KERNEL, MOST_BATCH = 256, 16, 64, 11, 256
SHAPES = {"conv": 4, "norm": 1, "relu": 1, "pool": 1}

Layers = Sequence[Sequence[Any]]


class Rules(Protocol):
    """The functions of an entry. They get copies."""

    def augment(self, images: Tensor, seed: int) -> Tensor:
        """Return images (n, 3, size, size) of the same classes."""

    def slope(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the gradient of the loss by the logits, (n, 10)."""

    def update(
        self, gradients: list[Tensor], states: list[Any], step: int, steps: int, rate: float
    ) -> tuple[list[Tensor], list[Any]]:
        """Return what is subtracted from each parameter, and the states after the step."""


def images_of(seed: int, level: Level = LEVEL) -> ImageData:
    """Return the images of one run: 16 x 16, 512 for training and 500 for the test."""
    return generated(level, train=TRAIN, test=TEST, size=SIZE, seed=seed)


def refusal(entry: object) -> str:
    """Return why an entry does not take part; "" if it does."""
    if not isinstance(entry, Mapping) or not {"layers", "batch", "rate"} <= set(entry):
        return tr('an entry is a dict with "layers", "batch" and "rate"')
    layers, batch, rate = entry["layers"], entry["batch"], entry["rate"]
    if type(batch) is not int or not 2 <= batch <= MOST_BATCH:
        return tr("the batch should be an int from 2 to {most}", most=MOST_BATCH)
    if type(rate) not in (int, float) or not 0 < rate < 1e3:
        return tr("the rate should be a number above 0")
    if type(layers) not in (list, tuple) or not 1 <= len(layers) <= MOST_LAYERS:
        return tr("the layers should be a list of 1 to {most} layers", most=MOST_LAYERS)
    size, convolved = SIZE, False
    for number, layer in enumerate(layers):
        kind = layer[0] if type(layer) in (list, tuple) and layer else None
        if type(kind) is not str or len(layer) != SHAPES.get(kind):
            return tr(
                'layer {number} should be ("conv", channels, kernel, stride), ("norm",) ...', number=number
            )
        if kind == "conv":
            if any(type(value) is not int for value in layer[1:]) or not (
                1 <= layer[1] <= MOST_CHANNELS
                and 1 <= layer[2] <= MOST_KERNEL
                and layer[2] % 2
                and 1 <= layer[3] <= 8
            ):
                text = (
                    "layer {number}: 1 to {most} channels, an odd kernel up to {kernel}, a stride of 1 to 8"
                )
                return tr(text, number=number, most=MOST_CHANNELS, kernel=MOST_KERNEL)
            size, convolved = -(-size // layer[3]), True
        elif kind == "pool":
            size //= 2
        if size < 1:
            return tr("layer {number} leaves no pixel", number=number)
    return "" if convolved else tr("a model needs a convolution")


def built(layers: Layers) -> nn.Sequential:
    """Return the model of declared layers, with the initial weights of the current seed."""
    modules: list[nn.Module] = []
    channels = CHANNELS
    for kind, *values in layers:
        if kind == "conv":
            out, kernel, stride = values
            modules.append(nn.Conv2d(channels, out, kernel, stride, padding=kernel // 2, bias=False))
            channels = out
        elif kind == "norm":
            modules.append(nn.BatchNorm2d(channels, momentum=0.2))
        else:
            modules.append(nn.ReLU() if kind == "relu" else nn.MaxPool2d(2))
    return nn.Sequential(*modules, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, CLASSES))


def counted(layers: Layers, size: int = SIZE) -> dict[str, int]:
    """Return the FLOPs of one image, "forward" and "backward", as PyTorch counts them."""
    from torch.utils.flop_counter import FlopCounterMode

    with torch.device("meta"):
        model, images = built(layers), torch.empty(2, CHANNELS, size, size)
    with FlopCounterMode(display=False) as forward:
        logits = model(images)
    with FlopCounterMode(display=False) as backward:
        logits.sum().backward()
    return {"forward": forward.get_total_flops() // 2, "backward": backward.get_total_flops() // 2}


def steps_of(entry: Mapping[str, Any], budget: float = BUDGET) -> int:
    """Return the number of steps that the budget pays, at most ``MOST_STEPS``."""
    return min(MOST_STEPS, int(budget // (entry["batch"] * sum(counted(entry["layers"]).values()))))


@dataclass(frozen=True)
class Coordinates:
    """Hidden coordinates of one parameter: order and sign of its rows and columns as a matrix."""

    shape: torch.Size
    rows: Tensor
    columns: Tensor
    signs: Tensor

    @classmethod
    def drawn(cls, parameter: Tensor, seed: Callable[[], int]) -> Coordinates:
        """Draw coordinates; a vector is a matrix with one column, and keeps this shape inside only."""
        matrix = parameter.flatten(1) if parameter.ndim > 1 else parameter[:, None]
        generator = torch.Generator().manual_seed(seed())

        def signs(count: int) -> Tensor:
            return torch.randint(0, 2, (count,), generator=generator) * 2.0 - 1

        rows, columns = (torch.randperm(count, generator=generator) for count in matrix.shape)
        signs_of_all = signs(matrix.shape[0])[:, None] * signs(matrix.shape[1])
        return cls(parameter.shape, rows, columns, signs_of_all)

    def hidden(self, value: Tensor) -> Tensor:
        """Return ``value``, of the shape of the parameter, in these coordinates: a matrix, or a vector."""
        matrix = value.reshape(self.signs.shape)[self.rows][:, self.columns] * self.signs
        return matrix if len(self.shape) > 1 else matrix.flatten()

    def shown(self, value: Tensor) -> Tensor:
        """Undo :meth:`hidden`."""
        matrix = torch.empty_like(self.signs)
        matrix[self.rows[:, None], self.columns] = value.reshape(self.signs.shape) * self.signs
        return matrix.reshape(self.shape)


Asked = tuple[str, tuple[Any, ...]]  # the name of a rule, and its arguments


def training(
    entry: Mapping[str, Any], data: ImageData, steps: int, seed: int
) -> Generator[Asked, Any, nn.Sequential]:
    """Yield each call of a rule as its name and arguments, get its result by ``send``, and return the model.

    See :func:`trained`.
    """
    if reason := refusal(entry):
        raise UserError(reason)
    drawn = torch.Generator().manual_seed(seed)

    def number() -> int:
        return int(torch.randint(0, 2**31, (1,), generator=drawn))

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(number())
        model = built(entry["layers"]).train()
    parameters = list(model.parameters())
    coordinates = [Coordinates.drawn(parameter, number) for parameter in parameters]
    states: list[Any] = [{} for _ in parameters]
    order = torch.empty(0, dtype=torch.long)
    for step in range(steps):
        while len(order) < entry["batch"]:
            order = torch.cat([order, torch.randperm(len(data.train), generator=drawn)])
        chosen, order = order[: entry["batch"]], order[entry["batch"] :]
        images, labels = data.train.images[chosen], data.train.labels[chosen]
        logits = model((yield "augment", (images, number())))
        slope = yield "slope", (logits.detach(), labels)
        gradients = torch.autograd.grad(logits, parameters, slope)
        hidden = [place.hidden(gradient) for place, gradient in zip(coordinates, gradients)]
        updates, states = yield "update", (hidden, states, step, steps, entry["rate"])
        with torch.no_grad():
            for parameter, place, update in zip(parameters, coordinates, updates):
                parameter.sub_(place.shown(update))
    return model.eval()


def trained_together(
    entry: Mapping[str, Any],
    runs: Sequence[tuple[ImageData, int]],
    steps: int,
    answers: Callable[[str, list[tuple[Any, ...]]], Sequence[Any]],
) -> list[nn.Sequential]:
    """Train the model of an entry on each pair of images and seed, step by step at the same time.

    Each model is the one that :func:`trained` returns. If the rules are in another process, one message
    serves all runs.

    Args:
        answers: gets the name of a rule and its arguments in each run, and returns its results.

    Raises:
        UserError: :func:`refusal` has a reason.
    """
    going = [training(entry, data, steps, seed) for data, seed in runs]
    results: Sequence[Any] = [None] * len(going)
    while True:
        asked: list[Asked] = []
        models: list[nn.Sequential] = []
        for run, result in zip(going, results):
            try:
                asked.append(run.send(result))
            except StopIteration as end:  # all runs have the same number of steps
                models.append(end.value)
        if not asked:
            return models
        results = answers(asked[0][0], [values for _, values in asked])


def trained(entry: Mapping[str, Any], data: ImageData, steps: int, seed: int, rules: Rules) -> nn.Sequential:
    """Train the model of an entry for ``steps`` steps, and return it ready for the test.

    Args:
        seed: of the initial weights, the order of the images, the coordinates, and what ``augment`` gets.

    Raises:
        UserError: :func:`refusal` has a reason.
    """

    def answers(name: str, calls: list[tuple[Any, ...]]) -> list[Any]:
        return [getattr(rules, name)(*values) for values in calls]

    return trained_together(entry, [(data, seed)], steps, answers)[0]


@torch.no_grad()
def accuracy(model: nn.Module, data: ImageData) -> float:
    """Return the share of the test images that the model classifies correctly."""
    found = model(data.test.images).argmax(-1) == data.test.labels
    return float(found.float().mean())


@dataclass(frozen=True)
class Functions:
    """The rules of an entry as plain functions, for a run in one process."""

    augmentation: Callable[[Tensor, int], Tensor]
    loss: Callable[[Tensor, Tensor], Tensor]
    rule: Callable[..., tuple[list[Tensor], list[Any]]]

    def augment(self, images: Tensor, seed: int) -> Tensor:
        return self.augmentation(images.clone(), seed)

    def slope(self, logits: Tensor, labels: Tensor) -> Tensor:
        held = logits.clone().requires_grad_()
        return torch.autograd.grad(self.loss(held, labels), held)[0]

    def update(self, *values: Any) -> tuple[list[Tensor], list[Any]]:
        with torch.no_grad():
            return self.rule(*values)


def plain_update(
    gradients: list[Tensor], states: list[Any], step: int, steps: int, rate: float
) -> tuple[list[Tensor], list[Any]]:
    """The rule of the baseline: SGD with one rate for all steps."""
    return [rate * gradient for gradient in gradients], states


BASELINE = {
    "layers": [("conv", 8, 3, 1), ("norm",), ("relu",), ("pool",), ("conv", 16, 3, 1), ("norm",), ("relu",)],
    "batch": 16,
    "rate": 0.1,
}
BASELINE_RULES = Functions(lambda images, seed: images, F.cross_entropy, plain_update)
