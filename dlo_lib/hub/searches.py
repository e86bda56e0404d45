"""A page of Optuna's searches for the server of a user: figures and a table of all trials, to read only.

optuna-dashboard, which notebooks show, cannot be served here: its program requests paths from the root of a
host, and the server of a user is below ``/user/NAME``. This page has no script and no address, except those
of the other searches, which are relative. It reads the journals with Optuna's interface and draws with
matplotlib. While a search runs the page stays as it is: load it again.
"""

from __future__ import annotations

import io
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

from dlo_lib.base.drawing import BLUE, GREY, VERMILLION, new_figure, whole_numbers
from dlo_lib.base.markup import environment
from dlo_lib.base.text import tr

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from optuna import Study
    from optuna.trial import FrozenTrial

PATTERN = "*.journal"
MOST_ROWS = 500
"""Of the table; figures have all trials."""
Application = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


def application(folder: Path) -> Application:
    """Return the WSGI application that serves the searches whose journals are below ``folder``."""
    drawing = threading.Lock()  # two threads must not use matplotlib's fonts at the same time

    def serve(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        asked = parse_qs(environ.get("QUERY_STRING", "")).get("search", [""])[0]
        status, body = "200 OK", ""
        if environ["REQUEST_METHOD"] not in ("GET", "HEAD"):
            status = "405 Method Not Allowed"
        elif environ.get("PATH_INFO", "").strip("/"):
            status = "404 Not Found"
        else:
            with drawing:
                body = page(folder, asked)
        content = body.encode()
        headers = [("Content-Type", "text/html; charset=utf-8"), ("Content-Length", str(len(content)))]
        start_response(status, headers)
        return [content] if environ["REQUEST_METHOD"] != "HEAD" else []

    return serve


def page(folder: Path, asked: str = "") -> str:
    """Return the page of a journal.

    Args:
        folder: where the journals are, or below.
        asked: path of the journal below ``folder``; the newest one if there is no such journal.
    """
    files = sorted(folder.rglob(PATTERN), key=lambda file: -file.stat().st_mtime)
    names = [file.relative_to(folder).as_posix() for file in files]
    shown = asked if asked in names else next(iter(names), "")
    studies = [shown_study(study) for study in read_studies(folder / shown)] if shown else []
    template = environment("dlo_lib.hub").get_template("searches.html.j2")
    return template.render(names=names, shown=shown, studies=studies, folder=folder, tr=tr)


def read_studies(journal: Path) -> list[Study]:
    """Open all studies of a journal."""
    import optuna
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    storage = JournalStorage(JournalFileBackend(str(journal)))
    return [
        optuna.load_study(study_name=name, storage=storage)
        for name in optuna.get_all_study_names(storage=storage)
    ]


def shown_study(study: Study) -> dict[str, Any]:
    """Return what the page shows of a study: its name, the number of trials of each state, the rows of the
    table, and with one objective the best trial and the figures as SVG.
    """
    from optuna.trial import TrialState

    trials = study.get_trials(deepcopy=False)
    states = [(state.name.lower(), sum(one.state is state for one in trials)) for state in TrialState]
    complete = any(one.state is TrialState.COMPLETE for one in trials)
    single = len(study.directions) == 1
    params = list(dict.fromkeys(name for one in trials for name in one.params))
    return {
        "name": study.study_name,
        "states": [(name, number) for name, number in states if number],
        "best": study.best_trial if single and complete else None,
        "figures": [svg(figure) for figure in draw(study, trials, params)] if single and complete else [],
        "params": params,
        "rows": [row(one, params) for one in reversed(trials[-MOST_ROWS:])],
        "left_out": max(0, len(trials) - MOST_ROWS),
    }


def row(trial: FrozenTrial, params: Sequence[str]) -> list[str]:
    """Return a row of the table: number, state, values, duration and hyperparameters."""
    values = ", ".join(f"{value:.4g}" for value in trial.values or trial.intermediate_values.values())
    seconds = "" if trial.duration is None else f"{trial.duration.total_seconds():.1f}"
    chosen = [trial.params.get(name, "") for name in params]
    shown = [f"{value:.4g}" if isinstance(value, float) else str(value) for value in chosen]
    return [str(trial.number), trial.state.name.lower(), values, seconds, *shown]


def draw(study: Study, trials: Sequence[FrozenTrial], params: Sequence[str]) -> list[Figure]:
    """Draw a study with one objective: the value of each trial and the best so far, the values that were
    reported during the trials, and the value by each hyperparameter.
    """
    from optuna.study import StudyDirection
    from optuna.trial import TrialState

    better = max if study.direction is StudyDirection.MAXIMIZE else min
    complete = [  # Optuna gives a pruned trial the value of its last report
        (one, one.value) for one in trials if one.state is TrialState.COMPLETE and one.value is not None
    ]
    figures = [new_figure(7, 3)]
    axes = figures[0].subplots()
    best, best_so_far = complete[0][1], []
    for _, value in complete:
        best = better(best, value)
        best_so_far.append(best)
    numbers = [one.number for one, _ in complete]
    axes.plot(numbers, [value for _, value in complete], "o", color=GREY, label=tr("trial"))
    axes.step(numbers, best_so_far, where="post", color=VERMILLION, label=tr("best so far"))
    _labelled(axes, "trial", tr("value"))
    axes.legend()
    if reported := [one for one in trials if len(one.intermediate_values) > 1]:
        figures.append(new_figure(7, 3))
        axes = figures[-1].subplots()
        for one in reported:
            colour = BLUE if one.state is TrialState.COMPLETE else GREY
            axes.plot(*zip(*sorted(one.intermediate_values.items())), marker="o", ms=3, lw=1, color=colour)
        _labelled(axes, tr("step of a report"), tr("value"))
    for name in params:
        points = [(one.params[name], value) for one, value in complete if name in one.params]
        numeric = all(isinstance(chosen, int | float) for chosen, _ in points)
        if not points:
            continue
        figures.append(new_figure(4, 3))
        axes = figures[-1].subplots()
        axes.plot([x if numeric else str(x) for x, _ in points], [y for _, y in points], "o", color=BLUE)
        _labelled(axes, name, tr("value"))
        if any(getattr(one.distributions.get(name), "log", False) for one in trials):
            axes.set_xscale("log")
    return figures


def _labelled(axes: Axes, x: str, y: str) -> None:
    axes.set(xlabel=x, ylabel=y)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    whole_numbers(axes)


def svg(figure: Figure) -> str:
    """Return a figure as an ``<svg>`` element."""
    file = io.StringIO()
    figure.savefig(file, format="svg", metadata={"Date": None})
    text = file.getvalue()
    return text[text.index("<svg") :]
