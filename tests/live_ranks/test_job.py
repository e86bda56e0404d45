"""Ranks in a running job of SLURM: as on this machine, on the job's nodes, and only for the job's owner.

A virtual cluster with two nodes runs the job. Its GPUs are no real ones, so all ranks compute on the CPU, and
NCCL between the nodes is not tested.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from dlo_lib.launch import DeadLock, RankFailure
from dlo_lib.live_ranks.magic import Interrupted
from dlo_lib.live_ranks.slurm_job import RunningJob
from tests.cluster.fixtures import elsewhere_conf
from tests.live_ranks.test_failures import assert_usable

__all__ = ["elsewhere_conf"]
pytestmark = pytest.mark.slow
LIMIT_S = 120
OTHER = "daemon"
SLEEP = "exec sleep 3000"
NODE = "dlo_lib.live_ranks.node"


def slurm(*command: str, fails: bool = False) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    assert fails or done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.fixture(scope="module")
def submit(elsewhere_conf: Path, tmp_path_factory) -> Iterator[Callable[..., str]]:
    """Submit a job that sleeps; return its number. All jobs are cancelled at the end."""
    numbers: list[str] = []
    logs = tmp_path_factory.mktemp("logs") / "log"

    def submit(*options: str, state: str = "R") -> str:
        number = slurm("sbatch", "--parsable", f"--output={logs}", *options, f"--wrap={SLEEP}").strip()
        numbers.append(number)
        wait_until(lambda: slurm("squeue", "-h", "-j", number, "-o", "%t").split() == [state])
        return number

    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith(("SLURM_", "SBATCH_"))]:
            patch.delenv(name)
        patch.setenv("SLURM_CONF", str(elsewhere_conf))
        yield submit
        slurm("scancel", *numbers, fails=True)


@pytest.fixture(scope="module")
def job(submit) -> str:
    """A job with two tasks on each of two nodes."""
    return submit("--partition=training", "--nodes=2", "--ntasks-per-node=2")


@pytest.fixture
def four_ranks(notebook, job):
    notebook.cell(f"%%ranks --job {job}\nkept = rank * 10\nx = torch.ones(1)")


def above(ranks: list[int]) -> set[int]:
    """The servers of these ranks, the seeds that forked them, and the nodes that forked the seeds."""
    parents = [parent for rank in ranks for parent in psutil.Process(rank).parents()]
    return {parent.pid for parent in parents if any(NODE in word for word in parent.cmdline())}


def test_a_rank_for_each_task_on_both_nodes(notebook, four_ranks, job):
    code = "%%ranks\nimport os\nos.uname().nodename, os.environ['LOCAL_RANK'], os.environ['LOCAL_WORLD_SIZE']"
    assert notebook.cell(code).by_rank() == {
        "rank 0": "('big-1', '0', '2')",
        "rank 1": "('big-1', '1', '2')",
        "rank 2": "('big-2', '0', '2')",
        "rank 3": "('big-2', '1', '2')",
    }
    assert repr(notebook.shell.user_ns["ranks"]) == (
        f"4 ranks in job {job}, for cells that begin with %%ranks"
    )


def test_variables_stay_and_values_come_and_go(notebook, four_ranks):
    notebook.cell("%%ranks\nt = torch.tensor(float(rank))\ndist.all_reduce(t)")
    assert notebook.cell("%%rank 3\nt").by_rank() == {"rank 3": "tensor(6.)"}
    assert notebook.cell("ranks.pull('kept')").value == [0, 10, 20, 30]
    large = notebook.cell("ranks.pull('torch.arange(1_000_000)', rank=2)").value
    assert large.tolist() == list(range(1_000_000))
    notebook.shell.user_ns["large"] = large
    notebook.cell("ranks.push('large')")
    assert notebook.cell("%%ranks\nint(large[-1])").by_rank() == {"all 4 ranks": "999999"}


def test_the_same_job_again_keeps_the_ranks(notebook, four_ranks, job):
    notebook.cell(f"%%ranks 4 --job {job}\nassert kept == rank * 10")


def test_prints_and_figures_keep_their_order(notebook, four_ranks):
    ran = notebook.cell(
        "%%ranks\nfrom IPython.display import HTML, display\nimport matplotlib.pyplot as plt\n"
        "if rank == 3:\n"
        "    for i in range(20):\n"
        "        print('text', i)\n"
        "        display(HTML(f'<b>shown {i}</b>'))\n"
        "    plt.plot([1, 2]);"
    )
    places = [ran.html.index(f"{what} {i}") for i in range(20) for what in ("text", "<b>shown")]
    assert places == sorted(places)
    assert ran.html.count('src="data:image/png;base64,') == 1


def test_a_rank_that_prints_much_holds_up_no_other(notebook, four_ranks):
    text = notebook.cell(
        "%%ranks\nif rank == 1:\n    print('line\\n' * 100_000)\nelse:\n    print('short')"
    ).text
    assert "[ranks 0, 2 and 3] short" in text
    assert "characters are left out" in text


def test_names_are_completed(notebook, four_ranks):
    notebook.cell("%%rank 3\nsome_long_name = 1")
    found = notebook.shell.user_ns["ranks"].complete("some_l", 6, rank=3)
    assert [word for *_, word, _ in found] == ["some_long_name"]


def test_nodes_have_no_port_for_cells(notebook, four_ranks):
    """Only the node of rank 0 has a port, at which the next process group will meet."""
    notebook.cell("%%ranks\nimport os")
    own = above(notebook.cell("ranks.pull('os.getpid()')").value)
    listening = [
        connection
        for pid in own
        for connection in psutil.Process(pid).net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert len(own) == 6, "a node, its seed and its server on each of two machines"
    assert len(listening) == 1


def test_a_skipped_collective_is_explained(notebook, four_ranks):
    ran = notebook.try_cell("%%ranks\nif rank != 2:\n    dist.all_reduce(x)")
    assert isinstance(ran.error, DeadLock)
    assert ran.message.startswith("DEADLOCK: ranks 0, 1 and 3 wait for something that can no longer happen.")
    assert ", line 3: dist.all_reduce(x)" in ran.message
    waited = next(line for line in ran.message.splitlines() if line.startswith("  0 "))
    assert float(waited.split()[-2]) < 1, "it is found in the same second"
    assert_usable(notebook)


def test_a_mismatch_between_two_nodes_is_explained(notebook, four_ranks):
    ran = notebook.try_cell("%%ranks\ndist.all_reduce(torch.ones(3 if rank == 3 else 2))")
    assert isinstance(ran.error, DeadLock)
    assert "the ranks pass tensors of different sizes" in ran.message
    assert_usable(notebook)


def test_an_error_on_one_rank(notebook, four_ranks):
    ran = notebook.try_cell("%%ranks\nif rank == 3:\n    raise ValueError('a bad batch')\ndist.all_reduce(x)")
    assert isinstance(ran.error, RankFailure)
    assert ran.message.startswith("rank 3 raised ValueError: a bad batch")
    assert ", line 3, in <module>" in ran.message
    assert_usable(notebook)


@pytest.mark.parametrize("rank", [0, 3])
def test_the_end_of_a_process_loses_its_variables_only(notebook, four_ranks, rank):
    ran = notebook.try_cell(f"%%ranks\nimport os\nif rank == {rank}:\n    os._exit(4)\ndist.all_reduce(x)")
    assert ran.message.startswith(f"rank {rank} ended its process with status 4")
    assert f"(The variables of rank {rank} are lost, because the process has ended.)" in ran.text
    assert_usable(notebook, lost={rank})


@pytest.mark.parametrize("code", ["while True: pass", "if rank == 3:\n    while True: pass\ndist.barrier()"])
def test_an_interrupt_stops_the_cell_on_all_ranks(notebook, four_ranks, interruptible, tmp_path, code):
    started = tmp_path / "started"

    def interrupt() -> None:
        wait_until(started.exists)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    ran = notebook.try_cell(f"%%ranks\nopen({str(started)!r}, 'w').close()\n{code}")
    thread.join()
    assert isinstance(ran.error, Interrupted)
    assert_usable(notebook)


def test_a_rank_that_cannot_be_interrupted_is_replaced(notebook, four_ranks, interruptible, tmp_path):
    started = tmp_path / "started"

    def interrupt() -> None:
        wait_until(started.exists)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    code = f"open({str(started)!r}, 'w').close()\nif rank == 2:\n    sum(range(10**12))\ndist.barrier()"
    ran = notebook.try_cell(f"%%ranks\n{code}")
    thread.join()
    assert isinstance(ran.error, Interrupted)
    assert "(The variables of rank 2 are lost, because the process has ended.)" in ran.text
    assert_usable(notebook, lost={2})


def test_idle_ranks_are_released_and_come_back_in_the_job(notebook, four_ranks, job):
    ranks = notebook.shell.user_ns["ranks"]
    ranks.idle_minutes = 0.2 / 60
    notebook.cell("%%ranks\npass")
    wait_until(lambda: ranks._notes)
    ranks.idle_minutes = 20.0
    ran = notebook.cell("%%ranks\nimport os\nos.uname().nodename")
    assert "The ranks were released" in ran.text
    assert ran.by_rank() == {"ranks 0 and 1": "'big-1'", "ranks 2 and 3": "'big-2'"}


def test_ranks_end_and_the_job_stays(notebook, job, submit):
    notebook.cell(f"%%ranks --job {job}\nimport os")
    pids = notebook.cell("ranks.pull('os.getpid()')").value
    own = above(pids)
    assert len(own) == 6
    notebook.cell("ranks.stop()")
    wait_until(lambda: not any(psutil.pid_exists(pid) for pid in (*pids, *own)))
    assert slurm("squeue", "-h", "-j", job, "-o", "%T").strip() == "RUNNING"
    assert notebook.try_cell("%%ranks\n1").message == "no ranks run: begin a cell with %%ranks 4"


def test_the_end_of_the_notebook_leaves_none_behind(job, tmp_path):
    def steps() -> list[str]:
        return slurm("squeue", "-h", "-s", "-j", job, "-o", "%i").split()

    before = steps()
    program = tmp_path / "program.py"
    program.write_text(f"""
import time
from dlo_lib.live_ranks.handle import Ranks
ranks = Ranks({{}})
ranks.start(2, job={job!r})
print(*ranks.pull("__import__('os').getpid()"), flush=True)
time.sleep(1000)
""")
    process = subprocess.Popen([sys.executable, str(program)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    pids = [int(pid) for pid in process.stdout.readline().split()]
    assert len(pids) == 2
    process.kill()
    process.wait()
    process.stdout.close()
    wait_until(lambda: not any(psutil.pid_exists(pid) for pid in pids))
    wait_until(lambda: steps() == before)
    assert slurm("squeue", "-h", "-j", job, "-o", "%T").strip() == "RUNNING"


def test_the_end_of_a_job_by_its_time_limit_is_one_sentence(notebook, submit):
    short = submit("--partition=debug", "--time=10")
    notebook.cell(f"%%ranks 2 --job {short}\nx = 1")

    def end_now() -> None:
        slurm("scontrol", "update", f"jobid={short}", "EndTime=now")

    thread = threading.Thread(target=end_now)
    thread.start()
    ran = notebook.try_cell("%%ranks\nimport time\ntime.sleep(1000)")
    thread.join()
    assert ran.message == (
        f"job {short} has reached its time limit, and its ranks have ended with it: "
        "submit a longer job, and give its number to --job"
    )
    assert "(The ranks were ended, and their variables are lost.)" in ran.text
    again = notebook.try_cell(f"%%ranks --job {short}\n1")
    assert again.message == ran.message


def test_the_end_of_a_job_between_two_cells_is_one_sentence(notebook, submit):
    short = submit("--partition=debug")
    notebook.cell(f"%%ranks 2 --job {short}\nx = 1")
    slurm("scancel", short)
    wait_until(lambda: not slurm("squeue", "-h", "-j", short, "-t", "running,completing", "-o", "%T"))
    ran = notebook.try_cell("%%ranks\nx")
    assert ran.message == (
        f"job {short} has ended (cancelled): submit another one, and give its number to --job"
    )


def test_a_job_that_cannot_be_used_is_one_sentence_with_the_cure(notebook, submit, job):
    held = submit("--hold", state="PD")
    theirs = submit(f"--uid={OTHER}", "--chdir=/tmp", "--output=/dev/null")
    several = submit("--array=0-1", "--hold", state="PD")
    for number, message in {
        "abc": "--job abc: give the number of a job, such as 1234 or 1234_0",
        "999999": "SLURM knows no job 999999: squeue --me lists your jobs",
        held: f"job {held} has not started (You hold it: scontrol release lets it start): "
        "run the cell again when it runs, which squeue --me shows",
        theirs: f"job {theirs} belongs to {OTHER}: give the number of one of yours, which squeue --me lists",
        f"{several}_0": f"job {several}_0 has not started (You hold it: scontrol release lets it start): "
        "run the cell again when it runs, which squeue --me shows",
    }.items():
        ran = notebook.try_cell(f"%%ranks --job {number}\n1")
        assert ran.message == message
    ran = notebook.try_cell(f"%%ranks 3 --job {job}\n1")
    assert ran.message == f"3 ranks cannot be shared evenly by the 2 nodes of job {job}: use 2"


def test_slurm_lets_no_other_user_start_a_step_in_a_job(job, elsewhere_conf):
    """The cells of a user arrive only through a step of the job, so this keeps out all other users."""
    srun = ["srun", f"--jobid={job}", "--overlap", "--nodes=1", "--chdir=/tmp", "true"]
    said = slurm(
        "runuser", "-u", OTHER, "--", "env", f"SLURM_CONF={elsewhere_conf.resolve()}", *srun, fails=True
    )
    assert "Access/permission denied" in said


def test_a_gpu_that_pytorch_does_not_see_is_named(notebook, submit, job):
    with_gpus = submit("--partition=training", "--nodes=1", "--gres=gpu:2", "--overcommit")
    ran = notebook.try_cell(f"%%ranks --job {with_gpus}\n1")
    assert re.fullmatch(
        r"PyTorch sees no GPU on node big-\d of job \d+: check its build, or use --cpu for ranks on the CPU",
        ran.message,
    )
    ran = notebook.cell(
        f"%%ranks --job {with_gpus} --cpu\nimport os\ndevice, os.environ['CUDA_VISIBLE_DEVICES']"
    )
    assert ran.by_rank() == {"ranks 0 and 1": "(device(type='cpu'), '0,1')"}


def test_the_number_of_ranks():
    assert RunningJob("1", ("a", "b"), gpus_per_node=8, tasks_per_node=1).ranks(None) == 16
    assert RunningJob("1", ("a",), gpus_per_node=0, tasks_per_node=4).ranks(None) == 4
    assert RunningJob("1", ("a", "b"), gpus_per_node=8, tasks_per_node=1).ranks(4) == 4
