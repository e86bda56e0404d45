"""The text that ``lab.check`` shows."""

import re

from dlo_lib.grading.checks.verdict import once, table_html


def test_the_table_of_a_dead_lock_is_a_table():
    message = (
        "DEADLOCK: <both> wait.\n\n  rank  what it does   since\n  0     waits in send  0.2 s\n"
        "        a.py, line 3: dist.send(x < y, 1)\n  1     computes\n\nLook at   line 3."
    )
    page = table_html("exchange: 0 of 2 points", [(False, "A ring", "0/2", message)], "a hint")
    assert "DEADLOCK: &lt;both&gt; wait.</td>" in page
    cells = re.findall(r"<t[dr][^>]*>([^<]*(?:<br><code[^>]*>[^<]*</code>)?)</td>", page)
    place = '<br><code style="overflow-wrap:anywhere">a.py, line 3: dist.send(x &lt; y, 1)</code>'
    assert cells[-8:] == [
        *("rank", "what it does", "since"),
        *("0", f"waits in send{place}", "0.2 s"),
        *("1", "computes"),
    ]
    assert ">Look at   line 3.</div>" in page


def test_lines_of_a_message_that_are_no_table_stay_as_they_are():
    page = table_html("", [(False, "A ring", "0/2", "Traceback\n  line 3\n    x = 1  # two")], "")
    assert ">  line 3\n    x = 1  # two</div>" in page


def test_a_message_of_one_line_is_plain_text():
    assert "<pre" not in table_html(
        "exchange: 0 of 2 points", [(False, "A ring", "0/2", "off by 1")], "a hint"
    )


def test_code_in_a_message_and_a_title_is_set_as_code():
    page = table_html("", [(False, "`f` works", "0/2", "`x < y` is wrong")], 'run `lab.hint("f")`')
    assert "<code>f</code> works" in page
    assert "<code>x &lt; y</code> is wrong" in page
    assert "run <code>lab.hint(&#34;f&#34;)</code>" in page


def test_a_long_message_that_two_checks_have_is_shown_once():
    long = "Your function returned None: a `return` is missing at its end.\n  line 3"
    rows = [(False, "Sum", "0/1", long), (True, "Shape", "1/1", ""), (False, "Any size", "0/1", long)]
    assert [message for *_, message in once(rows)] == [long, "", "the same as for “Sum”"]


def test_short_messages_are_repeated():
    rows = [(False, "Sum", "0/1", "not written yet"), (False, "Any size", "0/1", "not written yet")]
    assert once(rows) == rows
