"""What the checks of a lab never vary: arguments that are always the same, and constants that earn points.

An answer may take a value that is always the same for granted: ``accuracy(model, device)`` that ignores its
device, or a table of the few cases that are ever drawn. So the solution runs with the inputs of several class
secrets, and each of its functions notes the arguments with which it is called. Then functions that return
one constant, the most common results of the solution, are judged.

The notes come from the processes of the judge as plain data, beside the result of each scenario. Cost: one
judging of the solution for each secret, and 0.2 s for each constant and question.
"""

from __future__ import annotations

import ast
import textwrap
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from dlo_lib.grading.checks.contract import Check, Nudge, Run, Scenario, Student
from dlo_lib.grading.checks.outcome import Outcome
from dlo_lib.grading.checks.quiz_question import NAME as QUIZ
from dlo_lib.grading.judge.judge import Judge, judge_answer, reference_submission
from dlo_lib.grading.judge.lab_proof import SECRET, proof_secrets
from dlo_lib.grading.lab.modules import load_checks
from dlo_lib.grading.lab.mutants import with_bodies
from dlo_lib.grading.lab.source import LabSource
from dlo_lib.grading.lab.undrawn_record import UndrawnRecord, key_of, read_undrawn, write_undrawn
from dlo_lib.grading.sandbox.host import Zygote

SECRETS = 8  # class secrets
CONSTANTS = 3  # tried for each question
OTHER_SECRET = "another class"
OF_TYPES = 3  # class secrets over which types and shapes are followed
MOST_CASES = 24  # all arguments of a function that takes only few
RESULT = "result of "  # begins the notes on results
CALL = "call of "  # begins the notes on all arguments of a call
OF_A_TENSOR = (").dtype", ").shape")
Note = tuple[str, str, str]  # question, name, text
NOTES = '''

if "dlo_notes" not in globals():
    import functools as _functools
    import inspect as _inspect

    import torch as _torch

    _dlo_kept = {}

    def dlo_notes():
        """Return the notes since the last call: [question, name, text] and how often."""
        found = [[*key, count] for key, count in list(_dlo_kept.items())[:4000]]
        _dlo_kept.clear()
        return found

    def _dlo_note(question, name, value):
        key = question, name, value if len(value) <= 300 else f"{value[:280]} {hash(value)}"
        _dlo_kept[key] = _dlo_kept.get(key, 0) + 1

    def _dlo_text(value, depth=3):
        if value is None or isinstance(value, (bool, int, float, str)):
            return repr(value)
        if isinstance(value, _torch.Tensor):
            if value.numel() > 12:
                numbers = value.detach().reshape(-1)[:12].tolist()
                return f"a tensor of {tuple(value.shape)} that begins with {numbers}"
            return f"torch.tensor({value.detach().tolist()}, dtype={value.dtype})"
        if isinstance(value, (_torch.dtype, _torch.device)):
            return repr(value)
        if type(value) in (list, tuple) and depth:
            inner = [_dlo_text(each, depth - 1) for each in value]
            if type(value) is tuple:
                return f"({', '.join(inner)}{',' if len(inner) == 1 else ''})"
            return f"[{', '.join(inner)}]"
        if type(value) is dict and depth:
            inner = [f"{key!r}: {_dlo_text(each, depth - 1)}" for key, each in value.items()]
            return "{" + ", ".join(inner) + "}"
        return f"an object {id(value)}"

    def _dlo_noted(question, function, title, own):
        signature = _inspect.signature(function)

        @_functools.wraps(function)
        def wrapper(*args, **kwargs):
            if _torch.compiler.is_compiling():
                return function(*args, **kwargs)
            try:
                bound = signature.bind(*args, **kwargs)
                bound.apply_defaults()
                for name, value in list(bound.arguments.items())[1 if own else 0 :]:
                    if isinstance(value, _torch.Tensor):
                        _dlo_note(question, f"{title}({name}).dtype", str(value.dtype))
                        _dlo_note(question, f"{title}({name}).shape", str(tuple(value.shape)))
                    _dlo_note(question, f"{title}({name})", _dlo_text(value))
                given = list(bound.arguments.values())[1 if own else 0 :]
                every = ", ".join(_dlo_text(value) for value in given)
                _dlo_note(question, f"call of {title}", every)
            except Exception:
                _dlo_note(question, f"{title}(...)", f"an object {len(_dlo_kept)}")
            result = function(*args, **kwargs)
            try:
                _dlo_note(question, f"result of {title}", _dlo_text(result))
            except Exception:
                _dlo_note(question, f"result of {title}", "an object")
            return result

        return wrapper


for _name in NAMES:
    _value = globals().get(_name)
    if _inspect.isclass(_value):
        for _method, _function in list(vars(_value).items()):
            if _inspect.isfunction(_function) and (_method == "__init__" or not _method.startswith("_")):
                setattr(_value, _method, _dlo_noted(QUESTION, _function, f"{_name}.{_method}", True))
    elif _inspect.isfunction(_value):
        globals()[_name] = _dlo_noted(QUESTION, _value, _name, False)
'''


def renewed_undrawn(lab: LabSource, zygote: Zygote, secrets: int = SECRETS) -> UndrawnRecord:
    """Return the record of ``lab``, computed and written if its checks or solutions have changed.

    Raises:
        UserError: the record cannot be read.
    """
    before = read_undrawn(lab.folder)
    if before is not None and before.of == key_of(lab):
        return before
    record = undrawn(lab, zygote, secrets)
    if before is not None:
        record = replace(record, because=before.because)
    write_undrawn(lab.folder, record)
    return record


def undrawn(lab: LabSource, zygote: Zygote, secrets: int = SECRETS) -> UndrawnRecord:
    """Return what the checks of ``lab`` never vary over this number of class secrets, without reasons.

    A question whose arguments all vary is not run with further secrets; types and shapes alone are followed
    over ``OF_TYPES`` secrets.
    """
    key, left = key_of(lab), list(_of_code(lab))
    first: Mapping[Note, int] = {}
    values: dict[tuple[str, str], set[str]] = {}
    new: dict[tuple[str, str], int] = {}  # the number of the last secret with a new value
    ran: Counter[str] = Counter()  # the number of secrets by question
    for number, secret in enumerate(proof_secrets(secrets)):
        judge = NotingJudge(lab, load_checks(lab.given, lab.folder), secret, zygote)
        judge.judge(reference_submission(lab, {name: _noting(lab, name) for name in left}))
        ran.update(left)
        first = first or dict(judge.notes)
        for question, name, value in judge.notes:
            known = values.setdefault((question, name), set())
            if value not in known:
                known.add(value)
                new[question, name] = number
        kept = {
            question
            for (question, name), known in values.items()
            if _is_fixed(name, known, True) and (number + 1 < OF_TYPES or not name.endswith(OF_A_TENSOR))
        }
        left = [question for question in left if question in kept]
        if not left:
            break
    fixed: dict[str, str] = {}
    plain: dict[str, tuple[str, str]] = {}  # by question
    for (question, name), known in sorted(values.items()):
        title = f"{question}: {name}"
        if _is_fixed(name, known, new[question, name] < ran[question] // 2):
            fixed[title] = min(known) if len(known) == 1 else f"one of {len(known)} cases"
        elif _is_plain(name, known):
            plain[question] = min(plain.get(question, (title, min(known))), (title, min(known)), key=_length)
    # of a tensor that is always the same, its dtype and shape are too
    fixed = {name: value for name, value in fixed.items() if _base(name) not in fixed}
    constants: dict[str, dict[str, str | float]] = {}
    for question in _of_code(lab):
        best, points = best_constant(lab, question, zygote, first)
        if points:
            constants[question] = {**best, "points": points}
    return UndrawnRecord(key, fixed, constants, dict(plain.values()))


def _is_fixed(name: str, known: Collection[str], none_new: bool) -> bool:
    """Return whether values of this name are listed: there is only one, or, of all arguments of a call, few.

    ``none_new``: the later secrets had no new value.
    """
    if name.startswith(RESULT) or any("an object" in value for value in known):
        return False
    if not name.startswith(CALL):
        return len(known) == 1
    return 1 < len(known) <= MOST_CASES and none_new and not any("tensor" in value for value in known)


def _points(found: tuple[dict[str, str], float]) -> float:
    return found[1]


def _length(entry: tuple[str, str]) -> int:
    return len(entry[1])


def _is_plain(name: str, known: Collection[str]) -> bool:
    """Return whether an argument varies, and a value of it can be written into an answer."""
    if name.startswith((RESULT, CALL)) or name.endswith(OF_A_TENSOR) or len(known) < 2:
        return False
    return all(
        is_expression(value) and len(value) < 100 and "tensor" not in value and "torch" not in value
        for value in known
    )


def best_constant(
    lab: LabSource, question: str, zygote: Zygote, notes: Mapping[Note, int]
) -> tuple[dict[str, str], float]:
    """Return the constants by function, among the most common results of the solution, that earn most.

    The points are those with the inputs of another class, because no student knows what is drawn for theirs.
    """
    results: dict[str, Counter[str]] = {}
    for (of, name, value), count in notes.items():
        if of == question and name.startswith(RESULT) and is_expression(value):
            results.setdefault(name.removeprefix(RESULT), Counter())[value] += count
    best: tuple[dict[str, str], float] = {}, 0.0
    tried: list[dict[str, str]] = []
    for place in range(CONSTANTS):
        chosen = {}
        for name, values in results.items():
            common = [value for value, _ in values.most_common(CONSTANTS)]
            chosen[name] = common[place % len(common)]
        if chosen in tried or not chosen:
            continue
        tried.append(chosen)
        answer = constant_answer(lab, question, chosen)
        if judge_answer(lab, question, answer, zygote, SECRET).points > 0:
            points = judge_answer(lab, question, answer, zygote, OTHER_SECRET).points
            best = max(best, (chosen, points), key=_points)
    return best


def constant_answer(lab: LabSource, question: str, constants: Mapping[str, str]) -> str:
    """Return the solution's functions with bodies that return ``constants``, None where there is none."""
    return with_bodies(lab.solution(question).source, lambda name: constants.get(name, "None"))


def is_expression(value: str) -> bool:
    """Return whether the note on a result is a value that an answer can return."""
    if any(words in value for words in ("an object", "a tensor of", "nan", "inf")):
        return False
    try:
        ast.parse(value, mode="eval")
    except SyntaxError:  # it is too long, so only its beginning was noted
        return False
    return True


class NotingJudge(Judge):
    """A judge of the solution whose functions note their arguments.

    Attributes:
        notes: (question, name, text) → how often.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.notes: Counter[Note] = Counter()

    def outcome(self, check: Check, student: Student, seed: int) -> Outcome:
        """Run ``check``, and collect the notes of its calls that are to its question."""
        noted = NotedStudent(student)
        outcome = super().outcome(check, noted, seed)
        for question, name, text, count in noted.notes:
            if question == check.question:
                self.notes[question, name, text] += count
        return outcome


class NotedStudent:
    """``student``, whose processes return notes beside their results."""

    def __init__(self, student: Student) -> None:
        self._student = student
        self.notes: list[Sequence[Any]] = []

    def __getattr__(self, name: str) -> Callable[..., Any]:
        function = getattr(self._student, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            if args and isinstance(args[0], Scenario):
                return self._taken(function(_with_notes(args[0]), *args[1:], **kwargs))
            result = function(*args, **kwargs)
            self.notes += self._student.run(_NOTES)
            return result

        return call

    def get(self, name: str) -> Any:
        """Return the value of a name."""
        return self._student.get(name)

    def ranks(
        self, scenario: Scenario, inputs_per_rank: Sequence[Mapping[str, Any]], nudge: Nudge | None = None
    ) -> Run:
        """Run ``scenario`` on ranks."""
        return self._of_run(self._student.ranks(_with_notes(scenario), inputs_per_rank, nudge))

    def _of_run(self, run: Run) -> Run:
        repeat = run.repeat
        again = (lambda nudge: self._of_run(repeat(nudge))) if repeat is not None else None
        return replace(run, results=[self._taken(each) for each in run.results], repeat=again)

    def _taken(self, answer: Any) -> Any:
        self.notes += answer["notes"]
        return answer["result"]


_NOTES = Scenario("notes", "def notes(student):\n    return student.dlo_notes()\n")


def _with_notes(scenario: Scenario) -> Scenario:
    """Return ``scenario`` with the notes of its process beside its result."""
    name = scenario.name
    inner = textwrap.indent(scenario.source, "    ")
    ending = f'return {{"result": {name}(student, *args, **inputs), "notes": student.dlo_notes()}}'
    return Scenario(name, f"def {name}(student, *args, **inputs):\n{inner}\n    {ending}\n")


def _noting(lab: LabSource, question: str) -> str:
    """Return the solution of ``question``, whose functions and classes note their arguments."""
    source = lab.solution(question).source
    names = [
        node.name
        for node in ast.parse(source).body
        if isinstance(node, ast.ClassDef) or (isinstance(node, ast.FunctionDef) and not node.decorator_list)
    ]
    return source + NOTES.replace("NAMES", repr(names)).replace("QUESTION", repr(question))


def _of_code(lab: LabSource) -> Iterable[str]:
    for name in lab.questions:
        nodes = ast.walk(ast.parse(lab.solution(name).source))
        if name != QUIZ and any(isinstance(node, (ast.FunctionDef, ast.ClassDef)) for node in nodes):
            yield name


def _base(name: str) -> str:
    return name.rpartition(".")[0] if name.endswith(OF_A_TENSOR) else ""
