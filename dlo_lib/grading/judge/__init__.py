"""Judge a submitted notebook: run the checks here and the student's code in the sandbox, and write a report.

The room holds the intake of a file, the attempts at its questions and the judge; the server that forks a
judge for each submission and its client; the preprocessor that puts verdicts into nbgrader's pipeline;
reports on disk; the job array; and the proof that a lab's checks work. Imports ``checks``, ``switch``,
``sandbox`` and ``lab``. A module that needs torch imports it when it starts work.
"""
