"""The state of a run between two steps and its files: tensors as safetensors, other values as JSON in their
header.

In addition to the model, the state has that of the optimiser (such as moments and step counts), the fp16
scaler, the position of the sampler, and the random states of Python, NumPy and PyTorch (of the CPU and of the
GPU of this rank). With all of these, a run resumes bit for bit."""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from dlo_lib.base.files import full_disk_as_os_error
from dlo_lib.data import RankSampler
from dlo_lib.models import Llama
from dlo_lib.optim.averaging import WeightAverage
from dlo_lib.optim.schedule_free import ScheduleFreeAdamW
from dlo_lib.parallel.protocol import ParallelModel
from dlo_lib.train.compiled import Compiled


@dataclass
class TrainState:
    """The state of a run.

    Attributes:
        model: the plain module inside ``spread``.
        spread: the wrapper that distributes the model over the ranks.
        parameters: the number of parameters of the model on all ranks together.
        group: the data-parallel ranks.
        saves_in_parts: whether every rank writes its shards to a checkpoint.
        tokens: the number of valid tokens so far on all ranks.
        compiled: what this rank compiles; None without ``--compile``.
        average: of the weights; None without ``--average``.
    """

    model: Llama
    spread: nn.Module
    parameters: int
    optimizer: torch.optim.Optimizer
    sampler: RankSampler
    scaler: torch.amp.GradScaler | None
    group: dist.ProcessGroup | None = None
    saves_in_parts: bool = False
    step: int = 0
    tokens: int = 0
    compiled: Compiled | None = None
    average: WeightAverage | None = None

    @contextlib.contextmanager
    def averaged(self) -> Iterator[bool]:
        """Let the model hold the average of its weights in the block, if there is one, and yield whether
        there is. The weights of a schedule-free optimiser have one too."""
        source: WeightAverage | ScheduleFreeAdamW | None = None
        if self.average is not None and self.average.begun:
            source = self.average
        elif isinstance(self.optimizer, ScheduleFreeAdamW):
            source = self.optimizer
        with contextlib.nullcontext() if source is None else source.swapped():
            yield source is not None


@dataclass(frozen=True)
class RankSnapshot:
    """The random states of one rank: ``tensors``, and ``plain`` for JSON."""

    tensors: dict[str, Tensor]
    plain: dict[str, Any]

    @classmethod
    def now(cls) -> RankSnapshot:
        kind, keys, *rest = np.random.get_state(legacy=True)
        tensors = {
            "torch": torch.get_rng_state(),
            "numpy": torch.from_numpy(np.asarray(keys, dtype=np.int64)),
        }
        if torch.cuda.is_available():
            tensors["cuda"] = torch.cuda.get_rng_state()
        return cls(tensors, {"python": random.getstate(), "numpy": [kind, *rest]})

    def put_back(self) -> None:
        version, keys, gauss = self.plain["python"]
        random.setstate((version, tuple(keys), gauss))
        kind, *rest = self.plain["numpy"]
        np.random.set_state((kind, self.tensors["numpy"].numpy().astype(np.uint32), *rest))
        torch.set_rng_state(self.tensors["torch"])
        if "cuda" in self.tensors:
            torch.cuda.set_rng_state(self.tensors["cuda"])


def seed_everything(seed: int) -> None:
    """Seed Python, NumPy and PyTorch on all devices."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def save_rank(path: Path, state: TrainState, random_state: RankSnapshot) -> None:
    plain = {"random": random_state.plain, "sampler": state.sampler.state_dict()}
    _write(path, random_state.tensors, plain)


def load_rank(path: Path, state: TrainState) -> None:
    """Restore the state that ``save_rank`` wrote on this rank."""
    tensors, plain = _read(path)
    state.sampler.load_state_dict(plain["sampler"])
    RankSnapshot(tensors, plain["random"]).put_back()


def load_place_in_data(path: Path, state: TrainState) -> None:
    """Restore the position in the data from the file of any rank, without the random state of that rank."""
    _, plain = _read(path)
    state.sampler.load_state_dict(plain["sampler"])


def save_optimizer(path: Path, state: TrainState) -> None:
    """Write the tensors, named ``<state>.<parameter>`` such as ``exp_avg.norm.weight``.

    The header has the hyperparameters of each group.
    """
    names: dict[Tensor, str] = {parameter: name for name, parameter in state.model.named_parameters()}
    tensors = {
        f"{key}.{names[parameter]}": value.detach().contiguous()
        for parameter, values in state.optimizer.state.items()
        for key, value in values.items()
    }
    groups = [
        {**group, "params": [names[parameter] for parameter in group["params"]]}
        for group in state.optimizer.param_groups
    ]
    _write(path, tensors, {"groups": groups})


def load_optimizer(path: Path, state: TrainState) -> None:
    """Load what ``save_optimizer`` wrote: all of it, or this rank's part of it."""
    tensors, plain = _read(path)
    by_param: dict[str, dict[str, Tensor]] = {}
    for full_name, tensor in tensors.items():
        key, name = full_name.split(".", 1)
        by_param.setdefault(name, {})[key] = tensor
    if state.saves_in_parts:
        assert isinstance(state.spread, ParallelModel)
        # 0.7 s on each rank, which others need not pay
        from dlo_lib.parallel.checkpoint import load_whole_optimizer

        load_whole_optimizer(state.spread, state.optimizer, by_param, plain["groups"])
        return
    order = [name for group in plain["groups"] for name in group["params"]]
    index = {name: number for number, name in enumerate(order)}
    groups = [{**group, "params": [index[name] for name in group["params"]]} for group in plain["groups"]]
    values = {index[name]: found for name, found in by_param.items()}
    state.optimizer.load_state_dict({"state": values, "param_groups": groups})


def _write(path: Path, tensors: dict[str, Tensor], plain: dict[str, Any]) -> None:
    with full_disk_as_os_error():
        save_file(tensors, path, metadata={"state": json.dumps(plain)})


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, json.loads(file.metadata()["state"])  # noqa: SIM118
