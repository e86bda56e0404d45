"""Smaller models.

The room imports ``base`` and ``models``.
"""
