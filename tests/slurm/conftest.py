"""The virtual clusters, for every test of this folder."""

from tests.cluster.fixtures import elsewhere, elsewhere_conf, jean_zay, jean_zay_conf, log_in

__all__ = ["elsewhere", "elsewhere_conf", "jean_zay", "jean_zay_conf", "log_in"]
