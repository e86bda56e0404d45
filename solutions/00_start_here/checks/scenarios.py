"""What runs beside the student's code on each rank. No expected value is here."""

from __future__ import annotations

from dlo_lib.grading.checks.contract import scenario


@scenario
def averaged(student, rank, world, x):
    """The mean over the ranks."""
    return student.mean_over_ranks(x)
