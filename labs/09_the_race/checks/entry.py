"""The visible checks of the FLOPs of a declared model, and of the race, which the check itself runs."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from dlo_lib.base.one_thread import one_torch_thread
from dlo_lib.base.provenance import digest
from dlo_lib.grading.checks.contract import check
from dlo_lib.labkit import race
from dlo_lib.labkit.compare import entry, explaining, near, wrong_if

from .scenarios import augmented_in_each, counted_flops, slopes_in_each, updated_in_each
from .twins import RIGHT, baseline_scores, flops_of, half_width, is_shown

# -- flops

COUNTER = ["torch.utils.flop_counter.FlopCounterMode"]
COPIED = {"LibraryUsed": "Here you count by the formula; the library's counter comes at the end"}


def drawn_layers(t, pool: bool, convolutions: int = 3) -> list[tuple]:
    layers: list[tuple] = []
    for number in range(convolutions):
        layers += [("conv", t.integer(4, 12), t.choice([1, 3, 5]), 1 if pool else t.integer(2, 3)), ("relu",)]
        layers += [("pool",)] if pool and number < convolutions - 1 else [("norm",)]
    return layers


def compared_flops(student, t, layers: list[tuple], size: int, part: str, mistakes: dict[str, str]) -> None:
    """``mistakes``: a message for each way of ``flops_of``; ways that other checks name pass here."""
    known = flops_of(layers, size)
    with explaining(COPIED):
        got = student.run(
            counted_flops, layers=layers, size=size, refused=COUNTER if student.is_own("flops") else []
        )
    value = entry(t, got, part, "flops(...)")
    want = known[RIGHT][part]
    wrong_if(t, value, want, {message: known[way][part] for message, way in mistakes.items()})
    message = '"{part}" of {layers} on {size} x {size} pixels is {got:.0f}, PyTorch counts {want}'
    t.that(near(value, want), message, part=part, layers=str(layers), size=size, got=value, want=want)


@check("flops", points=1)
def check_forward(student, t):
    "The forward of convolutions with a stride, and of the head"
    size = t.draw_until(lambda: t.integer(17, 40), lambda size: size % 2 == 1)
    mistakes = {
        "A multiplication and an addition are 2 FLOPs.": "half",
        "A convolution with stride s has size / s pixels a side, rounded up: count there.": "same size",
        "A filter spans all channels of its input: 3 only in the first layer.": "colours",
        "The linear layer at the end is not counted.": "no head",
    }
    compared_flops(student, t, drawn_layers(t, pool=False), size, "forward", mistakes)


@check("flops", points=1)
def check_pool(student, t):
    "A pool halves the size for the layers after it"
    size = t.draw_until(lambda: t.integer(14, 30), lambda size: size % 4 > 1)
    mistakes = {"After a pool the sides are size // 2.": "no pool"}
    compared_flops(student, t, drawn_layers(t, pool=True), size, "forward", mistakes)


@check("flops", points=1)
def check_backward(student, t):
    "The backward is twice the forward, except in the first layer"
    mistakes = {
        "The first convolution needs no gradient of its input, the image: count it once.": "all twice",
        "Backward has two products for each one of the forward: for the weights, and for the input.": "once",
    }
    compared_flops(student, t, [("conv", t.integer(3, 20), 3, 1)], t.integer(8, 20), "backward", mistakes)


@check("flops", points=1)
def check_affordable(student, t):
    "Whole steps within the budget, and never more than the race allows"
    for least, most in ((3, 40), (400, 900)):
        layers, size, batch = drawn_layers(t, False, 1), t.integer(8, 20), t.integer(5, 40)
        cost = batch * sum(flops_of(layers, size)[RIGHT].values())
        steps = t.integer(least, most)
        got = t.number(
            student.affordable(layers, size, cost * (steps + t.uniform(0.6, 0.9)), batch), "affordable(...)"
        )
        text = "the budget pays {steps} steps and a part of one, and the race allows {most}: not {got}"
        t.that(got == min(steps, race.MOST_STEPS), text, steps=steps, most=race.MOST_STEPS, got=got)


# -- race


class Answers:
    """The student's functions as rules of the race, in several runs; each result is checked for its type and
    shape."""

    def __init__(self, student, t) -> None:
        self.student, self.t = student, t

    def __call__(self, rule: str, calls: list[tuple[Any, ...]]) -> list[Any]:
        columns = [list(column) for column in zip(*calls)]
        return getattr(self, rule)(*columns)

    def augment(self, images: list[Tensor], seeds: list[int]) -> list[Tensor]:
        found = self.student.run(augmented_in_each, images=images, seeds=seeds)
        return self.like(found, images, "augment(...)")

    def slope(self, logits: list[Tensor], labels: list[Tensor]) -> list[Tensor]:
        found = self.student.run(slopes_in_each, logits=logits, labels=labels)
        return self.like(found, logits, "the gradient of loss(...)")

    def update(self, gradients: list[list[Tensor]], states: list[Any], *values: list[Any]) -> list[Any]:
        step, steps, rate = (column[0] for column in values)
        found = self.student.run(
            updated_in_each, gradients=gradients, states=states, step=step, steps=steps, rate=rate
        )
        results = []
        for row, result in zip(gradients, self.t.items(found, len(gradients), "the runs")):
            updates, kept = self.t.items(result, 2, "update(...)")
            self.like(updates, row, "an update")
            results.append((updates, self.t.items(kept, len(row), "the states of update(...)")))
        return results

    def like(self, found: Any, wanted: list[Tensor], what: str) -> list[Tensor]:
        """The found tensors, each of the shape and dtype of the wanted one."""
        rows = zip(self.t.items(found, len(wanted), what), wanted)
        return [self.t.tensor(got, what, shape=want.shape, dtype=want.dtype) for got, want in rows]


def entered(student, t) -> dict[str, Any]:
    """The entry, if it takes part."""
    declared = student.get("ENTRY")
    reason = race.refusal(declared)
    t.that(not reason, "not tested yet: the entry does not take part, see the first check")
    return declared


def seeds_of(t, count: int) -> tuple[tuple[int, int], ...]:
    """Seeds of the images and of the run; too many to try."""
    return tuple((t.integer(0, 2**60), t.integer(0, 2**60)) for _ in range(count))


def raced(student, t, seeds: tuple[tuple[int, int], ...]) -> tuple[list[float], dict[str, Any]]:
    """The accuracies of the student's entry, which this process trains, and the entry, which is read once.

    All runs make a step together, so that a message carries what each of them needs.
    """
    declared = entered(student, t)
    runs = [(race.images_of(images), run) for images, run in seeds]
    with one_torch_thread():
        models = race.trained_together(declared, runs, race.steps_of(declared), Answers(student, t))
        return [race.accuracy(model, data) for model, (data, _) in zip(models, runs)], declared


def commit_of(declared: dict[str, Any]) -> str | None:
    commit = declared.get("commit")
    good = type(commit) is str and 7 <= len(commit) <= 64 and set(commit) <= set("0123456789abcdef")
    return commit if good else None


def said(scores: list[float]) -> dict[str, float]:
    mean, half = sum(scores) / len(scores), half_width(scores)
    return {"mean": 100 * mean, "low": 100 * max(mean - half, 0.0), "high": 100 * min(mean + half, 1.0)}


@check("race", points=1)
def check_allowed(student, t):
    "The entry takes part: its layers, its batch, its rate and its commit"
    declared = student.get("ENTRY")
    reason = race.refusal(declared)
    t.that(not reason, "the entry does not take part: {reason}", reason=reason)
    text = "the commit should be 7 to 64 hexadecimal digits, so that the run can be repeated"
    t.that(commit_of(declared) is not None, text)
    t.that(race.steps_of(declared) >= 1, "the budget does not pay one step of this model")
    logits, labels = t.normal(6, 10), t.integers(0, 9, 6)
    Answers(student, t).slope([logits], [labels])


RUNS = 4  # of each check, on its own seeds


@check("race", points=2, seconds=40)
def check_baseline(student, t):
    "Better than the baseline, shown on the same seeds"
    seeds = seeds_of(t, RUNS)
    (ours, _), theirs = raced(student, t, seeds), baseline_scores(seeds)
    text = "{mean:.1f} % in the mean of four runs; the baseline has {base:.1f} % on the same seeds"
    base = 100 * sum(theirs) / len(theirs)
    t.that(is_shown(ours, theirs), text + ": not shown", mean=said(ours)["mean"], base=base)


GOOD, VERY_GOOD = 0.7, 0.8
LINE = (
    "{mean:.1f} % (95 %: {low:.1f} to {high:.1f}) in the mean of {runs} runs: {line:.0f} % earns these points"
)


@check("race", points=2, seconds=40)
def check_good(student, t):
    "A good entry: 70 %"
    scores, _ = raced(student, t, seeds_of(t, RUNS))
    t.that(sum(scores) / len(scores) >= GOOD, LINE, runs=len(scores), line=100 * GOOD, **said(scores))


@check("race", points=3, seconds=40)
def check_very_good(student, t):
    "A very good entry: 80 %; this is the leaderboard's result"
    seeds = seeds_of(t, RUNS)
    scores, declared = raced(student, t, seeds)
    mean, half, steps = sum(scores) / len(scores), half_width(scores), race.steps_of(declared)
    cost = steps * declared["batch"] * sum(race.counted(declared["layers"]).values())
    settings = {name: declared[name] for name in ("layers", "batch", "rate")}
    data = race.images_of(seeds[0][0]).train
    record = {"commit": commit_of(declared), "seed": 0, "config": settings}
    record["data"] = digest(data.images, data.labels)
    t.measure(scores=scores, mean=mean, low=mean - half, high=mean + half, flops=cost)
    t.measure(steps=steps, batch=declared["batch"], run=record)
    t.explain(f"{100 * mean:.1f} % in the mean of {len(scores)} runs")
    t.that(mean >= VERY_GOOD, LINE, runs=len(scores), line=100 * VERY_GOOD, **said(scores))
