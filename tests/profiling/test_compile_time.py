"""The break-even step of a compilation, the choice of the backend, and hits in a warm cache."""

from __future__ import annotations

import shutil

import pytest
import torch

from dlo_lib.base.errors import UserError
from dlo_lib.profiling import compile_time
from dlo_lib.profiling.compile_time import (
    Backend,
    CompileTimes,
    break_even_steps,
    compile_times,
    compiled_in_new_process,
    usable_backend,
)

needs_a_compiler = pytest.mark.skipif(
    not any(map(shutil.which, compile_time.COMPILERS)),
    reason="NOT TESTED HERE: no C++ compiler: apt-get install g++",
)


@pytest.mark.parametrize(
    ("compile", "eager", "compiled"),
    [(30.0, 0.5, 0.25), (1.0, 0.375, 0.25), (7.5, 1.0, 0.999), (0.1, 5.0, 1.0)],
)
def test_break_even_is_the_smallest_number_of_steps_that_compensates_the_compilation(
    compile, eager, compiled
):
    steps = break_even_steps(compile, eager, compiled)
    assert steps is not None
    assert compile + steps * compiled <= steps * eager * (1 + 1e-12)
    assert compile + (steps - 1) * compiled > (steps - 1) * eager


def test_without_a_speedup_there_is_no_break_even_unless_the_compilation_takes_no_time():
    assert break_even_steps(1.0, 0.5, 0.5) is None
    assert break_even_steps(1.0, 0.5, 0.6) is None
    assert break_even_steps(0.0, 0.5, 0.5) == 0
    assert break_even_steps(0.0, 0.5, 0.6) is None


def test_negative_times_are_refused():
    with pytest.raises(UserError, match="must not be negative"):
        break_even_steps(-1.0, 0.5, 0.2)


def test_the_first_call_is_counted_as_compiling(monkeypatch):
    calls = []

    def timed(step):
        calls.append(step())
        return {"eager": 0.5, "compiled": 10.25 if calls.count("compiled") == 1 else 0.25}[calls[-1]]

    monkeypatch.setattr(compile_time, "_seconds", timed)
    found = compile_times(lambda: "eager", lambda: "compiled", steps=3)
    assert found == CompileTimes(10.0, 0.5, 0.25)
    assert found.speedup == 2
    assert found.break_even == 40
    assert calls == ["compiled", *["eager", "compiled"] * 3]  # alternately


def test_no_step_cannot_be_timed():
    with pytest.raises(UserError, match="at least 1"):
        compile_times(lambda: None, lambda: None, steps=0)


def test_without_a_compiler_the_backend_does_not_fuse_and_the_reason_is_given(monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(compile_time.shutil, "which", lambda name: None)
    choice = usable_backend("cpu")
    assert choice.backend is Backend.AOT_EAGER
    assert "no C++ compiler" in choice.why
    assert "apt-get install g++" in choice.why


def test_the_environment_variable_cxx_names_the_compiler(monkeypatch):
    monkeypatch.setenv("CXX", "my-ccache g++")
    monkeypatch.setattr(
        compile_time.shutil, "which", lambda name: f"/opt/{name}" if name == "my-ccache" else None
    )
    choice = usable_backend("cpu")
    assert choice.backend is Backend.INDUCTOR
    assert "/opt/my-ccache" in choice.why


def test_every_backend_exists_in_torch():
    assert {backend.value for backend in Backend} <= set(torch.compiler.list_backends(exclude_tags=()))


@pytest.mark.slow
@needs_a_compiler
def test_a_cold_cache_has_a_miss_and_a_warm_cache_has_a_hit(tmp_path):
    def job():
        import torch

        torch.compile(lambda x: x.sin() + 2 * x)(torch.ones(100))

    cold, warm = compiled_in_new_process(job, tmp_path), compiled_in_new_process(job, tmp_path)
    assert (cold.hits, cold.misses) == (0, 1)
    assert (warm.hits, warm.misses) == (1, 0)
    assert len(cold.graphs) == len(warm.graphs) == 1
