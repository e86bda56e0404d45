"""Clusters as data: a TOML file describes what jobs must request on a site and what the site allows.

A site is one kind of node of one cluster, because account, constraint, cores and limits depend on it. A file
is searched at the given path, in the folders of ``$DLO_SITES``, in ``~/.config/dlo/sites``, and in this
package. ``extends`` names another site whose values apply where the file has none. ``slurm/SITES.md``
describes the format.
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

from dlo_lib.base.errors import UserError, unknown_name
from dlo_lib.base.text import tr
from dlo_lib.cluster.site import sbatch_options, srun_options
from dlo_lib.cluster.site.duration import parse_duration
from dlo_lib.cluster.site.job_variables import variables
from dlo_lib.cluster.site.quoting import check_text
from dlo_lib.hardware import Gpu, GpuNodes, gpu
from dlo_lib.hardware import link as find_link

PACKAGED = Path(__file__).parent / "sites"
_LISTS = {
    "modules": '["gcc/12", "cuda/12.4"]',
    "setup": '["ulimit -n 65536"]',
    "container_options": '["--nv"]',
}
GPU_OPTIONS = ("gres", "gpus-per-node", "none")
KINDS = {str: "a text", int: "a whole number", bool: "true or false"}


class Scheduler(enum.Enum):
    """What starts a site's jobs: SLURM, or this machine, one job after another."""

    SLURM = "slurm"
    LOCAL = "local"


@dataclass(frozen=True)
class Qos:
    """A quality of service and its limits; None is no limit.

    Attributes:
        time: of the longest job.
        gpus: the most GPUs of one job.
        jobs: the most jobs of one user, waiting and running; each element of a sweep counts.
    """

    name: str
    time: timedelta
    gpus: int | None = None
    jobs: int | None = None


@dataclass(frozen=True)
class Site:
    """One kind of node of one cluster.

    Attributes:
        gpus_per_node: 0 for nodes without GPUs.
        cores_per_gpu: physical cores per GPU; on nodes without GPUs, cores of a task.
        cores_per_node: physical cores of a node, which limit ``ranks=``; 0: those of its GPUs, or unknown.
        gpu_type: the type of the GPU in SLURM's ``--gres``; "": not typed.
        gpu_option: what requests GPUs: ``gres``, ``gpus-per-node``, or ``none`` where SLURM does not know
            the GPUs of a node.
        gpu: its entry in ``dlo_lib.hardware``, for memory limits; None on a CPU.
        partition, constraint, hint, reservation: values of sbatch's options; "": not used.
        account_suffix: suffix of accounts for these nodes.
        account_variable: environment variable with the project's name.
        qos: the first one applies to jobs that name none.
        options: further options of sbatch (``sbatch_options``).
        srun: further options of srun (``srun_options``).
        modules: loaded at the start of the job.
        modules_init: script that defines the command ``module``, if the job's shell lacks it.
        venv, conda: virtual environment of jobs: its folder, or the name or folder of a conda environment;
            "": the one that submits.
        conda_base: folder of the conda installation; "": conda is asked.
        container: image in which jobs run, started by ``container_runtime`` with ``container_options``.
        setup: lines of bash that run before the program.
        min_torch: the oldest PyTorch for this GPU.
        arch: the GPU's CUDA architecture.
        environment: variables set in the job.
        network: whether compute nodes have internet access.
        interface: network interface for gloo.
        work, scratch: folders with room for files, with variables such as ``$WORK``.
        data: folder of shared models and data sets.
        link: a port between nodes, by its name in ``dlo_lib.hardware``; "": unknown.
        links: the ports of a node.
        co2_per_kwh: grams of CO2 that a kWh emits; 0: unknown.
        price_cents: of a GPU hour, in hundredths of any currency; 0: unknown.
    """

    name: str
    title: str
    scheduler: Scheduler
    gpus_per_node: int
    cores_per_gpu: int
    cores_per_node: int = 0
    gpu_type: str = ""
    gpu_option: str = "gres"
    gpu: Gpu | None = None
    partition: str = ""
    constraint: str = ""
    hint: str = ""
    reservation: str = ""
    account_suffix: str = ""
    account_variable: str = ""
    qos: tuple[Qos, ...] = ()
    options: Mapping[str, str | int | bool] = field(default_factory=dict)
    srun: Mapping[str, str | int | bool] = field(default_factory=dict)
    modules: tuple[str, ...] = ()
    modules_init: str = ""
    venv: str = ""
    conda: str = ""
    conda_base: str = ""
    container: str = ""
    container_runtime: str = "apptainer"
    container_options: tuple[str, ...] = ()
    setup: tuple[str, ...] = ()
    min_torch: str = ""
    arch: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    network: bool = True
    interface: str = ""
    work: str = ""
    scratch: str = ""
    data: str = ""
    link: str = ""
    links: int = 0
    co2_per_kwh: int = 0
    price_cents: int = 0

    def __post_init__(self) -> None:
        named = [name for name in ("venv", "conda", "container") if getattr(self, name)]
        if len(named) > 1:
            raise ValueError(tr("{names} contradict each other: keep one", names=" and ".join(named)))

    @property
    def has_software(self) -> bool:
        """Whether jobs use another Python than the one that submits them."""
        return bool(self.venv or self.conda or self.container)

    @property
    def nodes(self) -> GpuNodes:
        """The GPUs of this site and the links between its nodes, for the planner.

        Raises:
            UserError: the description names no GPU or no links.
        """
        if self.gpu is None or not self.link or not self.links:
            raise UserError(
                tr(
                    "the site {name} names no GPU or no links between nodes: "
                    "add gpu, link and links to its file (slurm/SITES.md)",
                    name=self.name,
                )
            )
        return GpuNodes(
            self.gpu,
            self.gpus_per_node,
            find_link(self.link),
            self.links,
            co2_per_kwh=self.co2_per_kwh or None,
            price=self.price_cents / 100 if self.price_cents else None,
        )


def site(name: str | Path) -> Site:
    """Return the site of that name, or of a file (a path contains a ``/`` or ends with ``.toml``).

    Raises:
        UserError: there is no such site (the message offers similar names), or the file does not describe
            one.
    """
    file = _file(name)
    values = _read(file)
    values.setdefault("name", file.stem)
    return _site(values, file)


def site_names() -> list[str]:
    """Return the names of all sites. No file is read, so one with mistakes does not hide the others."""
    return sorted(_known())


def sites() -> dict[str, Site]:
    """Return all sites by name; the user's sites replace packaged ones of the same name."""
    return {name: site(file) for name, file in sorted(_known().items())}


def _file(name: str | Path) -> Path:
    text = str(name)
    if "/" in text or text.endswith(".toml"):
        file = Path(text).expanduser()
        if not file.is_file():
            raise UserError(
                tr(
                    "no site at {file}: give the path of a TOML file, or a name: {names}",
                    file=file,
                    names=", ".join(_known()),
                )
            )
        return file
    known = _known()
    if text not in known:
        raise unknown_name("site", text, known)
    return known[text]


def _known() -> dict[str, Path]:
    config = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    own = [
        Path(folder).expanduser() for folder in os.environ.get("DLO_SITES", "").split(os.pathsep) if folder
    ]
    known: dict[str, Path] = {}
    for folder in (*own, config / "dlo" / "sites", PACKAGED):
        for file in sorted(folder.glob("*.toml")):
            known.setdefault(file.stem, file)
    return known


def _read(file: Path, seen: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Return the values of a file, merged over those of the site that it extends."""
    if file in seen:
        raise UserError(
            tr(
                "{file} extends itself: remove `extends` from one of {files}",
                file=file,
                files=", ".join(map(str, seen)),
            )
        )
    try:
        values = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UserError(tr("{file} is not a readable TOML file: {error}", file=file, error=error)) from error
    base = values.pop("extends", None)
    return values if base is None else _read(_file(base), (*seen, file)) | values


def _site(values: dict[str, Any], file: Path) -> Site:
    hints, known = get_type_hints(Site), {option.name: option for option in fields(Site)}
    for name in values:
        if name not in known:
            raise UserError(f"{file}: {unknown_name('key', name, known)}")
    absent = [
        name
        for name, option in known.items()
        if name not in values and (option.default, option.default_factory) == (MISSING, MISSING)
    ]
    if absent:
        raise UserError(
            tr("{file} lacks {names}: slurm/SITES.md describes them", file=file, names=", ".join(absent))
        )
    try:
        return Site(**{name: _value(name, value, hints[name]) for name, value in values.items()})
    except (UserError, TypeError, ValueError) as error:
        raise UserError(f"{file}: {error}") from error


def _value(name: str, value: Any, kind: Any) -> Any:
    """Convert a TOML value to the type of its field.

    Raises:
        TypeError, ValueError, UserError: the value is not valid.
    """
    if name == "gpu":
        return gpu(value)
    if name == "link" and value:
        return find_link(str(value)).name
    if name == "qos":
        if not isinstance(value, list) or not all(isinstance(row, dict) for row in value):
            raise _wrong_kind(name, value, tr("tables, each under [[qos]]"))
        return tuple(_qos(row) for row in value)
    if name == "scheduler":
        if value not in (known := [one.value for one in Scheduler]):
            raise unknown_name("scheduler", str(value), known)
        return Scheduler(value)
    if name in _LISTS:
        if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
            raise _wrong_kind(name, value, tr("a list of texts, such as {example}", example=_LISTS[name]))
        return tuple(value)
    if name in ("options", "srun"):
        example = '{ mem = "64G", exclusive = true }' if name == "options" else '{ mpi = "pmix" }'
        if not isinstance(value, dict):
            raise _wrong_kind(name, value, tr("a table, such as {example}", example=example))
        (sbatch_options if name == "options" else srun_options).normal(value)
        return value
    if name == "gpu_option" and value not in GPU_OPTIONS:
        raise unknown_name(name, str(value), GPU_OPTIONS)
    if name == "environment":
        if not isinstance(value, dict) or any(isinstance(text, (dict, list)) for text in value.values()):
            raise _wrong_kind(name, value, tr('a table of texts, such as { NCCL_DEBUG = "WARN" }'))
        return variables({variable: str(text) for variable, text in value.items()})
    if not isinstance(value, kind) or isinstance(value, bool) is not (kind is bool):
        raise _wrong_kind(name, value, tr(KINDS[kind]))
    if kind is str:
        check_text(name, value)
    least = 1 if name == "cores_per_gpu" else 0
    if kind is int and value < least:
        raise ValueError(
            tr("{name} is {value}: it must be at least {least}", name=name, value=value, least=least)
        )
    return value


def _wrong_kind(name: str, value: object, kind: str) -> TypeError:
    return TypeError(tr("{name} is {value!r}: it must be {kind}", name=name, value=value, kind=kind))


def _qos(row: dict[str, Any]) -> Qos:
    known = [option.name for option in fields(Qos)]
    for name, value in row.items():
        if name not in known:
            raise unknown_name("key of a qos", name, known)
        whole = name in ("gpus", "jobs")
        if whole and (type(value) is not int or value < 1):
            raise _wrong_kind(f"{name} of a qos", value, tr("a whole number from 1"))
        if not whole and not isinstance(value, str):
            raise _wrong_kind(f"{name} of a qos", value, tr("a text"))
    for name in ("name", "time"):
        if name not in row:
            called = row.get("name", "?")
            raise ValueError(
                tr('the qos "{called}" has no {name}: each has a name and the time of its longest job',
                   called=called, name=name)
            )  # fmt: skip
    return Qos(**(row | {"time": parse_duration(row["time"])}))
