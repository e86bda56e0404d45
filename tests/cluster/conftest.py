"""The virtual clusters and the small class, for every test of this folder."""

from tests.cluster.fixtures import elsewhere, elsewhere_conf, jean_zay, jean_zay_conf, log_in, other_site
from tests.grading.small_class import checkout, class_, in_checkout, ungraded

__all__ = [
    "checkout",
    "class_",
    "elsewhere",
    "elsewhere_conf",
    "in_checkout",
    "jean_zay",
    "jean_zay_conf",
    "log_in",
    "other_site",
    "ungraded",
]
