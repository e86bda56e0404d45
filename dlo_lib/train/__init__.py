"""The one training script: ``python -m dlo_lib.train`` under torchrun, srun or alone; from Python ``train(TrainConfig(...))``."""

from dlo_lib.train.checkpoint import Checkpoint, newest
from dlo_lib.train.config import TrainConfig
from dlo_lib.train.loop import TrainResult, train
from dlo_lib.train.metrics import Metrics, read_metrics

__all__ = ["Checkpoint", "Metrics", "TrainConfig", "TrainResult", "newest", "read_metrics", "train"]
