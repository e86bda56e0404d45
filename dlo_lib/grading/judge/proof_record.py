"""The record on disk that a lab's reference solution scores full marks, with the results of its twins.

Both depend on the lab, the library, the class secret and the versions of Python, torch and nbgrader, which
the key identifies. So the reference solution is judged again only after a change. The file contains pickled
results and is read only if its seal is right; to forge a seal takes the class secret, which gives all inputs
of all checks anyway. Cost: milliseconds, instead of the seconds that judging the reference solution takes.
"""

from __future__ import annotations

import hashlib
import hmac
import pickle
import stat
import sys
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlo_lib.base.files import write_aside

if TYPE_CHECKING:
    from dlo_lib.grading.lab.modules import LabChecks  # imports torch, which `stands` does without

SEAL_BYTES = hashlib.sha256().digest_size
MOST_BYTES = 256 << 20  # a lab with larger twins computes them again


@dataclass(frozen=True)
class ProofRecord:
    """The record in ``file`` for the lab that ``key`` identifies, sealed with the class ``secret``."""

    file: Path
    key: str
    secret: str

    def stands(self) -> bool:
        """Return whether there is a record of this lab; costs no import of torch."""
        return self._content() is not None

    def load(self, checks: LabChecks, seconds: dict[str, float] | None = None) -> bool:
        """Restore the results of the twins of ``checks``; return False if there is no record for this key.

        ``seconds``: receives the seconds of the reference solution by check.
        """
        content = self._content()
        if content is None:
            return False
        results_by_module = _results_of(checks)
        twins, by_check = pickle.loads(content)
        if seconds is not None:
            seconds.update(by_check)
        for name, results in twins.items():
            if name in results_by_module:
                results_by_module[name].update(results)
        return True

    def save(self, checks: LabChecks, seconds: dict[str, float] | None = None) -> str:
        """Write the results of the twins of ``checks`` and the ``seconds`` of the reference solution; return
        the reason if that is impossible, else an empty text.
        """
        try:
            content = pickle.dumps((_results_of(checks), seconds or {}))
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            return f"{type(error).__name__}: {error}"
        if len(content) > MOST_BYTES:
            return f"{len(content) >> 20} MB"
        with write_aside(self.file) as aside:
            aside.write_bytes(self._seal(content) + content)
        shared = self.file.parent.stat().st_mode & stat.S_ISGID  # by the graders of a course
        self.file.chmod(0o660 if shared else 0o600)  # it contains expected values
        return ""

    def _content(self) -> bytes | None:
        try:
            with open(self.file, "rb") as file:
                seal, content = file.read(SEAL_BYTES), file.read(MOST_BYTES + 1)
        except OSError:
            return None
        return content if hmac.compare_digest(seal, self._seal(content)) else None

    def _seal(self, content: bytes) -> bytes:
        return hmac.new(self.secret.encode(), self.key.encode() + b"\n" + content, hashlib.sha256).digest()


def _results_of(checks: LabChecks) -> dict[str, OrderedDict[Hashable, Any]]:
    from dlo_lib.grading.checks.twins import results_of

    names = dict.fromkeys(check.function.__module__ for check in (*checks.visible, *checks.hidden))
    return results_of([sys.modules[name] for name in names if name in sys.modules])
