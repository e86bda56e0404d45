"""Ranks of a kernel: they end with it, its interrupt reaches them, and their output arrives at once."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator

import jupyter_client
import nbformat
import psutil
import pytest
from nbclient import NotebookClient

TIMEOUT = 120


class Kernel:
    """A kernel with four ranks; a later test starts those that an earlier one has left, or new ones."""

    def __init__(self) -> None:
        self.manager = jupyter_client.KernelManager(kernel_name="python3")
        self.manager.start_kernel()
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=TIMEOUT)

    def run(self, code: str, on_message=lambda message: None) -> dict:
        """Run a cell; return its reply."""
        return self.client.execute_interactive(
            code, timeout=TIMEOUT, output_hook=on_message, store_history=True
        )["content"]

    def text(self, code: str) -> str:
        """Run a cell that should succeed; return the text of its last output."""
        texts: list[str] = []

        def collect(message: dict) -> None:
            texts.append(message["content"].get("data", {}).get("text/plain", ""))

        reply = self.run(code, collect)
        assert reply["status"] == "ok", reply
        return next((text for text in reversed(texts) if text), "")

    def start_ranks(self) -> list[int]:
        """Start four ranks; return their processes and the server's."""
        self.run("%load_ext dlo_lib.live_ranks")
        text = self.text("%%ranks 4\nimport os\nprint(os.getpid(), os.getppid())")
        pids = {int(pid) for pid in re.findall(r"\d+", re.sub(r"\[.*?\]", "", text))}
        assert len(pids) == 5
        return sorted(pids)

    def close(self) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)


@pytest.fixture(scope="module")
def kernel() -> Iterator[Kernel]:
    kernel = Kernel()
    yield kernel
    kernel.close()


def assert_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + 10
    while alive := [
        pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    ]:
        assert time.monotonic() < deadline, f"still there: {alive}"
        time.sleep(0.02)


def test_the_interrupt_of_the_kernel_stops_the_cell_and_keeps_the_ranks(kernel):
    kernel.start_ranks()
    kernel.run("%%ranks\nkept = torch.tensor(rank)")
    begun = []

    def interrupt(message: dict) -> None:
        if "begun" in message["content"].get("data", {}).get("text/plain", "") and not begun:
            begun.append(message)
            kernel.manager.interrupt_kernel()

    cell = "%%ranks\nprint('begun')\nif rank == 0:\n    while True: pass\ndist.all_reduce(kept)"
    reply = kernel.run(cell, interrupt)
    assert reply["status"] == "error"
    assert reply["traceback"] == [
        "KeyboardInterrupt: the cell was stopped on all ranks, which can be used again."
    ]
    code = "%%ranks\nt = torch.tensor(rank)\ndist.all_reduce(t)\nt.item(), 'kept' in globals()"
    assert kernel.text(code) == "[all 4 ranks] (6, True)"


def test_output_appears_while_the_cell_runs(kernel, tmp_path):
    kernel.start_ranks()
    seen = []

    def go_ahead(message: dict) -> None:
        content = message["content"]
        if text := content.get("data", {}).get("text/plain", ""):
            seen.append((message["msg_type"], text, content["transient"]["display_id"]))
            if "first" in text:
                (tmp_path / "seen").touch()

    code = f"""%%ranks
import pathlib, time
print("first", rank)
while not pathlib.Path({str(tmp_path / "seen")!r}).exists():
    time.sleep(0.05)
print("second", rank)"""
    assert kernel.run(code, go_ahead)["status"] == "ok"
    assert seen[0][0] == "display_data"
    assert {kind for kind, *_ in seen[1:]} == {"update_display_data"}
    assert len({display_id for *_, display_id in seen}) == 1
    assert seen[-1][1].count("second") == 4


def test_completion_in_the_kernel(kernel):
    kernel.start_ranks()
    kernel.run("%%ranks\nsome_long_name = 3")
    code = "%%ranks 4\nprint(some_l"
    kernel.client.complete(code)
    found = kernel.client.get_shell_msg(timeout=TIMEOUT)["content"]
    assert found["matches"] == ["some_long_name"]
    assert code[: found["cursor_start"]] + found["matches"][0] == "%%ranks 4\nprint(some_long_name"


def test_a_notebook_holds_the_output_of_all_ranks():
    cell = nbformat.v4.new_code_cell
    cells = [
        cell("%load_ext dlo_lib.live_ranks"),
        cell(
            "%%ranks 3\nimport matplotlib.pyplot as plt\nprint('rank', rank)\nplt.plot([rank, 1])\nplt.show()"
        ),
        cell("%%ranks\nif rank:\n    dist.barrier()"),
        cell("%%ranks\nrank * 2"),
    ]
    notebook = nbformat.v4.new_notebook(cells=cells)
    client = NotebookClient(
        notebook, timeout=TIMEOUT, startup_timeout=TIMEOUT, kernel_name="python3", allow_errors=True
    )
    client.execute()
    _, drawn, stuck, after = notebook.cells
    (output,) = drawn.outputs
    assert output["data"]["text/html"].count("data:image/png;base64,") == 3
    assert stuck.outputs[-1]["traceback"][0].startswith("DEADLOCK: ranks 1 and 2 wait")
    assert "Cell In[3], line 3: dist.barrier()" in "\n".join(stuck.outputs[-1]["traceback"])
    assert after.outputs[0]["data"]["text/plain"] == "[rank 0] 0\n[rank 1] 2\n[rank 2] 4"


def test_a_restart_of_the_kernel_ends_the_ranks(kernel):
    pids = kernel.start_ranks()
    kernel.manager.restart_kernel(now=False)
    assert_gone(pids)
    kernel.client.wait_for_ready(timeout=TIMEOUT)  # for the next test


def test_the_end_of_the_kernel_ends_ranks_that_work(kernel):
    pids = kernel.start_ranks()
    kernel.client.execute("%%ranks\nwhile True: pass")
    deadline = time.monotonic() + 60
    while not all(psutil.Process(pid).cpu_times().user > 0.5 for pid in pids[1:]):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.kill(kernel.manager.provisioner.pid, signal.SIGKILL)
    assert_gone(pids)
