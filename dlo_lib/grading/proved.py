"""That a lab's own answer scores full marks, found once and kept on disk with the twins that were computed on the way.

Both follow from the lab, the library, the class secret and the versions below them, which is what the key says: only a changed lab is
judged again before a class is. The file holds pickled twins; it is read only where its seal is right, and whoever can make that knows the
class secret, and so all inputs of all checks. Cost: some milliseconds instead of the seconds of judging the reference solution.
"""

from __future__ import annotations

import hashlib
import hmac
import pickle
import sys
from dataclasses import dataclass
from pathlib import Path

from dlo_lib.files import write_aside
from dlo_lib.grading.modules import LabChecks
from dlo_lib.grading.twins import results_of

SEAL_BYTES = hashlib.sha256().digest_size
MOST_BYTES = 256 << 20  # a lab with more computes its twins anew


@dataclass(frozen=True)
class Proved:
    """The record in ``file``, for what ``key`` stands for, sealed with the class ``secret``."""

    file: Path
    key: str
    secret: str

    def load(self, checks: LabChecks) -> bool:
        """Give the twins of ``checks`` what was kept; False when there is no record, or another lab's."""
        try:
            with open(self.file, "rb") as file:
                seal, content = file.read(SEAL_BYTES), file.read(MOST_BYTES + 1)
        except OSError:
            return False
        if not hmac.compare_digest(seal, self._seal(content)):
            return False
        kept = results_of(_modules(checks))
        for name, results in pickle.loads(content).items():
            if name in kept:
                kept[name].update(results)
        return True

    def save(self, checks: LabChecks) -> str:
        """Keep what the twins of ``checks`` have computed; why that cannot be, or nothing."""
        try:
            content = pickle.dumps(results_of(_modules(checks)))
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            return f"{type(error).__name__}: {error}"
        if len(content) > MOST_BYTES:
            return f"{len(content) >> 20} MB"
        with write_aside(self.file) as aside:
            aside.write_bytes(self._seal(content) + content)
        self.file.chmod(0o600)  # it holds what checks compare with
        return ""

    def _seal(self, content: bytes) -> bytes:
        return hmac.new(self.secret.encode(), self.key.encode() + b"\n" + content, hashlib.sha256).digest()


def _modules(checks: LabChecks) -> list:
    names = dict.fromkeys(check.function.__module__ for check in (*checks.visible, *checks.hidden))
    return [sys.modules[name] for name in names if name in sys.modules]
