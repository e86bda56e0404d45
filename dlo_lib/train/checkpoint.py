"""Checkpoints between two optimiser steps, from which a run goes on bit for bit: a folder that is whole or absent.

``step-000100/`` holds the model as a Hugging Face checkpoint (``config.json``, ``model*.safetensors``), ``optimizer.safetensors`` (each
tensor named ``<state>.<parameter>``), ``rank-00000.safetensors`` for every rank (random states, place in the data) and
``checkpoint.json`` with all else, and with the size and CRC-32 of every file. Nothing is pickled: a checkpoint from anywhere can be read
without running its code. Sharded training writes no whole model: ``sharded/`` is in the format of ``torch.distributed.checkpoint``, every
rank's shards in a file of its own, and may be resumed on another number of ranks. (That format is pickled.)

It is written as ``.step-000100.part``, synced and renamed when every rank has written its share; then ``latest``, a link, is turned to
it; older ones are removed last. So whatever happens in between, the newest folder of that name is whole.

Cost: 12 bytes a parameter on disk (fp32 and AdamW), and one reading of what was written.
"""

from __future__ import annotations

import json
import os
import shutil
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dlo_lib.errors import UserError
from dlo_lib.files import write_text
from dlo_lib.models.checkpoint import save_checkpoint, save_config
from dlo_lib.parallel.forms import FORMS, Parallel, Sharded
from dlo_lib.train.config import TrainConfig
from dlo_lib.train.control import Control
from dlo_lib.train.disk import writing
from dlo_lib.train.state import RankState, TrainState, load_optimizer, load_place_in_data, load_rank, save_optimizer, save_rank

MANIFEST = "checkpoint.json"
OPTIMIZER = "optimizer.safetensors"
SHARDED = "sharded"
LATEST = "latest"


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint on disk, and what its ``checkpoint.json`` says."""

    folder: Path
    step: int
    tokens: int
    world_size: int
    config: dict[str, Any]
    scaler: dict[str, Any] | None

    def restore(self, state: TrainState, rank: int, world_size: int, control: Control) -> None:
        """Put back the optimiser, the scaler, the sampler and, on as many ranks as before, this rank's random states; called by every
        rank. Shards are read here; a model that is whole was loaded when it was built.
        """
        sharded = _is_sharded(self.config["parallel"])
        if sharded:
            from dlo_lib.parallel.sharded_checkpoint import Spread, load_sharded  # 0.7 s on each rank, which others need not pay

            assert isinstance(state.spread, Spread)
            load_sharded(self.folder / SHARDED, state.spread, state.optimizer)
        with control.together():
            if not sharded:
                load_optimizer(self.folder / OPTIMIZER, state)
            if world_size == self.world_size:
                load_rank(self.folder / _rank_file(rank), state)
            else:
                load_place_in_data(self.folder / _rank_file(0), state)
        if state.scaler is not None and self.scaler is not None:
            state.scaler.load_state_dict(self.scaler)
        state.step, state.tokens = self.step, self.tokens


def folder_of(out: Path) -> Path:
    """Where the checkpoints of a run lie."""
    return out / "checkpoints"


def newest(out: Path) -> Checkpoint | None:
    """The newest checkpoint of a run, every byte of it verified; None when there is none.

    Raises:
        UserError: it is damaged; the message names the file, and the newest one before it that is whole.
    """
    folders = _steps(out)
    if not folders:
        return None
    try:
        return _verified(folders[-1])
    except UserError as error:
        for folder in reversed(folders[:-1]):
            try:
                _verified(folder)
            except UserError:
                continue
            raise UserError(f"{error}: remove {folders[-1]} and resume again, from {folder.name}, which is whole") from error
        raise UserError(f"{error}, and no checkpoint before it is whole: choose another --out and start again") from error


def save(state: TrainState, config: TrainConfig, rank: int, world_size: int, control: Control) -> Path:
    """Write the checkpoint of ``state.step``, called by every rank; return its folder.

    Rank 0 writes what is the same on all ranks, every rank its own. Each phase ends when all ranks have done it.

    Raises:
        AgreedError: the disk is full or cannot be written to. The earlier checkpoints are as they were.
    """
    target = folder_of(config.out) / f"step-{state.step:06d}"
    aside = target.with_name(f".{target.name}.part")
    sharded = _is_sharded(config.parallel)
    try:
        with control.together(), writing(target):
            if rank == 0:
                for left in target.parent.glob(".step-*.part"):  # by a run that was killed
                    shutil.rmtree(left)
                aside.mkdir(parents=True)
        if sharded:
            from dlo_lib.parallel.sharded_checkpoint import Spread, save_sharded  # as above

            assert isinstance(state.spread, Spread)
            save_sharded(aside / SHARDED, state.spread, state.optimizer)
        with control.together(), writing(target):
            save_rank(aside / _rank_file(rank), state, RankState.now())
            if rank == 0 and sharded:
                save_config(state.model.config, aside)
            elif rank == 0:
                save_checkpoint(state.model, aside)
                save_optimizer(aside / OPTIMIZER, state)
        with control.together(), writing(target):
            if rank == 0:
                _write_manifest(aside, state, config, world_size)
                _put_in_place(aside, target)
                for old in _steps(config.out)[: -config.keep]:
                    shutil.rmtree(old)
    except BaseException:
        if rank == 0:
            shutil.rmtree(aside, ignore_errors=True)
        raise
    return target


def _is_sharded(form: Parallel | str) -> bool:
    """Whether every rank writes what it alone holds."""
    return FORMS[Parallel(form)].sharded is not Sharded.NOTHING


def _write_manifest(folder: Path, state: TrainState, config: TrainConfig, world_size: int) -> None:
    files = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        files[path.relative_to(folder).as_posix()] = {"bytes": path.stat().st_size, "crc32": _crc32(path)}
        _sync(path)
    manifest = {
        "step": state.step,
        "tokens": state.tokens,
        "world_size": world_size,
        "config": config.plain(),
        "scaler": state.scaler.state_dict() if state.scaler is not None else None,
        "files": files,
    }
    write_text(folder / MANIFEST, json.dumps(manifest, indent=1) + "\n")


def _put_in_place(aside: Path, target: Path) -> None:
    _sync(aside)
    os.replace(aside, target)
    link = target.with_name(f".{LATEST}.part")
    link.unlink(missing_ok=True)
    link.symlink_to(target.name)
    os.replace(link, target.with_name(LATEST))
    _sync(target.parent)


def _verified(folder: Path) -> Checkpoint:
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        files = manifest.pop("files")
        checkpoint = Checkpoint(folder=folder, **manifest)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(f"{path} is missing or damaged") from error
    for name, expected in files.items():
        file = folder / name
        if not file.is_file():
            raise UserError(f"{file} is missing")
        size = file.stat().st_size
        if size != expected["bytes"]:
            raise UserError(f"{file} is truncated ({size:,} of {expected['bytes']:,} bytes)")
        if _crc32(file) != expected["crc32"]:
            raise UserError(f"{file} is damaged (its checksum differs)")
    return checkpoint


def _steps(out: Path) -> list[Path]:
    """The folders of whole checkpoints, oldest first."""
    return sorted(folder_of(out).glob("step-*"), key=lambda folder: int(folder.name.removeprefix("step-")))


def _rank_file(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def _crc32(path: Path) -> int:
    value = 0
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            value = zlib.crc32(block, value)
    return value


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
