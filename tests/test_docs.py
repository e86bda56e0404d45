"""The first page and the documentation site, without a build: links, contents, catalogues, docstrings.

`make docs` builds the site with warnings as errors; `.ci/run` calls it.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Annotated

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
WORDS = 1300
FENCE = re.compile(r"^ *(```+|~~~+).*?^ *\1`*$", re.DOTALL | re.MULTILINE)
CODE = re.compile(r"(`+)(?!`).+?(?<!`)\1(?!`)", re.DOTALL)
LINK = re.compile(r"\]\(<?([^)\s>]+)>?(?: \"[^\"]*\")?\)")
TOCTREE = re.compile(r"^```\{toctree\}\n(.*?)^```", re.DOTALL | re.MULTILINE)


@cache
def load(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"docs_under_test_{Path(path).stem}", ROOT / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    before = list(sys.path)
    spec.loader.exec_module(module)
    sys.path[:] = before
    return module


def pages() -> list[Path]:
    """Return the files of the site."""
    return [path for pattern in load("docs/conf.py").PAGES for path in sorted(ROOT.glob(pattern))]


def texts() -> list[Path]:
    """Return the Markdown files whose links are checked: the site's, and the pages of the labs."""
    return [*pages(), *sorted(ROOT.glob("solutions/*/*.md")), *sorted(ROOT.glob("tests/**/README.md"))]


@cache
def prose(path: Path) -> str:
    """Return a text without its blocks and spans of code."""
    return CODE.sub(
        lambda code: code[0].strip("`").replace("](", ""), FENCE.sub("", path.read_text(encoding="utf-8"))
    )


@cache
def anchors(path: Path) -> set[str]:
    """Return the anchors of a text, as GitHub and the site make them from its headings."""
    found: set[str] = set()
    for heading in re.findall(r"^#{1,6} +(.+?) *#*$", prose(path), re.MULTILINE):
        name = re.sub(r"[^\w\- ]", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()).replace(
            " ", "-"
        )
        number = 0
        while (name if not number else f"{name}-{number}") in found:
            number += 1
        found.add(name if not number else f"{name}-{number}")
    return found


def broken(path: Path, text: str) -> Iterator[str]:
    """Yield a line for each link of a text that leads nowhere in the repository."""
    for target in LINK.findall(text):
        name, _, anchor = target.partition("#")
        if re.match(r"[a-z][a-z+.-]*:", name):
            continue
        file = (path.parent / name).resolve() if name else path
        if not file.exists() or not file.is_relative_to(ROOT):
            yield f"{path.relative_to(ROOT)}: no {target}"
        elif anchor and file.suffix == ".md" and anchor not in anchors(file):
            yield f"{path.relative_to(ROOT)}: no heading {target}"


def test_every_link_leads_to_a_file_or_a_heading():
    assert len(texts()) > 40
    found = [line for path in texts() for line in broken(path, prose(path))]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("target", ["docs/absent.md", "docs/ranks.md#absent", "#absent", "../outside.md"])
def test_a_link_that_leads_nowhere_is_found(target):
    assert list(broken(README, f"See [this]({target})."))


@pytest.mark.parametrize(
    "target", ["docs/ranks.md#cells-on-ranks-ranks", "LICENSE", "https://arxiv.org", "#licence"]
)
def test_links_to_files_headings_and_other_sites_are_right(target):
    assert not list(broken(README, f"See [this]({target})."))


def named_files(text: str) -> Iterator[str]:
    """Yield the paths below a folder of the repository that spans of code name; ``NN``, ``NAME`` and patterns
    are not paths."""
    folders = "|".join(path.name for path in ROOT.iterdir() if path.is_dir() and path.name[0].isalpha())
    for span in re.findall(r"`([^`\n]+)`", FENCE.sub("", text)):
        for name in re.findall(rf"(?<![\w./~$-])(?:{folders})/[\w./-]+(?!\S*[*<{{])", span):
            if not re.search(r"NN_|NAME|30_my_lab", name):
                yield name


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "docs/site.md", "docs/tests.md"])
def test_the_files_that_a_page_names_exist(page):
    names = list(named_files((ROOT / page).read_text(encoding="utf-8")))
    assert names
    assert [name for name in names if not (ROOT / name).exists()] == []


def test_the_files_and_names_of_the_recipes_exist():
    """Those without a folder: such as `recognise.py`, `ScheduleKind` and `OPTIMIZERS`."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    recipes = text[text.index("## How to add …") : text.index("## You changed X")]
    spans = set(re.findall(r"`(\w+\.(?:py|toml)|_?[A-Z]\w+)`", recipes))
    sources = [path for pattern in ("dlo_lib/**/*", "solutions/15_fsdp/*") for path in ROOT.glob(pattern)]
    files = {path.name for path in sources}
    words = {
        word
        for path in sources
        if path.suffix == ".py"
        for word in re.findall(r"\w+", path.read_text("utf-8"))
    }
    assert {"cases.py", "ScheduleKind", "OPTIMIZERS"} <= spans
    assert spans - files - words == set()


def test_a_file_that_does_not_exist_is_found():
    text = "See `tests/absent.py`, `labs/NN_name/checks`, `solutions/*/x.md` and `https://x.org/docs/y`."
    assert list(named_files(text)) == ["tests/absent.py"]


def test_the_example_of_a_new_lab_has_a_free_number():
    """A reader who copies the command gets a lab; 29 is the number of the last one that is planned."""
    pages = ["README.md", "CONTRIBUTING.md", "solutions/CHECKS.md"]
    examples = re.findall(r"dlo new-lab (\d\d)_", "".join((ROOT / page).read_text("utf-8") for page in pages))
    assert len(examples) >= len(pages)
    assert all(int(number) > 29 for number in examples)
    assert not [folder for number in examples for folder in ROOT.glob(f"labs/{number}_*")]


def test_every_page_is_in_one_table_of_contents():
    listed = [
        (file.parent / line.split("<")[-1].rstrip(">")).resolve()
        for file in (ROOT / "docs" / "index.md", ROOT / "docs" / "api" / "index.md")
        for table in TOCTREE.findall(file.read_text(encoding="utf-8"))
        for line in table.splitlines()
        if line and not line.startswith(":")
    ]
    assert len(listed) == len(set(listed))
    assert {path.with_suffix("") for path in pages()} - {ROOT / "docs" / "index"} == set(listed)


def test_the_first_page_is_short_and_has_its_parts():
    text = README.read_text(encoding="utf-8")
    assert len(text.split()) <= WORDS
    for part in (
        "SPDX-License-Identifier: MIT",
        "git clone",
        "| lab | title | minutes |",
        "](docs/check.png)",
    ):
        assert part in text, part


def test_every_picture_has_a_text():
    bare = [
        f"{path.relative_to(ROOT)}: {link}"
        for path in pages()
        for link in re.findall(r"!\[\s*\]\(.*?\)", prose(path))
    ]
    assert not bare


def test_the_files_to_read_first_exist_and_take_an_evening():
    text = README.read_text(encoding="utf-8")
    part = text[text.index("## Read these first") :]
    part = part[: part.index("\n## ", 1)]
    files = [ROOT / target for target in LINK.findall(part)]
    said = int(re.search(r"([\d,]+) lines", part)[1].replace(",", ""))
    lines = sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)
    assert 10 <= len(files) <= 15
    assert abs(lines - said) <= 0.05 * said, f"the README says {said} lines, and there are {lines}"


def test_translations_keep_links_and_code():
    po = pytest.importorskip("babel.messages.pofile", reason="babel comes with JupyterLab")
    catalogues = sorted((ROOT / "docs" / "locale").rglob("*.po"))
    assert catalogues
    wrong = []
    for path in catalogues:
        page = path.relative_to(ROOT / "docs" / "locale").parts[2:]
        assert (ROOT.joinpath(*page).with_suffix(".md")).is_file(), f"{path}: its page is gone"
        with path.open("rb") as file:
            for message in po.read_po(file):
                if message.id and message.string:
                    for kind in (LINK, CODE):
                        before, after = (
                            sorted(found[0] for found in kind.finditer(str(text)))
                            for text in (message.id, message.string)
                        )
                        if before != after:
                            wrong.append(f"{path.relative_to(ROOT)}: {message.string}")
    assert not wrong, "\n".join(wrong)


def flat(text: str) -> str:
    """Return a text of Markdown without line breaks, marks of lists and quotation marks."""
    return " ".join(re.sub(r"^ *(?:[-*>]|\d+\.) +", "", text, flags=re.MULTILINE).split())


@pytest.mark.parametrize("page", ["docs/index", "docs/student", "docs/install", "docs/cluster"])
def test_the_pages_that_are_translated_are_translated_whole(page):
    """docs/site.md names them. A paragraph without its French appears in English among the others."""
    po = pytest.importorskip("babel.messages.pofile", reason="babel comes with JupyterLab")
    text = (ROOT / f"{page}.md").read_text(encoding="utf-8")
    with (ROOT / f"docs/locale/fr/LC_MESSAGES/{page}.po").open("rb") as file:
        french = {message.id: message for message in po.read_po(file) if message.id}
    assert not [name for name, message in french.items() if message.fuzzy or not message.string]
    assert not [name for name in french if flat(name) not in flat(text)], "the page has changed"
    left = re.sub(r"^```.*?^```|<!--.*?-->", "", text, flags=re.DOTALL | re.MULTILINE)
    left = flat(re.sub(r"^#+ |^[|\-: ]+$", "", left, flags=re.MULTILINE))
    for name in sorted(french, key=len, reverse=True):
        left = left.replace(flat(name), "")
    assert not re.findall(r"\w+", re.sub(r"!\[|\]\([^)]*\)", "", left)), "this has no translation"


FORMULA = """\
Return x * w, also for ``Unit``s.

    y = x * w        (n,)
    z = |y|_2

Names_ and *emphasis* stay.

- ``one``: the first,
  over two lines

Args:
    x: (n,), and then
        the rest.
"""


def test_what_a_docstring_indents_is_shown_unchanged():
    lines = FORMULA.splitlines()
    marked = [line for part in load("docs/_ext/docstrings.py").marked(lines) for line in part]
    text = "\n".join(marked)
    assert "::\n\n    y = x * w        (n,)\n    z = |y|_2\n" in text
    assert text.count("::\n") == 1
    assert r"Return x \* w, also for ``Unit``\ s." in text
    assert r"Names\_ and *emphasis* stay." in text
    assert text.endswith("\n".join(lines[-7:]))


def test_several_names_with_one_description_are_no_type_and_a_name():
    lines = [":param p, m: the sizes", ":param one: a, b: c", ":ivar x_1, y, z:", "   p, m: text"]
    load("docs/_ext/docstrings.py").join_names(None, "class", "x", None, None, lines)
    assert lines == [
        ":param p,\u200bm: the sizes",
        ":param one: a, b: c",
        ":ivar x_1,\u200by,\u200bz:",
        "   p, m: text",
    ]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--language", "xx"], "no catalogues of xx: use en"),
        (["--update", "french", "docs/student"], "french is no language to translate to"),
        (["--update", "fr", "docs/absent"], "no page docs/absent.md"),
    ],
)
def test_bad_input_to_make_docs_is_one_line(capsys, arguments, says):
    assert load("deploy/docs.py").main(arguments) == 2
    said = capsys.readouterr().err
    assert says in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("page.html", '<script async src="https://cdn.example/mathjax.js"></script>'),
        ("page.html", '<link rel="stylesheet" href="//fonts.example/css">'),
        ("below/style.css", "@import url(https://fonts.example/css);"),
        ("below/style.css", 'src: url("https://fonts.example/a.woff2")'),
    ],
)
def test_what_a_page_loads_from_a_network_is_found(tmp_path, name, text):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(text, encoding="utf-8")
    (line,) = load("deploy/docs.py").loaded_from_elsewhere(tmp_path)
    assert line.startswith(f"{name}: ")


def test_links_to_other_sites_load_nothing(tmp_path):
    page = '<a href="https://arxiv.org/abs/1910.02054"><img src="check.png"></a><script src="a.js"></script>'
    (tmp_path / "page.html").write_text(page, encoding="utf-8")
    (tmp_path / "style.css").write_text(
        "a { background: url(a.svg) }  /* https://example.org */", encoding="utf-8"
    )
    assert not load("deploy/docs.py").loaded_from_elsewhere(tmp_path)


@dataclass
class Configuration:
    """A training run."""

    lr: Annotated[float, SimpleNamespace(help="largest learning rate")] = 1e-3
    data: Annotated[str, SimpleNamespace(help="a*b|c")] = ""
    plain: int = 0


def test_the_options_of_a_configuration_are_a_table():
    signatures = load("docs/_ext/signatures.py")
    lines = ["A training run."]
    signatures.add_table(None, "class", "Configuration", Configuration, None, lines)
    assert lines == [
        *["A training run.", "", ".. list-table::", "   :header-rows: 1", ""],
        *["   * - option", "     - default", "     - meaning"],
        *["   * - ``lr``", "     - ``0.001``", "     - largest learning rate"],
        *["   * - ``data``", "     - ", r"     - a\*b\|c", ""],
    ]
    assert not list(signatures.rows(dict))
