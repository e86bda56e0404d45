"""The training script: ``python -m dlo_lib.train`` under torchrun, srun or alone, or
``train(TrainConfig(...))``.

The training:

- ``config``: what defines a run
- ``option``: what an option has beside its value
- ``config_checks``: which values are refused
- ``config_file``: its options from a TOML file
- ``prepare``: builds data, model and optimiser
- ``loop``: reads, steps, reports and saves
- ``control``: decisions of all ranks: stop, or a rank has failed
- ``compiled``: ``--compile``
- ``fp8``: ``--fp8``
- ``batch_search``: ``--batch auto``

Checkpoints:

- ``checkpoint``: saves and restores
- ``state``: the state as files
- ``disk``: errors of the file system in one line

What a run reports:

- ``report``: lines of metrics on rank 0
- ``tracking``: the record of a run, and its curves in TensorBoard or MLflow
- ``mlflow_store``: runs in MLflow
- ``metrics``: ``metrics.jsonl``
- ``clock``: the parts of a step
- ``progress``: a bar or text lines
- ``board``: TensorBoard in a notebook
- ``compare``: runs in a table
- ``curves``: smoothed curves of runs in a figure

The room imports ``profiling``, ``parallel``, ``kernels``, ``optim``, ``models``, ``data``, ``launch``,
``comm`` and ``hardware``.
"""

import dlo_lib.base.stop  # noqa: F401  first: under `python -m dlo_lib.train` it notes signals during the imports
from dlo_lib.base.garbage import without_collector

with without_collector():  # a fifth of the CPU time of a process that imports torch here
    from dlo_lib.train.checkpoint import Checkpoint, newest
    from dlo_lib.train.config import TrainConfig
    from dlo_lib.train.loop import TrainResult, train
    from dlo_lib.train.metrics import Metrics, read_metrics
    from dlo_lib.train.tracking import track

__all__ = ["Checkpoint", "Metrics", "TrainConfig", "TrainResult", "newest", "read_metrics", "track", "train"]
