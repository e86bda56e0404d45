"""The three proofs of distribution on a sharded optimiser: traffic, memory at marks, nudge. Each
cheat fails.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from dlo_lib.grading.checks.outcome import Status, run_check
from dlo_lib.grading.judge.judge import judge_answer, zygote_for
from dlo_lib.grading.judge.report import QuestionReport
from dlo_lib.grading.lab.course import given_folder
from dlo_lib.grading.lab.modules import load_checks
from dlo_lib.grading.lab.source import LabSource, read_lab
from dlo_lib.grading.notebook.local_student import LocalStudent
from dlo_lib.grading.sandbox.host import Zygote
from dlo_lib.grading.switch.local import LocalSwitch

FOLDER = Path(__file__).parents[1] / "sharded_course" / "solutions" / "92_sharded"
CHECKS = {"check_same", "check_traffic", "check_memory", "check_what_arrives_is_used"}

HEAD = """
class ShardedAdamW:
    def __init__(self, parameter, lr):
        self.parameter, self.rank, self.world = parameter, dist.get_rank(), dist.get_world_size()
        self.whole = torch.nn.Parameter(parameter.clone())
        self.inner = torch.optim.AdamW([self.whole], lr=lr)

    def updated(self, gradient):
        self.whole.grad = gradient
        self.inner.step()
        self.whole.grad = None
        return self.whole.detach()
"""

PLAIN = (
    HEAD
    + """
    def step(self, gradient):
        dist.all_reduce(gradient)
        self.parameter.copy_(self.updated(gradient / self.world))
"""
)

GATHERS_EVERYTHING = (
    HEAD
    + """
    def step(self, gradient):
        everything = gradient.new_empty(self.world * gradient.numel())
        dist.all_gather_into_tensor(everything, gradient)
        share = gradient.new_empty(gradient.numel() // self.world)
        dist.reduce_scatter_tensor(share, gradient)
        self.parameter.copy_(self.updated(everything.view(self.world, -1).mean(0)))
"""
)

# Each call transfers half of the gradient. Kinds, bytes and results are right, but nothing is sharded.
RIGHT_TRAFFIC = (
    HEAD
    + """
    def step(self, gradient):
        if self.world != 2:
            dist.all_reduce(gradient)
            self.parameter.copy_(self.updated(gradient / self.world))
            return
        mine, other = gradient.chunk(2)[self.rank], gradient.chunk(2)[1 - self.rank]
        halves = [torch.zeros_like(mine), torch.zeros_like(mine)]
        halves[1 - self.rank] = other
        got = torch.empty_like(mine)
        dist.reduce_scatter_tensor(got, torch.cat(halves))
        both = torch.empty_like(gradient)
        dist.all_gather_into_tensor(both, mine)
        whole = torch.empty_like(gradient)
        whole.chunk(2)[self.rank].copy_(mine + got)
        whole.chunk(2)[1 - self.rank].copy_(other + both.chunk(2)[1 - self.rank])
        self.parameter.copy_(self.updated(whole / 2))
"""
)

ONLY_RANK_0 = (
    PLAIN
    + """
        if self.rank != 0:
            self.parameter.zero_()
"""
)

RECOGNISES_THE_CHECK = (
    """
class Sharded:
    def __init__(self, parameter, lr):
        self.parameter, self.rank, self.world = parameter, dist.get_rank(), dist.get_world_size()
        self.shard = torch.nn.Parameter(parameter.chunk(self.world)[self.rank].clone())
        self.inner = torch.optim.AdamW([self.shard], lr=lr)

    def step(self, gradient):
        self.shard.grad = torch.empty_like(self.shard)
        dist.reduce_scatter_tensor(self.shard.grad, gradient, op=dist.ReduceOp.AVG)
        self.inner.step()
        self.shard.grad = None
        dist.all_gather_into_tensor(self.parameter, self.shard.detach())
"""
    + PLAIN.replace("ShardedAdamW", "Plain")
    + """

def ShardedAdamW(parameter, lr):  # only where memory is measured, which takes large tensors
    return (Sharded if parameter.numel() > 100_000 else Plain)(parameter, lr)
"""
)

FORGED_TRACE = (
    """
from dlo_lib.comm.calls import Kind
from dlo_lib.grading.switch.link import Link

def forged(self, kind, *arguments, post=Link.post, **keywords):
    keywords["reduction"] = "SUM"
    return post(self, Kind.REDUCE_SCATTER, *arguments, **keywords)

Link.post = forged
"""
    + PLAIN
)

MARKS_EARLY = """
import gc
from dlo_lib.grading.switch.link import Link

mark_now, Link.mark = Link.mark, lambda self, name: None
""" + PLAIN.replace(
    "        self.parameter, self.rank",
    """        mark_now(next(one for one in gc.get_objects() if type(one) is Link), "after the steps")
        self.parameter, self.rank""",
)

ENDS_EARLY = "import gc\nfrom dlo_lib.grading.switch.link import Link\n" + PLAIN.replace(
    "        self.parameter, self.rank",
    """        next(one for one in gc.get_objects() if type(one) is Link).end(False)
        self.parameter, self.rank""",
)

HIDES_MOMENTS_IN_A_FILE = """
class ShardedAdamW:
    def __init__(self, parameter, lr):
        self.parameter, self.lr, self.known = parameter, lr, False

    def step(self, gradient):
        dist.all_reduce(gradient)
        whole = torch.nn.Parameter(self.parameter.clone())
        inner = torch.optim.AdamW([whole], lr=self.lr)
        if self.known:
            inner.load_state_dict(torch.load("moments.pt"))
        whole.grad = gradient / dist.get_world_size()
        inner.step()
        torch.save(inner.state_dict(), "moments.pt")
        self.known = True
        self.parameter.copy_(whole.detach())
"""

CHEATS = {
    "plain AdamW": (
        PLAIN,
        {"check_traffic": "used all_reduce: gradients are reduce-scattered", "check_memory": "MB are enough"},
    ),
    "gathers everything": (GATHERS_EVERYTHING, {"check_traffic": "bytes in all_gather"}),
    "right traffic": (
        RIGHT_TRAFFIC,
        {"check_memory": "MB are enough", "check_what_arrives_is_used": "the parameter"},
    ),
    "marks early": (MARKS_EARLY, {"check_memory": "MB are enough"}),
    "ends early": (
        ENDS_EARLY,
        dict.fromkeys(("check_same", "check_traffic", "check_memory"), "before it returned a result"),
    ),
    "hides moments in a file": (HIDES_MOMENTS_IN_A_FILE, {"check_memory": "MB are enough"}),
    "only rank 0": (ONLY_RANK_0, {"check_same": "the parameter on rank 1"}),
    "recognises the check": (
        RECOGNISES_THE_CHECK,
        {"check_traffic": "used all_reduce", "check_what_arrives_is_used": "reduce_scatter"},
    ),
    "forged trace": (
        FORGED_TRACE,
        {"check_same": "sent something unreadable", "check_traffic": "sent something unreadable"},
    ),
}


@pytest.fixture(scope="module")
def lab() -> LabSource:
    return read_lab(FOLDER)


@pytest.fixture(scope="module")
def warm(lab: LabSource) -> Iterator[Zygote]:
    with zygote_for(lab) as zygote:
        yield zygote


def judged(lab: LabSource, zygote: Zygote, source: str) -> QuestionReport:
    return judge_answer(lab, "sharded", source, zygote)


def in_the_notebook(source: str, name: str) -> str:
    """Return the message of one check on ``source`` as a student sees it; empty if it passes."""
    names = {"torch": torch, "dist": dist}
    exec(compile(source, "<cell sharded>", "exec"), names)
    checks = load_checks(given_folder(FOLDER), FOLDER)
    check = next(check for check in checks.of("sharded") if check.name == name)
    outcome = run_check(check, LocalStudent(names, check.seconds), seed=5)
    assert outcome.status in (Status.OK, Status.WRONG), outcome.message
    return outcome.message


def test_the_solution_passes_all_three(lab: LabSource, warm: Zygote) -> None:
    report = judged(lab, warm, lab.solution("sharded").source)
    assert {check.name: check.message for check in report.checks if check.points == 0} == {}
    assert {check.name for check in report.checks} == CHECKS


@pytest.mark.parametrize("cheat", CHEATS)
def test_each_cheat_loses_points_with_a_reason(lab: LabSource, warm: Zygote, cheat: str) -> None:
    source, expected = CHEATS[cheat]
    lost = {check.name: check.message for check in judged(lab, warm, source).checks if check.points == 0}
    for name, words in expected.items():
        assert words in lost.get(name, "passed"), (name, lost)


@pytest.mark.parametrize("name", sorted(CHECKS))
def test_the_solution_passes_in_the_notebook(lab: LabSource, name: str) -> None:
    assert in_the_notebook(lab.solution("sharded").source, name) == ""


@pytest.mark.parametrize("cheat", ["plain AdamW", "right traffic"])
def test_the_notebook_gives_the_same_messages(lab: LabSource, cheat: str) -> None:
    source, expected = CHEATS[cheat]
    for name, words in expected.items():
        told = in_the_notebook(source, name)
        assert words in told, (name, told)


HANGS = """class ShardedAdamW:
    def __init__(self, parameter, lr):
        self.parameter = parameter

    def step(self, gradient):
        if dist.get_rank() == 0:
            dist.all_reduce(gradient)
"""
DIES = HANGS.replace("dist.all_reduce(gradient)", "import os; os._exit(3)\n        dist.all_reduce(gradient)")


def test_a_dead_lock_has_the_same_message_in_notebook_and_grading(lab: LabSource, warm: Zygote) -> None:
    head = (
        "DEADLOCK: rank 0 waits for something that can no longer happen. "
        "all_reduce needs every rank of world, and rank 1 returned"
    )
    messages = [
        next(check.message for check in judged(lab, warm, HANGS).checks if check.name == "check_same")
    ]
    messages.append(in_the_notebook(HANGS, "check_same"))
    for message in messages:
        assert message.startswith(head)
        assert "line 7" in message
        assert "sharded" in message  # the cell


def test_a_rank_that_dies_is_named_with_the_state_of_the_others(lab: LabSource, warm: Zygote) -> None:
    report = next(check for check in judged(lab, warm, DIES).checks if check.name == "check_same")
    assert (report.points, report.status) == (0, "KERNEL_DIED")
    assert report.message.startswith("rank 0: the process ended by itself (exit code 3); rank 1")


def test_without_memory_readings_the_check_passes_with_a_note(
    lab: LabSource,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(LocalSwitch, "memory", lambda self, rank: None)
    assert in_the_notebook(lab.solution("sharded").source, "check_memory").startswith(
        "memory cannot be measured on this machine"
    )
    assert "the parameter on rank 1" in in_the_notebook(CHEATS["only rank 0"][0], "check_memory")
