"""Formulas as MathML, which browsers draw without a script and without a font from elsewhere."""

from docutils import nodes
from latex2mathml.converter import convert


def inline(self, node: nodes.math) -> None:
    """Write a formula within a line."""
    self.body.append(convert(node.astext()))
    raise nodes.SkipNode


def block(self, node: nodes.math_block) -> None:
    """Write a formula on a separate line."""
    self.body.append(self.starttag(node, "div", CLASS="formula"))
    self.body.append(convert(node.astext(), display="block"))
    self.body.append("</div>")
    raise nodes.SkipNode


def setup(app) -> dict:
    """Register the renderer `mathml`."""
    app.add_html_math_renderer("mathml", (inline, None), (block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
