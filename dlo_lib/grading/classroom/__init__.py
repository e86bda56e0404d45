"""A whole class: collection, grading in a batch, the gradebook, feedback and exports.

- ``roster``: the students, the rules, and the files of a course
- ``publish``: publishes a lab
- ``collect``: collects a lab, so that no file is lost
- ``gradebook``: grades a class, and exports the grades
- ``feedback``: feedback for a class
- ``similar``: similar submissions

The docstring of each room names what it imports. They read reports; they run neither checks nor the code of
a student.
"""
