"""The kernel of a Hub: it finds what ipykernel finds, and its ranks share its import of PyTorch."""

from __future__ import annotations

import sys
from pathlib import Path

CELL = """
import figures
from dlo_lib.launch import client, run_ranks
ranks = run_ranks(lambda: 3, 2)
print(figures.drawn, type(client._server._process).__name__, list(ranks))
"""


def test_a_notebook_imports_the_files_beside_it_and_its_ranks_come_from_the_seed(tmp_path: Path) -> None:
    from jupyter_client.manager import KernelManager

    (tmp_path / "figures.py").write_text("drawn = 'drawn'\n")
    (tmp_path / "random.py").write_text("raise ImportError('the standard module is hidden')\n")
    manager = KernelManager()
    assert manager.kernel_spec is not None
    manager.kernel_spec.argv = [sys.executable, "-m", "dlo_lib.hub.kernel", "-f", "{connection_file}"]
    manager.start_kernel(cwd=str(tmp_path))
    said: list[str] = []
    client = manager.client()
    try:
        client.start_channels()
        client.wait_for_ready(timeout=300)
        client.execute_interactive(CELL, timeout=300, output_hook=lambda message: said.append(text(message)))
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    assert "".join(said).split() == ["drawn", "SeededServer", "[3,", "3]"]


def text(message: dict) -> str:
    """What an output of the kernel says."""
    content = message["content"]
    return str(content.get("text") or content.get("traceback") or "")
