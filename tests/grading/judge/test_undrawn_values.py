"""What the checks of a lab never vary: arguments, the cases of a call, and constants that earn points."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from dlo_lib.base.errors import UserError
from dlo_lib.grading.judge.undrawn_values import constant_answer, is_expression, undrawn
from dlo_lib.grading.lab.source import LabSource
from dlo_lib.grading.lab.undrawn_record import UndrawnRecord, key_of, read_undrawn, write_undrawn
from dlo_lib.grading.sandbox.host import Zygote


def test_the_arguments_that_never_vary_are_listed(small: LabSource, zygote: Zygote) -> None:
    record = undrawn(small, zygote, secrets=3)
    assert record.of == key_of(small)
    assert record.arguments, record
    assert all(value for value in record.arguments.values())
    assert any(name.endswith(").dtype") for name in record.arguments)
    assert not any(name.endswith("(x)") for name in record.arguments)  # its values are drawn


def test_a_constant_takes_the_place_of_each_result(small: LabSource) -> None:
    question = small.questions[0]
    text = constant_answer(small, question, {})
    names: dict[str, object] = {}
    exec("import torch\nfrom torch import Tensor\n" + text, names)
    functions = [value for value in names.values() if getattr(value, "__module__", "") == "builtins"]
    assert all(function(*[None] * function.__code__.co_argcount) is None for function in functions)


def test_what_is_not_plain_is_no_constant() -> None:
    assert is_expression("[1, (2.0, None)]")
    assert is_expression("torch.tensor([1], dtype=torch.int64)")
    assert not any(map(is_expression, ("an object 7", "a tensor of (3, 4)", "[nan]", "[1, 2, 1234567")))


def test_each_entry_needs_a_reason() -> None:
    record = UndrawnRecord(
        "key", {"scale: f(x).dtype": "torch.float32", "scale: f(k)": "2"}, {"mean": {"points": 1}}
    )
    assert record.without_reason() == [
        "scale: f(x).dtype is always torch.float32",
        "scale: f(k) is always 2",
        "mean: a constant earns 1",
    ]
    because = {"*.dtype": "one type", "mean": "a part", "*(no_such)": "old"}
    known = dataclasses.replace(record, because=because)
    assert known.without_reason() == ["scale: f(k) is always 2"]
    assert known.unused_reasons() == ["*(no_such)"]


def test_a_record_is_read_unchanged(tmp_path: Path) -> None:
    assert read_undrawn(tmp_path) is None
    record = UndrawnRecord("key", {"scale: f(k)": "2"}, {}, {}, {"*": "é"})
    write_undrawn(tmp_path, record)
    assert read_undrawn(tmp_path) == record
    (tmp_path / "undrawn.json").write_text("{")
    with pytest.raises(UserError, match="remove it"):
        read_undrawn(tmp_path)


def test_the_key_depends_on_code_and_not_on_comments(small: LabSource) -> None:
    (cell,) = [cell for cell in small.cells if cell.id == small.questions[0] and cell.answer]
    changed = dataclasses.replace(cell, source=f"{cell.source}\nx = 1")
    commented = dataclasses.replace(cell, source=f"{cell.source}\n# x = 1")
    key = key_of(small)
    for other, same in ((changed, False), (commented, True)):
        cells = tuple(other if each is cell else each for each in small.cells)
        assert (key_of(dataclasses.replace(small, cells=cells)) == key) is same
