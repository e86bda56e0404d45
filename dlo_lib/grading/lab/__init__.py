"""A lab as files: what an instructor edits, what is released from it, and what is read to prove it.

The files of a lab:

- ``course``: the course on disk, and each ``lab.toml``
- ``source``: the text and its cells
- ``modules``: the Python files with checks
- ``declared``: what these files say, read without an import
- ``new_lab``: a new lab that proves itself green
- ``mutants``: wrong solutions
- ``mutant_table``: mutants as a table of text
- ``undrawn_record``: what the checks never vary, and why

What students get:

- ``release``: the files of ``labs/``, by an allow-list
- ``clear_solutions``: takes the solutions out
- ``references``: the answers that later cells use
- ``quiz_answers``: the answers of a quiz
- ``released_lab``: a lab as a student has it
- ``kit``: the students' archive
- ``exchange``: the exchange of a class

Rules for authors, and times:

- ``lint``: what a check must not do
- ``lint_claims``: finds what a scenario returns that its parts have written
- ``lint_flow``: follows the student's values through a check
- ``text_rules``: widths, minutes, hints
- ``syntax``: cells as Python
- ``names``: names in a text of Python
- ``times``: times in UTC

Nothing here runs a check; a reference runs in a notebook. Imports ``checks``.
"""
