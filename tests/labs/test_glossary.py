"""The glossary has every term that a lab introduces, with the same French term, and names the labs."""

import re
from collections import defaultdict

from dlo_lib.grading.lab.course import GLOSSARY, course_root, source_labs
from dlo_lib.grading.lab.source import source_folder, text_source

WORDS = re.compile(r"^# Words: ((?:.+\n# )*.+)\n", re.MULTILINE)
TERM = re.compile(r"(?:^|, )([^,(]+?)(?: \(\*([^*]+)\*[^)]*\))?(?=,|\.|$)")
ROW = re.compile(
    r"^\| (?P<term>[^|]+) \| (?P<french>[^|]+) \| [^|]{10,} \| (?P<labs>[\d, ]+) \|$", re.MULTILINE
)


def in_labs() -> dict[tuple[str, str], set[int]]:
    found: dict[tuple[str, str], set[int]] = defaultdict(set)
    for lab in source_labs():
        introduced = WORDS.search(text_source(source_folder(lab)).read_text(encoding="utf-8"))
        assert introduced, f"{lab.directory} introduces no terms: # Words: rank (*rang*), ..."
        text = introduced[1].replace("\n# ", " ").split(". ")[0].rstrip(".")
        for term, french in TERM.findall(text):
            found[term, french or term].add(lab.number)
    return found


def in_the_glossary() -> dict[tuple[str, str], set[int]]:
    text = (course_root() / "labs" / GLOSSARY).read_text(encoding="utf-8")
    rows = [row for row in ROW.finditer(text) if row["term"] != "term"]
    terms = [row["term"] for row in rows]
    assert terms == sorted(terms, key=str.lower), "the terms are not in alphabetical order"
    found: dict[tuple[str, str], set[int]] = defaultdict(set)
    for row in rows:
        found[row["term"], row["french"]] |= {int(number) for number in row["labs"].split(",")}
    return found


def test_the_glossary_has_the_terms_of_the_labs() -> None:
    assert dict(in_the_glossary()) == dict(in_labs())
