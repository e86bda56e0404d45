"""Show the progress of a run: a bar in a terminal, otherwise one text line for each line of metrics."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from dlo_lib.base.text import tr
from dlo_lib.train.metrics import Metrics


class TrainProgress:
    """A context: call ``show`` after each line of metrics, ``advance`` after each step, ``say`` for other
    messages.
    """

    def __init__(self, steps: int, done: int) -> None:
        self._steps = steps
        self._console = Console()
        # Not rich's detection: a notebook kernel sets FORCE_COLOR, with which rich treats pipes as terminals.
        self._terminal = self._console.file.isatty()
        self._bar = Progress(
            TextColumn(tr("training")),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[metrics]}"),
            console=self._console,
            disable=not self._terminal,
        )
        self._task = self._bar.add_task("", total=steps, completed=done, metrics="")

    def __enter__(self) -> TrainProgress:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def advance(self, step: int) -> None:
        self._bar.update(self._task, completed=step)

    def show(self, metrics: Metrics) -> None:
        text = tr(
            "loss {loss:.4f}  {rate:,.0f} tokens/s",
            loss=_number(metrics.loss),
            rate=metrics.tokens_per_second,
        )
        if metrics.mfu is not None:
            text += tr("  MFU {mfu:.1%}", mfu=metrics.mfu)
        if self._terminal:
            self._bar.update(self._task, metrics=text)
        else:
            self.say(tr("step {step}/{steps}  ", step=metrics.step, steps=self._steps) + text)

    def say(self, text: str) -> None:
        self._console.print(text, soft_wrap=True, markup=False, highlight=False)
        self._console.file.flush()


def _number(value: float | None) -> float:
    return float("nan") if value is None else value
