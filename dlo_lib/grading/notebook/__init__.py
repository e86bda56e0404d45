"""The notebook's side of a lab: ``from dlo_lib.grading import Lab``.

- ``lab``: ``Lab``: checks, hints, quiz and references
- ``local_student``: the student's functions, as checks call them here
- ``progress``: the stored points and hints
- ``quiz``: the quiz
- ``reference``: the reference of a question

A verdict:

- ``verdict_display``: shows that a check runs, then its verdict
- ``verdict_age``: whether it is still about its cell
- ``cell_runs``: which text of a cell ran last
- ``check_output``: what the student's code prints

Errors in a cell:

- ``tracebacks``: one line in place of a traceback
- ``interrupts``: an interrupt as one sentence
- ``time_limit``: an endless call
- ``failed_cells``: names whose cell failed
- ``undefined_names``: names whose cell has not run
- ``defining_cell``: the cell that defines a name
- ``fresh_kernel``: a kernel in which no cell has run

The course:

- ``start_page``: the opening page in lab 00
- ``class_state``: what a class knows of a student's labs

Imports ``checks``, ``switch``, ``lab`` and ``launch``; no sandbox and no judge.
"""
