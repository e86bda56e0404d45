"""The notebook's side of a lab: ``from dlo_lib.grading import Lab``.

The room holds ``Lab`` (checks, hints, quiz, references), the student's functions as checks call them in this
process, the stored progress, and the two cells of lab 00 that show the course (``start_page``) and the
``machine``.
Imports ``checks``, ``switch`` and ``lab``; no sandbox and no judge.
"""
