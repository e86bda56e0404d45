"""The trainer: a file with ``build()``, or a script of torchrun with two marked lines.

    def build():                            # called in one process, and on each rank of a process group
        return model, optimizer, batches    # wrapped where dist.is_initialized()

    def loss(model, batch): ...             # the mean loss of a batch; default: model(*batch)
    def step(model, optimizer, batch): ...  # the trainer's step on a rank; default: a share of the batch
    MAX_NORM = 1.0                          # if the step clips without torch.nn.utils.clip_grad_norm_

``batches`` gives the same global batches in one process and on each rank: tensors, or a tuple, list or
dictionary of tensors, whose first dimension counts the samples. ``step`` takes the rank's share of it.

In a script of torchrun, the end of two lines is marked. The first assigns the model before it is wrapped, the
second the mean loss of one micro-batch, before it is divided or scaled:

    model = Net()                                         # parity: model
    loss = F.cross_entropy(wrapped(inputs), targets)      # parity: loss
"""

from __future__ import annotations

import ast
import inspect
import re
import runpy
import sys
import tokenize
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from dlo_lib.base.errors import UserError

MARK = re.compile(r"#\s*parity:\s*(\w+)\s*$")
HOOK = "__parity__"
_NO_BUILD = (
    "{file} has no build(): let build() return model, optimizer, batches, or end two lines in "
    "# parity: model and # parity: loss"
)


@dataclass(frozen=True)
class TrainerFile:
    """A trainer that ``build()`` offers."""

    build: Callable[[], tuple[Any, Any, Any]]
    loss: Callable[[Any, Any], Tensor]
    step: Callable[[Any, Any, Any], Any]
    max_norm: float | None


def marks(file: Path) -> dict[str, int]:
    """Return the lines of a script that end in ``# parity: model`` and ``# parity: loss``.

    Raises:
        UserError: the file is no Python script, it has one mark without the other, or neither marks nor
            ``build``.
    """
    try:
        with tokenize.open(file) as source:
            tokens = list(tokenize.generate_tokens(source.readline))
        ast.parse(file.read_bytes(), str(file))
    except (OSError, SyntaxError, tokenize.TokenError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"cannot read {file} ({reason}): give a Python script") from error
    found = {
        match[1]: token.start[0]
        for token in tokens
        if token.type == tokenize.COMMENT and (match := MARK.search(token.string))
    }
    if unknown := found.keys() - {"model", "loss"}:
        raise UserError(f"{file} has the mark {unknown.pop()}: use # parity: model and # parity: loss")
    if not found and all(token.string != "build" for token in tokens if token.type == tokenize.NAME):
        raise UserError(_NO_BUILD.format(file=file.name))
    if len(found) == 1:
        missing = ({"model", "loss"} - found.keys()).pop()
        raise UserError(
            f"{file} has one mark: end the line that assigns the {missing} in # parity: {missing}"
        )
    return found


@contextmanager
def beside(file: Path) -> Iterator[None]:
    """In the block, modules in the folder of ``file`` can be imported, as by its own start."""
    sys.path.insert(0, str(file.parent))
    try:
        yield
    finally:
        sys.path.remove(str(file.parent))


def trainer_of(file: Path) -> TrainerFile:
    """Run a file and return the trainer that it offers.

    Raises:
        UserError: it offers no ``build()``.
    """
    with beside(file):
        names = runpy.run_path(str(file), run_name="parity")
    build = names.get("build")
    if not callable(build):
        raise UserError(_NO_BUILD.format(file=file.name))
    loss = names.get("loss", loss_of_model)
    return TrainerFile(build, loss, names.get("step") or _plain_step(loss), names.get("MAX_NORM"))


@dataclass(frozen=True)
class BuiltTrainer:
    """What ``build()`` returned. ``given``: the model and the optimiser as they are, for ``step()``."""

    models: list[nn.Module]
    optimizers: list[torch.optim.Optimizer]
    batches: Iterator[Any]
    given: tuple[Any, Any]


def built(trainer: TrainerFile) -> BuiltTrainer:
    """Call ``build()``.

    Raises:
        UserError: it returns something else.
    """
    result = trainer.build()
    if not isinstance(result, tuple) or len(result) != 3:
        raise UserError("build() must return model, optimizer, batches")
    model, optimizer, batches = result
    models = list(model) if isinstance(model, list | tuple | nn.ModuleList) else [model]
    optimizers = list(optimizer) if isinstance(optimizer, list | tuple) else [optimizer]
    for one in models:
        if not isinstance(one, nn.Module):
            raise UserError(f"the model of build() is a {type(one).__name__}: return a module, or a list")
    for one in optimizers:
        if not isinstance(one, torch.optim.Optimizer):
            raise UserError(
                f"the optimizer of build() is a {type(one).__name__}: return a torch.optim.Optimizer"
            )
    try:
        return BuiltTrainer(models, optimizers, iter(batches), (model, optimizer))
    except TypeError as error:
        raise UserError("the batches of build() cannot be iterated: return a list or a loader") from error


def loss_of_model(model: Any, batch: Any) -> Tensor:
    """Return the loss of a model that computes it by itself.

    Raises:
        UserError: the model does not accept the batch, or returns no loss.
    """
    named: dict[str, Any] = dict(batch) if isinstance(batch, Mapping) else {}
    values = () if named else tuple(batch) if isinstance(batch, tuple | list) else (batch,)
    try:
        inspect.signature(getattr(model, "forward", model)).bind(*values, **named)
    except TypeError as error:
        raise UserError(
            f"the model cannot be called with a batch ({error}): add a function loss(model, batch)"
        ) from error
    result = model(*values, **named)
    found = result.get("loss") if isinstance(result, Mapping) else getattr(result, "loss", result)
    if not isinstance(found, Tensor) or found.numel() != 1:
        raise UserError("the model returns no loss: add a function loss(model, batch) to the script")
    return found


def samples(batch: Any) -> int:
    """Return the number of samples of a batch, 0 if it is not known."""
    leaves = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim()]
    return max(leaves, key=Tensor.numel).shape[0] if leaves else 0


def take(batch: Any, rows: Any) -> Any:
    """Return the samples ``rows`` of a batch."""
    count, index = samples(batch), torch.as_tensor(list(rows))

    def part(leaf: Any) -> Any:
        counts = isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.shape[0] == count
        return leaf.index_select(0, index.to(leaf.device)) if counts else leaf

    return tree_map(part, batch)


def _plain_step(loss: Callable[[Any, Any], Tensor]) -> Callable[[Any, Any, Any], None]:
    """The step of a script that has none: each rank trains on its share of the batch."""

    def step(model: Any, optimizer: Any, batch: Any) -> None:
        count, rank, world = samples(batch), dist.get_rank(), dist.get_world_size()
        if count % world:
            raise UserError(f"a batch of {count} samples has no equal shares for {world} ranks: add step()")
        share = count // world
        loss(model, take(batch, range(rank * share, (rank + 1) * share))).backward()
        for one in optimizer if isinstance(optimizer, list | tuple) else [optimizer]:
            one.step()
            one.zero_grad()

    return step


def compiled(file: Path, lines: dict[str, int]) -> CodeType:
    """Return the code of a marked script, in which the two marked lines also report to ``__parity__``.

    Raises:
        UserError: a marked line assigns nothing, or no name of the loss is a model.
    """
    tree = ast.parse(file.read_text(encoding="utf-8"), str(file))
    found = {
        node.end_lineno: node
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and len(node.targets) == 1
    }
    for kind, line in lines.items():
        if line not in found:
            raise UserError(f"{file.name}:{line} assigns no name: mark the line that assigns the {kind}")
    model, loss = found[lines["model"]], found[lines["loss"]]
    model.value = _call("model", model.value)
    seen = [node for node in ast.walk(loss.value) if isinstance(node, ast.Name)]
    bound = {node.id for node in seen if isinstance(node.ctx, ast.Store)}  # of comprehensions
    used = sorted({node.id for node in seen} - bound)
    # The expression as a function of each name in it: the one that is a module is replaced by the twin.
    parameters = ast.arguments(
        posonlyargs=[], args=[ast.arg(name) for name in used], kwonlyargs=[], kw_defaults=[], defaults=[]
    )
    names = [ast.Tuple([ast.Constant(name), ast.Name(name, ast.Load())], ast.Load()) for name in used]
    loss.value = _call("loss", ast.Lambda(parameters, loss.value), *names)
    return compile(ast.fix_missing_locations(tree), str(file), "exec")


def _call(name: str, *arguments: ast.expr) -> ast.Call:
    return ast.Call(ast.Attribute(ast.Name(HOOK, ast.Load()), name, ast.Load()), list(arguments), keywords=[])
