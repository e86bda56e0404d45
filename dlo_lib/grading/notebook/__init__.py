"""The notebook's side of a lab: ``from dlo_lib.grading import Lab``.

The room holds ``Lab`` (checks, hints, quiz, references), the student's functions as checks call them in this
process, and the stored progress.
Imports ``checks``, ``switch`` and ``lab``; no sandbox and no judge.
"""
