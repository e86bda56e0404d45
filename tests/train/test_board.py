"""TensorBoard is served by this process for the runs of a folder and ends with the process."""

import json
import subprocess
import sys
import urllib.request

import pytest

from dlo_lib.train.board import TensorBoardView

pytest.importorskip("tensorboard")

SERVE = """
import json, sys, urllib.request
from torch.utils.tensorboard import SummaryWriter
from dlo_lib.train.board import serve_board
with SummaryWriter(sys.argv[1] + "/cosine") as board:
    board.add_scalar("loss", 1.5, 1)
url = serve_board(sys.argv[1]).url
for _ in range(600):
    runs = json.load(urllib.request.urlopen(url + "data/runs"))
    if runs:
        break
print(json.dumps([url, runs]))
"""


def test_the_runs_of_the_folder_are_served_and_the_server_ends_with_the_process(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", SERVE, str(tmp_path)], capture_output=True, text=True, timeout=120, check=True
    )
    url, runs = json.loads(done.stdout.splitlines()[-1])
    assert runs == ["cosine"]
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(url)


def test_behind_a_hub_the_proxy_url_is_used(monkeypatch):
    shown = TensorBoardView("http://localhost:4321/", 500)._repr_html_()
    assert 'location.hostname + ":4321/"' in shown
    monkeypatch.setenv("TENSORBOARD_PROXY_URL", "/user/ada/proxy/%PORT%/")
    assert '"/user/ada/proxy/4321/"' in TensorBoardView("http://localhost:4321/", 500)._repr_html_()
