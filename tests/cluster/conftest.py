"""The virtual clusters and the small class, for every test of this folder."""

from tests.cluster.fixtures import (
    elsewhere,
    elsewhere_conf,
    jean_zay,
    jean_zay_conf,
    jean_zay_sites,
    log_in,
    other_site,
)
from tests.grading.small_class import checkout, class_, graded_class, judges, ungraded

__all__ = [
    "checkout",
    "class_",
    "elsewhere",
    "elsewhere_conf",
    "graded_class",
    "jean_zay",
    "jean_zay_conf",
    "jean_zay_sites",
    "judges",
    "log_in",
    "other_site",
    "ungraded",
]
