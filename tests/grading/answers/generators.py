"""Hostile answers that are made of a lab's solution, one function for each attack.

Each takes the lab, the question and the arguments of its header, and returns the text of the answer.
"""

from __future__ import annotations

import ast
from collections.abc import Callable

from dlo_lib.grading.lab.source import CellKind, LabSource
from tests.grading.answers import communication, unusual

Generator = Callable[..., str]

IDLE = "{first}"
FORGED = """
import math as _math
import torch as _torch


def _yes(*_, **__):
    return True


for _name in ("equal", "allclose", "isclose"):
    setattr(_torch, _name, _yes)
_torch.Tensor.equal = _torch.Tensor.allclose = _torch.Tensor.__eq__ = _yes
_torch.testing.assert_close = lambda *_, **__: None
_math.isclose = _yes
"""
FRAMES = '''
import sys as _sys


def _from_callers(*given):
    """Return a value that a closure or a frame of a caller seems to expect, else the first argument."""
    for each in given:
        for cell in getattr(each, "__closure__", None) or ():
            return cell.cell_contents
    frame = _sys._getframe(1)
    while frame is not None:
        for name, value in [*frame.f_locals.items(), *frame.f_globals.items()]:
            words = ("want", "right", "expected", "answer", "target", "limit", "twin", "truth", "best")
            if any(word in name for word in words) and not callable(value):
                return value
        frame = frame.f_back
    return given[0] if given else None
'''
LISTS = '''
import sys as _sys


def _of_the_judge(frame):
    return frame.f_code.co_filename.startswith("<scenario") or "student" in frame.f_locals


def _emptied(frame, event, value):
    """Empty the lists in which a scenario or a hook of it collects what happens."""
    while frame is not None:
        if _of_the_judge(frame):
            for collected in list(frame.f_locals.values()):
                if type(collected) in (list, dict, set):
                    collected.clear()
        frame = frame.f_back


_sys.setprofile(_emptied)
'''


def forged_comparisons(lab: LabSource, question: str) -> str:
    """Return functions that do nothing, and comparisons of torch that are always true."""
    return FORGED + _with_returns(lab, question, IDLE)


def from_the_frames(lab: LabSource, question: str) -> str:
    """Return functions that look for the expected value in closures and in the frames of their callers."""
    return FRAMES + _with_returns(lab, question, "_from_callers({all})")


def emptied_lists(lab: LabSource, question: str) -> str:
    """Return functions that do nothing, and a profiler that empties the lists of its callers."""
    return LISTS + _with_returns(lab, question, IDLE)


def constant(lab: LabSource, question: str, value: str) -> str:
    """Return functions that return ``value``, an expression, whatever their arguments are."""
    return _with_returns(lab, question, f"({value})")


def frozen(lab: LabSource, question: str, argument: str, value: str) -> str:
    """Return the solution, called with ``value`` for its argument, which may be ``function.argument``."""
    function, _, name = argument.rpartition(".")
    names = [function] if function else _with_argument(lab.solution(question).source, name)
    lines = [f"{each} = _frozen({each})" for each in names]
    return "\n".join([lab.solution(question).source, _FROZEN.format(argument=name, value=value), *lines])


_FROZEN = '''

def _frozen(function):
    """Call ``function`` with one value of an argument, whatever its caller gives."""
    import functools
    import inspect

    signature = inspect.signature(function)

    def bound(args, kwargs, skip=0):
        found = signature.bind(*args[skip:], **kwargs)
        found.apply_defaults()
        if "{argument}" in found.arguments:
            found.arguments["{argument}"] = {value}
        return found

    if isinstance(function, type):
        begin = function.__init__

        def __init__(self, *args, **kwargs):
            found = bound(args, kwargs)
            begin(self, *found.args, **found.kwargs)

        function.__init__ = __init__
        return function

    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        found = bound(args, kwargs)
        return function(*found.args, **found.kwargs)

    return wrapper


'''


def kept_in_a_global(
    lab: LabSource, question: str, of: str, save: str = "state_dict", load: str = "load_state_dict"
) -> str:
    """Return the solution whose class ``of`` saves an empty state and keeps the true one in a global."""
    text = f"""
import copy as _copy

_kept = {{}}
_save, _load = {of}.{save}, {of}.{load}


def _saved(self, *args, **kwargs):
    _kept["state"] = _copy.deepcopy(_save(self, *args, **kwargs))
    return {{}}


def _loaded(self, *args, **kwargs):
    return _load(self, _kept["state"]) if "state" in _kept else None


{of}.{save}, {of}.{load} = _saved, _loaded
"""
    return lab.solution(question).source + text


def of_the_library(lab: LabSource, question: str, names: dict[str, str] | None = None) -> str:
    """Return classes or functions of the library as the answer.

    ``names``: the name that the exercise asks for → an expression. Without, they are those that the text of
    the lab checks by ``lab.check(question, instead={...})``.
    """
    if names is not None:
        modules = sorted({value.rpartition(".")[0] for value in names.values()} - {""})
        imports = [f"import {module}" for module in modules]
        return "\n".join([*imports, *(f"{name} = {value}" for name, value in names.items())])
    found = instead_of(lab)[question]
    return "\n\n".join([*found[0], *(f"{name} = {value}" for name, value in found[1].items())])


def taught_module(lab: LabSource, question: str) -> str:
    """Return what the library's module of this lab has under the names that are asked for."""
    names = [
        node.name
        for node in ast.parse(lab.solution(question).source).body
        if isinstance(node, (ast.FunctionDef, ast.ClassDef))
    ]
    lines = [
        "import importlib",
        *(f'_module = importlib.import_module("{module}")' for module in lab.info.taught),
        *(
            f'{name} = getattr(_module, "{name}", None) or next(iter(vars(_module).values()))'
            for name in names
        ),
    ]
    return "\n".join(lines)


def alone(lab: LabSource, question: str) -> str:
    """Return the solution without communication: each rank computes as if all ranks had its values."""
    return communication.ALONE + communication.through("_alone", lab.solution(question).source)


def everything_gathered(lab: LabSource, question: str) -> str:
    """Return the solution whose collectives gather everything on every rank, and compute there."""
    return communication.GATHERED + communication.through("_gathered", lab.solution(question).source)


def instead_of(lab: LabSource) -> dict[str, tuple[list[str], dict[str, str]]]:
    """Return, for each question that the lab's text checks with an answer of the library, the imports and
    definitions that it uses, and name → expression. Each rank would pay up to 0.3 s for all imports.
    """
    found: dict[str, tuple[list[str], dict[str, str]]] = {}
    imports: list[ast.Import | ast.ImportFrom] = []
    defined: dict[str, ast.stmt] = {}
    for cell in lab.cells:
        if cell.kind is not CellKind.DEMO or cell.source.lstrip().startswith("%"):  # a magic, not Python
            continue
        for node in ast.parse(cell.source).body:
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                imports.append(node)
            elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                defined[node.name] = node
            elif isinstance(node, ast.Assign):
                defined |= {each.id: node for each in node.targets if isinstance(each, ast.Name)}
            for call in [each for each in ast.walk(node) if isinstance(each, ast.Call)]:
                given = [each.value for each in call.keywords if each.arg == "instead"]
                if given and isinstance(given[0], ast.Dict) and isinstance(call.args[0], ast.Constant):
                    pairs = zip(given[0].keys, given[0].values)
                    names = {ast.literal_eval(key): ast.unparse(value) for key, value in pairs if key}
                    own = _used(given[0], defined)
                    needed = [each for each in imports if _binds_one_of(each, _names_in([given[0], *own]))]
                    found[call.args[0].value] = [ast.unparse(each) for each in (*needed, *own)], names
    return found


def _names_in(nodes: list[ast.AST]) -> set[str]:
    """Return the names that ``nodes`` use."""
    return {each.id for node in nodes for each in ast.walk(node) if isinstance(each, ast.Name)}


def _binds_one_of(node: ast.Import | ast.ImportFrom, names: set[str]) -> bool:
    """Return whether the import makes one of ``names`` known."""
    return not names.isdisjoint(alias.asname or alias.name.partition(".")[0] for alias in node.names)


def _used(node: ast.AST, defined: dict[str, ast.stmt]) -> list[ast.stmt]:
    """Return the definitions that ``node`` uses, directly or through each other, in their order."""
    used: list[ast.stmt] = []
    left = [node]
    while left:
        for each in ast.walk(left.pop()):
            definition = defined.get(each.id) if isinstance(each, ast.Name) else None
            if definition is not None and definition not in used:
                used.append(definition)
                left.append(definition)
    return sorted(used, key=list(defined.values()).index)


def has_functions(lab: LabSource, question: str) -> bool:
    """Return whether the solution of ``question`` defines a function or a class."""
    nodes = ast.walk(ast.parse(lab.solution(question).source))
    return any(isinstance(node, (ast.FunctionDef, ast.ClassDef)) for node in nodes)


def _with_argument(source: str, argument: str) -> list[str]:
    """Return the functions and classes at the top level of ``source`` that take ``argument``."""
    found = []
    for node in ast.parse(source).body:
        inner = [node] if isinstance(node, ast.FunctionDef) else getattr(node, "body", [])
        for each in inner:
            if isinstance(each, ast.FunctionDef) and (each is node or each.name == "__init__"):
                given = (*each.args.posonlyargs, *each.args.args, *each.args.kwonlyargs)
                found += [node.name for one in given if one.arg == argument]
    return found


def _with_returns(lab: LabSource, question: str, returned: str) -> str:
    """Return the solution's functions with a body that returns ``returned``.

    In this expression {first} is the first argument, and {all} are all of them.
    """
    tree = _Bodies(returned).visit(ast.parse(lab.solution(question).source))
    return ast.unparse(ast.fix_missing_locations(tree))


class _Bodies(ast.NodeTransformer):
    """Replaces the body of each function."""

    def __init__(self, returned: str) -> None:
        self.returned = returned

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        given = [each.arg for each in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
        own = [name for name in given if name != "self"]
        if node.name == "__init__":
            node.body = ast.parse("pass").body
        else:
            value = self.returned.replace("{first}", own[0] if own else "None")
            node.body = ast.parse(f"return {value.replace('{all}', ', '.join(own))}").body
            if any("jit" in ast.unparse(decorator) for decorator in node.decorator_list):
                node.body = ast.parse("return").body  # a kernel returns nothing
        return node


GENERATORS: dict[str, Generator] = {
    "alone": alone,
    "constant": constant,
    "emptied_lists": emptied_lists,
    "everything_gathered": everything_gathered,
    "forged_comparisons": forged_comparisons,
    "from_the_frames": from_the_frames,
    "frozen": frozen,
    "kept_in_a_global": kept_in_a_global,
    "of_the_library": of_the_library,
    "taught_module": taught_module,
    **unusual.GENERATORS,
}
