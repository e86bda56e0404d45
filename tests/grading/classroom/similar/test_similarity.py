"""Similar submissions are found after renaming and moving; released code and common code do not count."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from benchmarks.planted_class import Kind, planted_class
from dlo_lib.grading.classroom.gradebook.nbgrader_course import open_course
from dlo_lib.grading.classroom.similar import similarity
from dlo_lib.grading.classroom.similar.fingerprints import K, fingerprints, statements, strings, tokens
from dlo_lib.grading.classroom.similar.hidden_code import reasons
from dlo_lib.grading.classroom.similar.matching import Match, compare, least_evidence
from dlo_lib.grading.classroom.similar.similarity import (
    document,
    find_similar,
    given_code,
    source_texts,
    submitted_cells,
)
from dlo_lib.grading.lab.course import find_lab, source_labs
from dlo_lib.grading.lab.release import release_notebook, released_files
from dlo_lib.grading.lab.source import LabSource, notebook_text, read_lab, source_folder

ORIGINAL = '''
def quantise(x):
    """int8 values and the scale of each row."""
    scale = absmax_scale(x)
    if not torch.isfinite(scale).all():
        raise ValueError("a scale is not finite")
    safe = torch.where(scale == 0, torch.ones_like(scale), scale)
    values = []
    for row, divisor in zip(x, safe):
        rounded = torch.round(row / divisor)
        values.append(rounded.clamp(-127, 127).to(torch.int8))
    result = torch.stack(values)
    if result.shape != x.shape:
        raise ValueError(f"{result.shape} is not {x.shape}")
    return result, scale
'''
DISGUISED = """
# my very own work
def quantise( tensor ):
    s = absmax_scale(tensor)   # the scale
    if not torch.isfinite( s ).all( ):
        raise ValueError('infinite scales')
    t = torch.where( s == 0, torch.ones_like( s ), s )
    out = [ ]
    for a, b in zip(tensor, t):
        c = torch.round(a / b)
        out.append(c.clamp(-127, 127).to(torch.int8))
    res = torch.stack(out)
    if res.shape != tensor.shape:
        raise ValueError('wrong shapes')
    return res, s
"""
ANOTHER = """
def quantise(x):
    scale = absmax_scale(x)
    divisor = scale.clone()
    divisor[divisor == 0] = 1
    return (x / divisor.unsqueeze(1)).round().type(torch.int8), scale
"""


def handed_in(lab: LabSource, folder: Path, answer: str, extra: str = "") -> Path:
    notebook: dict[str, Any] = json.loads(notebook_text(release_notebook(lab.folder)))
    for cell in notebook["cells"]:
        if cell["id"] == "quantise":
            cell["source"] = answer
    notebook["cells"].append(
        {
            "cell_type": "code",
            "id": "own",
            "metadata": {},
            "source": extra,
            "outputs": [],
            "execution_count": None,
        }
    )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "small.ipynb").write_text(json.dumps(notebook), encoding="utf-8")
    return folder / "small.ipynb"


def pairs(matches: list[Match]) -> set[tuple[str, str]]:
    return {(match.one, match.other) for match in matches}


def read(lab: LabSource, notebook: Path) -> Mapping[str, frozenset[int]]:
    return document(submitted_cells(lab, notebook), given_code(lab))


def test_names_layout_comments_and_messages_do_not_count() -> None:
    assert fingerprints(ORIGINAL) == fingerprints(DISGUISED)
    assert list(tokens("x = [y.size for y in 'a']  # why")) == list(
        tokens("abc=[ d . size for d in '''a''' ]")
    )


def test_what_a_result_depends_on_counts() -> None:
    assert list(tokens("a.size")) != list(tokens("a.shape"))
    assert list(tokens("2 * a")) != list(tokens("3 * a"))
    assert list(tokens("a['hidden']")) != list(tokens("a['layers']"))
    assert list(tokens("f'{rank}F{i}'")) == list(tokens('f"{r}F{k}"'))
    assert list(tokens("dist.f()", frozenset({"dist"}))) != list(tokens("other.f()", frozenset({"dist"})))


def test_a_name_of_the_notebook_that_the_cell_binds_can_be_renamed() -> None:
    """An earlier step is called ``state`` too, and so is a variable of a student."""
    text = "def f(model, {a}=0):\n    {b} = model.rows({a})\n    for {c}, k in {b}: yield {c} + peak(model)\n"
    mine, copy = text.format(a="state", b="rank", c="loss"), text.format(a="s", b="r", c="l")
    names = frozenset({"state", "rank", "loss", "peak", "model"})
    assert list(tokens(mine, names)) == list(tokens(copy, names))
    assert "peak" in tokens(mine, names)
    assert [*tokens("state = 1\nf(rank=2)\n", names)][::5] == ["state", "rank"]


def test_two_equal_answers_are_more_than_one_of_the_same_size() -> None:
    others = {f"s{number}": {"a": frozenset({-number})} for number in range(1, 21)}
    first, second = frozenset(range(K * 3)), frozenset(range(K * 3, K * 6))
    one = {student: {"a": first | second} for student in ("ada", "blaise")}
    two = {student: {"a": first, "b": second} for student in ("ada", "blaise")}
    assert compare(one | others, {}) == []
    (match,) = compare(two | others, {})
    assert match.evidence == pytest.approx(1.5 * 6)


def test_text_that_is_not_python_has_tokens_too() -> None:
    assert list(tokens("def f(: 'open\n\\ ∑ %%bash\0\x1b")) != []


def test_a_statement_ends_with_its_line_outside_of_brackets() -> None:
    text = "x = (1,\n 2,\n)\nif x: y = 3; z = 4\n"
    assert [" ".join(found.tokens) for found in statements(text)] == [
        "name = ( 1 , 2 )", "if name", "name = 3", "name = 4",
    ]  # fmt: skip
    assert [(found.first, found.last) for found in statements(text)] == [(1, 3), (4, 4), (4, 4), (4, 4)]


def test_a_common_passage_is_found_in_any_place_and_a_short_one_is_not() -> None:
    passage = " + ".join(f"a.f{number}" for number in range(6))  # 23 tokens
    for before in range(12):
        one, other = f"{'p() ;' * before} z = {passage}", f"w = {passage} if q else r[{before}]"
        assert fingerprints(one) & fingerprints(other)
    assert K < 23
    assert not fingerprints("z = a.f0 + a.f1 + b()") & fingerprints("f(a.f0 + a.f1)")


def test_moved_statements_and_statements_without_effect_do_not_count() -> None:
    lines = [f"a{n} = b.f{n}(c, d.g{n})" for n in range(4)]
    inserted = ["pass", "unused = 0", "assert a0", "'step'", "if False:\n    pass"]
    moved = "\n".join(text for pair in zip(inserted, reversed(lines), strict=False) for text in pair)
    statement_marks = {value for value in fingerprints("\n".join(lines)) if value < 0}
    assert len(statement_marks) == 4
    assert {value for value in fingerprints(moved) if value < 0} == statement_marks
    with_no_ops = "\n".join(text for pair in zip(inserted, lines, strict=False) for text in pair)
    assert fingerprints(with_no_ops) == fingerprints("\n".join(lines))


def test_released_code_is_removed(small: LabSource, tmp_path: Path) -> None:
    untouched = json.loads(notebook_text(release_notebook(small.folder)))
    (tmp_path / "small.ipynb").write_text(json.dumps(untouched))
    assert read(small, tmp_path / "small.ipynb") == {}
    given = next(cell.released for cell in small.cells if cell.id == "setup")
    assert fingerprints(given, given_code(small).names, "setup")
    assert document({"setup": given}, given_code(small)) == {}
    (tmp_path / "small.ipynb").write_text("{")
    assert submitted_cells(small, tmp_path / "small.ipynb") == {}


def test_a_disguised_copy_is_listed_and_an_independent_solution_is_not(
    small: LabSource,
    tmp_path: Path,
) -> None:
    answers = {"ada": ORIGINAL, "blaise": DISGUISED, "chloe": ANOTHER}
    class_ = {
        name: read(small, handed_in(small, tmp_path / name, answer)) for name, answer in answers.items()
    }
    (match,) = compare(class_, {})
    (cell,) = match.cells
    assert (match.one, match.other) == ("ada", "blaise")
    assert (cell.of_one, cell.of_other, cell.score) == ("quantise", "quantise", 1.0)


def test_a_copy_in_another_cell_is_found(small: LabSource, tmp_path: Path) -> None:
    one = read(small, handed_in(small, tmp_path / "a", ORIGINAL))
    other = read(small, handed_in(small, tmp_path / "b", "def quantise(x):\n    return helper(x)", DISGUISED))
    (match,) = compare({"a": one, "b": other}, {})
    assert [(cell.of_one, cell.of_other[:5]) for cell in match.cells] == [("quantise", "extra")]


def test_a_short_answer_that_two_share_is_no_evidence(small: LabSource) -> None:
    parts = document(
        {"quantise": "def quantise(x):\n    return (x / x.max()).round(), x.max()"}, given_code(small)
    )
    assert parts
    assert compare({"a": parts, "b": parts}, {}) == []


def test_the_library_is_among_the_sources(course: Path, small: LabSource, tmp_path: Path) -> None:
    import dlo_lib.parallel.zero.optimizer as pasted

    text = Path(pasted.__file__).read_text(encoding="utf-8")
    part = text[len(text) // 3 : 2 * len(text) // 3]
    given = given_code(small)
    sources = {name: document(parts, given) for name, parts in source_texts(small).items()}
    class_ = {
        name: read(small, handed_in(small, tmp_path / name, "pass", part)) for name in ("ada", "blaise")
    }
    matches = compare(class_, sources)
    of_library = [match for match in matches if match.other == "dlo_lib/parallel/zero/optimizer.py"]
    assert [match.one for match in of_library] == ["ada", "blaise"]
    assert all(match.cells[0].score > 0.8 for match in of_library)


def test_code_shared_by_much_of_a_class_does_not_count(small: LabSource) -> None:
    copied = document({"quantise": ORIGINAL}, given_code(small))
    others = {f"s{number}": {"quantise": frozenset({number})} for number in range(97)}
    three = {f"c{number}": copied for number in range(3)}
    assert len(compare(three | others, {})) == 3
    assert compare({f"s{number}": copied for number in range(30)}, {}) == []


def test_a_pair_of_a_small_class_needs_more_evidence() -> None:
    """Of 30 students, two may be the only ones with an answer that a hundred would give several times."""
    copied = {student: {"a": frozenset(range(K * 6))} for student in ("ada", "blaise")}
    others = {f"s{number}": {"a": frozenset({-number})} for number in range(1, 99)}
    assert len(compare(copied | others, {})) == 1
    assert compare(copied | dict(list(others.items())[:28]), {}) == []
    assert [least_evidence(number) for number in (2, 6, 8, 60, 80, 100, 300)] == pytest.approx(
        [5.5, 7.2, 8.9, 8.9, 7.2, 5.5, 5.5]
    )


def test_a_class_of_many_different_solutions_has_no_match() -> None:
    class_ = {
        f"s{number}": {"cell": frozenset(range(1000 * number, 1000 * number + 50))} for number in range(300)
    }
    assert compare(class_, {}) == []


def test_copies_in_a_class_of_100_are_found_and_honest_students_are_not_accused() -> None:
    """The goal is 28 of 30 copies and at most one other pair; ``benchmarks/similar.py`` has more."""
    lab = read_lab(source_folder(find_lab("13", source_labs())))
    given, planted = given_code(lab), planted_class(lab, seed=11)
    class_ = {name: document(answers, given) for name, answers in planted.answers.items()}
    answers = next(parts for name, parts in source_texts(lab).items() if name.endswith("references.json"))
    matches = compare(class_, {"references": document(answers, given)})
    found = {(match.one, match.other): match for match in matches if match.other in class_}
    copies = {copy.pair: copy for copy in planted.copies}
    assert len(class_) == 100
    assert len(copies) == 30
    assert len(found.keys() & copies.keys()) >= 28
    assert len(found.keys() - copies.keys()) <= 1
    whole = [found[pair] for pair, copy in copies.items() if copy.kind is Kind.RENAMED]
    assert all(match.cells[0].score > 0.99 and match.evidence > least_evidence(100) for match in whole)


def test_the_list_of_a_course_is_written_and_the_same_each_time(
    course: Path, small: LabSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = {name: parts for name, parts in source_texts(small).items() if "/parallel/" in name or "91" in name}
    assert len(few) > 50
    # the whole library, which takes seconds, is compared above and by a test of the command
    monkeypatch.setattr(similarity, "source_texts", lambda lab: few)
    escape = "\n# \x1b[2J\u202e"
    for student, answer in {"ada": ORIGINAL, "blaise": DISGUISED + escape, "chloe": ANOTHER}.items():
        handed_in(small, course / "submitted" / student / "91_small", answer)
    (course / "submitted" / "dan" / "91_small").mkdir(parents=True)
    opened, lab = open_course(course), find_lab("91", source_labs())
    assert ("ada", "blaise") in pairs(find_similar(opened, lab))
    files = [course / "grades" / "91_small" / name for name in ("similar.csv", "similar.txt")]
    before = [file.read_bytes() for file in files]
    find_similar(opened, lab)
    assert [file.read_bytes() for file in files] == before
    assert before[0].startswith(b"one,other,evidence,")
    shown = before[1].decode()
    assert ">     values = []" in shown
    assert ">     out = [ ]" in shown
    assert "\x1b" not in shown
    assert "\u202e" not in shown


@pytest.mark.parametrize(
    "text",
    [
        "'" * 50_001,
        '"""' * 20_001,
        "\\" * 50_000,
        "f('" * 20_000,
        "0" * 100_000,
        "(" * 50_000,
        "\0;" * 50_000,
        " " * 300_000,
        "\n a" + ", " * 200_000,
        "def f(" * 20_000,
        "for " * 30_000,
        "lambda " * 20_000,
        "a+" * 90_000,
    ],
)
def test_no_text_takes_long(text: str) -> None:
    assert len(list(tokens(text))) <= len(text)
    assert len(fingerprints(text)) <= len(text)


# -- many students paste the reference, and disguises


def honest(number: int) -> str:
    """A separate answer of one student: no two share a run of tokens."""
    lines = [f"    v{n} = own_{number}.f{n}(x, {number * 100 + n}) ** {n} - g{number}[{n}]" for n in range(6)]
    return "\n".join(["def quantise(x):", *lines, f"    return v0 + v{number % 6}, {number}"])


def test_however_many_paste_the_reference_all_of_them_are_listed(small: LabSource) -> None:
    given = given_code(small)
    reference = {"quantise": ORIGINAL, "scale": "def absmax_scale(x):\n    return x.abs().amax(dim=1) / 127"}
    sources = {"91_small/references.json": document(reference, given)}
    pasted = document({"quantise": DISGUISED, "scale": reference["scale"]}, given)
    others = [document({"quantise": honest(n), "scale": reference["scale"]}, given) for n in range(34)]
    for number in range(35):
        class_ = {f"s{n:02}": pasted if n < number else others[n] for n in range(34)}
        listed = pairs(compare(class_, sources))
        # the short answer, which all have, is no evidence
        assert listed == {(f"s{n:02}", "91_small/references.json") for n in range(number)}, number


@pytest.mark.parametrize(
    "padding",
    [
        "1," * 15_000,
        "_ = [" + ",".join(map(str, range(15_000))) + "]",
        "\n".join(f"{n}," for n in range(15_000)),
        "(" + "'a', " * 15_000 + ")",
        "x = f(1)\n" * 15_000,
        "_ = (" + "a, b, " * 15_000 + ")",
    ],
    ids=["ones", "numbers", "lines", "strings", "statements", "names"],
)
def test_a_table_before_an_answer_hides_nothing(small: LabSource, padding: str) -> None:
    given = given_code(small)
    class_ = {
        "ada": document({"quantise": ORIGINAL}, given),
        "blaise": document({"quantise": f"{padding}\n{ORIGINAL}"}, given),
    }
    assert pairs(compare(class_, {})) == {("ada", "blaise")}


@pytest.mark.parametrize(
    "disguise",
    [
        "kernel = r'''{code}'''\nrun(kernel)",
        "def quantise(x):\n    '''{code}'''\n    return run(quantise.__doc__)",
        "text = (\n{lines}\n)",
        "text = '\\n'.join([\n{commas}\n])",
    ],
    ids=["kernel", "docstring", "pieces", "list"],
)
def test_code_in_a_string_is_compared(small: LabSource, disguise: str) -> None:
    lines = [repr(line + "\n") for line in ORIGINAL.splitlines()]
    code = ORIGINAL.replace('"""', '"')
    text = disguise.format(code=code, lines="\n".join(lines), commas=",\n".join(lines))
    given = given_code(small)
    class_ = {"ada": document({"quantise": ORIGINAL}, given), "blaise": document({"quantise": text}, given)}
    (match,) = compare(class_, {})
    assert match.cells[0].score > 0.8


def test_prose_in_a_string_is_no_code() -> None:
    prose = '''"""Return the scale of x (rows, columns).

    The scale is absmax / 127; it is 0 if x = 0. Use it as in y = x / scale; return both.
    if a row is 0, its scale is 0: see the text
    """'''
    assert list(strings(prose)) == []
    assert list(strings('f("a short = one; b = 2; c = 3")')) == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("__builtins__['ex' + 'ec'](text)", "runs code from text (__builtins__); looks up a name"),
        ("getattr(torch, 'com' + 'pile')(f)", "looks up a name that it puts together from pieces"),
        ("from builtins import exec as run\nrun(t)", "runs code from text (exec)"),
        ("import marshal\nmarshal.loads(t)", "runs code from text (marshal)"),
        ("eval('1')", "runs code from text (eval)"),
        (f"t = '{'QUJD' * 200}'", "has a long text without spaces"),
        ("\n".join(f"a{n} = b.f{n}({n}, c) + {n}" for n in range(4000)), "is too long to be read as a whole"),
        ("x = 1," * 80_000, "is too long to be read as a whole"),
    ],
)
def test_code_that_cannot_be_compared_has_a_reason(text: str, said: str) -> None:
    assert said in "; ".join(reasons(text))


@pytest.mark.parametrize(
    "text",
    ["model.eval()", "f = torch.compile(f)", "x[f'a{i}']", "d['a' + name]", "getattr(m, name)", ORIGINAL],
)
def test_honest_code_has_no_reason(text: str) -> None:
    assert reasons(text) == []


def test_files_beside_the_notebook_are_compared(
    course: Path, small: LabSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(similarity, "source_texts", lambda lab: {})
    folders = {}
    for student in ("ada", "blaise", "chloe"):
        folders[student] = course / "submitted" / student / "91_small"
        handed_in(small, folders[student], ORIGINAL if student == "ada" else "from mine import quantise")
        for name, content in released_files(small.info).items():  # as nbgrader submits them
            if name != "small.ipynb":
                (folders[student] / name).parent.mkdir(exist_ok=True)
                (folders[student] / name).write_bytes(content)
    (folders["blaise"] / "mine.py").write_text(DISGUISED, encoding="utf-8")
    (folders["chloe"] / "mine.so").write_bytes(b"\x7fELF")
    opened, lab = open_course(course), find_lab("91", source_labs())
    found = find_similar(opened, lab)
    assert pairs(found) == {("ada", "blaise"), ("chloe", "mine.so")}
    (match,) = (match for match in found if match.other == "blaise")
    assert [(cell.of_one, cell.of_other) for cell in match.cells] == [("quantise", "mine.py")]
    text = (course / "grades" / "91_small" / "similar.csv").read_text(encoding="utf-8")
    assert 'chloe,"is compiled or packed code, which Python can import",,mine.so,,' in text
