#!/usr/bin/env python3
"""Build the documentation site: `make docs`, `make docs LANGUAGE=fr`, `make docs ARGS="--update fr"`.

Sphinx reads docs/conf.py and writes build/docs, or build/docs-fr for another language. A warning is an error,
and nothing is downloaded. ``--update`` writes the catalogues of pages in docs/locale instead: new and changed
paragraphs get an empty or a *fuzzy* translation, and the others keep theirs.

Exit status 0: the site or the catalogues are complete. 1: Sphinx has warned, or a page would load from a
network. 2: bad input, one line with the cure.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build"
LOCALE = ROOT / "docs" / "locale"
SOURCE = "en"
LOADED = re.compile(
    r"""<(?:script|link|img|iframe|source|video|audio)\b[^>]*?\b(?:src|href|srcset)=["']?(?:https?:)?//[^>]*>"""
    r"""|@import\s+(?:url\()?["']?(?:https?:)?//[^;]*|\burl\(["']?(?:https?:)?//[^)]*"""
)


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--language", default=SOURCE, help="the language of the site")
    parser.add_argument("--update", nargs="+", metavar=("LANGUAGE", "PAGE"), help="the catalogues to write")
    chosen = parser.parse_args(arguments)
    if chosen.update:
        return update(chosen.update[0], chosen.update[1:])
    languages = [SOURCE, *sorted(folder.name for folder in LOCALE.iterdir() if folder.is_dir())]
    if chosen.language not in languages:
        return refuse(f"no catalogues of {chosen.language}: use {' or '.join(languages)}, or --update")
    target = BUILD / ("docs" if chosen.language == SOURCE else f"docs-{chosen.language}")
    status = build("html", target, "-D", f"language={chosen.language}")
    if elsewhere := loaded_from_elsewhere(target):
        print("docs: these pages load from a network:", *elsewhere, sep="\n  ", file=sys.stderr)
        return 1
    if status == 0:
        print(f"docs: open {target.relative_to(ROOT)}/index.html with a browser")
    return status


def build(builder: str, target: Path, *options: str) -> int:
    """Run Sphinx; return its exit status."""
    from sphinx.cmd.build import main as sphinx_build

    read = BUILD / f"{target.name}-read"
    # A second build repeats no warning of a page that it need not read again: read all.
    quiet = ["--quiet", "--fail-on-warning", "--keep-going", "--fresh-env"]
    return sphinx_build(
        ["-b", builder, "-c", str(ROOT / "docs"), "-d", str(read), *quiet, *options, str(ROOT), str(target)]
    )


def loaded_from_elsewhere(site: Path) -> list[str]:
    """Return a line for each script, style, font or picture that a page loads from a network."""
    return [
        f"{file.relative_to(site)}: {found[0][:100]}"
        for kind in ("*.html", "*.css")
        for file in sorted(site.rglob(kind))
        for found in LOADED.finditer(file.read_text(encoding="utf-8"))
    ]


def update(language: str, pages: list[str]) -> int:
    """Write the catalogues of ``pages`` (all that exist already, if there are none) for a language."""
    if not re.fullmatch(r"[a-z]{2}(_[A-Z]{2})?", language) or language == SOURCE:
        return refuse(f"{language} is no language to translate to: use a code such as fr")
    folder = LOCALE / language / "LC_MESSAGES"
    names = [page.removesuffix(".md") for page in pages]
    names = names or [path.relative_to(folder).with_suffix("").as_posix() for path in folder.rglob("*.po")]
    for name in names:
        if not (ROOT / f"{name}.md").is_file():
            return refuse(f"no page {name}.md in {ROOT}: name a page such as docs/student")
    templates = BUILD / "docs-templates"
    status = build("gettext", templates)
    if status:
        return status
    from sphinx_intl.basic import update as update_catalogues

    with tempfile.TemporaryDirectory() as chosen:
        for name in names:
            template = Path(chosen) / f"{name}.pot"
            template.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(templates / f"{name}.pot", template)
        update_catalogues(str(LOCALE), chosen, [language], line_width=110)
    return 0


def refuse(reason: str) -> int:
    """Print why nothing was done; return the exit status of bad input."""
    print(f"docs: {reason}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
