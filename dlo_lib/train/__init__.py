"""The training script: ``python -m dlo_lib.train`` under torchrun, srun or alone, or
``train(TrainConfig(...))``.

``config`` defines a run, ``prepare`` builds it, ``loop`` trains, ``checkpoint`` and ``state`` save and
restore. ``compiled`` and ``fp8`` make the blocks faster, and ``batch_search`` finds the largest batch.
``metrics`` and ``clock`` measure, ``board`` writes to TensorBoard. The room imports ``profiling`` and the
floors below it.
"""

import dlo_lib.stop  # noqa: F401  first: under `python -m dlo_lib.train` it notes signals during the imports
from dlo_lib.train.checkpoint import Checkpoint, newest
from dlo_lib.train.config import TrainConfig
from dlo_lib.train.loop import TrainResult, train
from dlo_lib.train.metrics import Metrics, read_metrics

__all__ = ["Checkpoint", "Metrics", "TrainConfig", "TrainResult", "newest", "read_metrics", "train"]
