"""Draw the trace of a training with a bottleneck: a different one for each student, and new ones for checks.

A model makes the spans, as a profiler records them with ``record_shapes=True`` of a training on a GPU with
``CUDA_LAUNCH_BLOCKING=1``, with which the thread of the steps waits for each kernel. Sizes, the place of the
bottleneck and the noise are drawn; nothing is measured. A span is a dict; ``dtype`` is "" and ``shapes`` is
empty if it is no operator::

    {"name": str, "track": int, "begin": ms, "end": ms, "dtype": "float32", "shapes": [[rows, columns], ...]}

Cost: about 10 ms for a program with 500 spans.
"""

from __future__ import annotations

import getpass
import hashlib
import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from dlo_lib.grading.checks.trial import Trial

Span = dict[str, Any]
CAUSES = ("loader", "read", "copy", "float64", "repeated", "small")
PHASES = ("load", "forward", "backward", "optimizer", "metrics")
MAIN, LOADER = 17, 23
RELU = 0.06  # ms
USUAL = {"loader": 0.12, "read": 0.08, "copy": 0.15, "small": 0.12}
"""The ms of a step that a program without a bottleneck spends for each cause."""


def seed_of_login() -> int:
    """A number that depends on the login."""
    try:
        login = os.environ.get("JUPYTERHUB_USER") or getpass.getuser()
    except (KeyError, OSError):  # a container may run a user without a name
        login = str(os.getuid())
    return int(hashlib.sha256(login.encode()).hexdigest(), 16) % 10**6


@dataclass
class Plan:
    """A training whose `layers` have these inputs and outputs. In a step the products in float32 take
    `products` ms, and each cause takes `times` ms. The layers of `wide` are in float64."""

    layers: list[tuple[int, int]]
    batch: int
    products: float
    times: dict[str, float]
    wide: set[int]
    place: dict[str, str]
    pieces: dict[str, int]
    probe: float  # ms of a product in `metrics` that is no fault: its shapes occur nowhere else

    def share(self, layer: int) -> float:
        """The part of a layer in the products of the layers of its dtype."""
        same = [n for n in range(len(self.layers)) if (n in self.wide) == (layer in self.wide)]
        sizes = {n: self.layers[n][0] * self.layers[n][1] for n in same}
        return sizes[layer] / sum(sizes.values())

    def product_ms(self, layer: int) -> float:
        """The ms of one of the three products of a layer."""
        total = self.times["float64"] if layer in self.wide else self.products
        return total * self.share(layer) / 3


def drawn_plan(t: Trial, main: str, second: str) -> Plan:
    """Draw a training in which the cause `main` takes most time, and `second` about half of it; "" is no
    cause."""
    sizes = [64 * t.integer(8, 20) for _ in range(t.integer(5, 7))]
    layers = list(itertools.pairwise(sizes))
    wide = set(t.shuffled(range(len(layers)))[: t.integer(1, 2)])
    products = t.uniform(3.0, 5.0)
    most = products * t.uniform(1.5, 2.0)
    chosen = {"": 0.0, second: most * t.uniform(0.5, 0.62), main: most}
    times = {cause: chosen.get(cause, 0.0) + USUAL.get(cause, 0.0) for cause in CAUSES}
    places = {
        "read": t.choice(("forward", "optimizer", "metrics")),
        "copy": t.choice(("forward", "metrics")),
        "small": t.choice(("optimizer", "metrics")),
        "repeated": "metrics",
    }
    pieces = {"read": t.choice((2, 25)), "copy": t.integer(1, 3)}
    wide = wide if "float64" in (main, second) else set()
    probe = 0.0 if main or second else 0.5 * products
    return Plan(layers, 32 * t.integer(2, 8), products, times, wide, places, pieces, probe)


@dataclass
class DrawnTrace:
    """The spans of one track, which begin one after another from `now`, in ms."""

    t: Trial
    track: int = MAIN
    now: float = 0.0
    spans: list[Span] = field(default_factory=list)

    @contextmanager
    def within(self, name: str, dtype: str = "", shapes: list[list[int]] | None = None) -> Iterator[None]:
        """A span around those of the block."""
        self.now += 0.001
        span = {"name": name, "track": self.track, "begin": self.now, "end": 0.0, "dtype": dtype}
        self.spans.append(span | {"shapes": shapes or []})
        place = len(self.spans) - 1
        yield
        self.now += 0.001
        self.spans[place]["end"] = self.now

    def wait(self, ms: float) -> None:
        """Let about this time pass."""
        self.now += ms * self.t.uniform(0.9, 1.1)

    def run(self, name: str, ms: float, dtype: str = "", shapes: list[list[int]] | None = None) -> None:
        """A span that takes about this time."""
        with self.within(name, dtype, shapes):
            self.wait(ms)

    def copy(self, ms: float, dtype: str, shape: list[int]) -> None:
        """A tensor travels between host and device, or to another dtype."""
        with (
            self.within("aten::to", dtype, [shape]),
            self.within("aten::_to_copy", dtype, [shape]),
            self.within("aten::copy_", dtype, [shape, shape]),
        ):
            self.run("cudaMemcpyAsync", 0.1 * ms)
            self.run("cudaStreamSynchronize", 0.9 * ms)

    def read(self, ms: float) -> None:
        """A number comes to Python."""
        with (
            self.within("aten::item", "float32", [[]]),
            self.within("aten::_local_scalar_dense", "float32", [[]]),
        ):
            self.run("cudaMemcpyAsync", 0.1 * ms)
            self.run("cudaStreamSynchronize", 0.9 * ms)

    def small(self, ms: float) -> None:
        """Many operators of some microseconds each."""
        names = ("aten::select", "aten::mul_", "aten::add_")
        for number in range(round(ms / 0.025)):
            self.run(names[number % 3], self.t.uniform(0.015, 0.035), "float32", [[64], []])


def forward(trace: DrawnTrace, plan: Plan, layer: int, ms: float) -> None:
    """The operators of a layer, which take about `ms`."""
    inputs, outputs = plan.layers[layer]
    dtype = "float64" if layer in plan.wide else "float32"
    weight, x, y = [outputs, inputs], [plan.batch, inputs], [plan.batch, outputs]
    with trace.within("aten::linear", dtype, [x, weight, [outputs]]):
        trace.run("aten::addmm", ms, dtype, [[outputs], x, weight[::-1]])
    trace.run("aten::relu", RELU, "float32", [y])


def step(trace: DrawnTrace, plan: Plan, number: int) -> None:
    """A step of the training, with its five phases."""
    order = range(len(plan.layers))
    with trace.within(f"ProfilerStep#{number}"):
        with trace.within("load"):
            with trace.within("enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"):
                trace.wait(plan.times["loader"])
            trace.copy(USUAL["copy"], "float32", [plan.batch, plan.layers[0][0]])
        with trace.within("forward"):
            for layer in order:
                if layer in plan.wide:
                    trace.copy(0.03, "float64", [plan.batch, plan.layers[layer][0]])
                forward(trace, plan, layer, plan.product_ms(layer))
            lost(trace, plan, "forward")
        with trace.within("backward"):
            for layer in reversed(order):
                inputs, outputs = plan.layers[layer]
                dtype = "float64" if layer in plan.wide else "float32"
                of_weight = [[inputs, plan.batch], [plan.batch, outputs]]
                of_input = [[plan.batch, outputs], [outputs, inputs]]
                for shapes in (of_weight, of_input):
                    trace.run("aten::mm", plan.product_ms(layer), dtype, shapes)
        with trace.within("optimizer"):
            trace.run("aten::_foreach_mul_", 0.1, "float32", [list(size) for size in plan.layers])
            trace.run("aten::_foreach_add_", 0.1, "float32", [list(size) for size in plan.layers])
            lost(trace, plan, "optimizer")
        with trace.within("metrics"):
            trace.run("aten::argmax", 0.07, "float32", [[plan.batch, plan.layers[-1][1]]])
            if plan.probe:
                probe(trace, plan)
            trace.read(USUAL["read"])
            lost(trace, plan, "metrics")


def probe(trace: DrawnTrace, plan: Plan) -> None:
    """A classifier of more classes, which only `metrics` runs."""
    inputs = plan.layers[-1][1]
    x, weight = [plan.batch, inputs], [10 * inputs + 1, inputs]
    with trace.within("aten::linear", "float32", [x, weight, weight[:1]]):
        trace.run("aten::addmm", plan.probe, "float32", [weight[:1], x, weight[::-1]])


def lost(trace: DrawnTrace, plan: Plan, phase: str) -> None:
    """What the causes at this place cost."""
    beyond = {cause: plan.times[cause] - USUAL.get(cause, 0.0) for cause in plan.times}
    for cause, place in plan.place.items():
        if place != phase:
            continue
        if cause == "read" and beyond["read"] > 0:
            for _ in range(plan.pieces["read"]):
                trace.read(beyond["read"] / plan.pieces["read"])
        if cause == "copy" and beyond["copy"] > 0:
            for _ in range(plan.pieces["copy"]):
                trace.copy(beyond["copy"] / plan.pieces["copy"], "float32", [plan.batch, plan.layers[-1][1]])
        if cause == "small":
            trace.small(plan.times["small"])
        if cause == "repeated" and beyond["repeated"] > 0:
            again(trace, plan, beyond["repeated"])


def again(trace: DrawnTrace, plan: Plan, ms: float) -> None:
    """The forward of the layers in float32, as often as fits into about `ms`."""
    layers = [layer for layer in range(len(plan.layers)) if layer not in plan.wide]
    rounds = max(1, round(ms / (plan.products / 3)))
    for _, layer in itertools.product(range(rounds), layers):
        forward(trace, plan, layer, max(0.02, ms / rounds * plan.share(layer) - RELU))


def program(t: Trial, main: str = "", second: str = "", outside: bool = False) -> list[Span]:
    """Draw the spans of some steps of a training, sorted. The cause `main` costs most time, `second` about
    half of it. With `outside`, much happens before the steps and on another track."""
    plan, trace = drawn_plan(t, main, second), DrawnTrace(t)
    if outside:
        trace.copy(t.uniform(30.0, 60.0), "float32", list(plan.layers[0]))
        trace.read(t.uniform(20.0, 40.0))
    for number in range(t.integer(2, 3)):
        trace.wait(0.05)
        step(trace, plan, number + 2)
    found = trace.spans
    if outside:
        loader = DrawnTrace(t, LOADER)
        while loader.now < trace.now:
            loader.run("aten::stack", t.uniform(0.02, 0.04), "float32", [[plan.layers[0][0]]] * 4)
            loader.copy(t.uniform(1.0, 3.0), "float32", [plan.batch, plan.layers[0][0]])
        found = found + loader.spans
    return sorted(found, key=lambda span: (span["begin"], -span["end"]))


@dataclass(frozen=True)
class Unknown:
    """A drawn program: its spans, those without its bottleneck, the bottleneck, and a second fault."""

    spans: list[Span]
    without: list[Span]
    bottleneck: str
    second: str


def unknown(seed: int) -> Unknown:
    """Draw a program with two faults; the same seed draws the same program."""
    bottleneck, second = Trial(seed).shuffled(CAUSES)[:2]
    spans, without = (program(Trial(seed), main, second) for main in (bottleneck, ""))
    return Unknown(spans, without, bottleneck, second)
