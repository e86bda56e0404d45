"""A lab as files: what an instructor edits, what is released from it, and what is read to prove it.

Here: the course on disk, a lab's text and its cells, its checks as modules, its release with the references,
the students' kit, its mutants, and the lint of its checks. Nothing here runs a check; a reference runs in a
notebook. Imports ``checks``.
"""
