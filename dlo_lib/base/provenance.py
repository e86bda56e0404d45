"""Where a result comes from: what another person needs to repeat a run.

    commit          the code, as a commit without uncommitted changes
    seed            the initial weights, the order of the data, and all other random numbers
    configuration   every setting of the run
    data hash       SHA-256 of the data

A run without one of them is *not reproducible*: its result can be looked at, and not confirmed.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dlo_lib.base.text import tr

CHANGED = "-changed"
"""Follows a commit if tracked files differ from it."""
_COMMIT, _HASH = re.compile(r"[0-9a-f]{7,64}"), re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Provenance:
    """The four fields of a run; None for one that is not known.

    Attributes:
        commit: 7 to 64 hexadecimal digits, as ``commit_of`` returns it.
        seed: an integer.
        config: the settings by name, JSON values.
        data: the SHA-256 of the data, 64 hexadecimal digits, as ``digest`` returns it.
    """

    commit: str | None = None
    seed: int | None = None
    config: Mapping[str, Any] | None = None
    data: str | None = None

    @property
    def missing(self) -> tuple[str, ...]:
        """What is missing or cannot be right, as words for the reader; empty if the run is reproducible."""
        commit, data = self.commit, self.data
        lacks = []
        if isinstance(commit, str) and commit.endswith(CHANGED):
            lacks.append(tr("commit (files are changed and not committed)"))
        elif not (isinstance(commit, str) and _COMMIT.fullmatch(commit)):
            lacks.append(tr("commit"))
        if not isinstance(self.seed, int) or isinstance(self.seed, bool):
            lacks.append(tr("seed"))
        if not isinstance(self.config, Mapping) or not self.config:
            lacks.append(tr("configuration"))
        if not (isinstance(data, str) and _HASH.fullmatch(data)):
            lacks.append(tr("data hash"))
        return tuple(lacks)

    def plain(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        config = None if self.config is None else dict(self.config)
        return {"commit": self.commit, "seed": self.seed, "config": config, "data": self.data}

    @classmethod
    def read(cls, plain: Any) -> Provenance:
        """Return the fields that ``plain`` has, whatever else it contains: a student may have written it."""
        known = plain if isinstance(plain, Mapping) else {}
        return cls(known.get("commit"), known.get("seed"), known.get("config"), known.get("data"))


def commit_of(folder: str | Path = ".") -> str | None:
    """Return the commit of the repository that contains ``folder``; None if there is no repository.

    ``CHANGED`` follows it if a tracked file differs from the commit.
    """
    said = git_answer(Path(folder), "rev-parse", "HEAD")
    if said is None:
        return None
    changes = git_answer(Path(folder), "status", "--porcelain", "--untracked-files=no")
    return said.strip() + (CHANGED if changes is None or changes.strip() else "")


def git_answer(folder: Path, *words: str) -> str | None:
    """Return what the command ``git words`` prints in ``folder``; None if there is no git or no repository,
    or the command fails."""
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *words], capture_output=True, text=True, timeout=60, check=False
        )
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def digest(*parts: Any) -> str:
    """Return the SHA-256 of ``parts``, 64 hexadecimal digits. The dtype and the shape of an array count too.

    Args:
        parts: tensors, arrays, texts, bytes, or paths of files.
    """
    import numpy as np

    whole = hashlib.sha256()
    for part in parts:
        if isinstance(part, Path):
            with part.open("rb") as file:
                kind, content = "file", hashlib.file_digest(file, "sha256").digest()
        elif isinstance(part, (str, bytes)):
            kind, content = type(part).__name__, part.encode() if isinstance(part, str) else part
        else:
            array = np.asarray(part.detach().cpu() if hasattr(part, "detach") else part)
            kind, content = f"{array.dtype.str} {array.shape}", array.tobytes()  # in C order
        whole.update(f"{kind} {len(content)}\n".encode())
        whole.update(content)
    return whole.hexdigest()
