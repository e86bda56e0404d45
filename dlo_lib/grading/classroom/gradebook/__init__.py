"""The grades of a class: lateness, nbgrader's gradebook, exports.

- ``nbgrader_course``: creates and opens nbgrader's course
- ``nbgrader_steps``: the steps of nbgrader's own programs, and their log
- ``gradebook_file``: the gradebook's file
- ``deadlines``: lateness and penalties
- ``manual_points``: points that a grader gave by hand
- ``submission_copy``: a copy of a submission that nbgrader can read
- ``inventory``: the state of each student's submission
- ``late_work``: keeps late work beside work that was on time
- ``batch``: grades a whole class, one row for each student
- ``gradebook_entry``: enters a class into the gradebook
- ``regrade``: the points before and after a change of the checks, for a look before the release
- ``export``: the grades as tables
- ``timings``: what each submission costs
- ``moodle``: the grades for Moodle

Imports ``checks``, ``judge``, ``lab``, ``roster`` and ``sandbox``.
"""
