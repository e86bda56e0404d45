"""The judge writes only text into a graded notebook, for any file names of a student."""

from nbconvert.filters import markdown2html

from dlo_lib.grading.judge.preprocessor import status_cell
from dlo_lib.grading.judge.report import Report

NASTY = (
    "renamed from <script>alert(1)</script> `code` [here](javascript:alert(1)) **b** $x$ ![](http://there)\n"
    "# heading"
)


def test_a_warning_is_shown_as_plain_text():
    html = markdown2html(status_cell(Report("lab", "GRADED", {}, warnings=(NASTY,))).source)
    for tag in ("<script", "<code", "<a ", "<strong>b", "<img", "<h1"):
        assert tag not in html, html
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in html
    assert "# heading" in html
