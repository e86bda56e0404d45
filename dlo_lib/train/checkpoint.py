"""Checkpoints between two optimiser steps.

A run resumes from them bit for bit; a checkpoint is complete or absent.

``step-000100/`` contains the model as a Hugging Face checkpoint (``config.json``, ``model*.safetensors``),
``optimizer.safetensors`` (each tensor is named ``<state>.<parameter>``), ``rank-00000.safetensors`` for every
rank (random states, position in the data) and ``checkpoint.json`` with the remaining state and the size and
CRC-32 of every file. These files are not pickled, so a checkpoint can be read without running code from it.
Sharded training does not write a full model: ``sharded/`` has the format of ``torch.distributed.checkpoint``
(which is pickled) with one file per rank. The average of the weights (``--average``) is the folder
``average/`` beside a full model, and the state ``optimizer.state.<parameter>.average`` in ``sharded/``.

A run may resume with another plan on another number of ranks: a rank reads its parts of either form. The
random states of the ranks are restored only if the plan is the same.

A checkpoint is written as ``.step-000100.part``, synced, and renamed when every rank has written its part.
Then the link ``latest`` is set to it, and old checkpoints are removed last. The newest folder ``step-*`` is
therefore always complete.

Cost: 12 bytes per parameter on disk (fp32 and AdamW), and reading the files once for the checksums.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dlo_lib.base import progress
from dlo_lib.base.errors import UserError
from dlo_lib.base.files import write_text
from dlo_lib.models.checkpoint import save_checkpoint, save_config
from dlo_lib.parallel.protocol import ParallelModel, WholeModel
from dlo_lib.train.config import TrainConfig
from dlo_lib.train.control import Control
from dlo_lib.train.disk import writing
from dlo_lib.train.state import (
    RankSnapshot,
    TrainState,
    load_optimizer,
    load_place_in_data,
    load_rank,
    save_optimizer,
    save_rank,
)

MANIFEST = "checkpoint.json"
OPTIMIZER = "optimizer.safetensors"
SHARDED = "sharded"
AVERAGE = "average"
LATEST = "latest"
STEP = re.compile(r"step-(\d+)")  # the name of a checkpoint


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on disk, with the content of its ``checkpoint.json``.

    ``sequences`` is the number of sequences in a step of all ranks; None in checkpoints of older versions.
    """

    folder: Path
    step: int
    tokens: int
    world_size: int
    config: dict[str, Any]
    scaler: dict[str, Any] | None
    sequences: int | None = None

    @property
    def sharded(self) -> bool:
        """Whether each rank has written its part of the model."""
        return (self.folder / SHARDED).is_dir()

    def restore(
        self, state: TrainState, config: TrainConfig, rank: int, world_size: int, control: Control
    ) -> None:
        """Restore the optimiser, the scaler and the sampler; every rank calls it.

        The random states of the ranks are restored if the plan and the number of ranks are unchanged. Shards
        of the model are read here; a full model was loaded when it was built."""
        if self.sharded:
            # 0.7 s on each rank, which others need not pay
            from dlo_lib.parallel.checkpoint import load_sharded

            parts = state.spread if isinstance(state.spread, ParallelModel) else WholeModel(state.spread)
            load_sharded(self.folder / SHARDED, parts, state.optimizer)
        with control.together():
            if not self.sharded:
                load_optimizer(self.folder / OPTIMIZER, state)
            if world_size == self.world_size and config.same_plan(self.config):
                load_rank(self.folder / _rank_file(rank), state)
            else:
                load_place_in_data(self.folder / _rank_file(0), state)
        if state.scaler is not None and self.scaler is not None:
            state.scaler.load_state_dict(self.scaler)
        state.step, state.tokens = self.step, self.tokens


def folder_of(out: Path) -> Path:
    """Return the folder of the checkpoints of a run."""
    return out / "checkpoints"


def newest(out: Path) -> Checkpoint | None:
    """Return the newest checkpoint of a run after verifying all its files; None if there is no checkpoint.

    Raises:
        UserError: it is damaged; the message names the file and the newest earlier checkpoint that is
            complete.
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
            raise UserError(
                f"{error}: remove {folders[-1]} and resume from {folder.name}, which is complete"
            ) from error
        raise UserError(
            f"{error}, and no earlier checkpoint is complete: choose another --out and start again"
        ) from error


def save(state: TrainState, config: TrainConfig, rank: int, world_size: int, control: Control) -> Path:
    """Write the checkpoint of ``state.step`` and return its folder; every rank calls it.

    Rank 0 writes the state that is the same on all ranks; each rank writes its own state. Each phase ends
    when all ranks have completed it.

    Raises:
        AgreedError: the disk is full or cannot be written to. Earlier checkpoints are unchanged.
    """
    target = folder_of(config.out) / f"step-{state.step:06d}"
    aside = target.with_name(f".{target.name}.part")
    sharded = state.saves_in_parts
    try:
        with control.together(), writing(target):
            if rank == 0:
                for left in target.parent.glob(".step-*.part"):  # from a killed run
                    shutil.rmtree(left)
                aside.mkdir(parents=True)
        if sharded:
            from dlo_lib.parallel.checkpoint import save_sharded  # as above

            assert isinstance(state.spread, ParallelModel)
            save_sharded(aside / SHARDED, state.spread, state.optimizer)
        with control.together(), writing(target):
            save_rank(aside / _rank_file(rank), state, RankSnapshot.now())
            if rank == 0 and sharded:
                save_config(state.model.config, aside)
            elif rank == 0:
                save_checkpoint(state.model, aside)
                save_optimizer(aside / OPTIMIZER, state)
                with state.averaged() as exists:
                    if exists:
                        save_checkpoint(state.model, aside / AVERAGE)
        with control.together(), writing(target):
            if rank == 0:
                _write_manifest(aside, state, config, world_size)
                _put_in_place(aside, target)
                progress.report(state.step, config.steps)
                for old in _steps(config.out)[: -config.keep]:
                    shutil.rmtree(old)
    except BaseException:
        if rank == 0:
            shutil.rmtree(aside, ignore_errors=True)
        raise
    return target


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
        "sequences": state.sampler.batch * state.sampler.world_size * config.accumulation,
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
        _check_types(checkpoint, files)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
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


def _check_types(checkpoint: Checkpoint, files: Any) -> None:
    """Raise ``TypeError`` if a value of ``checkpoint.json`` has another type than ``save`` writes."""
    numbers = [checkpoint.step, checkpoint.tokens, checkpoint.world_size]
    if checkpoint.sequences is not None:
        numbers.append(checkpoint.sequences)
    for entry in files.values():
        numbers.append(entry["bytes"])
        numbers.append(entry["crc32"])
    mappings = [checkpoint.config, {} if checkpoint.scaler is None else checkpoint.scaler]
    if not all(type(number) is int for number in numbers):
        raise TypeError("a number is not an int")
    if not all(type(mapping) is dict for mapping in mappings):
        raise TypeError("config or scaler is not a mapping")


def _steps(out: Path) -> list[Path]:
    """Return the folders of complete checkpoints, the oldest first.

    Copies with other names, such as ``step-000010.bak`` and ``step-best``, are the user's: they are not read
    and not removed.
    """
    folders = {STEP.fullmatch(folder.name): folder for folder in folder_of(out).glob("step-*")}
    found = {int(name[1]): folder for name, folder in folders.items() if name}
    return [found[step] for step in sorted(found)]


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
