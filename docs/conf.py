"""The documentation site: `make docs` builds it with Sphinx in build/docs, and warnings are errors.

The source folder is the repository, because its texts stay where their readers look for them: a page of the
site is a Markdown file of ``PAGES``, unchanged, and its links work in the repository and on the site. A link
to another file of the repository is a download.

The pages request nothing from a network: formulas are MathML (``_ext/mathml.py``), and the search has its
index beside it.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "docs" / "_ext"), str(ROOT)]

PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    "COMPATIBILITY.md",
    "benchmarks/RESULTS.md",
    "datasets/README.md",
    "deploy/hub/README.md",
    "docs/*.md",
    "docs/api/*.md",
    "labs/GLOSSARY.md",
    "slurm/*.md",
    "solutions/*.md",
]

project = "dlo"
author = copyright = "the dlo_lib authors"
language = "en"
root_doc = "docs/index"
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "docstrings",
    "rooms",
    "signatures",
    "mathml",
    "ipython_lexer",
]
include_patterns = PAGES
exclude_patterns = [".*", "build", "dlo_lib", "runs", "tests", "**/node_modules"]

# The archive of the students has no solutions, and its site no pages of them.
suppress_warnings = [] if (ROOT / "solutions").is_dir() else ["toc", "myst.xref_missing"]

source_suffix = {".md": "markdown"}
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 4

autodoc_member_order = "bysource"
autodoc_inherit_docstrings = False
autodoc_preserve_defaults = True
autodoc_typehints_format = "short"
autodoc_default_options = {"members": True}
default_role = "code"
smartquotes_action = "qe"  # quotation marks and dots; two dashes begin an option
highlight_language = "text"  # of blocks in docstrings; the blocks of a page name theirs
maximum_signature_line_length = 90
add_module_names = False
napoleon_use_ivar = True
napoleon_use_rtype = False

html_theme = "furo"
html_title = "Distributed deep learning, in labs"
html_static_path = ["_static"]
html_css_files = ["dlo.css"]
html_extra_path = ["_extra"]
html_math_renderer = "mathml"
html_copy_source = False
html_show_sphinx = False
html_show_search_summary = False  # a browser does not let a local page read its neighbours
pygments_style, pygments_dark_style = "default", "native"

locale_dirs = ["docs/locale"]
gettext_compact = False
gettext_location = False  # a change of a line number is no change of a catalogue
TITLES = {"fr": "Deep learning distribué, en TP"}


def setup(app) -> None:
    """Give the site of each language its title."""
    app.connect(
        "config-inited",
        lambda app, config: setattr(config, "html_title", TITLES.get(config.language, config.html_title)),
    )
