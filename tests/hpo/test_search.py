"""A shared search whose workers are killed: each trial exists once and is trained to the resource that it
reports.
"""

from __future__ import annotations

import errno
import fcntl
import math
import os
import signal
import subprocess
import sys
import textwrap
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import optuna
import pytest
import torch
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import TrialState

from dlo_lib.base.errors import UserError
from dlo_lib.base.lifetime import start_time
from dlo_lib.hpo.asha import Asha
from dlo_lib.hpo.definition import Definition, Sampler
from dlo_lib.hpo.fixed_budget import EveryTrial, Grid
from dlo_lib.hpo.halving import Hyperband, SuccessiveHalving
from dlo_lib.hpo.journal import Journal
from dlo_lib.hpo.lease import is_alive
from dlo_lib.hpo.population import PopulationBased
from dlo_lib.hpo.search import ATTEMPTS, Search, Task
from dlo_lib.hpo.table import NoTask

SPACE = {"x": FloatDistribution(0.001, 1, log=True)}
ASHA = Definition(SPACE, Asha(9, 1, 9), seed=3)


def by_x(task: Task) -> float:
    """Return a loss that falls to x; the checkpoint holds the resource that the
    trial is really trained to."""
    trained = int(task.resume.read_text()) if task.resume else 0
    assert trained == task.begin
    task.checkpoint.write_text(str(trained + task.resource - task.begin))
    return task.params["x"] + 1 / task.resource


WORKER = """
    import json, os, sys, time
    sys.path[:0] = {path!r}
    from test_search import by_x
    from dlo_lib.hpo.search import Search

    def objective(task):
        with open({log!r}, "a") as log:
            log.write(json.dumps([task.trial, task.begin, task.resource]) + "\\n")
        if {killed!r} and task.resource >= 3:
            try:
                os.unlink({kill!r})
            except FileNotFoundError:
                return by_x(task)
            os.kill(os.getpid(), 9)
        return by_x(task)

    Search.join({file!r}).work(objective)
"""


def worker(folder: Path, *, killed: bool) -> subprocess.Popen:
    names = {"file": str(folder / "s.journal"), "log": str(folder / "log"), "kill": str(folder / "kill")}
    source = textwrap.dedent(WORKER).format(path=[str(Path(__file__).parent)], killed=killed, **names)
    return subprocess.Popen([sys.executable, "-c", source])


@pytest.mark.slow
def test_a_killed_worker_neither_loses_nor_repeats_a_trial(tmp_path):
    undisturbed = Search.make(tmp_path / "u" / "s.journal", ASHA)
    undisturbed.work(by_x)
    search = Search.make(tmp_path / "s.journal", ASHA)
    (tmp_path / "kill").touch()
    first = worker(tmp_path, killed=True)
    assert first.wait() == -signal.SIGKILL
    left = [row for row in search.table() if row.goal is not None]
    assert len(left) == 1, "the worker was killed while it trained a trial"
    assert worker(tmp_path, killed=False).wait() == 0
    assert search.table() == undisturbed.table()
    trained = Counter((tmp_path / "log").read_text().splitlines())
    assert sorted(trained.values())[-2:] == [1, 2], "only the trial in training is trained again"


@pytest.mark.slow
def test_a_worker_is_killed_while_others_work(tmp_path):
    search = Search.make(tmp_path / "s.journal", Definition(SPACE, SuccessiveHalving(12, 1, 9), seed=1))
    (tmp_path / "kill").touch()
    workers = [worker(tmp_path, killed=True) for _ in range(3)]
    assert sorted(process.wait() for process in workers) == [-signal.SIGKILL, 0, 0]
    table = search.table()
    assert [sum(resource in row.reports for row in table) for resource in (1, 3, 9)] == [12, 4, 1]
    assert len(search.study.get_trials(states=[TrialState.COMPLETE])) == 1
    assert len(search.study.get_trials(states=[TrialState.PRUNED])) == 11


@pytest.mark.parametrize(
    "policy",
    [EveryTrial(5, 4), SuccessiveHalving(9, 1, 9), Hyperband(9), Asha(9, 1, 9), PopulationBased(4, 2, 3)],
    ids=lambda policy: type(policy).__name__,
)
def test_a_search_interrupted_after_every_task_ends_with_the_same_table(tmp_path, policy):
    definition = Definition(SPACE, policy, seed=5)
    whole = Search.make(tmp_path / "whole.journal", definition)
    done = whole.work(by_x)
    for _ in range(done):
        search = Search.make(tmp_path / "cut.journal", definition)
        task = search.ask()
        assert isinstance(task, Task)
        search.tell(task, by_x(task))
        search.leave()
    assert Search.join(tmp_path / "cut.journal").ask() is NoTask.DONE
    assert Search.join(tmp_path / "cut.journal").table() == whole.table()


def test_a_trial_is_trained_by_one_worker_at_a_time(tmp_path):
    one = Search.make(tmp_path / "s.journal", Definition(SPACE, EveryTrial(2, 1)))
    two = Search.join(tmp_path / "s.journal")
    tasks = [one.ask(), two.ask()]
    assert [task.trial for task in tasks] == [0, 1]
    assert two.ask() is NoTask.WAIT
    with pytest.raises(UserError, match="not claimed by this process"):
        two.tell(tasks[0], 0.5)
    one.leave()
    assert two.ask() == tasks[0], "the task of a worker that has left is released at once"
    two.tell(tasks[0], 0.5)
    with pytest.raises(UserError, match="not claimed by this process"):
        two.tell(tasks[0], 0.5)


def test_many_threads_share_a_search(tmp_path):
    Search.make(tmp_path / "s.journal", Definition(SPACE, Asha(18, 1, 9), seed=2))
    with ThreadPoolExecutor(4) as pool:
        done = list(pool.map(lambda _: Search.join(tmp_path / "s.journal").work(by_x), range(4)))
    table = Search.join(tmp_path / "s.journal").table()
    assert sum(done) == sum(len(row.reports) for row in table)
    assert len(table) == 18


def test_an_incomplete_record_at_the_end_is_ignored(tmp_path):
    search = Search.make(tmp_path / "s.journal", ASHA)
    task = search.ask()
    search.tell(task, by_x(task))
    with open(tmp_path / "s.journal", "ab") as file:
        file.write(b'{"op_code":8,"worker_id":"x","trial')
    other = Search.join(tmp_path / "s.journal")
    assert other.table() == search.table()
    other.work(by_x)
    assert len(other.table()) == 9


def test_a_worker_killed_between_report_and_completion_leaves_a_complete_trial(tmp_path):
    search = Search.make(tmp_path / "s.journal", Definition(SPACE, EveryTrial(1, 4)))
    search.ask()
    trial = search.study.get_trials()[0]
    search.study._storage.set_trial_intermediate_value(trial._trial_id, 4, 0.25)
    assert Search.join(tmp_path / "s.journal").ask() is NoTask.DONE
    assert search.study.best_value == 0.25


def test_a_trial_that_kills_its_workers_fails_after_a_few_attempts(tmp_path):
    Search.make(tmp_path / "s.journal", Definition(SPACE, EveryTrial(2, 1)))
    for _ in range(ATTEMPTS):
        worker = Search.join(tmp_path / "s.journal")
        assert worker.ask().trial == 0
        worker.leave()
    last = Search.join(tmp_path / "s.journal")
    assert last.ask().trial == 1
    assert last.table()[0].failed


def test_divergence_fails_the_trial_and_an_error_in_the_objective_does_not(tmp_path):
    search = Search.make(tmp_path / "s.journal", Definition(SPACE, EveryTrial(3, 1)))

    def objective(task: Task) -> float:
        if task.trial == 0:
            return math.nan
        return task.params["x"] / (task.trial - 1)

    search.work(objective)
    assert [row.failed for row in search.table()] == [True, True, False]

    other = Search.make(tmp_path / "o.journal", Definition(SPACE, EveryTrial(2, 1)))
    with pytest.raises(KeyError):
        other.work(lambda task: task.params["learning rate"])
    assert other.work(by_x) == 2, "the task was released"


@pytest.fixture
def one_thread():
    """Use one thread: Optuna's Gaussian process is many times slower with several
    threads on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("sampler", Sampler)
def test_sampled_hyperparameters_depend_on_the_table_only(tmp_path, sampler):
    space = {**SPACE, "width": IntDistribution(8, 64, step=8), "kind": CategoricalDistribution(("a", "b"))}
    definition = Definition(space, EveryTrial(13, 1), sampler, seed=7)

    def loss(task: Task) -> float:
        return (
            abs(math.log(task.params["x"] / 0.05)) + task.params["width"] / 64 + (task.params["kind"] == "b")
        )

    tables = []
    for name in ("one", "two"):
        for _ in range(13):
            search = Search.make(tmp_path / f"{name}.journal", definition)
            task = search.ask()
            search.tell(task, loss(task))
        tables.append(search.table())
    assert tables[0] == tables[1]
    assert len({row.params["x"] for row in tables[0]}) == 13
    assert all(row.params["width"] in range(8, 65, 8) for row in tables[0])


def test_another_definition_in_the_same_file_raises(tmp_path):
    Search.make(tmp_path / "s.journal", ASHA)
    with pytest.raises(UserError, match="holds another search"):
        Search.make(tmp_path / "s.journal", Definition(SPACE, Asha(10, 1, 9), seed=3))
    with pytest.raises(UserError, match="there is no search at"):
        Search.join(tmp_path / "t.journal")
    (tmp_path / "t.journal").touch()
    with pytest.raises(UserError, match="holds no search called t"):
        Search.join(tmp_path / "t.journal")


def test_a_definition_survives_serialisation():
    grid = Definition({"x": IntDistribution(1, 3)}, Grid({"x": [1, 2]}, 4), Sampler.TPE, 9)
    for definition in (ASHA, grid):
        assert Definition.from_json(definition.to_json()) == definition
    with pytest.raises(UserError):
        Definition.from_json("{}")


def test_only_the_last_checkpoint_of_a_trial_is_kept(tmp_path):
    search = Search.make(tmp_path / "s.journal", ASHA)
    search.work(by_x)
    for row in search.table():
        kept = [path.name for path in (tmp_path / "s.journal.trials" / f"{row.number:05d}").iterdir()]
        assert kept == [f"at-{max(row.reports)}"]


def test_optuna_reads_the_study(tmp_path):
    search = Search.make(tmp_path / "s.journal", ASHA)
    search.work(by_x)
    study = optuna.load_study(study_name="s", storage=Journal(tmp_path / "s.journal").storage())
    assert study.best_trial.number == search.best.number
    assert {trial.state for trial in study.trials} == {TrialState.COMPLETE, TrialState.PRUNED}


def test_without_flock_a_killed_worker_is_noticed_on_its_machine(tmp_path, monkeypatch):
    def refuse(*arguments: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    one = Search.make(tmp_path / "s.journal", Definition(SPACE, EveryTrial(2, 1)))
    two = Search.join(tmp_path / "s.journal")
    tasks = [one.ask(), two.ask()]
    assert [task.trial for task in tasks] == [0, 1]
    assert two.ask() is NoTask.WAIT
    lease = next(file for file in (tmp_path / "s.journal.workers").iterdir() if file.name == one._lease.id)
    machine, process, start = lease.read_text().split()
    lease.write_text(f"another-machine {process} {start}")
    assert two.ask() is NoTask.WAIT, "another machine's process may run"
    zombie = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
    try:
        of_zombie = f"{machine} {zombie.pid} {start_time(zombie.pid)}"
        lease.write_text(of_zombie)
        assert two.ask() is NoTask.WAIT
        zombie.stdin.close()
        os.waitid(os.P_PID, zombie.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and is not reaped
        assert not is_alive(lease.parent, lease.name), "the kernel would have released its lock"
    finally:
        zombie.kill()
        zombie.wait()
    lease.write_text("")
    assert is_alive(lease.parent, lease.name), "the worker writes its file at this moment"
    lease.write_text(f"{machine} {process} {int(start) - 1}")
    assert two.ask() == tasks[0], "the number of the process belongs to a later one"


def test_a_forked_child_does_not_keep_the_lease_of_its_parent(tmp_path):
    Search.make(tmp_path / "s.journal", Definition(SPACE, EveryTrial(1, 1)))
    read, write = os.pipe()
    source = f"""
import os, sys
from dlo_lib.hpo.search import Search
search = Search.join({str(tmp_path / "s.journal")!r})
search.ask()
if os.fork() == 0:
    os.read({read}, 1)
    os._exit(0)
"""
    try:
        parent = subprocess.run([sys.executable, "-c", source], pass_fds=[read])
        assert parent.returncode == 0
        assert isinstance(Search.join(tmp_path / "s.journal").ask(), Task), (
            "the parent has ended, the child is still running"
        )
    finally:
        os.close(read)
        os.close(write)
