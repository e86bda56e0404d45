"""Llama checkpoints in the layout of Hugging Face: ``config.json`` and the weights as safetensors.

The weights are in one file, or in several files with an index. A tied embedding is stored once. Loading
builds the model on the meta device, allocates it on the target device and copies the tensors one by one from
the memory-mapped files, so the memory holds the model once. Saving writes all temporary files before it
renames the first one, so a full disk changes nothing.

Format: https://huggingface.co/docs/safetensors. The files contain no code. They have no checksum, so a
flipped bit in a weight is not detected."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from dlo_lib.base.errors import UserError, unknown_name
from dlo_lib.base.files import full_disk_as_os_error, write_aside
from dlo_lib.models.hf_config import config_from_hf, config_to_hf
from dlo_lib.models.llama import Llama, LlamaConfig

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"

_OUTPUT = "lm_head.weight"
_EMBEDDING = "model.embed_tokens.weight"


def find_checkpoint(name: str | Path) -> Path:
    """Return the folder of a checkpoint: ``name``, or ``$DSDIR/HuggingFace_Models/<name>`` on a cluster such
    as Jean Zay.

    Args:
        name: a folder, or the name of a model on the hub, such as "meta-llama/Llama-3.2-3B".

    Raises:
        UserError: neither exists; the message suggests the nearest names below ``$DSDIR``.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    shared = os.environ.get("DSDIR")
    if not shared:
        raise UserError(
            f"no folder {folder}: give one with config.json and model.safetensors (a model name needs $DSDIR "
            "to be set)"
        )
    models = Path(shared) / "HuggingFace_Models"
    if not folder.is_absolute() and (models / folder).is_dir():
        return models / folder
    owner = folder.parts[0] if len(folder.parts) == 2 else "*"
    raise unknown_name(
        f"model below {models}",
        str(name),
        (str(path.relative_to(models)) for path in models.glob(f"{owner}/*") if path.is_dir()),
    )


def load_checkpoint(
    name: str | Path,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    checkpointing: bool = False,
) -> Llama:
    """Load the Llama of a checkpoint on ``device``.

    Args:
        name: a folder or the name of a model, as in ``find_checkpoint``.
        dtype: the dtype of the parameters; None takes that of the stored embedding.
        checkpointing: as in ``Llama``.

    Raises:
        UserError: the checkpoint does not exist, a file is damaged, or tensors are missing, unexpected or of
            another shape; the message names them.
    """
    folder = find_checkpoint(name)
    config = read_config(folder)
    with ExitStack() as stack:
        stored = _Stored(stack, _weight_files(folder))
        model = Llama(config, checkpointing, device="meta", dtype=dtype or stored.dtype(_EMBEDDING)).to_empty(
            device=device
        )
        model.tie_weights()
        wanted = _state(model)
        stored.check(folder, wanted, optional=_OUTPUT if config.tied_embeddings else None)
        for key, parameter in wanted.items():
            stored.copy(key, parameter)
        if config.tied_embeddings and _OUTPUT in stored.file_of:
            stored.check_equal(folder, _OUTPUT, wanted[_EMBEDDING])
    return model


def read_config(folder: Path) -> LlamaConfig:
    """Read the configuration from the ``config.json`` of a checkpoint.

    Raises:
        UserError: the file is missing or damaged, or it describes another kind of model.
    """
    return config_from_hf(_read_json(folder / CONFIG))


def save_checkpoint(
    model: Llama, folder: str | Path, *, dtype: torch.dtype | None = None, max_shard_bytes: int = 5 * 10**9
) -> None:
    """Write ``model`` to ``folder`` in the layout of transformers.

    An existing checkpoint is replaced after all new files are completely on disk. Other files in ``folder``
    are kept.

    Args:
        dtype: the dtype of the stored tensors; None takes that of the model.
        max_shard_bytes: the maximal size of the weights in a file; a file with a single tensor may be larger.

    Raises:
        UserError: there is no space left; ``folder`` is then unchanged.
    """
    folder = Path(folder)
    dtype = dtype or model.embed_tokens.weight.dtype
    state = _state(model)
    shards = _shards(state, dtype, max_shard_bytes)
    count = len(shards)
    files = {
        WEIGHTS if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors": keys
        for number, keys in enumerate(shards, 1)
    }
    texts = {CONFIG: config_to_hf(model.config, dtype)}
    if count > 1:
        texts[INDEX] = {
            "metadata": {
                "total_size": sum(parameter.numel() for parameter in state.values()) * dtype.itemsize
            },
            "weight_map": {key: file for file, keys in files.items() for key in keys},
        }
    with ExitStack() as stack:  # renames the files if it closes without an exception
        for file, keys in files.items():
            aside = stack.enter_context(write_aside(folder / file))
            with full_disk_as_os_error():
                save_file(
                    {key: state[key].detach().to("cpu", dtype).contiguous() for key in keys},
                    aside,
                    metadata={"format": "pt"},
                )
            _sync(aside)
        for file, table in texts.items():
            aside = stack.enter_context(write_aside(folder / file))
            aside.write_text(json.dumps(table, indent=2) + "\n", encoding="utf-8")
            _sync(aside)
    for old in {folder / WEIGHTS, folder / INDEX, *folder.glob("model-*-of-*.safetensors")}:
        if old.name not in files and old.name not in texts:
            old.unlink(missing_ok=True)


def save_config(config: LlamaConfig, folder: Path) -> None:
    """Write only ``config.json``, for weights that are stored in another format.

    Raises:
        UserError: there is no space left.
    """
    with write_aside(folder / CONFIG) as aside:
        aside.write_text(json.dumps(config_to_hf(config, torch.float32), indent=2) + "\n", encoding="utf-8")
        _sync(aside)


class _Stored:
    """The tensors in the files of a checkpoint, read one at a time."""

    def __init__(self, stack: ExitStack, files: Iterable[Path]) -> None:
        self.file_of: dict[str, Path] = {}
        self._open = {}
        for file in files:
            with _damage_named(file):
                self._open[file] = stack.enter_context(safe_open(file, framework="pt"))
                self.file_of |= dict.fromkeys(self._open[file].keys(), file)

    def check(self, folder: Path, wanted: dict[str, Tensor], optional: str | None) -> None:
        """Raise UserError unless the tensors are exactly ``wanted``, in their shapes; ``optional`` is also
        allowed.
        """
        # Checkpoints from before 2023 also store the rotary frequencies, which follow from the configuration.
        found = {key for key in self.file_of if not key.endswith("rotary_emb.inv_freq")} - {optional}
        faults = [f"{key} is missing" for key in wanted if key not in found]
        faults += [f"{key} is unexpected" for key in sorted(found - wanted.keys())]
        shapes = {
            key: (tuple(self._slice(key).get_shape()), tuple(wanted[key].shape))
            for key in wanted
            if key in found
        }
        faults += [
            f"{key} is {shape} instead of {own}" for key, (shape, own) in shapes.items() if shape != own
        ]
        if faults:
            more = f" and {len(faults) - 5} more" if len(faults) > 5 else ""
            raise UserError(
                f"the weights in {folder} do not match its config.json: {', '.join(faults[:5])}{more}: "
                "copy the whole checkpoint again"
            )

    def check_equal(self, folder: Path, key: str, tensor: Tensor) -> None:
        """Raise UserError unless the second copy of a tied tensor equals the first."""
        if not torch.equal(self._read(key).to(tensor), tensor):
            raise UserError(
                f"{folder} ties its embeddings, but its {key} differs: "
                "set tie_word_embeddings to false in its config.json"
            )

    def dtype(self, key: str) -> torch.dtype:
        if key not in self.file_of:
            return torch.float32  # `check` then reports the missing tensor
        return self._slice(key)[:0].dtype

    def copy(self, key: str, parameter: Tensor) -> None:
        with torch.no_grad():
            parameter.copy_(self._read(key))

    def _read(self, key: str) -> Tensor:
        with _damage_named(self.file_of[key]):
            return self._open[self.file_of[key]].get_tensor(key)

    def _slice(self, key: str):
        return self._open[self.file_of[key]].get_slice(key)


def _state(model: Llama) -> dict[str, Tensor]:
    """Return the parameters and buffers by their names in the files; a tied parameter occurs once."""
    return {
        name if name.startswith("lm_head.") else f"model.{name}": tensor
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]
    }


def _shards(state: dict[str, Tensor], dtype: torch.dtype, max_bytes: int) -> list[list[str]]:
    """Divide the names, in order, into shards of at most ``max_bytes``."""
    shards: list[list[str]] = []
    room = 0
    for key, parameter in state.items():
        size = parameter.numel() * dtype.itemsize
        if size > room:
            shards.append([])
            room = max_bytes
        shards[-1].append(key)
        room -= size
    return shards


def _weight_files(folder: Path) -> list[Path]:
    if (folder / WEIGHTS).exists():
        return [folder / WEIGHTS]
    if not (folder / INDEX).exists():
        raise UserError(f"no {WEIGHTS} in {folder}: give the folder of a checkpoint saved as safetensors")
    index = _read_json(folder / INDEX)
    names = sorted(set(index.get("weight_map", {}).values()))
    missing = [name for name in names if not (folder / name).exists()]
    if missing or not names:
        raise UserError(
            f"{folder} has no {', '.join(missing) or 'file'} of its {INDEX}: copy the whole checkpoint again"
        )
    return [folder / name for name in names]


def _read_json(path: Path) -> dict:
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(
            f"no {path.name} in {path.parent}: give the folder of a Hugging Face checkpoint"
        ) from error
    except ValueError as error:
        raise UserError(f"{path} is damaged: copy it again from the source of the checkpoint") from error
    if not isinstance(table, dict):
        raise UserError(f"{path} is damaged: copy it again from the source of the checkpoint")
    return table


@contextmanager
def _damage_named(file: Path) -> Iterator[None]:
    try:
        yield
    except SafetensorError as error:
        raise UserError(
            f"{file} is damaged or cut short ({error}): copy it again from the source of the checkpoint"
        ) from error


def _sync(path: Path) -> None:
    """Flush the file to disk, so that a full disk raises before the first file is renamed."""
    with open(path, "rb+") as file:
        os.fsync(file.fileno())
