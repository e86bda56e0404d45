"""What the judge writes into a graded notebook is text, whatever a student has called their files."""

from nbconvert.filters import markdown2html

from dlo_lib.grading.judge_cells import status_cell
from dlo_lib.grading.report import Report

NASTY = "renamed from <script>alert(1)</script> `code` [here](javascript:alert(1)) **b** $x$ ![](http://there)\n# heading"


def test_a_warning_is_shown_as_it_stands():
    html = markdown2html(status_cell(Report("lab", "GRADED", {}, warnings=(NASTY,))).source)
    for tag in ("<script", "<code", "<a ", "<strong>b", "<img", "<h1"):
        assert tag not in html, html
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in html
    assert "# heading" in html
