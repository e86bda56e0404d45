"""Clusters as data: what a job must ask for on a site, and what the site allows, is a TOML file; nothing of a site is code.

A site is one kind of node of one cluster, since that is what account, constraint, cores and limits hang on. Files are looked for at the
path given, in the folders of ``$DLO_SITES``, in ``~/.config/dlo/sites``, then here. ``extends`` names another site whose values stand
where the file has none. ``slurm/SITES.md`` says how to write one.
"""

from __future__ import annotations

import enum
import os
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from datetime import timedelta
from pathlib import Path
from typing import Any, get_type_hints

from dlo_lib.cluster.duration import parse_duration
from dlo_lib.errors import UserError, unknown_name
from dlo_lib.hardware import Gpu, gpu
from dlo_lib.text import tr

PACKAGED = Path(__file__).parent / "sites"


class Scheduler(enum.Enum):
    """Who starts a site's jobs: SLURM, or this machine itself, one after another."""

    SLURM = "slurm"
    LOCAL = "local"


@dataclass(frozen=True)
class Qos:
    """A quality of service and its limits; None is no limit.

    time: of the longest job. gpus: the most of one job. jobs: the most of one user, waiting and running, each element of a sweep.
    """

    name: str
    time: timedelta
    gpus: int | None = None
    jobs: int | None = None


@dataclass(frozen=True)
class Site:
    """One kind of node of one cluster.

    gpus_per_node, cores_per_gpu: of a node, physical cores; nodes without GPUs: 0, and the cores of a task.
    gpu: its card in ``dlo_lib.hardware``, for limits of memory; None on a CPU.
    partition, constraint, hint, reservation: as sbatch takes them; empty: not given. account_suffix: what accounts end with here.
    account_variable: the environment variable with the project's name. qos: the first is what a job has that asks for none.
    modules: loaded in the job before anything else. min_torch: the oldest PyTorch for this card. arch: its CUDA architecture.
    environment: variables that a job is given. network: whether compute nodes reach the internet. interface: the network's, for gloo.
    work, scratch: where there is room for files, with variables such as ``$WORK``. data: where models and data sets lie for everybody.
    """

    name: str
    title: str
    scheduler: Scheduler
    gpus_per_node: int
    cores_per_gpu: int
    gpu: Gpu | None = None
    partition: str = ""
    constraint: str = ""
    hint: str = ""
    reservation: str = ""
    account_suffix: str = ""
    account_variable: str = ""
    qos: tuple[Qos, ...] = ()
    modules: tuple[str, ...] = ()
    min_torch: str = ""
    arch: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    network: bool = True
    interface: str = ""
    work: str = ""
    scratch: str = ""
    data: str = ""


def site(name: str | Path) -> Site:
    """The site of that name, or that a file describes (a path has a ``/`` or ends with ``.toml``).

    Raises:
        UserError: no such site, the nearest names are offered; a file that does not describe one.
    """
    file = _file(name)
    values = _read(file)
    values.setdefault("name", file.stem)
    return _site(values, file)


def sites() -> dict[str, Site]:
    """All sites by name; one's own hide the packaged ones of the same name."""
    return {name: site(file) for name, file in sorted(_known().items())}


def _file(name: str | Path) -> Path:
    text = str(name)
    if "/" in text or text.endswith(".toml"):
        file = Path(text).expanduser()
        if not file.is_file():
            raise UserError(tr("no site at {file}: give the path of a TOML file, or a name: {names}", file=file, names=", ".join(_known())))
        return file
    known = _known()
    if text not in known:
        raise unknown_name("site", text, known)
    return known[text]


def _known() -> dict[str, Path]:
    config = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    own = [Path(folder).expanduser() for folder in os.environ.get("DLO_SITES", "").split(os.pathsep) if folder]
    known: dict[str, Path] = {}
    for folder in (*own, config / "dlo" / "sites", PACKAGED):
        for file in sorted(folder.glob("*.toml")):
            known.setdefault(file.stem, file)
    return known


def _read(file: Path, seen: tuple[Path, ...] = ()) -> dict[str, Any]:
    """The values of a file, over those of the one it extends."""
    if file in seen:
        raise UserError(tr("{file} extends itself: remove `extends` from one of {files}", file=file, files=", ".join(map(str, seen))))
    try:
        values = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UserError(tr("{file} is no TOML file that can be read: {error}", file=file, error=error)) from error
    base = values.pop("extends", None)
    return values if base is None else _read(_file(base), (*seen, file)) | values


def _site(values: dict[str, Any], file: Path) -> Site:
    hints, known = get_type_hints(Site), {option.name: option for option in fields(Site)}
    for name in values:
        if name not in known:
            raise UserError(f"{file}: {unknown_name('key', name, known)}")
    absent = [
        name for name, option in known.items() if name not in values and (option.default, option.default_factory) == (MISSING, MISSING)
    ]
    if absent:
        raise UserError(tr("{file} lacks {names}: slurm/SITES.md says what they mean", file=file, names=", ".join(absent)))
    try:
        return Site(**{name: _value(name, value, hints[name]) for name, value in values.items()})
    except (UserError, TypeError, ValueError) as error:
        raise UserError(f"{file}: {error}") from error


def _value(name: str, value: Any, kind: Any) -> Any:
    """A TOML value as the field holds it.

    Raises:
        TypeError, ValueError, UserError: it is none.
    """
    if name == "gpu":
        return gpu(value)
    if name == "qos":
        return tuple(_qos(row) for row in value)
    if name == "scheduler":
        return Scheduler(value)
    if name == "modules":
        kind, value = tuple, tuple(value)
    if name == "environment":
        return {str(variable): str(text) for variable, text in value.items()}
    if not isinstance(value, kind) or isinstance(value, bool) is not (kind is bool):
        raise TypeError(tr("{name} is {value!r}: it must be {kind}", name=name, value=value, kind=kind.__name__))
    least = 0 if name == "gpus_per_node" else 1
    if kind is int and value < least:
        raise ValueError(tr("{name} is {value}: it must be at least {least}", name=name, value=value, least=least))
    return value


def _qos(row: dict[str, Any]) -> Qos:
    known = [option.name for option in fields(Qos)]
    for name in row:
        if name not in known:
            raise unknown_name("key of a qos", name, known)
    return Qos(**(row | {"time": parse_duration(row["time"])}))
