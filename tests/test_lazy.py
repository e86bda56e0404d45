"""A lazy module of a test is imported by its first use, and not by pytest's look for fixtures."""

import pytest

from tests.lazy import Lazy


def test_a_look_for_fixtures_imports_nothing():
    module = Lazy("a_module_that_does_not_exist")
    assert not hasattr(module, "__wrapped__")
    assert not hasattr(module, "_pytestfixturefunction")
    with pytest.raises(ModuleNotFoundError):
        _ = module.name
