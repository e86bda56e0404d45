"""The table of two forms shows what was measured; lines of code are those that a reader has to read."""

import inspect
import linecache

import pytest

from dlo_lib.labkit.side_by_side import Form, lines_of, table


def test_only_measured_columns_are_shown():
    header, mine, torchs = table(
        [Form("yours", lines=31, nbytes=2048), Form("torch DDP", lines=2, nbytes=2048.0)]
    ).splitlines()
    assert header.split() == ["communicated", "lines", "of", "code"]
    assert mine.split() == ["yours", "2", "KiB", "31"]
    assert torchs.split() == ["torch", "DDP", "2", "KiB", "2"]


def test_a_missing_value_is_a_dash():
    assert table([Form("a", seconds=0.0012), Form("b")]).splitlines()[2].split() == ["b", "-"]


def test_comments_docstrings_and_empty_lines_are_no_code():
    code = '''
    class A:
        """A docstring
        of two lines."""

        # a comment
        def f(self, x):
            """Another."""
            return (x
                    + 1)
    '''
    assert lines_of(code) == 3
    assert lines_of(code, "x = 1") == 4


def test_a_class_of_a_notebook_is_counted_by_its_methods():
    text = "class A:\n    def f(self):\n        return 1\n\n    def g(self):\n        return 2\n"
    linecache.cache["<cell>"] = (len(text), None, text.splitlines(True), "<cell>")
    namespace = {"__name__": "__main__"}
    exec(compile(text, "<cell>", "exec"), namespace)
    assert lines_of(namespace["A"]) == 5


def test_every_kind_of_method_of_a_class_is_counted():
    text = (
        "class B:\n    @staticmethod\n    def f(x):\n        return x\n\n"
        "    @staticmethod\n    def g(x):\n        return -x\n"
    )
    more = (
        "class C:\n    @classmethod\n    def f(cls):\n        return 1\n\n"
        "    @property\n    def g(self):\n        return 2\n"
    )
    for name, source in (("B", text), ("C", more)):
        file = f"<cell {name}>"
        linecache.cache[file] = (len(source), None, source.splitlines(True), file)
        namespace = {"__name__": "__main__"}
        exec(compile(source, file, "exec"), namespace)
        assert lines_of(namespace[name]) == 7


@pytest.mark.parametrize("other", ["import sys\n", "class Other:\n    pass\n", "    if True\n"])
def test_lines_of_another_file_are_not_counted(monkeypatch, other):
    """Python 3.13 takes the lines of a class of a notebook from the file of the running program."""
    text = "class D:\n    def f(self):\n        return 1\n"
    linecache.cache["<cell D>"] = (len(text), None, text.splitlines(True), "<cell D>")
    namespace = {"__name__": "__main__"}
    exec(compile(text, "<cell D>", "exec"), namespace)
    real = inspect.getsource
    monkeypatch.setattr(inspect, "getsource", lambda code: other if inspect.isclass(code) else real(code))
    assert lines_of(namespace["D"]) == 3


def test_without_a_source_there_is_no_number(monkeypatch):
    # as Python 3.13 stores it in a process that `python -c` has started
    monkeypatch.setitem(linecache.cache, "<string>", (9, None, ["import sys\n"], "<string>"))
    namespace = {}
    exec("def f(): return 1", namespace)
    assert lines_of(namespace["f"]) is None
