"""Submissions that take all they can get: each answer of a notebook is one of these bombs."""

from __future__ import annotations

import ast
from collections.abc import Mapping

from dlo_lib.grading.checks.quiz_question import NAME as QUIZ
from dlo_lib.grading.lab.names import defined_names
from dlo_lib.grading.lab.source import LabSource

FILL = """while True:
    try: open("FOLDER/full", "ab").write(bytes(1 << 24))
    except OSError: pass"""
THREADS = """import hashlib, threading
data = bytes(1 << 28)
def burn():
    while True: hashlib.sha256(data)
while True:
    try: threading.Thread(target=burn, daemon=True).start()
    except RuntimeError: pass"""
BOMBS: Mapping[str, str] = {
    "an endless loop in C": "sum(iter(int, 1))",
    "one long operation": "10**10**10",
    "a torch operation of hours": "import torch\na = torch.randn(30000, 3000)\nwhile True: a.T @ a",
    "a fork bomb": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "threads": THREADS,
    "a full /tmp": FILL.replace("FOLDER", "/tmp/work"),
    "a full /dev/shm": FILL.replace("FOLDER", "/dev/shm"),
    "memory": "held = []\nwhile True: held.append(b'x' * (1 << 24))",
    "memory of children": (
        "import os, time\nwhile True:\n    try:\n"
        "        if os.fork() == 0: held = b'x' * (100 << 20); time.sleep(1e6)\n    except OSError: pass"
    ),
    "a stopped process": (
        "import os, signal, time\nchild = os.fork()\nif child == 0: time.sleep(1e6)\n"
        "os.kill(os.getpid(), signal.SIGSTOP)\nos.waitpid(child, 0)"
    ),
    "sleep": "import time\ntime.sleep(1e6)",
    "output": "import os\nwhile True: print('x' * 2**20); os.write(1, b'x' * 2**20)",
}  # fmt: skip


def bombed(lab: LabSource, bomb: str) -> dict[str, str]:
    """Return the answers to all questions of a lab, in which every function is ``bomb``."""
    answers = {}
    for question in lab.questions:
        if question != QUIZ:
            answer = lab.solution(question).answer
            names = sorted(defined_names(ast.parse(answer)))
            body = "\n".join(f"    {line}" for line in bomb.splitlines())
            renamed = "".join(f"\n{name} = bomb" for name in names)
            answers[question] = f"{answer}\n\ndef bomb(*args, **kwargs):\n{body}\n{renamed}\n"
    return answers
