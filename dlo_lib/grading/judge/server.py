"""The judging service: one process per lab with its checks, its twins and a zygote, which forks a judge for
each submission.

The service has one thread and no GPU, so that it can fork. Each judge is a child that judges one submission:
a crash, a leak or an endless loop costs one row. The judge writes its report to a file; the service itself
reads nothing that a student wrote. The service ends with the process that started it, and its judges and its
zygote end with it. Before the first submission it judges the reference solution, unless a record shows that
this lab has passed. A lab whose reference solution does not score full marks judges no submission. The
results of the twins that this computes serve all judges. The zygote starts first, and imports torch at the
same time as the service. Cost: two forks per submission.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from dlo_lib.base.files import write_text
from dlo_lib.base.garbage import without_collector
from dlo_lib.base.huge_pages import collapse
from dlo_lib.base.lifetime import die_with
from dlo_lib.base.text import tr
from dlo_lib.grading.judge.client import NEEDS_JUDGE
from dlo_lib.grading.judge.intake import Invalid
from dlo_lib.grading.judge.lab_zygote import zygote_for
from dlo_lib.grading.judge.own_limits import MOST_SECONDS as MOST_CPU_SECONDS
from dlo_lib.grading.judge.own_limits import OwnTime, stopped_reason
from dlo_lib.grading.judge.rebuilt_notebook import rebuild
from dlo_lib.grading.judge.report import Report
from dlo_lib.grading.judge.report_store import StoredReport, lab_key
from dlo_lib.grading.lab.source import LabSource, notebook_text, read_lab
from dlo_lib.grading.sandbox.isolation import Isolation, Unsandboxed, marked, required_isolation
from dlo_lib.grading.sandbox.lockdown import PR_SET_CHILD_SUBREAPER, prctl

if TYPE_CHECKING:
    from dlo_lib.grading.judge.cells import Submission
    from dlo_lib.grading.judge.judge import Judge

MOST_SECONDS = 1800  # of one submission, far more than all its checks together need
REAP_SECONDS = 5.0


class JudgeServer:
    """The state of the service, which each judge inherits by its fork."""

    def __init__(self, lab: LabSource, secret: str, isolation: Isolation, record: Path) -> None:
        self.lab, self.secret, self.isolation, self.record = lab, secret, isolation, record
        self.zygote = zygote_for(lab, isolation)
        with without_collector():
            import torch  # after the zygote has started to import it

            from dlo_lib.grading.lab.modules import load_checks

            importlib.import_module("dlo_lib.grading.judge.judge")  # once, before the forks
            torch.set_num_threads(1)
            self.checks = load_checks(lab.given, lab.folder)
            rebuild(lab, None)  # builds the release once, before the forks
        self._ready = False
        self._reference: dict[str, float] = {}  # seconds of the reference solution, by check

    def ready(self) -> str:
        """Check that the reference solution scores full marks, by the record or by judging it.

        Returns:
            The first check that it fails, or an empty text.
        """
        if self._ready:
            return ""
        from dlo_lib.grading.judge.judge import reference_submission
        from dlo_lib.grading.judge.proof_record import ProofRecord

        self.zygote.wait()
        record = ProofRecord(self.record, lab_key(self.lab, self.secret, self.isolation.name), self.secret)
        if not record.load(self.checks, self._reference):
            judge = self._judge()
            report = judge.judge(reference_submission(self.lab))
            failed = [
                check
                for question in report.questions.values()
                for check in question.checks
                if check.points < check.maximum
            ]
            if failed:
                return tr("check {name}: {message}", name=failed[0].name, message=failed[0].message)
            self._reference = judge.seconds
            if reason := record.save(self.checks, judge.seconds):
                print(f"--- no record of {self.lab.info.directory}'s twins: {reason}", file=sys.stderr)
        self._ready = True
        return ""

    def screen(self, job: dict[str, Any]) -> int:
        """Write the report of a submission if nothing in it can be run; return the exit status."""
        own_time = OwnTime()
        with own_time.limited():
            submission, opened = self._opened(job, own_time)
        if not isinstance(opened, Report):
            return NEEDS_JUDGE
        self._save(job, submission, opened, 0.0, (0.0, 0.0), crowded=False)
        return 0

    def judge(self, job: dict[str, Any]) -> int:
        """Judge a submission and write its report; return the exit status."""
        own_time = OwnTime()
        began, judge = time.perf_counter(), self._judge(own_time)
        with own_time.limited():
            submission, opened = self._opened(job, own_time)
            report = opened if isinstance(opened, Report) else judge.judge(*opened)
        student = judge.computed, judge.outside
        self._save(job, submission, report, time.perf_counter() - began, student, judge.crowded)
        return 0

    def give_up(self, job: dict[str, Any]) -> None:
        """Write the report of a submission whose judge the kernel has ended, because it computed too long."""
        from dlo_lib.grading.judge.judge import empty_report

        report = empty_report(self.lab, self.checks, f"INVALID({stopped_reason()})")
        timing = {"wall": 0.0, "judge_cpu": float(MOST_CPU_SECONDS), "student_cpu": 0.0, "start_cpu": 0.0}
        self._write(job, None, report, timing, True)

    def _opened(self, job: dict[str, Any], own_time: OwnTime) -> tuple[Submission | None, Any]:
        from dlo_lib.grading.judge.judge import open_and_keep

        with own_time.ending(Invalid):
            return open_and_keep(Path(job["notebook"]), self.lab, self.checks)

    def _judge(self, own_time: OwnTime | None = None) -> Judge:
        from dlo_lib.grading.judge.judge import Judge

        return Judge(self.lab, self.checks, self.secret, self.zygote, self._reference, own_time)

    def _save(
        self,
        job: dict[str, Any],
        submission: Submission | None,
        report: Report,
        wall: float,
        student: tuple[float, float],
        crowded: bool,
    ) -> None:
        """Write the report. ``student``: CPU time of the student's processes, and of their starts."""
        # Without a zygote no worker can have answered, so the report would be wrong.
        if os.getppid() != job["service"] or not self.zygote.serving:
            os._exit(1)
        timing = {
            "wall": round(wall, 3),
            "judge_cpu": round(time.process_time(), 3),
            "student_cpu": round(student[0], 3),
            "start_cpu": round(student[1], 3),
        }
        # Computing and sleeping do not depend on other submissions. A submission is judged again only if it
        # ran out of time while it waited for a processor.
        self._write(job, submission, report, timing, job["alone"] or not crowded)

    def _write(
        self,
        job: dict[str, Any],
        submission: Submission | None,
        report: Report,
        timing: dict[str, float],
        alone: bool,
    ) -> None:
        shown = Report(report.lab, marked(report.status, self.isolation), report.questions, report.warnings)
        write_text(job["rebuilt"], notebook_text(rebuild(self.lab, submission)))
        StoredReport(job["key"], shown, alone, timing).save(Path(job["report"]))


def serve(descriptor: int, settings: dict[str, Any]) -> None:
    """Serve requests until the client ends.

    Args:
        descriptor: the server's end of the socket to the client.
        settings: ``folder`` of the lab's source, ``secret``, ``unsafe``, the file of the ``record``, and
            ``parent``, the process to end with.

    Requests and answers are JSON datagrams. The answer to ``{"do": "ready"}`` is ``{"ready": ""}``, or the
    reason why not. The answer to ``screen`` and ``judge``, each with a ``tag``, is ``{"tag": ..., "code":
    exit status}``; the exit status of a child killed by a signal is negative.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    die_with(settings["parent"], signal.SIGTERM)
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    control = socket.socket(fileno=descriptor)
    isolation: Isolation = Unsandboxed() if settings["unsafe"] else required_isolation()
    service = JudgeServer(
        read_lab(settings["folder"]), settings["secret"], isolation, Path(settings["record"])
    )
    running: dict[int, dict[str, Any]] = {}  # by pidfd
    code = 1
    try:
        _serve(service, control, running)
        code = 0
    except Exception:  # noqa: BLE001  as Python does at its end
        traceback.print_exc()
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the client closes its socket, then sends it
        for handle in running:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(handle, signal.SIGKILL)
        service.zygote.close()
        _reap()
        sys.stderr.flush()
        os._exit(code)  # the end of Python and torch would take a second of CPU time


def _serve(service: JudgeServer, control: socket.socket, running: dict[int, dict[str, Any]]) -> None:
    """Answer requests until the client or the zygote ends; ``running`` has the judges, by pidfd."""
    poll = select.poll()
    poll.register(control, select.POLLIN)
    gathering: Iterator[bool] | None = None
    more = False
    while True:
        ready = poll.poll(0 if more else 1000)
        if not ready and gathering is not None:
            more = next(gathering, False)
        for descriptor, _ in ready:
            if descriptor in running:
                poll.unregister(descriptor)
                job, code = running.pop(descriptor), _code_of(descriptor)
                if code == -signal.SIGXCPU:
                    service.give_up(job)
                    code = 0
                _reply(control, tag=job["tag"], code=code)
                continue
            message = control.recv(1 << 16)
            if not message:
                return
            job = json.loads(message)
            if job["do"] == "ready":
                _reply(control, ready=service.ready())
                if gathering is None:
                    gc.collect()
                    gc.freeze()  # otherwise the collector of each judge writes to shared pages
                    gathering, more = collapse(), True
            else:
                handle = _fork(service, job, control)
                running[handle] = {**job, "until": time.monotonic() + MOST_SECONDS}
                poll.register(handle, select.POLLIN)
        for handle, job in running.items():
            if time.monotonic() > job["until"]:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(handle, signal.SIGKILL)
        if not service.zygote.serving:
            return


def _reap() -> None:
    """Wait for the children that have ended or are about to, so that their CPU time counts for the command.

    The sandbox of a zygote ends without waiting for the zygote, which then becomes a child of this process.
    """
    end = time.monotonic() + REAP_SECONDS
    with contextlib.suppress(ChildProcessError):
        while time.monotonic() < end:
            if os.waitpid(-1, os.WNOHANG) == (0, 0):
                time.sleep(0.01)


def _fork(service: JudgeServer, job: dict[str, Any], control: socket.socket) -> int:
    """Fork a child that does one job; return its pidfd."""
    myself = os.getpid()
    pid = os.fork()
    if pid:
        return os.pidfd_open(pid)
    _child(service, {**job, "service": myself}, control)


def _child(service: JudgeServer, job: dict[str, Any], control: socket.socket) -> NoReturn:
    code = 1
    try:
        die_with(job["service"])
        control.close()
        code = service.screen(job) if job["do"] == "screen" else service.judge(job)
    except BaseException:  # noqa: BLE001  an error of the grader: it is logged
        print(f"--- {job['notebook']}", file=sys.stderr)
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _code_of(handle: int) -> int:
    ended = os.waitid(os.P_PIDFD, handle, os.WEXITED)
    os.close(handle)
    assert ended is not None
    return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status


def _reply(control: socket.socket, **message: Any) -> None:
    with contextlib.suppress(OSError):  # the client has ended: the next recv ends this process
        control.send(json.dumps(message).encode())
