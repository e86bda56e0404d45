"""The training step, the optimisers, learning-rate schedules and the learning-rate range test.

- ``step``: the step of training and profiling

Optimisers:

- ``registry``: all of them by name, for training, profiling, search and labs
- ``entry``: what the library must know about one
- ``foreach_step``: the step that those of this library share
- ``moments``: Adam's direction, and ratios of norms
- ``in_backward``: AdamW inside the backward
- ``lion``: the sign of an average of gradients
- ``lars``: SGD with one rate for each layer
- ``lamb``: Adam with one rate for each layer
- ``muon``: orthogonal updates of matrices
- ``soap``: Adam in the eigenbases of Shampoo
- ``adafactor``: Adam's second moment from means of rows and columns
- ``adamw_8bit``: AdamW with states of 8 bits
- ``schedule_free``: AdamW with an average in place of a schedule
- ``flat_moments``: Adam's averages as one tensor, for optimisers that send them in one bit
- ``one_bit_adam``: Adam that sends its momentum in one bit
- ``one_bit_lamb``: LAMB that sends its momentum in one bit
- ``zero_one_adam``: Adam whose steps send one bit of each element, and later mostly nothing

The learning rate:

- ``schedules``: functions from the number of steps to a factor
- ``batch_rules``: the rate for another batch
- ``adapter``: a schedule as a PyTorch scheduler
- ``plateau``: a rate that falls with the loss
- ``finder``: the range test
- ``saved_state``: saves a model and its optimiser before the test, and restores them
- ``draw``: figures of schedules and tests

The minimum that a training found:

- ``curvature``: the largest eigenvalue and the trace of the Hessian
- ``landscape``: the loss on a plane through the weights

The end of a training:

- ``early_stopping``: stops when the validation loss no longer falls
- ``averaging``: an average of the weights, EMA or SWA
- ``snapshots``: saves a model at the end of each cycle, and predicts with all of them

Number formats:

- ``precision``: number formats, loss scaling and master weights
- ``fp8_blocks``: 8-bit products in the blocks of a Llama

The room imports ``kernels``, ``data``, ``models`` and ``comm``; only the registry imports ``kernels``.
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
