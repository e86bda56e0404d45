"""Functions, arguments and results are sent by value, wherever they are defined."""

import importlib.util
import sys
import textwrap
from dataclasses import dataclass
from types import CodeType

import cloudpickle
import pytest
import torch
import torch.distributed as dist

from dlo_lib.launch import run_ranks
from dlo_lib.launch.values import pack_call, pack_result, unpack_call, unpack_result


@dataclass
class Point:
    x: int


def test_a_result_has_the_callers_class():
    def make(point: Point) -> Point:
        return Point(point.x + dist.get_rank())

    results = run_ranks(make, 2, Point(1))
    assert results == [Point(1), Point(2)]
    assert all(type(result) is Point for result in results)


def test_a_function_may_use_dist_and_an_attribute_called_config():
    class Model:
        config = 3

    def total(model: Model) -> int:
        return dist.get_rank() + model.config

    def backend() -> bool:
        return torch.distributed.config is sys.modules["torch.distributed.config"]

    pytest.importorskip("torch.distributed.config")  # 2.8 has none
    values = [unpack_call(pack_call(fn, given, {})) for fn, given in ((total, (Model(),)), (backend, ()))]
    assert [fn.__name__ for fn, *_ in values] == ["total", "backend"]
    _, (model,), _ = values[0]
    assert model.config == 3
    assert values[1][0]()


def test_a_class_of_a_notebook_passes_between_ranks():
    """``all_gather_object`` pickles, and pickle looks for a notebook's classes in ``__main__``."""
    cell = """
from dataclasses import dataclass
import torch.distributed as dist

@dataclass
class Loss:
    value: float

def gather():
    everybody = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, Loss(float(dist.get_rank())))
    return everybody
"""
    main = sys.modules["__main__"]
    try:
        exec(compile(cell, "<cell>", "exec"), vars(main))
        results = run_ranks(main.gather, 2)
        assert results == [[main.Loss(0.0), main.Loss(1.0)]] * 2
    finally:
        for name in ("Loss", "gather"):
            vars(main).pop(name, None)


@pytest.fixture
def in_main():
    """Return a function that runs a cell in ``__main__`` and returns that module."""
    main = sys.modules["__main__"]
    before = dict(vars(main))

    def run(cell: str):
        exec(compile(textwrap.dedent(cell), "<cell>", "exec"), vars(main))
        return main

    yield run
    for name in vars(main).keys() - before.keys():
        del vars(main)[name]


def compiled(functions: dict) -> list[float]:
    """Return what a function computes as one graph of torch.compile."""
    return torch.compile(functions["step"], backend="eager", fullgraph=True)(torch.ones(2)).tolist()


def test_a_decorated_function_of_a_notebook_is_compiled(in_main):
    """torch.compile looks for ``torch`` and ``twice`` in ``__main__``: the wrapper is of another module."""
    main = in_main("""
        import torch

        def twice(x):
            return torch.add(x, x)

        @torch.no_grad()
        def step(x):
            return torch.sub(twice(x), 3)
    """)
    assert run_ranks(compiled, 1, {"step": main.step}) == [[-1.0, -1.0]]


def test_functions_of_main_share_the_globals_of_the_ranks_main(in_main):
    main = in_main("""
        COUNT = 0

        def count():
            global COUNT
            COUNT += 1
            return COUNT

        class Counter:
            def up(self):
                return count()
    """)

    def both(values: list) -> tuple:
        counter, function = values
        counter.up(), function()
        return sys.modules["__main__"].COUNT, function.__globals__ is vars(sys.modules["__main__"])

    assert run_ranks(both, 2, [main.Counter(), main.count]) == [(2, True)] * 2
    assert main.COUNT == 0, "the caller's is unchanged"
    *_, (held,) = unpack_call(pack_call(print, (), {"held": [main.count]}))[2].values()
    assert held() == 1
    assert main.COUNT == 0, "without a rank a call has globals that are not the reader's"


def test_code_keeps_the_name_of_its_file(monkeypatch):
    """cloudpickle 3.1.3 replaces it: then a stack shows no cell."""

    def outer():
        def inner():
            return None

        return inner

    def without_file(code):
        code_type, given = original(code)
        return code_type, tuple("<dynamic-code>" if value == code.co_filename else value for value in given)

    table = cloudpickle.Pickler._dispatch_table
    original = table[CodeType]
    monkeypatch.setitem(table, CodeType, without_file)
    assert cloudpickle.loads(cloudpickle.dumps(outer)).__code__.co_filename == "<dynamic-code>"
    (sent, *_), (back,) = unpack_call(pack_call(outer, (), {})), unpack_result(pack_result([outer]))
    for function in (sent, back, sent(), back()):
        assert function.__code__.co_filename == __file__


def test_a_module_that_was_loaded_from_a_path_need_not_be_importable(tmp_path):
    file = tmp_path / "loose.py"
    file.write_text(
        "FACTOR = 3\ndef helper(x):\n    return x * FACTOR\ndef entry(x):\n    return helper(x)\n"
    )
    spec = importlib.util.spec_from_file_location("loose", file)
    module = importlib.util.module_from_spec(spec)
    sys.modules["loose"] = module
    try:
        spec.loader.exec_module(module)
        assert run_ranks(module.entry, 2, 2) == [6, 6]
    finally:
        del sys.modules["loose"]


def test_each_rank_imports_the_present_version_of_a_module(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    file = tmp_path / "edited_module.py"
    file.write_text("def version():\n    return 1\n")
    module = importlib.import_module("edited_module")
    monkeypatch.setitem(sys.modules, "edited_module", module)
    assert run_ranks(module.version, 1) == [1]
    file.write_text("def version():\n    return 'two'\n")
    assert run_ranks(module.version, 1) == ["two"]


def test_other_keywords_than_timeout_are_passed_to_the_function():
    def echo(**kwargs: int) -> dict:
        return kwargs

    names = {"fn": 1, "world_size": 2, "rank": 3, "args": 4}
    assert run_ranks(echo, 1, **names) == [names]


def test_a_view_is_returned_without_its_storage():
    base = torch.arange(1_000_000.0)
    packed = pack_result({"part": base[10:12], "row": base.view(1000, 1000)[:, 0]})
    assert len(packed) < 20_000
    assert unpack_result(packed)["part"].tolist() == [10.0, 11.0]
    assert unpack_result(packed)["row"][1].item() == 1000.0


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6.0).view(2, 3).t(),
        torch.ones(3, requires_grad=True),
        torch.ones(3, requires_grad=True) * 2,
        torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16)),
        torch.zeros(1).expand(4),
        torch.empty(0, 3, dtype=torch.int64),
    ],
)
def test_a_tensor_keeps_values_dtype_and_requires_grad(tensor):
    back = unpack_result(pack_result(tensor))
    assert type(back) is type(tensor)
    assert torch.equal(back, tensor)
    assert (back.dtype, back.requires_grad) == (tensor.dtype, tensor.requires_grad)


def test_an_argument_that_is_a_view_is_sent_without_its_storage():
    base = torch.arange(1_000_000.0)
    packed = pack_call(print, [base[:2]], {})
    assert len(packed) < 5_000
    assert unpack_call(packed)[1][0].tolist() == [0.0, 1.0]
