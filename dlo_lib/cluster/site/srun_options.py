"""Options of srun that a site or a call adds, such as those of the plug-ins that start containers.

    srun={"container-image": "nvcr.io#nvidia/pytorch:25.01-py3"}      pyxis and enroot
    srun={"uenv": "prgenv-gnu/24.11:v1", "view": "default"}           uenv
    srun={"image": "docker:pytorch/pytorch"}                          shifter
    srun={"cpu-bind": "verbose", "mpi": "pmix"}                       SLURM's

The names of a plug-in's options are not checked, because only srun on that cluster knows them. Values may
have variables, such as ``$SCRATCH``, which the script expands.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from dlo_lib.base.errors import UserError
from dlo_lib.base.text import tr
from dlo_lib.cluster.site.quoting import check_text, expanded
from dlo_lib.cluster.site.sbatch_options import Options, off, refuse_heterogeneous

_OURS = {
    "cpus-per-task": "cores=",
    "error": "job.logs()",
    "export": "env= or setup=",
    "gpus": "gpus=",
    "gres": "gpus=",
    "jobid": "submit(), which has the job",
    "kill-on-bad-exit": "submit(), which sets it",
    "label": "job.logs(rank=...)",
    "nodes": "nodes=",
    "ntasks": "gpus= or ranks=",
    "ntasks-per-node": "gpus= or ranks=, with nodes=",
    "output": "job.logs()",
    "pty": "srun in a terminal",
}
_IMAGES = ("container-image", "container-name", "environment", "image")
"""Options that start the program in an image, which has another Python."""


def normal(options: Options) -> dict[str, str | bool]:
    """Return options by their long names, without those that are off.

    Raises:
        UserError: an option is one that the job sets, or has a value of a wrong kind.
    """
    if not isinstance(options, Mapping):
        text = 'srun is {given!r}: write a dict, such as srun={{"container-image": "..."}}'
        raise UserError(tr(text, given=options))
    found: dict[str, str | bool] = {}
    for given, value in options.items():
        name = str(given).removeprefix("--").replace("_", "-")
        refuse_heterogeneous(name)
        if name in _OURS:
            raise UserError(tr("srun: the job sets --{name}: use {ours}", name=name, ours=_OURS[name]))
        if not re.fullmatch(r"[a-z][a-z0-9-]+", name):
            text = 'srun: "{name}" is no long name of an option: write it as in "cpu-bind"'
            raise UserError(tr(text, name=given))
        if value is None or value is False:
            continue
        if not isinstance(value, (str, int)):
            text = "srun: {name} is {value!r}: it must be a text, a whole number, true or false"
            raise UserError(tr(text, name=name, value=value))
        found[name] = True if value is True else check_text(f"srun: {name}", str(value))
    return found


def merged(of_site: Options, asked: Options) -> dict[str, str | bool]:
    """Return the options of the site, replaced by those of the call; None or False takes one of the site out.

    Raises:
        UserError: one of them is not valid.
    """
    own = normal(asked)
    site = {name: value for name, value in normal(of_site).items() if name not in off(asked)}
    return site | own


def starts_image(options: Mapping[str, str | bool]) -> bool:
    """Whether the program runs in an image, so that the Python of the submitting process may be absent."""
    return any(name in options for name in _IMAGES)


def words(options: Mapping[str, str | bool], folder: bool) -> str:
    """Return the options as words of bash, with a blank at the end; "" without any.

    An image of pyxis sees the working directory and the folder of the job, besides the mounts of the user.

    Args:
        options: as :func:`merged` returns them.
        folder: whether the job has a folder.
    """
    found = {name: value if value is True else expanded(str(value)) for name, value in options.items()}
    if "container-image" in found or "container-name" in found:
        library = '"${job%/jobs/*}/library:${job%/jobs/*}/library"'
        mounts = ['"$PWD:$PWD"', *['"$job:$job"', library] * folder]
        own = found.get("container-mounts")
        found["container-mounts"] = ",".join([*([str(own)] if own else []), *mounts])
        found.setdefault("container-workdir", '"$PWD"')
    return "".join(f"--{name} " if value is True else f"--{name}={value} " for name, value in found.items())
