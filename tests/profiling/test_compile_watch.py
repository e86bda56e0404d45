"""A watch reports the work of Dynamo, with lines and causes, from its beginning to its end only."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dlo_lib.profiling import compile_watch
from dlo_lib.profiling.compile_reasons import BreakCause, GuardCause
from dlo_lib.profiling.compile_watch import CompileReport, GraphBreak, watch_compilation


@pytest.fixture(autouse=True)
def reset_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def compiled(function):
    return torch.compile(function, backend="eager")


def branching(x):
    if x.sum() > 0:
        return x + 1
    return x - 1


def printing(x):
    print("a step")
    return x * 2


def number(x):
    return x * x.sum().item()


def selecting(x):
    return x[x > 0].sum()


def whole(x):
    return torch.where(x.sum() > 0, x + 1, x - 1)


@pytest.mark.parametrize(
    ("function", "cause", "source"),
    [
        (branching, BreakCause.BRANCH, "if x.sum() > 0:"),
        (printing, BreakCause.OUTPUT, 'print("a step")'),
        (number, BreakCause.SCALAR, "return x * x.sum().item()"),
        (selecting, BreakCause.SHAPE, "return x[x > 0].sum()"),
    ],
)
def test_a_break_is_reported_with_its_line_its_cause_and_its_cure(function, cause, source):
    with watch_compilation() as watch:
        compiled(function)(torch.ones(4))
    (broken,) = watch.report.breaks
    assert broken.cause is cause
    assert broken.source == source
    assert broken.file == __file__
    assert function.__code__.co_firstlineno < broken.line
    assert cause.cure in str(watch.report)
    assert source in str(watch.report)


def test_a_whole_graph_has_no_break():
    with watch_compilation() as watch:
        compiled(whole)(torch.ones(4))
    assert len(watch.report.graphs) == 1
    assert not watch.report.breaks
    assert not watch.report.recompilations
    assert watch.report.graphs[0].function == "whole"
    assert watch.report.seconds > 0


def test_a_new_size_is_a_recompilation_and_a_third_is_not():
    function = compiled(whole)
    with watch_compilation() as watch:
        for size in (3, 4, 5, 6):  # the second graph has a symbolic size
            function(torch.ones(size))
    (again,) = watch.report.recompilations
    assert again.cause is GuardCause.SIZE
    assert again.function == "whole"
    assert [graph.number for graph in watch.report.graphs] == [0, 1]


def test_an_attribute_that_changes_recompiles_at_each_step():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.steps = 0

        def forward(self, x):
            self.steps += 1
            return x * self.steps

    module = compiled(Counting())
    with watch_compilation() as watch:
        for _ in range(4):
            module(torch.ones(3))
    assert [again.cause for again in watch.report.recompilations] == [GuardCause.ATTRIBUTE] * 3


def test_a_function_with_a_break_in_a_loop_runs_in_python_as_a_whole():
    def looping(x):
        total = x.new_zeros(())
        for number in range(3):
            total = total + x[x > number].sum()
        return total

    with watch_compilation() as watch:
        compiled(looping)(torch.ones(4))
    (left,) = watch.report.left
    assert left.cause is BreakCause.SHAPE
    assert left.source == "total = total + x[x > number].sum()"
    assert "left to Python as a whole" in str(watch.report)
    assert watch.report.graphs == ()


def test_above_the_limit_of_recompilations_the_report_names_the_limit():
    function = torch.compile(lambda x: x + x.shape[0], backend="eager", dynamic=False)
    with watch_compilation() as watch:
        for size in range(2, 14):
            function(torch.ones(size))
    assert len(watch.report.graphs) == torch._dynamo.config.recompile_limit
    assert {left.cause for left in watch.report.left} == {BreakCause.LIMIT}


def test_compilations_outside_of_a_watch_are_not_reported():
    compiled(branching)(torch.ones(4))
    with watch_compilation() as watch:
        compiled(branching)(torch.ones(4))
    assert watch.report.graphs == ()
    assert watch.report.breaks == ()
    assert watch.report.seconds == 0


def test_watches_nest():
    with watch_compilation() as outer:
        with watch_compilation() as inner:
            compiled(whole)(torch.ones(4))
        compiled(branching)(torch.ones(4))
    assert len(inner.report.graphs) == 1
    assert not inner.report.breaks
    assert len(outer.report.graphs) == 3
    assert len(outer.report.breaks) == 1


def test_more_graphs_than_dynamo_keeps_by_default_are_all_reported():
    with watch_compilation() as watch:
        for count in range(70):  # Dynamo keeps 64 records by default
            scope: dict = {}
            # With the name of a file, because some releases skip functions without one.
            exec(compile(f"def f(x): return x + {count}", __file__, "exec"), scope)
            compiled(scope["f"])(torch.ones(2))
    assert len(watch.report.graphs) == 70


def test_a_watch_reports_although_the_code_raised():
    def failing(x):
        y = x + 1
        raise ValueError(y.shape)

    with pytest.raises(ValueError), watch_compilation() as watch:
        compiled(whole)(torch.ones(3))
        failing(torch.ones(3))
    assert len(watch.report.graphs) == 1


def test_a_release_without_the_list_of_breaks_is_reported(monkeypatch):
    import torch._dynamo.utils as utils

    monkeypatch.delattr(utils, "graph_break_reasons")
    monkeypatch.delattr(utils.CompilationMetrics, "recompile_reason")
    with watch_compilation() as watch:
        compiled(whole)(torch.ones(3))
    assert watch.report.missing == ("where graphs break", "why code is compiled again")
    assert "not known with this version of torch: where graphs break" in str(watch.report)


def test_a_release_that_names_no_guard_has_an_unknown_cause(monkeypatch):
    function = compiled(whole)
    monkeypatch.setattr(compile_watch, "_reason", lambda record: None)
    with watch_compilation() as watch:
        function(torch.ones(3))
        function(torch.ones(4))
    assert [again.cause for again in watch.report.recompilations] == [GuardCause.UNKNOWN]


def test_a_line_of_a_notebook_is_a_line_of_a_cell():
    place = ("/tmp/ipykernel_12/3672487079.py", 3, "if n > limit:", "generic_jump TensorVariable()")
    report = CompileReport(breaks=(GraphBreak(BreakCause.BRANCH, *place),))
    assert "graph break at line 3 of a cell: if n > limit:" in str(report)
