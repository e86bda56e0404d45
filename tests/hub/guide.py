"""The commands of ``deploy/hub/README.md``, as a test types them."""

from __future__ import annotations

import re
from pathlib import Path

README = Path(__file__).resolve().parents[2] / "deploy" / "hub" / "README.md"


def blocks(heading: str) -> list[list[str]]:
    """Return the lines of each block of commands below a heading of the README, without their comments."""
    text = README.read_text(encoding="utf-8")
    section = re.search(rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", text, re.DOTALL | re.MULTILINE)
    assert section is not None, heading
    found = re.findall(r"^```bash\n(.*?)^```", section.group(1), re.DOTALL | re.MULTILINE)
    assert found, heading
    return [[re.sub(r"\s+# .*", "", line) for line in block.splitlines()] for block in found]
