"""The judging service: one process for a lab that has its checks, its twins and a warm zygote, and forks a judge for each submission.

It has one thread and no GPU, so that a fork of it is whole. Each judge is a child with one submission: a crash, a leak or an endless loop
in it costs one row. The report goes to a file; the service itself reads nothing that a student wrote. It ends with the process that asked
for it, and its judges and the zygote end with it. Before the first submission it judges the reference solution, unless it is on record that
this lab passed: a lab whose own answer does not score full marks judges nobody, and the twins that this computes are there for all.
The zygote starts first, and imports torch at the same time as the service does. Cost: two forks a submission, made cheap in idle moments.
"""

from __future__ import annotations

import contextlib
import ctypes
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

from dlo_lib.files import write_text
from dlo_lib.grading.huge_pages import collapse
from dlo_lib.grading.isolation import Isolation, Unsandboxed, marked, required_isolation
from dlo_lib.grading.lab_zygote import zygote_for
from dlo_lib.grading.lockdown import PR_SET_PDEATHSIG
from dlo_lib.grading.rebuild import rebuild
from dlo_lib.grading.report import Report
from dlo_lib.grading.source import LabSource, notebook_text, read_lab
from dlo_lib.grading.stored import Stored, lab_key
from dlo_lib.text import tr

if TYPE_CHECKING:
    from dlo_lib.grading.judge import Judge

MOST_SECONDS = 1800  # of one submission: far more than all its checks together may take
TO_BE_JUDGED = 3  # exit status of a look that found something to run


class Service:
    """What judges are forked from."""

    def __init__(self, lab: LabSource, secret: str, isolation: Isolation, record: Path) -> None:
        self.lab, self.secret, self.isolation, self.record = lab, secret, isolation, record
        self.zygote = zygote_for(lab, isolation)
        import torch  # not before the zygote does too

        from dlo_lib.grading.modules import load_checks

        importlib.import_module("dlo_lib.grading.judge")  # here, or each child would import it for itself
        torch.set_num_threads(1)
        self.checks = load_checks(lab.folder, lab.folder)
        rebuild(lab, Path(os.devnull))  # so that children find the release made
        self._ready = False

    def ready(self) -> str:
        """Know that the reference solution scores full marks: from the record, else by judging it; what it lost, or nothing."""
        if self._ready:
            return ""
        from dlo_lib.grading.judge import reference_submission
        from dlo_lib.grading.proved import Proved

        self.zygote.wait()
        proved = Proved(self.record, lab_key(self.lab, self.secret, self.isolation.name), self.secret)
        if not proved.load(self.checks):
            report = self._judge().judge(reference_submission(self.lab))
            failed = [check for question in report.questions.values() for check in question.checks if check.points < check.maximum]
            if failed:
                return tr("check {name}: {message}", name=failed[0].name, message=failed[0].message)
            if reason := proved.save(self.checks):
                print(f"--- no record of {self.lab.info.directory}'s twins: {reason}", file=sys.stderr)
        self._ready = True
        return ""

    def look(self, job: dict[str, Any]) -> int:
        """Write the report of a submission in which nothing can be run."""
        from dlo_lib.grading.judge import open_submission

        opened = open_submission(Path(job["notebook"]), self.lab, self.checks)
        if not isinstance(opened, Report):
            return TO_BE_JUDGED
        self._save(job, opened, 0.0, 0.0)
        return 0

    def judge(self, job: dict[str, Any]) -> int:
        """Judge a submission and write its report."""
        from dlo_lib.grading.judge import open_submission

        began, judge = time.perf_counter(), self._judge()
        opened = open_submission(Path(job["notebook"]), self.lab, self.checks)
        report = opened if isinstance(opened, Report) else judge.judge(*opened)
        self._save(job, report, time.perf_counter() - began, judge.computed)
        return 0

    def _judge(self) -> Judge:
        from dlo_lib.grading.judge import Judge

        return Judge(self.lab, self.checks, self.secret, self.zygote)

    def _save(self, job: dict[str, Any], report: Report, wall: float, student: float) -> None:
        # Without a zygote every worker has died: that is no finding about the submission.
        if os.getppid() != job["service"] or not self.zygote.serving:
            os._exit(1)
        shown = Report(report.lab, marked(report.status, self.isolation), report.questions, report.warnings)
        timing = {"wall": round(wall, 3), "judge_cpu": round(time.process_time(), 3), "student_cpu": round(student, 3)}
        write_text(job["rebuilt"], notebook_text(rebuild(self.lab, Path(job["notebook"]))))
        Stored(job["key"], shown, job["alone"], timing).save(Path(job["report"]))


def serve(descriptor: int, settings: dict[str, Any]) -> None:
    """The whole life of the process. ``settings``: ``folder`` of the lab's source, ``secret``, ``unsafe``, the file of its
    ``record``, and the ``parent`` it ends with.

    Requests and answers are JSON datagrams. ``{"do": "ready"}`` is answered by ``{"ready": ""}`` or the reason why not; ``look`` and
    ``judge``, each with a ``tag``, by ``{"tag": ..., "code": the child's exit status, negative for a signal}``.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != settings["parent"]:
        return
    control = socket.socket(fileno=descriptor)
    isolation: Isolation = Unsandboxed() if settings["unsafe"] else required_isolation()
    service = Service(read_lab(settings["folder"]), settings["secret"], isolation, Path(settings["record"]))
    running: dict[int, dict[str, Any]] = {}  # by pidfd
    poll = select.poll()
    poll.register(control, select.POLLIN)
    gathering: Iterator[bool] | None = None
    more = False
    try:
        while True:
            ready = poll.poll(0 if more else 1000)
            if not ready and gathering is not None:
                more = next(gathering, False)
            for descriptor, _ in ready:
                if descriptor in running:
                    poll.unregister(descriptor)
                    _tell(control, tag=running.pop(descriptor)["tag"], code=_code_of(descriptor))
                    continue
                message = control.recv(1 << 16)
                if not message:
                    return
                job = json.loads(message)
                if job["do"] == "ready":
                    _tell(control, ready=service.ready())
                    if gathering is None:
                        gc.collect()
                        gc.freeze()  # else each judge's collector would write to all that it shares with this process
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
    finally:
        for handle in running:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(handle, signal.SIGKILL)
        service.zygote.close()


def _fork(service: Service, job: dict[str, Any], control: socket.socket) -> int:
    """A child that does one job; its pidfd."""
    myself = os.getpid()
    pid = os.fork()
    if pid:
        return os.pidfd_open(pid)
    _child(service, {**job, "service": myself}, control)


def _child(service: Service, job: dict[str, Any], control: socket.socket) -> NoReturn:
    code = 1
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != job["service"]:
            os._exit(1)
        control.close()
        code = service.look(job) if job["do"] == "look" else service.judge(job)
    except BaseException:  # noqa: BLE001  a fault of ours: the log says what, the row says that
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


def _tell(control: socket.socket, **message: Any) -> None:
    with contextlib.suppress(OSError):  # who asked is gone: the next look at the line ends this process
        control.send(json.dumps(message).encode())
