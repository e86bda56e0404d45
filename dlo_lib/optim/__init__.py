"""The training step, learning-rate schedules and the learning-rate range test.

``step`` is the training step of training and profiling. ``schedules``, ``plateau`` and ``adapter`` set the
learning rate, ``finder`` runs the range test, ``snapshots`` averages models, ``early_stopping`` ends a
training. ``precision`` has low-precision formats, loss scaling and master weights. The room imports
``data``.
"""

from dlo_lib.optim.adapter import ScheduleLR
from dlo_lib.optim.early_stopping import EarlyStopping
from dlo_lib.optim.finder import RangeTest, Suggestion, range_test, range_test_with_reset
from dlo_lib.optim.plateau import PlateauState, ReduceOnPlateau
from dlo_lib.optim.snapshots import SnapshotEnsemble
from dlo_lib.optim.step import IGNORE_INDEX, Phase, Precision, StepResult, train_step

__all__ = [
    "IGNORE_INDEX",
    "EarlyStopping",
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
