"""The table of a GPU, at tiny sizes on a CPU: what it compares, keeps and prints. No figure is tested."""

from __future__ import annotations

import json
import math
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.card_cases import Case, cases
from benchmarks.card_markdown import table
from benchmarks.card_table import (
    Table,
    compile_ahead,
    compiled,
    measure,
    measure_compiled,
    relative_error,
    results,
)
from dlo_lib.profiling.compile_time import Backend, usable_backend

CPU = torch.device("cpu")


def made(folder: Path, seconds: float = 600) -> Table:
    return Table(folder, "fp32", CPU, time.monotonic() + seconds)


def doubled(ours=lambda x: x * 2, **options) -> Case:
    return Case("double", "4 × 4", ours, lambda x: x + x, ((4, 4),), (32, 32), **options)


def test_every_operation_is_compared_measured_and_printed(tmp_path, capsys):
    assert measure(tmp_path, "fp32", 600, smoke=True) == 0, capsys.readouterr().out
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    names = {case.name for case in cases(torch.float32, CPU, 16)} | {"adamw, 0 M in fp32"}
    assert {row["name"] for row in rows if row["who"] == "ours"} == names
    assert {row["name"] for row in rows if row["who"] == "eager"} == names
    assert {row["name"] for row in rows if row["who"] == "compile"} == names - {"adamw, 0 M in fp32"}
    assert all(row["error"] <= 2e-3 and row["forward_ms"] > 0 for row in rows)
    lines = (tmp_path / "table.md").read_text().splitlines()
    assert len([line for line in lines if line.startswith("| ")]) == 2 + len(names)
    capsys.readouterr()
    assert measure(tmp_path, "fp32", 600, smoke=True) == 0  # nothing is measured twice
    assert len((tmp_path / "rows.jsonl").read_text().splitlines()) == len(rows)
    assert "FLASH" in capsys.readouterr().out


def test_what_is_wrong_or_fails_is_reported_and_not_timed(tmp_path):
    def fails(x: torch.Tensor) -> torch.Tensor:
        raise ValueError("no kernel\nfor this")

    case = doubled(peers={"wrong gradient": lambda x: x * 3 - x.detach(), "fails": fails})
    own = made(tmp_path)
    own.measure(case, {"ours": lambda x: x * 2.1, "eager": case.eager, **case.peers})
    rows = {row["who"]: row for row in own.rows}
    assert rows["ours"]["problem"].startswith("wrong: differs from eager by 5")
    assert rows["wrong gradient"]["problem"].startswith("wrong: differs from eager by 5")
    assert rows["fails"]["problem"] == "ValueError: no kernel"
    assert "problem" not in rows["eager"]
    line = table(own.rows, "fp32", 1e12, 1e12).splitlines()[-1]
    assert "| double | 4 × 4 | wrong |" in line
    again = made(tmp_path)  # what failed is measured again
    again.measure(case, {"ours": case.ours, "eager": case.eager})
    assert "problem" not in next(row for row in again.rows if row["who"] == "ours")


def test_an_implementation_may_write_over_its_input(tmp_path):
    class Overwrites(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            out = x * 2
            x.detach().zero_()
            return out

        @staticmethod
        def backward(ctx, grad):
            return grad * 2

    inputs = doubled().inputs(torch.float32, CPU)
    before = inputs[0].detach().clone()
    found = results(Overwrites.apply, inputs, torch.ones(4, 4))
    torch.testing.assert_close(found[0], 2 * before)
    own = made(tmp_path)
    case = doubled(peers={"peer": Overwrites.apply}, writes_input=("peer",))
    own.measure(case, {"peer": Overwrites.apply, "eager": case.eager})
    assert all("problem" not in row for row in own.rows)


def test_after_the_limit_rows_are_left_out(tmp_path):
    own = made(tmp_path, seconds=-1)
    case = doubled()
    own.measure(case, {"ours": case.ours})
    assert own.left_out == ["double, 4 × 4: ours"]
    assert not own.rows


def test_the_compiled_peer_is_compared_and_has_its_column(tmp_path):
    own = made(tmp_path)
    case = doubled()
    own.measure(case, {"ours": case.ours, "eager": case.eager, "compile": compiled(case, "aot_eager")})
    line = table(own.rows, "fp32", 1e12, 1e12).splitlines()[-1]
    forward, both = line.split("|")[9].split("/")
    assert float(forward) > 0
    assert float(both) > 0
    wrong = compiled(replace(case, eager=lambda x: x * 3), "aot_eager")
    own.measure(case, {"compile again": wrong})
    assert own.rows[-1]["problem"].startswith("wrong: differs from eager")


def test_without_time_to_compile_the_peer_is_left_out(tmp_path):
    own = made(tmp_path, seconds=30)
    measure_compiled(own, [doubled(compiled=True), doubled()], smoke=False)
    assert own.left_out == ["double, 4 × 4: compile"]


@pytest.mark.skipif(
    usable_backend(CPU).backend is not Backend.INDUCTOR, reason="NOT TESTED HERE: Inductor needs a compiler"
)
def test_other_processes_fill_the_cache_of_the_compiler(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    compile_ahead(["vector_add, 16 × 256", "no case"], "fp32", 3000, "cpu", 16)
    assert list((tmp_path / "fxgraph").iterdir())
    assert capsys.readouterr().out.startswith("no case: torch.compile: ValueError")


def test_rows_of_another_machine_are_dropped(tmp_path):
    (tmp_path / "rows.jsonl").write_text(
        json.dumps({"machine": "another card", "name": "x", "dtype": "fp32", "who": "ours"}) + "\n"
    )
    assert not made(tmp_path).rows


def test_the_ratios_are_peer_to_ours():
    shared = {"name": "n", "operation": "add", "size": "1", "dtype": "bf16", "machine": "a card"}
    ours = {"forward_ms": 1.0, "backward_ms": 1.0, "cpu_us": 20.0, "loop_us": 50.0, "shares": [0.9, None]}
    rows = [
        {**shared, "who": "ours", **ours},
        {**shared, "who": "eager", **ours, "forward_ms": 2.0, "backward_ms": 4.0, "loop_us": 100.0},
        {**shared, "who": "cuDNN", "problem": "RuntimeError: refused"},
    ]
    first, *_, line = table(rows, "bf16", 3e12, 6.6e14).splitlines()
    assert first == "a card, bf16. A copy moves 3.00 TB/s, a bf16 product does 660 TFLOP/s."
    assert line == (
        "| add | 1 | 1.000 | 1.000 | 90% / – | 20 / 20 | 2.00 | 2.00 / 3.00 | – | – | cuDNN RuntimeError |"
    )
    assert table(rows, "fp32", 1.0, 1.0) == "no rows in fp32\n"


@pytest.mark.parametrize("bad", [torch.tensor([math.nan]), torch.ones(2)])
def test_the_error_of_a_wrong_answer_is_not_small(bad):
    assert not relative_error(bad, torch.ones(1)) < 1
