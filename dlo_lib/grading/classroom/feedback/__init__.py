"""Feedback for a class.

- ``feedback``: the pages of a class
- ``feedback_page``: the page of a student
- ``comment``: an instructor's comment as HTML
- ``pictures``: the plots of a student's notebook, made safe
- ``other_release``: work on another release of PyTorch
- ``leaderboard``: the measured entries of a class, with intervals

Imports ``checks``, ``collect``, ``gradebook``, ``judge``, ``lab``, ``publish``, ``roster`` and ``sandbox``.
"""
