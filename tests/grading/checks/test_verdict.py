"""The text that ``lab.check`` shows."""

from dlo_lib.grading.checks.verdict import table_html


def test_the_table_of_a_dead_lock_keeps_its_lines_and_columns():
    message = "DEAD-LOCK: <both> wait.\n\n  rank  what it does\n  0     waits in send"
    page = table_html("exchange: 0 of 2 points", [(False, "A ring", "0/2", message)], "a hint")
    assert "DEAD-LOCK: &lt;both&gt; wait.</td>" in page
    assert "  rank  what it does\n  0     waits in send</pre>" in page


def test_a_message_of_one_line_is_plain_text():
    assert "<pre" not in table_html(
        "exchange: 0 of 2 points", [(False, "A ring", "0/2", "off by 1")], "a hint"
    )
