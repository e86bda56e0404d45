"""What ``faulthandler`` writes becomes a traceback of the caller's functions."""

from __future__ import annotations

from dlo_lib.launch.frames import stack_as_traceback

ASKED = """\
Stack (most recent call first):
  File "/a/earlier.py", line 3 in waits

"""
CRASH = """\
Fatal Python error: Segmentation fault

Stack (most recent call first):
  File "/a/inner.py", line 5 in g
  File "/a/outer.py", line 6 in f
"""
# Python 3.14 adds this.
OF_C = """
Current thread's C stack trace (most recent call first):
  Binary file "/usr/bin/python3", at _Py_DumpStack+0x4a [0x499c1d]
  Binary file "/usr/bin/python3" [0x53bf79]
"""
TRACEBACK = '  File "/a/outer.py", line 6, in f\n  File "/a/inner.py", line 5, in g'


def test_the_last_python_stack_is_taken_with_and_without_a_stack_of_c() -> None:
    assert stack_as_traceback(CRASH) == TRACEBACK
    assert stack_as_traceback(CRASH + OF_C) == TRACEBACK
    assert stack_as_traceback(ASKED + CRASH + OF_C) == TRACEBACK
    of_threads = CRASH.replace("Stack (", "Current thread 0x00007f53674ffab0 [python] (")
    assert stack_as_traceback(of_threads + OF_C) == TRACEBACK


def test_no_stack_is_no_traceback() -> None:
    assert stack_as_traceback("") == stack_as_traceback(OF_C) == ""
