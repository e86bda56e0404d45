"""``--compile``: the same training with every plan that allows it, and rates without the time of compilation.

The backend is aot_eager, which makes the graphs of Inductor and generates no code.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from dlo_lib.base.errors import UserError
from dlo_lib.launch import run_ranks
from dlo_lib.models.llama import Block
from dlo_lib.profiling.compile_watch import CompileReport, watch_compilation
from dlo_lib.train import TrainConfig, TrainResult, compiled, loop, read_metrics, report, train
from dlo_lib.train.__main__ import parse
from tests.train.test_pipeline import assert_learned_the_same

FORMS = {
    "fsdp": {"parallel": "fsdp", "checkpointing": True},
    "pp": {"pp": 2, "accumulation": 2},
}
GRAPHS = {"fsdp": 2, "pp": 8}
"""All blocks share their graphs: one, or those between what is left to Python. The loss has another."""


def trained_both_ways(configs: list[TrainConfig]) -> list[tuple[TrainResult, TrainResult, CompileReport]]:
    """Train each eager and compiled; return the results and what was compiled."""
    compiled.inductor = lambda device: "aot_eager"
    found = []
    for config in configs:
        eager = train(replace(config, out=config.out / "eager"))
        with watch_compilation() as watch:
            compiled_run = train(replace(config, out=config.out / "compiled", compile=True))
        torch.compiler.reset()
        found.append((eager, compiled_run, watch.report))
    return found


def test_compiled_ranks_train_the_same_model(small_run):
    configs = [small_run(name, model="tiny", steps=3, **form) for name, form in FORMS.items()]
    found = run_ranks(trained_both_ways, 2, configs, timeout=200)[0]
    for name, (eager, compiled_run, seen) in zip(FORMS, found):
        assert_learned_the_same(compiled_run, eager)
        assert len(seen.graphs) <= GRAPHS[name], name
        assert not seen.left, name
        assert not seen.recompilations, name


@pytest.fixture
def aot_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "inductor", lambda device: "aot_eager")
    monkeypatch.setenv(compiled.CACHE_VARIABLE, os.environ.get(compiled.CACHE_VARIABLE, "/tmp/of-the-user"))


def test_an_eager_run_resumes_compiled_and_says_what_it_compiled(small_run, aot_eager, capfd):
    whole = train(small_run("whole"))
    train(small_run("run", steps=3))
    assert_learned_the_same(train(small_run("run", resume=True, compile=True)), whole)
    said = capfd.readouterr().out
    assert said.count("compiled 2 blocks in ") == 1
    assert f"cache: {os.environ[compiled.CACHE_VARIABLE]}" in said
    seconds = [line.compile_seconds for line in read_metrics(whole.out.with_name("run"))]
    assert seconds[:3] == [None] * 3
    assert seconds[3] > 0
    assert seconds[4:] == [0.0, 0.0]


def test_the_cache_is_in_a_folder_that_lasts(small_run, monkeypatch, tmp_path):
    monkeypatch.setattr(compiled, "inductor", lambda device: "aot_eager")
    monkeypatch.setenv("DLO_CACHE", str(tmp_path))
    monkeypatch.setenv(compiled.CACHE_VARIABLE, "")
    monkeypatch.delenv(compiled.CACHE_VARIABLE)
    model = torch.nn.ModuleList([Block(_tiny())])
    made = compiled.compile_model(model, small_run().plan(1, 1), torch.device("cpu"))
    assert (made.blocks, made.cache) == (1, tmp_path / "inductor")
    assert os.environ[compiled.CACHE_VARIABLE] == str(tmp_path / "inductor")


def _tiny():
    from dlo_lib.models import model_config

    return model_config("tiny")


@pytest.mark.parametrize("log_every", [1, 2, 3])
def test_rates_leave_out_compilation_and_the_first_step(small_run, monkeypatch, log_every):
    """A step takes a second, the first one 10 more to initialise the device and 100 more to compile."""
    now, laps = [0.0], iter([100.0])
    real = loop.train_step

    def train_step(*arguments, **options):
        now[0] += 1 if now[0] else 111
        return real(*arguments, **options)

    monkeypatch.setattr(loop, "train_step", train_step)
    monkeypatch.setattr(report, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(report, "CompileClock", lambda: SimpleNamespace(lap=lambda: next(laps, 0.0)))
    monkeypatch.setattr(loop, "losses_of_run", lambda *arguments: {})
    nothing = compiled.Compiled(0, Path("/nowhere"))
    monkeypatch.setattr("dlo_lib.train.prepare.compile_model", lambda *arguments: nothing)
    lines = read_metrics(train(small_run(log_every=log_every, compile=True)).out)
    assert lines[0].compile_seconds == 100
    assert all(line.compile_seconds == 0 for line in lines[1:])
    assert lines[0].step_seconds == (11 if log_every == 1 else 1), "its line shows the first step"
    assert all(line.step_seconds == 1 for line in lines[1:])


def test_what_cannot_be_compiled_is_refused(small_run, monkeypatch, tmp_path):
    with pytest.raises(UserError, match="compile cannot trace the communication .* use --tp 1"):
        parse(["--compile", "--tp", "2"])
    monkeypatch.setenv("CXX", str(tmp_path / "no-compiler"))
    with pytest.raises(UserError, match="--compile would not make training faster.*Cure"):
        train(small_run(compile=True))
    assert not (tmp_path / "run").exists()
