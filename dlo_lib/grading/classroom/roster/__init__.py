"""The students of a course, its rules, and the files that a course reads and writes.

- ``roster``: the students, and their import
- ``roster_table``: the table that is imported
- ``course_file``: due dates and rules, in ``course.toml``
- ``course_access``: who may enter the course's folder
- ``archive``: reads a folder or a zip safely
- ``safe_files``: files that another user may change meanwhile
- ``look_alikes``: names that look the same
- ``tables``: CSV without cells that run

Imports ``lab``.
"""
