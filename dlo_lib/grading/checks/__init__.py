"""Write and run the checks of a lab.

The room holds ``contract`` (``check``, ``scenario``, ``Trial``), which authors of checks import, comparisons,
quizzes, recorded graphs and schedules, the codec for plain data between a check and the student's process,
and the outcome of a check as a status, a verdict and a message. Imports no other room of grading, so that the
same check runs in a notebook and under the judge.
"""
