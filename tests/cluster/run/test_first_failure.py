"""On two nodes of a real SLURM, the user sees the first error of the ranks, or their deadlock."""

from __future__ import annotations

from pathlib import Path

import pytest

from dlo_lib import cluster
from dlo_lib.cluster import JobFailed

LIMIT_S = 900
PROGRAM = """
import torch, torch.distributed as dist
from dlo_lib.launch import explained, init_process_group, place

here = place()
with explained(here), init_process_group(here):
    if here.rank == 1:
        dist.recv(torch.ones(4), 0)
    dist.all_reduce(torch.ones(4))
"""


def of_a_bad_batch() -> None:
    import torch
    import torch.distributed as dist

    for _ in range(3):
        dist.all_reduce(torch.ones(4))
        if dist.get_rank() == 1:
            raise ValueError("a bad batch")


@pytest.mark.slow
def test_the_first_error_and_a_dead_lock_across_nodes_are_named(elsewhere, other_site, tmp_path, monkeypatch):
    monkeypatch.setenv("DLO_POLL_S", "0.3")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.chdir(tmp_path)
    Path("program.py").write_text(PROGRAM)
    wanted = {"gpus": 2, "nodes": 2, "time": 20, "site": other_site, "setup": ["export OMP_NUM_THREADS=1"]}
    raises = cluster.submit(of_a_bad_batch, **wanted)
    locked = cluster.submit("program.py", **wanted)
    with pytest.raises(JobFailed) as failed:
        raises.wait(timeout=LIMIT_S)
    error = 'raise ValueError("a bad batch")\nValueError: a bad batch\n\nrank 0 lost the connection as a cons'
    assert "rank 1 raised ValueError: a bad batch\n\nTraceback (most recent call last):" in str(failed.value)
    assert error in str(failed.value)
    with pytest.raises(JobFailed, match="rank 1 raised ValueError: a bad batch"):
        raises.result()
    assert "rank 1 raised ValueError: a bad batch  " in repr(raises), "the reason, in the table of elements"
    assert "DEADLOCK" not in raises.logs()

    with pytest.raises(JobFailed, match=r"with status \d+; .*\n\nDEADLOCK: ranks 0 and 1 wait for") as failed:
        locked.wait(timeout=LIMIT_S)
    for row in (
        r"  0     waits in all_reduce of float32[4]        1 on world ",
        r"  1     waits in recv from rank 0 of float32[4]  message 1, tag 0  ",
    ):
        assert row in str(failed.value)
        assert row in locked.logs()
    assert "DEADLOCK: ranks 0 and 1 wait" in repr(locked)
