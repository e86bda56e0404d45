"""A whole class: collection, grading in a batch, the gradebook, feedback and exports.

The room holds collection and receipts, the roster, nbgrader's course and gradebook, feedback pages, tables
for other tools, similar submissions, and a fictitious class that uses all of them. Imports every other room
of grading except ``notebook``. It reads reports; it runs neither checks nor a student's code.
"""
