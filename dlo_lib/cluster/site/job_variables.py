"""Environment variables that a site or a call sets in a job."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from dlo_lib.base.errors import UserError
from dlo_lib.base.text import tr

_OF_JOB = re.compile(
    r"DLO_(JOB|ELEMENT|OUT|PROGRESS(_DECIDES)?|RANKS)|(LOCAL_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)"
    r"|SLURM_(EXPORT_ENV|(ARRAY|JOB)_\w+|PROCID|LOCALID|NODEID|NTASKS|NNODES|RESTART_COUNT)"
)
"""Variables that tell a rank its job and its place."""


def variables(env: Mapping[str, object]) -> dict[str, str]:
    """Return environment variables of a job as texts.

    Raises:
        UserError: they are not a dict of texts and numbers, a name is not valid, or the job sets it.
    """
    if not isinstance(env, Mapping):
        raise UserError(tr('env is {given!r}: write a dict, such as env={{"NCCL_DEBUG": "INFO"}}', given=env))
    for name, value in env.items():
        if not re.fullmatch(r"[A-Za-z_]\w*", str(name), re.ASCII):
            raise UserError(
                tr("env: {name!r} is no name of a variable: use letters, digits and _", name=name)
            )
        if _OF_JOB.fullmatch(name):
            raise UserError(tr("env: the job sets {name}: leave it out", name=name))
        if not isinstance(value, (str, int, float, os.PathLike)) or "\0" in str(value):
            raise UserError(
                tr("env: {name} is {value!r}: it must be a text or a number", name=name, value=value)
            )
    return {name: str(value) for name, value in env.items()}
