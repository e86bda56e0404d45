"""`pytest --nbval-lax solutions` runs the reference notebooks; without that option nothing is collected here."""

from tests.labs.reference_notebooks import (
    pytest_addoption,
    pytest_collect_directory,
    pytest_configure,
    pytest_terminal_summary,
)
