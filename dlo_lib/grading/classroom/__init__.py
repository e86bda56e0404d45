"""A whole class: collection, grading in a batch, the gradebook, feedback and exports.

The course:

- ``roster``: the students
- ``course_file``: due dates and rules, in ``course.toml``
- ``nbgrader_course``: creates and opens nbgrader's course
- ``course_access``: who may enter its folder
- ``publication``: publishes a proved lab
- ``slides``: slides from a notebook
- ``demo_class``: a fictitious class that uses all of this

Collection:

- ``collection``: collects a lab, so that no file is lost
- ``arrivals``: submissions from the exchange, a folder or a zip
- ``archive``: reads a folder or a zip safely
- ``submission_copy``: a copy that nbgrader can read
- ``receipt``: the hash of a submission
- ``inventory``: the state of each student's submission
- ``late_work``: late work beside work in time

Grades:

- ``batch``: grades a whole class, one row for each student
- ``deadlines``: lateness and penalties
- ``gradebook_entry``: enters a class into the gradebook
- ``gradebook_file``: the gradebook's file
- ``manual_points``: points that a grader gave by hand

Feedback and exports:

- ``feedback``: feedback for a class
- ``feedback_page``: the page of a student
- ``comment``: an instructor's comment as HTML
- ``formulas``: formulas as pictures
- ``pictures``: the plots of a student's notebook, made safe
- ``other_release``: work on another release of PyTorch
- ``export``: the grades as tables
- ``tables``: CSV without cells that run
- ``moodle``: the grades for Moodle

Similar submissions:

- ``similarity``: lists them
- ``fingerprints``: what two texts share
- ``matching``: compares fingerprints
- ``hidden_code``: code that cannot be compared

Imports ``judge``, ``sandbox``, ``lab`` and ``checks``. It reads reports; it runs neither checks nor the code
of a student.
"""
