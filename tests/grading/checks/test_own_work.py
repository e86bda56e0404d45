"""What the library does, where one's own is asked."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import CheckpointFunction, checkpoint

from dlo_lib.grading.checks.own_work import LibraryUsed, without


class Inherited(torch.amp.GradScaler):
    def __init__(self) -> None:
        super().__init__("cpu")


def test_a_class_its_heirs_and_older_objects_and_a_renamed_function_are_refused() -> None:
    older, arguments = torch.amp.GradScaler("cpu"), (torch.zeros(1, 2), torch.tensor([1]))
    with without("torch.amp.GradScaler", "torch.nn.functional.cross_entropy"):
        for use in (Inherited, older.get_scale, lambda: cross_entropy(*arguments)):
            with pytest.raises(LibraryUsed, match="does what you are asked to write: write it yourself"):
                use()
    assert Inherited().get_scale() == 65536
    assert cross_entropy(*arguments) > 0
    with without("torch.utils.checkpoint.checkpoint", "torch.utils.checkpoint.CheckpointFunction"):
        for each in (lambda: checkpoint(torch.tanh, arguments[0]), lambda: CheckpointFunction.apply(0, True)):
            with pytest.raises(LibraryUsed, match="write it yourself"):
                each()
    assert checkpoint(torch.tanh, arguments[0], use_reentrant=False).shape == (1, 2)
    with pytest.raises(TypeError, match="no plain function"), without("torch.nn.functional.linear"):
        pass
