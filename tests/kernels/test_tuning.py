"""The table of tile sizes."""

from __future__ import annotations

import threading

import pytest
import torch

from dlo_lib.base.errors import UserError
from dlo_lib.kernels.dispatch import KernelBackend, backend_for_rows, using
from dlo_lib.kernels.triton_code import tuning

TABLES = {
    "like": {"sm_100": "sm_90", "sm_103": "sm_90"},
    "kernels": {
        "sum": {
            "interpreted": [{"BLOCK": 4}],
            "sm_90": [{"when": {"columns": {"min": 64, "max": 128}}, "BLOCK": 64}, {"BLOCK": 32}],
            "sm_103": [{"BLOCK": 5}],
            "default": [
                {"when": {"dtype": "fp32", "is_causal": True}, "BLOCK": 1},
                {"when": {"dtype": ["bf16", "fp16"], "columns": {"min": 10}}, "BLOCK": 2, "num_warps": 8},
                {"when": {"columns": {"max": 9}}, "BLOCK": 3},
            ],
        }
    },
}
CPU, META = torch.device("cpu"), torch.device("meta")


@pytest.fixture
def tables(monkeypatch):
    monkeypatch.setattr(tuning, "_tables", lambda: TABLES)
    tuning._found.cache_clear()
    yield
    tuning._found.cache_clear()


def ask(device=META, dtype=torch.bfloat16, columns=10, is_causal=False):
    return tuning.tuned("sum", device, dtype=dtype, columns=columns, is_causal=is_causal)


def test_the_first_rule_whose_conditions_hold_gives_the_values(tables):
    assert ask(dtype=torch.float32, is_causal=True) == {"BLOCK": 1}
    assert ask() == ask(dtype=torch.float16) == {"BLOCK": 2, "num_warps": 8}
    assert ask(columns=9) == ask(dtype=torch.float32, columns=9) == {"BLOCK": 3}
    with pytest.raises(UserError, match=r"no rule of sum for default and \{'dtype': 'fp32', 'columns': 10"):
        ask(dtype=torch.float32)


def test_an_architecture_has_its_rules_or_those_of_another(tables):
    assert ask(CPU) == {"BLOCK": 4}
    for capability in (90, 100):
        with tuning.compiled_for(capability):
            found = [ask(columns=columns)["BLOCK"] for columns in (63, 64, 128, 129)]
            assert found == [32, 64, 64, 32]
    with tuning.compiled_for(103):  # its rules precede those of the architecture that it is like
        assert ask()["BLOCK"] == 5
    with tuning.compiled_for(86):
        assert ask() == {"BLOCK": 2, "num_warps": 8}


def test_a_search_replaces_values_in_every_thread(tables):
    seen = []
    with tuning.trying("sum", {"num_warps": 4}), tuning.trying("sum", {"BLOCK": 7}):
        thread = threading.Thread(target=lambda: seen.append(ask()))
        thread.start()
        thread.join()
    assert seen == [{"BLOCK": 7, "num_warps": 4}]
    assert ask() == {"BLOCK": 2, "num_warps": 8}


def test_what_is_kept_of_the_values_is_kept_under_another_number(tables):
    seen = [tuning.changes()]
    with tuning.trying("sum", {"BLOCK": 7}):
        seen.append(tuning.changes())
        with tuning.compiled_for(90):
            seen.append(tuning.changes())
        seen.append(tuning.changes())
    seen.append(tuning.changes())
    assert len(set(seen)) == 5


def test_the_rules_of_an_architecture_that_a_call_uses_are_known(tables):
    assert tuning.rules_of(90) == tuning.rules_of(100) == {("sum", "sm_90", 0), ("sum", "sm_90", 1)}
    assert tuning.rules_of(103) == {("sum", "sm_103", 0)}
    assert tuning.rules_of(86) == {("sum", "default", place) for place in range(3)}
    with tuning.used_rules() as outer:
        with tuning.compiled_for(86):
            ask()
        with tuning.used_rules() as inner, tuning.compiled_for(100):
            ask(columns=128)
            ask(columns=128)
    assert (outer, inner) == ({("sum", "default", 1)}, {("sum", "sm_90", 0)})
    ask(columns=9)
    assert len(outer) == 1


def test_fp32_rows_whose_kernel_would_spill_are_left_to_pytorch(monkeypatch):
    monkeypatch.setattr("dlo_lib.kernels.dispatch.has_triton", lambda: True)
    with using(KernelBackend.TRITON):
        for columns, dtype, expected in (
            (8192, torch.float32, KernelBackend.TRITON),
            (8193, torch.float32, KernelBackend.TORCH),
            (16384, torch.bfloat16, KernelBackend.TRITON),
            (16385, torch.bfloat16, KernelBackend.TORCH),
        ):
            x = torch.empty(2, columns, dtype=dtype, device=META)
            assert backend_for_rows(x) is expected, (columns, dtype)


def test_a_caller_may_change_what_it_receives(tables):
    ask()["BLOCK"] = 99
    assert ask()["BLOCK"] == 2


def test_wrong_names_are_refused(tables):
    with pytest.raises(UserError, match='unknown kernel "summ": did you mean sum'):
        tuning.tuned("summ", META)
    with pytest.raises(UserError, match='unknown kernel "summ"'), tuning.trying("summ", {}):
        pass
    with pytest.raises(UserError, match="compares is_causal: the call should give it"):
        tuning.tuned("sum", META, dtype=torch.float32)


def test_the_file_has_complete_tables():
    tables = tuning._tables()
    for kernel, table in tables["kernels"].items():
        assert {"interpreted", "default"} <= set(table), kernel
        for architecture, rules in table.items():
            assert architecture in ("interpreted", "default") or architecture.startswith("sm_"), kernel
            *others, last = rules
            assert "when" not in last, f"{kernel}, {architecture}: the last rule should have no condition"
            assert all(rule.get("when") for rule in others), (
                f"{kernel}, {architecture}: a rule is unreachable"
            )
            for rule in rules:
                values = [value for name, value in rule.items() if name != "when"]
                assert values
                assert all(type(value) is int and value >= 0 for value in values), kernel
    assert all(target.startswith("sm_") for target in tables["like"].values())
