"""The dashboards below the URL of a user's server."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

from dlo_lib.hub.dashboards import proxied
from dlo_lib.hub.searches import MOST_ROWS, application, draw, page, read_studies, shown_study

ADDRESS = re.compile(r"""(?:src|href|action)=["']?([^"' >]+)|url\(([^)]+)\)""")


def answer(folder: Path, path: str = "/", query: str = "", method: str = "GET") -> tuple[str, str]:
    said: list[Any] = []
    environ = {"REQUEST_METHOD": method, "PATH_INFO": path, "QUERY_STRING": query}
    body = b"".join(
        application(folder)(environ, lambda status, headers: said.append((status, dict(headers))))
    )
    status, headers = said[0]
    assert method == "HEAD" or headers["Content-Length"] == str(len(body))
    return status, body.decode()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two searches: one of eight trials, some of them pruned, and an older one of two objectives."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)

    def loss(trial: optuna.Trial) -> float:
        rate = trial.suggest_float("rate <1>", 1e-3, 1.0, log=True)
        kind = trial.suggest_categorical("kind", ["a&b", "c"])
        for step in (1, 2, 3):
            trial.report(rate / step, step)
        if trial.number == 5:
            raise optuna.TrialPruned
        return rate + (kind == "c")

    for name, directions, objective in (
        ("both", ["minimize", "maximize"], lambda trial: (trial.suggest_int("n", 1, 3), 2.0)),
        ("lr & co", ["minimize"], loss),
    ):
        file = tmp_path / "sub" / f"{name}.journal"
        file.parent.mkdir(exist_ok=True)
        storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(file)))
        sampler = optuna.samplers.RandomSampler(seed=0)
        study = optuna.create_study(storage=storage, study_name=name, directions=directions, sampler=sampler)
        study.optimize(objective, n_trials=8)
    os.utime(tmp_path / "sub" / "both.journal", (1, 1))
    return tmp_path


def test_the_newest_search_is_shown_with_its_figures_and_trials(folder: Path) -> None:
    status, text = answer(folder)
    assert status == "200 OK"
    assert "<h1>sub/lr &amp; co.journal</h1>" in text
    assert "7 complete, 1 pruned" in text
    assert text.count("<svg") == 4  # values, reports, and one for each hyperparameter
    assert "rate &lt;1&gt;" in text
    assert "<1>" not in text
    assert text.count("<tr>") == 1 + 8


def test_a_pruned_trial_has_no_value_in_the_figures(folder: Path) -> None:
    (study,) = read_studies(folder / "sub" / "lr & co.journal")
    trials = study.get_trials()
    values, reports, *_ = draw(study, trials, [])
    points, best = values.axes[0].get_lines()
    complete = [one for one in trials if one.number != 5]
    assert list(points.get_xdata()) == [one.number for one in complete]
    assert list(best.get_ydata())[-1] == min(one.value for one in complete)
    assert len({line.get_color() for line in reports.axes[0].get_lines()}) == 2


def test_another_search_is_reached_by_a_relative_address(folder: Path) -> None:
    (query,) = re.findall(r'href="\?([^"]+)"', answer(folder)[1])
    _, text = answer(folder, query=query)
    assert "<h1>sub/both.journal</h1>" in text
    assert "8 complete" in text
    assert "<svg" not in text  # two objectives have no best value
    _, text = answer(folder, query="search=../../etc/passwd")
    assert "<h1>sub/lr &amp; co.journal</h1>" in text


def test_the_page_needs_no_other_file_and_no_address_of_the_host(folder: Path) -> None:
    _, text = answer(folder)
    assert "<script" not in text
    addresses = [one or other for one, other in ADDRESS.findall(text)]
    assert addresses
    assert [one for one in addresses if not one.startswith(("#", "?"))] == []


def test_only_the_page_is_served_and_only_for_reading(folder: Path) -> None:
    assert answer(folder, "/static/x")[0].startswith("404")
    assert answer(folder, method="POST")[0].startswith("405")
    assert answer(folder, method="HEAD") == ("200 OK", "")


def test_a_folder_without_a_search_is_named(tmp_path: Path) -> None:
    assert f"No *.journal is below {tmp_path}" in page(tmp_path)


def test_a_long_search_has_the_latest_trials_in_its_table() -> None:
    import optuna

    study = optuna.create_study()
    trial = optuna.trial.create_trial(value=1.0)
    study.add_trials([trial] * (MOST_ROWS + 3))
    shown = shown_study(study)
    assert (len(shown["rows"]), shown["left_out"], shown["rows"][0][0]) == (MOST_ROWS, 3, str(MOST_ROWS + 2))


def test_a_dashboard_listens_on_a_socket_and_not_on_a_port() -> None:
    for name, board in proxied(Path("/opt/dlo/.venv/bin/python")).items():
        assert board["unix_socket"] is True
        assert board["command"][3:] == [name, "{unix_socket}"]
