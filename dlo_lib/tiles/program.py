"""Reads the text of a kernel: its syntax tree becomes functions of the machine.

Only what this file names is accepted: assignments, ``for`` over a range, ``if``, arithmetic, and calls of
``tl``. There is no other way from a kernel to Python, so the text of a stranger can be run.
"""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from dlo_lib.base.errors import UserError
from dlo_lib.base.text import tr
from dlo_lib.tiles import language
from dlo_lib.tiles.cures import dtype_cure, instead_of
from dlo_lib.tiles.faults import TileError
from dlo_lib.tiles.functions import FUNCTIONS, subscript, to, trans
from dlo_lib.tiles.kinds import kind_of, require_same_kind
from dlo_lib.tiles.memory import Pointer
from dlo_lib.tiles.state import TileMachine
from dlo_lib.tiles.values import DTYPES, LARGEST_INT, Runtime, binary, truth

Evaluate = Callable[["TileMachine"], Any]
LONGEST_TEXT = 20_000
DEEPEST = 60
RANGES = ("range", "tl.range", "tl.static_range")


class NotWrittenError(UserError):
    """The kernel is the stub of an exercise: it raises NotImplementedError."""


@dataclass(frozen=True)
class Program:
    """A kernel that can be run: ``parameters`` are pairs (name, is it a constexpr)."""

    name: str
    source: str
    parameters: tuple[tuple[str, bool], ...]
    body: Evaluate

    def line(self, number: int) -> str:
        """Return a line of the text, from 1."""
        lines = self.source.splitlines()
        return lines[number - 1].strip()[:100] if 1 <= number <= len(lines) else ""


@lru_cache(maxsize=256)
def read_program(source: str) -> Program:
    """Read the text of one kernel, a function with the decorator ``jit``.

    Raises:
        TileError: it is no kernel, or uses what the interpreter does not support.
        NotWrittenError: it raises NotImplementedError.
    """
    if len(source) > LONGEST_TEXT:
        raise TileError("the kernel has more than {most} characters", most=LONGEST_TEXT)
    text = textwrap.dedent(source)
    try:
        statements = ast.parse(text).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise TileError("the text of the kernel is not Python") from None
    if len(statements) != 1 or not isinstance(statements[0], ast.FunctionDef):
        raise TileError("a kernel is one function")
    function = statements[0]
    reader = _Reader()
    try:
        return Program(function.name, text, _parameters(function), reader.block(function.body))
    except NotWrittenError:
        cure = "{name} is not written yet: write it in its cell, run that cell, and then this one"
        raise NotWrittenError(tr(cure, name=function.name)) from None
    except TileError as error:
        error.line = error.line or reader.line
        lines = text.splitlines()
        error.code = lines[error.line - 1].strip()[:100] if 0 < error.line <= len(lines) else ""
        raise


def _parameters(function: ast.FunctionDef) -> tuple[tuple[str, bool], ...]:
    own = function.args
    if own.vararg or own.kwarg or own.kwonlyargs or own.posonlyargs or own.defaults:
        raise TileError(
            "the parameters of a kernel are names without defaults, * or **", line=function.lineno
        )
    return tuple(
        (each.arg, each.annotation is not None and "constexpr" in ast.unparse(each.annotation))
        for each in own.args
    )


class _Reader:
    """Turns statements and expressions into functions of the machine."""

    def __init__(self) -> None:
        self.line = 0
        self.depth = 0

    # -- statements

    def block(self, statements: list[ast.stmt]) -> Evaluate:
        steps = [self.statement(each) for each in statements]

        def run(machine: TileMachine) -> None:
            for step in steps:
                step(machine)

        return run

    def statement(self, node: ast.stmt) -> Evaluate:
        self.line = line = node.lineno
        step = self._statement(node)

        def run(machine: TileMachine) -> None:
            machine.line = line
            machine.add_work(1)
            step(machine)

        return run

    def _statement(self, node: ast.stmt) -> Evaluate:
        match node:
            case ast.Assign(targets=[target], value=value):
                return self._assign(target, self.expression(value))
            case ast.AnnAssign(target=ast.Name() as target, value=ast.expr() as value):
                return self._assign(target, self.expression(value))
            case ast.AugAssign(target=ast.Name() as target, op=op, value=value):
                name = ast.Name(target.id, ast.Load())
                return self._assign(target, self.expression(ast.BinOp(name, op, value)))
            case ast.Expr(value=ast.Constant(value=str())) | ast.Pass():
                return lambda machine: None
            case ast.Expr(value=value):
                return self.expression(value)
            case ast.For(orelse=[]):
                return self._loop(node)
            case ast.If(test=test, body=body, orelse=other):
                return self._choice(self.expression(test), self.block(body), self.block(other))
            case (
                ast.Raise(exc=ast.Call(func=ast.Name(id="NotImplementedError")))
                | ast.Raise(exc=ast.Name(id="NotImplementedError"))
            ):
                raise NotWrittenError
            case ast.Return():
                raise TileError("a kernel returns nothing: it writes its results with tl.store")
            case ast.While():
                raise TileError("use `for` over a range: the interpreter has no while")
        raise TileError("a kernel has assignments, for, if and calls of tl: this statement is none of them")

    def _assign(self, target: ast.expr, value: Evaluate) -> Evaluate:
        match target:
            case ast.Name(id=name):

                def assign(machine: TileMachine) -> None:
                    machine.assign(name, value(machine))

                return assign
            case ast.Tuple(elts=elements) if all(isinstance(each, ast.Name) for each in elements):
                names = [each.id for each in elements if isinstance(each, ast.Name)]

                def spread(machine: TileMachine) -> None:
                    values = value(machine)
                    if not isinstance(values, tuple) or len(values) != len(names):
                        raise TileError("there should be {count} values on the right", count=len(names))
                    for name, each in zip(names, values):
                        machine.assign(name, each)

                return spread
        raise TileError("assign to a name: tiles are values, and tl.store writes to memory")

    def _choice(self, test: Evaluate, body: Evaluate, other: Evaluate) -> Evaluate:
        def run(machine: TileMachine) -> None:
            (body if truth(test(machine)) else other)(machine)

        return run

    def _loop(self, node: ast.For) -> Evaluate:
        if not isinstance(node.target, ast.Name) or not isinstance(node.iter, ast.Call):
            raise TileError("a loop is `for name in range(start, end, step)`")
        name, call = node.target.id, node.iter
        if ast.unparse(call.func) not in RANGES or call.keywords or not 1 <= len(call.args) <= 3:
            raise TileError("a loop is `for name in range(start, end, step)`")
        bounds = [self.expression(each) for each in call.args]
        body = self.block(node.body)
        line = node.lineno

        def run(machine: TileMachine) -> None:
            limits = [bound(machine) for bound in bounds]
            if any(isinstance(limit, bool) or not isinstance(limit, int) for limit in limits):
                raise TileError("the bounds of a loop should be whole numbers, not tiles")
            if len(limits) == 3 and limits[2] == 0:
                raise TileError("the step of a loop is 0")
            before = {key: kind_of(value) for key, value in machine.names.items()}
            for index in range(*limits):
                machine.add_work(1 + len(before) // 2)
                machine.names[name] = Runtime(index)
                body(machine)
                for key, kind in before.items():
                    require_same_kind(key, kind, machine.names[key], line)

        return run

    # -- expressions

    def expression(self, node: ast.expr) -> Evaluate:
        self.depth += 1
        if self.depth > DEEPEST:
            raise TileError("the expression is nested too deeply")
        self.line = getattr(node, "lineno", self.line)
        made = self._expression(node)
        self.depth -= 1
        return made

    def _expression(self, node: ast.expr) -> Evaluate:
        match node:
            case ast.Constant(value=bool() | int() | float() | None as value):
                if isinstance(value, int) and abs(value) >= LARGEST_INT:
                    raise TileError("a whole number of more than 63 bits")
                return lambda machine: value
            case ast.Name(id=name):
                return self._name(name)
            case ast.Tuple(elts=elements) | ast.List(elts=elements):
                parts = [self.expression(each) for each in elements]
                return lambda machine: tuple(part(machine) for part in parts)
            case ast.BinOp(left=left, op=op, right=right):
                kind = type(op).__name__
                if kind in ("MatMult", "Pow", "LShift", "RShift"):
                    raise TileError(
                        "this operator is not supported: x * x is a square, tl.sqrt(x) is x ** 0.5, "
                        "tl.rsqrt(x) is x ** -0.5, and tl.dot(a, b) is a @ b"
                    )
                a, b = self.expression(left), self.expression(right)
                return lambda machine: binary(machine, kind, a(machine), b(machine))
            case ast.Compare(left=left, ops=[op], comparators=[right]):
                kind = type(op).__name__
                if kind in ("Is", "IsNot", "In", "NotIn"):
                    raise TileError("compare with <, <=, >, >=, == or !=")
                a, b = self.expression(left), self.expression(right)
                return lambda machine: binary(machine, kind, a(machine), b(machine))
            case ast.Compare():
                raise TileError("one comparison at a time: (a < b) & (b < c)")
            case ast.BoolOp(op=op, values=values):
                parts = [self.expression(each) for each in values]
                every = all if isinstance(op, ast.And) else any
                return lambda machine: every(truth(part(machine)) for part in parts)
            case ast.UnaryOp(op=op, operand=operand):
                return self._unary(op, self.expression(operand))
            case ast.IfExp(test=test, body=body, orelse=other):
                chosen, yes, no = self.expression(test), self.expression(body), self.expression(other)
                return lambda machine: yes(machine) if truth(chosen(machine)) else no(machine)
            case ast.Subscript(value=value, slice=index):
                places = self._places(index)
                inner = self.expression(value)
                return lambda machine: subscript(machine, inner(machine), places)
            case ast.Attribute():
                return self._attribute(node)
            case ast.Call(
                func=ast.Attribute(value=ast.expr() as owner, attr="to"), args=[dtype], keywords=[]
            ):
                inner, wanted = self.expression(owner), self.expression(dtype)
                return lambda machine: to(machine, inner(machine), wanted(machine))
            case ast.Call():
                return self._call(node)
        raise TileError("this expression is not supported in a kernel")

    def _name(self, name: str) -> Evaluate:
        def get(machine: TileMachine) -> Any:
            if name not in machine.names:
                message = "{name} is not defined in the kernel: it sees its parameters and its variables only"
                raise TileError(message, name=name)
            return machine.names[name]

        return get

    def _unary(self, op: ast.unaryop, operand: Evaluate) -> Evaluate:
        match op:
            case ast.USub():
                return lambda machine: binary(machine, "Mult", operand(machine), -1)
            case ast.UAdd():
                return operand
            case ast.Not():
                return lambda machine: not truth(operand(machine))
        return lambda machine: binary(machine, "Eq", operand(machine), False)

    def _places(self, index: ast.expr) -> tuple[bool, ...]:
        """Return for each part of ``[:, None]`` whether it is a new dimension."""
        parts = index.elts if isinstance(index, ast.Tuple) else [index]
        places = []
        for part in parts:
            match part:
                case ast.Constant(value=None):
                    places.append(True)
                case ast.Slice(lower=None, upper=None, step=None):
                    places.append(False)
                case _:
                    raise TileError(
                        "a tile has the indices [:, None] and [None, :] only: tl.load reads elements"
                    )
        if len(places) > 3:
            raise TileError("a tile has at most three dimensions")
        return tuple(places)

    def _attribute(self, node: ast.Attribute) -> Evaluate:
        match node:
            case ast.Attribute(value=ast.Name(id="tl"), attr=name) if name in DTYPES:
                return lambda machine: language.DType(name)
            case ast.Attribute(value=ast.Attribute(value=owner, attr="dtype"), attr="element_ty"):
                return self._element_type(self.expression(owner))
            case ast.Attribute(value=owner, attr="T"):
                inner = self.expression(owner)
                return lambda machine: trans(machine, inner(machine))
            case ast.Attribute(value=owner, attr="dtype"):
                return self._element_type(self.expression(owner))
        name = ast.unparse(node)[:60]
        raise TileError("{name} is not supported: {cure}", name=name, cure=dtype_cure(name))

    def _element_type(self, owner: Evaluate) -> Evaluate:
        names = {dtype: name for name, dtype in DTYPES.items()}

        def get(machine: TileMachine) -> language.DType:
            value = owner(machine)
            dtype = value.buffer.flat.dtype if isinstance(value, Pointer) else getattr(value, "dtype", None)
            if dtype not in names:
                raise TileError("this value has no dtype of tl")
            return language.DType(names[dtype])

        return get

    def _call(self, node: ast.Call) -> Evaluate:
        match node.func:
            case ast.Name(id="float"):
                match node.args:
                    case [ast.Constant(value="inf" | "-inf" | "nan" as text)]:
                        number = float(text)
                        return lambda machine: number
                raise TileError(
                    'float("-inf") and float("inf") are supported; x.to(tl.float32) converts a tile'
                )
            case ast.Attribute(value=ast.Name(id="tl"), attr=name) if name in FUNCTIONS:
                function = FUNCTIONS[name]
            case _:
                called = ast.unparse(node.func)[:60]
                message = "a kernel cannot call {name}: {cure}"
                raise TileError(message, name=called, cure=instead_of(called))
        if any(isinstance(each, ast.Starred) for each in node.args) or any(
            each.arg is None for each in node.keywords
        ):
            raise TileError("* and ** are not supported in a call")
        args = [self.expression(each) for each in node.args]
        kwargs = {str(each.arg): self._keyword(each.value) for each in node.keywords}
        line = node.lineno

        def call(machine: TileMachine) -> Any:
            values = [arg(machine) for arg in args]
            named = {key: value(machine) for key, value in kwargs.items()}
            machine.line = line
            try:
                return function(machine, *values, **named)
            except TypeError as error:
                message = "tl.{name}: {error}"
                raise TileError(
                    message, name=name, error=str(error).replace("call()", "the call")[:160]
                ) from None

        return call

    def _keyword(self, node: ast.expr) -> Evaluate:
        """Read the value of a keyword, which may be a text such as input_precision="ieee"."""
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value[:20]
            return lambda machine: text
        return self.expression(node)
