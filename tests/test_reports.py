"""A report of a test reaches the process that collects them, whatever characters it has."""

from tests.conftest import encodable


def test_characters_that_are_no_utf_8_are_written_as_escapes():
    report = {"sections": [("log", "a name \udcff")], "longrepr": None, "when": "call", "duration": 0.5}
    assert encodable(report) == {
        "sections": [("log", "a name \\udcff")],
        "longrepr": None,
        "when": "call",
        "duration": 0.5,
    }
