"""Write and run the checks of a lab.

What authors of checks import:

- ``contract``: ``check``, ``scenario``, ``Trial``, ``Wrong`` and ``Run``
- ``trial``: the ``t`` of every check
- ``runs``: the run of a scenario on ranks, and the nudge
- ``asked``: functions of a check that the student's code calls
- ``claimed``: what the student's process says about itself
- ``own_work``: refuses a class of a library where students write theirs
- ``exceptions``: what ends a check
- ``schedules``: the tables of pipeline schedules
- ``graph_run``: runs a recorded graph and watches its operations
- ``graphs``: graphs of a student's function, replayed
- ``calculation``: where graphs and kernels run
- ``twins``: the results of twins, cached

A check and its outcome:

- ``outcome``: runs one check once
- ``codec``: plain data between a check and the student's process
- ``stand_in``: takes the place of a function of the check in that process
- ``faults``: an exception of the student's code in one line
- ``words``: the words of the check's author in a message
- ``status``: the statuses of a check
- ``verdict``: the text that ``lab.check`` shows

Quizzes:

- ``quiz_question``: a question
- ``quiz``: the checks of a quiz

Imports ``comm``, ``parallel`` and ``tiles``, and no other room of grading, so that the same check runs in a
notebook and under the judge.
"""
