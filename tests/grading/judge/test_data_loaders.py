"""An answer may load its data with the workers of a ``DataLoader``, in the judge as in the notebook."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dlo_lib.grading.judge.report import Report

ANSWER = """
from torch.utils.data import DataLoader, Dataset


class Rows(Dataset):
    def __init__(self, x):
        self.x = x

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index].float().abs().max() / 127


def absmax_scale(x):
    return torch.cat(list(DataLoader(Rows(x), batch_size=4, num_workers=1)))
"""


def test_workers_know_the_classes_of_the_notebook(
    judge: Callable[..., Report], reference: dict[str, Any]
) -> None:
    for cell in reference["cells"]:
        cell["source"] = ANSWER if cell["id"] == "scale" else cell["source"]
    report = judge(reference)
    scale = report.questions["scale"]
    assert scale.points == 3, [check.message for check in scale.checks]
