"""Feedback for a class.

- ``feedback``: the pages of a class
- ``student_page``: what a student's page says
- ``feedback_page``: the page as HTML
- ``comment``: an instructor's comment as HTML
- ``pictures``: the plots of a student's notebook, made safe
- ``other_release``: work on another release of PyTorch
- ``leaderboard``: the measured entries of a class, with intervals

Imports ``checks``, ``collect``, ``gradebook``, ``judge``, ``lab``, ``publish``, ``roster`` and ``sandbox``.
"""
