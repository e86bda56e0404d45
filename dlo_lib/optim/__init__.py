"""The training step and what it is made of; learning rates: their schedules, and the test that finds them."""

from dlo_lib.optim.adapter import ScheduleLR
from dlo_lib.optim.finder import RangeTest, Suggestion, range_test, range_test_with_reset
from dlo_lib.optim.plateau import PlateauState, ReduceOnPlateau
from dlo_lib.optim.snapshots import SnapshotEnsemble
from dlo_lib.optim.step import IGNORE_INDEX, Phase, Precision, StepResult, train_step

__all__ = [
    "IGNORE_INDEX",
    "Phase",
    "PlateauState",
    "Precision",
    "RangeTest",
    "ReduceOnPlateau",
    "ScheduleLR",
    "SnapshotEnsemble",
    "StepResult",
    "Suggestion",
    "range_test",
    "range_test_with_reset",
    "train_step",
]
