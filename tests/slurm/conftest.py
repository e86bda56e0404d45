"""The virtual clusters for the tests in this folder."""

from tests.cluster.fixtures import elsewhere, elsewhere_conf, jean_zay, jean_zay_conf, jean_zay_sites, log_in

__all__ = ["elsewhere", "elsewhere_conf", "jean_zay", "jean_zay_conf", "jean_zay_sites", "log_in"]
