"""A fictitious class of a lab in which some submissions are copies: the ground truth for ``dlo similar``.

Honest students do not share a source. For each question the folder ``honest_answers`` has several solutions
that differ in method, each with places where a student chooses between phrasings. Every honest student draws
a solution and its phrasings, with separate names, comments, assertions and habits. Some leave a question
unanswered, some answer like a mutant of the lab, some like the course's reference. A solution ``a «b¦c»``
means ``a b`` or ``a c``; alternatives may contain others.

Copies have distinct honest sources:

- *partial*: two or three questions with ``LEAST_COPIED`` tokens or more are those of the source, the others
  are honest. Half of the copies are verbatim; in the other half, names are changed and comments are removed.
- *renamed*: the whole source with all local names changed, without comments, in another layout.
- *reordered*: the whole source with its independent statements and its functions in another order, and with
  statements without effect between them.
"""

from __future__ import annotations

import ast
import builtins
import random
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache
from pathlib import Path

from benchmarks.phrasings import blocks, independent, rephrased
from dlo_lib.grading.classroom.similar.fingerprints import tokens
from dlo_lib.grading.lab.mutants import read_mutants
from dlo_lib.grading.lab.release import release_notebook
from dlo_lib.grading.lab.source import LabSource, notebook_text, read_lab

FOLDER = Path(__file__).parent / "honest_answers"
LEAST_COPIED = 50  # tokens that the copied answer has more than the released cell: a shorter one is no work
UNANSWERED, MUTANT, REFERENCE = 0.06, 0.05, 0.03  # shares of the answers of honest students
Answers = Mapping[str, str]  # question → text of its cell

SYNONYMS = {
    "rank": "r me my_rank this_rank", "world": "n world_size ranks_total size_of_world p",
    "me": "rank r mine_id", "n": "world count number world_size", "chunks": "parts pieces splits blocks",
    "parts": "chunks pieces blocks", "pieces": "chunks parts slices", "step": "k s hop it round_",
    "current": "acc moving send_buf packet", "received": "recv buf incoming_chunk got",
    "buffer": "tmp recv_buf buf received", "result": "out res ans output", "whole": "full out result",
    "rows": "table all_rows result schedule", "row": "cells line current_row r_cells",
    "total": "acc s summed everything", "i": "j m mb index",
    "warmup": "ahead w n_warm warm_up first_ones", "warm_up": "ahead warm n_first",
    "low": "lo left lower", "high": "hi right upper", "mid": "middle m half",
    "count": "n_valid number num_tokens c", "valid": "mask ok keep", "mask": "valid keep",
    "state": "st memory_state s", "acts": "activations act a", "q": "q_dim queries query_size",
    "kv": "kv_dim keys kv_size", "h": "d hidden_size", "table": "rows emb result",
    "start": "t begin earliest", "cell": "name key c", "stages": "mine my_stages own",
    "forwards": "fwd fs f_cells", "backwards": "bwd bs b_cells", "depth": "log_n rounds levels",
    "parameters": "counts params", "counts": "params parts", "logits": "logits",
    "tokens": "n_tokens positions",
}  # fmt: skip
WORDS = ("alpha", "beta", "gamma", "delta", "omega", "foo", "bar", "baz", "qux", "val", "var", "item", "elem")
COMMENTS = (
    "see the figure above", "as in the text", "TODO: check this", "careful with the last one",
    "from the hint",
    "this took me a while", "same as before", "all ranks do this", "not sure why, but it works", "the sum",
    "in bytes", "now the rest", "the easy case first", "one after the other", "ok", "works for 1 rank too",
)  # fmt: skip
NO_OPS = ("pass", "unused = 0", "_ = None", "assert True", "if False:\n    pass", "done = False", "'step'")


class Kind(Enum):
    """How a copy was made."""

    PARTIAL = "partial"
    RENAMED = "renamed"
    REORDERED = "reordered"


@dataclass(frozen=True)
class Copy:
    """A planted pair; ``questions`` are the copied ones."""

    source: str
    copy: str
    kind: Kind
    questions: tuple[str, ...]

    @property
    def pair(self) -> tuple[str, str]:
        """The two students, in alphabetical order."""
        first, second = sorted((self.source, self.copy))
        return first, second


@dataclass(frozen=True)
class PlantedClass:
    """The answers of each student, and the copies among them."""

    lab: LabSource
    answers: Mapping[str, Answers]
    copies: tuple[Copy, ...]

    def write(self, folder: Path) -> dict[str, Path]:
        """Write the notebook of each student below ``folder``; return student → file."""
        files = {}
        for student, answers in self.answers.items():
            notebook = release_notebook(self.lab.folder)
            for cell in notebook.cells:
                cell.source = answers.get(cell.id, cell.source)
            files[student] = folder / student / self.lab.info.notebook
            files[student].parent.mkdir(parents=True)
            files[student].write_text(notebook_text(notebook), encoding="utf-8")
        return files


def planted_class(lab: LabSource, seed: int, honest: int = 70, each: int = 10) -> PlantedClass:
    """Return a class of ``honest`` independent students and ``each`` copies of every kind."""
    draw = random.Random(f"{lab.info.directory} {seed}")
    names = [f"s{number:03}" for number in range(honest + len(Kind) * each)]
    draw.shuffle(names)
    answers: dict[str, Answers] = {name: honest_answers(lab, draw) for name in names[:honest]}
    sources = draw.sample(names[:honest], len(Kind) * each)
    copies = []
    for number, (source, name) in enumerate(zip(sources, names[honest:], strict=True)):
        kind = list(Kind)[number // each]
        answers[name], questions = _copied(lab, answers[source], kind, number % 2 == 0, draw)
        copies.append(Copy(source, name, kind, questions))
    return PlantedClass(lab, {name: answers[name] for name in sorted(answers)}, tuple(copies))


def honest_answers(lab: LabSource, draw: random.Random) -> dict[str, str]:
    """Return the answers of one honest student."""
    habits = _Habits(draw)
    solutions, mutants = _solutions(lab.info.directory), _mutants(lab.folder)
    answers = {}
    for question in lab.questions:
        cell, chance = lab.solution(question), draw.random()
        if question == "quiz":
            answers[question] = re.sub(r': "\w"', lambda _: f': "{draw.choice("abcd")}"', cell.answer)
        elif chance < UNANSWERED:
            answers[question] = cell.released
        elif chance < UNANSWERED + MUTANT and mutants.get(question):
            answers[question] = habits.applied(draw.choice(mutants[question]), draw)
        elif chance < UNANSWERED + MUTANT + REFERENCE or question not in solutions:
            answers[question] = habits.applied(cell.answer, draw)
        else:
            body = _chosen(draw.choice(solutions[question]), draw)
            answers[question] = habits.applied(_with_body(cell.released, body), draw)
    return answers


def renamed(text: str, draw: random.Random) -> str:
    """Return ``text`` with other local names, without comments, in another layout."""
    tree = ast.parse(text)
    words = [f"{one}_{other}" if one != other else one for one in WORDS for other in WORDS]
    draw.shuffle(words)
    _rename(tree, dict(zip(_local_names(tree), words, strict=False)))
    lines = []
    for line in ast.unparse(tree).splitlines():
        lines.append(line)
        if draw.random() < 0.1:
            lines.append("")
    return "\n".join(lines)


def reordered(text: str, draw: random.Random) -> str:
    """Return ``text`` with independent statements and functions in another order and no-ops between them."""
    tree = ast.parse(text)
    for block in blocks(tree):
        block[:] = _shuffled(block, draw, in_function=block is not tree.body)
    return ast.unparse(ast.fix_missing_locations(tree))


class _Habits:
    """What one student does in every answer: names, comments, assertions, results in a variable."""

    def __init__(self, draw: random.Random) -> None:
        self.boldness = draw.choice((0.5, 1.0, 1.5))
        self.names = {name: draw.choice([name, *words.split()]) for name, words in SYNONYMS.items()}
        self.comments = draw.choice((0.0, 0.02, 0.1))
        self.returns = draw.choice((0.0, 0.1, 0.5))
        self.result = draw.choice(("result", "out", "value", "answer", "res"))
        self.asserts = draw.choice((0.0, 0.0, 0.1))
        self.augmented = draw.choice((True, True, False))

    def applied(self, text: str, draw: random.Random) -> str:
        tree = rephrased(ast.parse(text), draw, self.boldness)
        local = _local_names(tree)
        taken = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} | set(_arguments(tree))
        chosen: dict[str, str] = {}
        for name in local:
            new = self.names.get(name, name)
            if new not in taken and new not in chosen.values():
                chosen[name] = new
        _rename(tree, chosen)
        for block in blocks(tree):
            block[:] = [new for old in block for new in self._statement(old, draw, taken)]
        lines: list[str] = []
        for line in ast.unparse(ast.fix_missing_locations(tree)).splitlines():
            if line.strip() and not line.strip().endswith('"""') and draw.random() < self.comments:
                indent = line[: len(line) - len(line.lstrip())]
                if lines and '"""' not in "".join(lines[-3:]):
                    lines.append(f"{indent}# {draw.choice(COMMENTS)}")
            lines.append(line)
        return "\n".join(lines)

    def _statement(self, node: ast.stmt, draw: random.Random, taken: set[str]) -> Iterator[ast.stmt]:
        if isinstance(node, ast.AugAssign) and not self.augmented and isinstance(node.target, ast.Name):
            left = ast.Name(node.target.id, ast.Load())
            node = ast.Assign([node.target], ast.BinOp(left, node.op, node.value))
        value = node.value if isinstance(node, ast.Return) else None
        long = value is not None and not isinstance(value, (ast.Name, ast.Constant))
        if value is not None and long and self.result not in taken and draw.random() < self.returns:
            yield ast.Assign([ast.Name(self.result, ast.Store())], value)
            node = ast.Return(ast.Name(self.result, ast.Load()))
        yield node
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Name)
            and draw.random() < self.asserts
        ):
            yield ast.parse(f"assert {node.targets[0].id} is not None").body[0]


def _copied(
    lab: LabSource, source: Answers, kind: Kind, verbatim: bool, draw: random.Random
) -> tuple[Answers, tuple[str, ...]]:
    answered = [question for question in source if source[question] != lab.solution(question).released]
    if kind is not Kind.PARTIAL:
        change = renamed if kind is Kind.RENAMED else reordered
        return {question: change(text, draw) for question, text in source.items()}, tuple(answered)
    long = [
        question
        for question in answered
        if _length(source[question]) - _length(lab.solution(question).released) >= LEAST_COPIED
    ]
    questions = tuple(draw.sample(long, draw.choice((2, 3))))
    change = (lambda text, draw: text) if verbatim else renamed
    return {
        **honest_answers(lab, draw),
        **{name: change(source[name], draw) for name in questions},
    }, questions


def _length(text: str) -> int:
    return len(list(tokens(text)))


@cache
def _solutions(directory: str) -> dict[str, tuple[str, ...]]:
    found: dict[str, tuple[str, ...]] = {}
    for section in re.split(r"^=== ", (FOLDER / f"{directory}.txt").read_text(encoding="utf-8"), flags=re.M)[
        1:
    ]:
        question, _, rest = section.partition("\n")
        found[question.strip()] = tuple(re.split(r"^---[ ]*\n", rest, flags=re.M)[1:])
    return found


@cache
def _mutants(folder: Path) -> dict[str, list[str]]:
    lab = read_lab(folder)
    found: dict[str, list[str]] = {}
    for mutant in read_mutants(lab.folder):
        planted = mutant.planted(lab)
        found.setdefault(planted.question, []).append(planted.answer)
    return found


def _chosen(text: str, draw: random.Random) -> str:
    """Replace every ``«a¦b»`` by one of its alternatives, the innermost first."""
    innermost = re.compile(r"«([^«»]*)»")
    while innermost.search(text):
        text = innermost.sub(lambda found: draw.choice(found[1].split("¦")), text)
    return text


def _with_body(released: str, body: str) -> str:
    """Return the released cell with ``body`` in place of the statement that raises NotImplementedError."""
    head = ast.parse(released)
    function = next(node for node in head.body if isinstance(node, ast.FunctionDef))
    given = [node for node in function.body if isinstance(node, ast.Expr)]
    function.body = [*given, *ast.parse(body_function(body)).body[0].body]  # type: ignore[attr-defined]
    return ast.unparse(head)


def body_function(body: str) -> str:
    """Return a function with ``body``, because a body alone may hold ``return``."""
    lines = "\n".join(f"    {line}" for line in body.splitlines())
    return f"def answer():\n{lines}"


def _arguments(tree: ast.AST) -> list[str]:
    return [node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)]


def _local_names(tree: ast.Module) -> list[str]:
    """Return the names that functions of ``tree`` bind: variables, inner functions and their parameters."""
    outer = {
        argument for node in tree.body if isinstance(node, ast.FunctionDef) for argument in _parameters(node)
    }
    found: dict[str, None] = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            for inner in ast.walk(node):
                if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store):
                    found[inner.id] = None
                elif isinstance(inner, ast.FunctionDef) and inner is not node:
                    found.update(dict.fromkeys([inner.name, *_parameters(inner)]))
                elif isinstance(inner, ast.Lambda):
                    found.update(dict.fromkeys(_parameters(inner)))
    return [name for name in found if name not in outer and name not in dir(builtins)]


def _parameters(node: ast.FunctionDef | ast.Lambda) -> list[str]:
    arguments = node.args
    every = [
        *arguments.posonlyargs,
        *arguments.args,
        *arguments.kwonlyargs,
        arguments.vararg,
        arguments.kwarg,
    ]
    return [argument.arg for argument in every if argument is not None]


def _rename(tree: ast.AST, names: Mapping[str, str]) -> None:
    called = {
        node.func.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            node.id = names.get(node.id, node.id)
        elif isinstance(node, ast.arg):
            node.arg = names.get(node.arg, node.arg)
        elif isinstance(node, ast.FunctionDef):
            node.name = names.get(node.name, node.name)
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in called & set(names)
        ):
            for word in node.keywords:
                word.arg = names.get(word.arg or "", word.arg)


def _shuffled(block: list[ast.stmt], draw: random.Random, in_function: bool) -> list[ast.stmt]:
    for _ in range(3):
        for place in range(len(block) - 1):
            if draw.random() < 0.7 and independent(block[place], block[place + 1]):
                block[place], block[place + 1] = block[place + 1], block[place]
    if not in_function:
        return block
    docstring = (
        [block[0]] if isinstance(block[0], ast.Expr) and isinstance(block[0].value, ast.Constant) else []
    )
    result: list[ast.stmt] = [*docstring]
    for node in block[len(docstring) :]:
        if draw.random() < 0.35:
            result += ast.parse(draw.choice(NO_OPS)).body
        result.append(node)
    return result
