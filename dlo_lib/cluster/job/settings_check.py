"""Settings of a job, checked before it waits in the queue: those of a training, and arguments of a function.

Options of another program are its own: what it accepts is not known here.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlo_lib.base.errors import UserError, unknown_name
from dlo_lib.base.text import tr
from dlo_lib.cluster.site.request import Allocation

if TYPE_CHECKING:
    from dlo_lib.models import LlamaConfig

ALL = 64
"""Elements of a sweep up to which each is checked; of more, enough that each value is checked once."""


def check_training(
    words: Sequence[str], elements: Sequence[Sequence[str]], allocation: Allocation, *, alone: bool = True
) -> None:
    """Check the options of a training, for each element of its sweep.

    Args:
        words: the arguments that all elements share.
        elements: the further arguments of each element.
        allocation: the ranks that it runs on.
        alone: whether the job waits for no other one, which could write the model or the data.

    Raises:
        UserError: an option does not exist, a value is not valid, or the plan does not fit the ranks; the
            message names the element of a sweep.
    """
    for number in covering(elements):
        try:
            _check_one([*words, *elements[number]], allocation, alone)
        except UserError as error:
            if len(elements) == 1:
                raise
            said = tr("element {number} ({settings}): {error}",
                      number=number, settings=" ".join(elements[number]), error=error)  # fmt: skip
            raise UserError(said) from error


def covering(elements: Sequence[Sequence[str]], at_most: int = ALL) -> list[int]:
    """Return the numbers of elements that are checked: all, or of many those that have a new word.

    >>> covering([["--a", "1"], ["--a", "2"], ["--a", "1"]], at_most=2)
    [0, 1]
    """
    if len(elements) <= at_most:
        return list(range(len(elements)))
    seen, found = set[tuple[str, ...]](), []
    for number, words in enumerate(elements):
        pairs = set(itertools.pairwise(words))
        if not pairs <= seen or number == 0:
            found.append(number)
            seen |= pairs
    return found


def _check_one(words: list[str], allocation: Allocation, alone: bool) -> None:
    from dlo_lib.cluster.job.plan_check import check_plan
    from dlo_lib.train.__main__ import parse

    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):  # --help prints
        config = parse(words)
    if config is None:
        return
    plan = config.plan(allocation.ranks, allocation.ranks_per_node)
    if alone:
        _check_names(config.model, config.data)
    llama = _config_of(config.model, alone)
    if llama is None:
        return
    if config.seq > llama.max_positions:
        text = "seq is {seq}: {model} has {most} positions; use at most that"
        raise UserError(tr(text, seq=config.seq, model=config.model, most=llama.max_positions))
    if config.is_parallel:
        check_plan(llama, plan, allocation.ranks, config.seq)


def _config_of(model: str, alone: bool) -> LlamaConfig | None:
    """Return the configuration of a model; None if its folder is not here or an earlier job writes it."""
    from dlo_lib.models.checkpoint import CONFIG, read_config
    from dlo_lib.models.configs import CONFIGS, model_config

    if model in CONFIGS:
        return model_config(model)
    folders = (place for place in _places(model) if (place / CONFIG).is_file())
    folder = next(folders, None) if alone else None
    return None if folder is None else read_config(folder)


def _check_names(model: str, data: str) -> None:
    """Check the names of a model and of a data set. A path may exist on the nodes of the cluster alone."""
    from dlo_lib.data.open import NAMES
    from dlo_lib.models.configs import CONFIGS

    if model not in CONFIGS and not _may_exist(model, *_places(model)):
        raise unknown_name("model", model, CONFIGS)
    if data not in NAMES and not _may_exist(data, Path(data).expanduser()):
        raise unknown_name("data set", data, NAMES)


def _places(model: str) -> list[Path]:
    """Return the folders that the name of a model may mean."""
    shared = os.environ.get("DSDIR")
    below = [Path(shared) / "HuggingFace_Models" / model] if shared else []
    return [Path(model).expanduser(), *below]


def _may_exist(name: str, *places: Path) -> bool:
    """Return whether a name may be that of a folder on the nodes: of one here, or of one with a path."""
    return "/" in name or any(place.is_dir() for place in places)


def check_function(
    function: Callable[..., Any], named: Mapping[str, Any], sweep: Iterable[Mapping[str, Any]]
) -> None:
    """Check that a function accepts its arguments, for each element of its sweep.

    Raises:
        UserError: it has no such argument, needs another one, or gets one twice.
    """
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # a function of C without a signature
        return
    name = getattr(function, "__name__", type(function).__name__)
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    known = [key for key, one in parameters.items() if one.kind in by_name]
    takes_all = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values())
    needed = [key for key in known if parameters[key].default is inspect.Parameter.empty]
    for settings in sweep:
        for key in settings:
            if key in named:
                text = "{name} gets {key} twice, from the arguments and from the sweep: leave one out"
                raise UserError(tr(text, name=name, key=key))
        for key in {**named, **settings}:
            if key not in known and not takes_all:
                raise unknown_name(tr("argument of {name}", name=name), str(key), known)
        for key in needed:
            if key not in named and key not in settings:
                text = "{name} needs the argument {key}: give it in a dict after the function, or in sweep="
                raise UserError(tr(text, name=name, key=key))
