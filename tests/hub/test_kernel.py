"""The kernel of a Hub: it finds what ipykernel finds, its ranks share its import of PyTorch, and its debugger
is loaded when it is opened.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CELL = """
import figures
from dlo_lib.launch import client, run_ranks
ranks = run_ranks(lambda: 3, 2)
print(figures.drawn, type(client._server._process).__name__, list(ranks))
"""


FIGURE = """
import matplotlib, sys
from matplotlib import pyplot
pyplot.plot([1, 2])
pyplot.show()
print("inline" in matplotlib.get_backend(), "debugpy" in sys.modules, flush=True)
"""
BREAK = "a = 3\nb = a + 1\nprint(b)"
WAIT_S = 120


@contextmanager
def kernel_in(folder: Path) -> Iterator[Any]:
    """A client of a kernel of the Hub that runs in a folder."""
    from jupyter_client.manager import KernelManager

    manager = KernelManager()
    assert manager.kernel_spec is not None
    manager.kernel_spec.argv = [sys.executable, "-m", "dlo_lib.hub.kernel", "-f", "{connection_file}"]
    manager.start_kernel(cwd=str(folder))
    client = manager.client()
    try:
        client.start_channels()
        client.wait_for_ready(timeout=300)
        yield client
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def run(client: Any, code: str) -> list[dict]:
    """Run a cell and return its outputs."""
    said: list[dict] = []
    client.execute_interactive(code, timeout=300, output_hook=said.append)
    return said


def text(message: dict) -> str:
    """What an output of the kernel says."""
    content = message["content"]
    return str(content.get("text") or content.get("traceback") or "")


def test_a_notebook_imports_the_files_beside_it_and_its_ranks_come_from_the_seed(tmp_path: Path) -> None:
    (tmp_path / "figures.py").write_text("drawn = 'drawn'\n")
    (tmp_path / "random.py").write_text("raise ImportError('the standard module is hidden')\n")
    with kernel_in(tmp_path) as client:
        said = "".join(map(text, run(client, CELL)))
    assert said.split() == ["drawn", "SeededServer", "[3,", "3]"]


def test_figures_are_shown_in_the_notebook_and_the_debugger_is_loaded_on_demand(tmp_path: Path) -> None:
    with kernel_in(tmp_path) as client:
        said = run(client, FIGURE)
        shown = [one["content"]["data"] for one in said if one["msg_type"] == "display_data"]
        assert "image/png" in shown[0]
        assert "".join(map(text, said)).split() == ["True", "False"]
        info = debug(client, "debugInfo")
        assert not info["isStarted"]
        assert "".join(map(text, run(client, "print('debugpy' in sys.modules)"))) == "False\n"

        debug(client, "initialize", {"clientID": "test", "adapterID": "", "linesStartAt1": True})
        debug(client, "attach", {"justMyCode": True})
        file = debug(client, "dumpCell", {"code": BREAK})["sourcePath"]
        assert file.startswith(info["tmpFilePrefix"])
        points = {"source": {"path": file}, "breakpoints": [{"line": 2}], "sourceModified": False}
        assert debug(client, "setBreakpoints", points)["breakpoints"][0]["verified"]
        debug(client, "configurationDone")
        assert debug(client, "debugInfo")["isStarted"]
        client.execute(BREAK)
        thread = event(client, "stopped")["threadId"]
        frame = debug(client, "stackTrace", {"threadId": thread})["stackFrames"][0]
        assert (frame["line"], frame["source"]["path"]) == (2, file)
        debug(client, "continue", {"threadId": thread})
        while (message := client.get_iopub_msg(timeout=WAIT_S))["msg_type"] != "stream":
            pass
        assert text(message).strip() == "4"


def debug(client: Any, command: str, arguments: dict | None = None) -> dict[str, Any]:
    """Send a request of JupyterLab's debugger and return the body of its answer."""
    content = {"type": "request", "seq": 1, "command": command, "arguments": arguments or {}}
    request = client.session.msg("debug_request", content)
    client.control_channel.send(request)
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        answer = client.get_control_msg(timeout=WAIT_S)
        if answer["parent_header"].get("msg_id") == request["header"]["msg_id"]:
            assert answer["content"].get("success", True), answer["content"]
            return answer["content"].get("body", {})
    raise TimeoutError(f"no answer to {command}")


def event(client: Any, name: str) -> dict[str, Any]:
    """Wait for an event of the debugger and return its body."""
    while True:
        message = client.get_iopub_msg(timeout=WAIT_S)
        if message["msg_type"] == "debug_event" and message["content"]["event"] == name:
            return message["content"]["body"]
