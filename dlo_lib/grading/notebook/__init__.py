"""The notebook's side of a lab: ``from dlo_lib.grading import Lab``.

The room holds ``Lab`` (checks, hints, quiz, references), the student's functions as checks call them in this
process, the stored progress, and ``start_page``, which shows the course in lab 00. ``verdict_display`` and
``verdict_age`` show a verdict and its age, ``interrupts`` and ``tracebacks`` shorten errors, and
``fresh_kernel`` explains a kernel in which no cell has run.
Imports ``checks``, ``switch`` and ``lab``; no sandbox and no judge.
"""
