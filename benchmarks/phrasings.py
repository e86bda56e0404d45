"""The same code in other words: what two students who had the same idea still write differently.

Each function changes a syntax tree at places that a random generator draws, and keeps what the code computes:
operands and comparisons change sides, branches are inverted, an expression gets a name or loses it,
assignments change places or are joined, ``a if c else b`` becomes a statement. :func:`rephrased` applies them
all. The code is not executed.
"""

from __future__ import annotations

import ast
import random
from collections import Counter
from collections.abc import Callable, Iterable

Block = list[ast.stmt]

MIRRORED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.Gt, ast.Gt: ast.Lt, ast.LtE: ast.GtE, ast.GtE: ast.LtE, ast.Eq: ast.Eq, ast.NotEq: ast.NotEq,
}  # fmt: skip
NEGATED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.GtE, ast.Gt: ast.LtE, ast.LtE: ast.Gt, ast.GtE: ast.Lt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
FREE_NAMES = ["part", "amount", "value", "first", "piece", "inner", "term", "size", "factor", "numbers"]


def rephrased(tree: ast.Module, draw: random.Random, boldness: float) -> ast.Module:
    """Return ``tree``, changed in place; ``boldness`` scales the probability of every change."""
    tree = _Expressions(draw, boldness).visit(tree)
    for function in [node for node in tree.body if isinstance(node, ast.FunctionDef)]:
        _name_repeated_attributes(function, draw, 0.25 * boldness)
        changes: tuple[tuple[Callable[[Block, random.Random, ast.AST], None], float], ...] = (
            (_split_tuple, 0.3), (_statement_of_choice, 0.2), (_inline, 0.15), (_name_a_part, 0.2),
            (_swap, 0.3), (_join, 0.1),
        )  # fmt: skip
        for change, rate in changes:
            for block in blocks(function):
                if draw.random() < rate * boldness * max(1, len(block) / 2):
                    change(block, draw, function)
    return tree


def blocks(tree: ast.AST) -> list[Block]:
    """Return every list of statements in ``tree``, which is a module or a statement."""
    found = []
    for name in ("body", "orelse", "finalbody", "handlers", "cases"):
        block = getattr(tree, name, None)
        if isinstance(block, list) and block:
            if isinstance(block[0], ast.stmt):
                found.append(block)
            for node in block:
                found += blocks(node)
    return found


def independent(one: ast.stmt, other: ast.stmt) -> bool:
    """Return whether two statements may change places: functions, and assignments that share no name that
    one of them writes."""
    if isinstance(one, ast.FunctionDef) and isinstance(other, ast.FunctionDef):
        return True
    if not all(isinstance(node, (ast.Assign, ast.AugAssign, ast.FunctionDef)) for node in (one, other)):
        return False
    return not (written(one) & used(other) or written(other) & used(one))


def written(node: ast.AST) -> set[str]:
    """Return the names that a statement binds, or whose elements or attributes it changes."""
    found = {node.name} if isinstance(node, ast.FunctionDef) else set()
    for inner in ast.walk(node):
        if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store):
            found.add(inner.id)
        elif isinstance(inner, (ast.Subscript, ast.Attribute)) and isinstance(inner.ctx, ast.Store):
            found |= used(inner.value)
    return found


def used(node: ast.AST) -> set[str]:
    """Return all names in ``node``."""
    names = {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}
    return names | ({node.name} if isinstance(node, ast.FunctionDef) else set())


class _Expressions(ast.NodeTransformer):
    def __init__(self, draw: random.Random, boldness: float) -> None:
        self.draw, self.boldness = draw, boldness

    def _says(self, probability: float) -> bool:
        return self.draw.random() < probability * self.boldness

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        numbers = _is_number(node.left) or _is_number(node.right)
        commutes = isinstance(node.op, ast.Mult) or (isinstance(node.op, ast.Add) and numbers)
        if commutes and self._says(0.2) and not _calls(node):
            node.left, node.right = node.right, node.left
        return node

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        self.generic_visit(node)
        if len(node.ops) == 1 and type(node.ops[0]) in MIRRORED and self._says(0.15):
            node.left, node.comparators = node.comparators[0], [node.left]
            node.ops = [MIRRORED[type(node.ops[0])]()]
        return node

    def visit_IfExp(self, node: ast.IfExp) -> ast.AST:
        self.generic_visit(node)
        if self._says(0.25):
            node.test, node.body, node.orelse = _negated(node.test), node.orelse, node.body
        return node

    def visit_If(self, node: ast.If) -> ast.AST:
        self.generic_visit(node)
        simple = (
            node.orelse and not isinstance(node.orelse[0], ast.If) and not isinstance(node.body[0], ast.If)
        )
        if simple and self._says(0.25):
            node.test, node.body, node.orelse = _negated(node.test), node.orelse, node.body
        return node

    def visit_Dict(self, node: ast.Dict) -> ast.AST:
        self.generic_visit(node)
        words = [
            key.value for key in node.keys if isinstance(key, ast.Constant) and isinstance(key.value, str)
        ]
        if len(words) == len(node.keys) > 1:
            if self._says(0.2):
                place = self.draw.randrange(len(words) - 1)
                keys, values = node.keys, node.values
                keys[place], keys[place + 1] = keys[place + 1], keys[place]
                values[place], values[place + 1] = values[place + 1], values[place]
                words[place], words[place + 1] = words[place + 1], words[place]
            if all(word.isidentifier() for word in words) and self._says(0.15):
                pairs = [ast.keyword(word, value) for word, value in zip(words, node.values, strict=True)]
                return ast.Call(ast.Name("dict", ast.Load()), [], pairs)
        return node


def _name_repeated_attributes(function: ast.FunctionDef, draw: random.Random, rate: float) -> None:
    """``config.hidden`` everywhere → ``hidden = config.hidden`` at the start."""
    given = [argument.arg for argument in function.args.args]
    counts = Counter(
        (node.value.id, node.attr)
        for node in ast.walk(function)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
        and node.value.id in given and node.value.id == "config"
    )  # fmt: skip
    taken = used(function) | set(given)
    has_docstring = isinstance(function.body[0], ast.Expr) and isinstance(
        function.body[0].value, ast.Constant
    )
    start = 1 if has_docstring and len(function.body) > 1 else 0
    for (owner, attribute), number in counts.items():
        name = draw.choice((attribute, attribute, "".join(word[0] for word in attribute.split("_")) + "_"))
        if number < 2 or name in taken or draw.random() >= rate:
            continue
        _Replace(lambda node, o=owner, a=attribute: _is_attribute(node, o, a), name).visit(function)
        value = ast.Attribute(ast.Name(owner, ast.Load()), attribute, ast.Load())
        function.body.insert(start, ast.Assign([ast.Name(name, ast.Store())], value))
        taken.add(name)


def _split_tuple(block: Block, draw: random.Random, function: ast.AST) -> None:
    """``a, b = x, y`` → two statements, where ``y`` does not use ``a``."""
    for place, node in enumerate(block):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple):
            target = node.targets[0]
            if isinstance(target, ast.Tuple) and len(target.elts) == len(node.value.elts):
                pairs = list(zip(target.elts, node.value.elts, strict=True))
                if not written(target) & used(node.value):
                    block[place : place + 1] = [ast.Assign([one], value) for one, value in pairs]
                    return


def _join(block: Block, draw: random.Random, function: ast.AST) -> None:
    """Two assignments one after the other → ``a, b = x, y``."""
    for place in range(len(block) - 1):
        one, other = block[place], block[place + 1]
        if isinstance(one, ast.Assign) and isinstance(other, ast.Assign) and independent(one, other):
            names = [*one.targets, *other.targets]
            if len(names) == 2 and all(isinstance(name, ast.Name) for name in names):
                values = ast.Tuple([one.value, other.value], ast.Load())
                block[place : place + 2] = [ast.Assign([ast.Tuple(names, ast.Store())], values)]
                return


def _statement_of_choice(block: Block, draw: random.Random, function: ast.AST) -> None:
    """``x = a if c else b`` → an if statement; the same for ``return``."""
    for place, node in enumerate(block):
        if isinstance(node, (ast.Assign, ast.Return)) and isinstance(node.value, ast.IfExp):
            choice = node.value
            if isinstance(node, ast.Return):
                block[place : place + 1] = [
                    ast.If(choice.test, [ast.Return(choice.body)], []),
                    ast.Return(choice.orelse),
                ]
            else:
                branches = [[ast.Assign(node.targets, value)] for value in (choice.body, choice.orelse)]
                block[place] = ast.If(choice.test, list(branches[0]), list(branches[1]))
            return


def _inline(block: Block, draw: random.Random, function: ast.AST) -> None:
    """``x = expression`` followed by the only use of ``x`` → the expression in its place."""
    counts = Counter(node.id for node in ast.walk(function) if isinstance(node, ast.Name))
    places = list(range(len(block) - 1))
    draw.shuffle(places)
    for place in places:
        node, after = block[place], block[place + 1]
        if not (isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)):
            continue
        name = node.targets[0].id
        simple = isinstance(after, (ast.Assign, ast.Return, ast.Expr)) and not any(
            isinstance(inner, (ast.comprehension, ast.Lambda)) for inner in ast.walk(after)
        )
        if simple and counts[name] == 2 and name in used(after):
            _Replace(lambda found, n=name: isinstance(found, ast.Name) and found.id == n, node.value).visit(
                after
            )
            del block[place]
            return


def _name_a_part(block: Block, draw: random.Random, function: ast.AST) -> None:
    """An expression inside a statement → a variable before it."""
    places = [
        n
        for n, node in enumerate(block)
        if isinstance(node, (ast.Assign, ast.Return, ast.AugAssign, ast.Expr))
    ]
    draw.shuffle(places)
    taken = used(function) | {node.arg for node in ast.walk(function) if isinstance(node, ast.arg)}
    free = [name for name in FREE_NAMES if name not in taken]
    for place in places:
        parts = [
            part
            for part in _outside_of_scopes(block[place])
            if isinstance(part, (ast.BinOp, ast.Call)) and used(part)
        ]
        parts = [part for part in parts if part is not getattr(block[place], "value", None)]
        if parts and free:
            part = draw.choice(parts)
            name = draw.choice(free)
            _Replace(lambda node, p=part: node is p, name).visit(block[place])
            block.insert(place, ast.Assign([ast.Name(name, ast.Store())], part))
            return


def _swap(block: Block, draw: random.Random, function: ast.AST) -> None:
    """Two independent assignments change places."""
    places = [n for n in range(len(block) - 1) if independent(block[n], block[n + 1])]
    if places:
        place = draw.choice(places)
        block[place], block[place + 1] = block[place + 1], block[place]


class _Replace(ast.NodeTransformer):
    """Replaces each expression for which ``chosen`` is true, by a name or by another expression."""

    def __init__(self, chosen: Callable[..., bool], new: str | ast.expr) -> None:
        self.chosen = chosen
        self.new = ast.Name(new, ast.Load()) if isinstance(new, str) else new

    def visit(self, node: ast.AST) -> ast.AST:
        if (
            isinstance(node, ast.expr)
            and isinstance(getattr(node, "ctx", ast.Load()), ast.Load)
            and self.chosen(node)
        ):
            return self.new
        result: ast.AST = self.generic_visit(node)
        return result


def _outside_of_scopes(node: ast.AST) -> Iterable[ast.AST]:
    """Yield the expressions of a statement that are always computed, and outside of lambdas and loops."""
    for child in ast.iter_child_nodes(node):
        inner = (ast.Lambda, ast.ListComp, ast.GeneratorExp, ast.DictComp, ast.SetComp, ast.IfExp, ast.BoolOp)
        if not isinstance(child, (*inner, ast.JoinedStr, ast.stmt)):
            yield child
            yield from _outside_of_scopes(child)


def _is_attribute(node: ast.AST, owner: str, attribute: str) -> bool:
    return (
        isinstance(node, ast.Attribute) and node.attr == attribute
        and isinstance(node.value, ast.Name) and node.value.id == owner
    )  # fmt: skip


def _is_number(node: ast.expr) -> bool:
    if isinstance(node, ast.Constant):
        return isinstance(node.value, (int, float))
    return isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Mult, ast.Div, ast.Sub, ast.FloorDiv))


def _calls(node: ast.AST) -> bool:
    return any(isinstance(inner, (ast.Call, ast.Await)) for inner in ast.walk(node))


def _negated(test: ast.expr) -> ast.expr:
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return test.operand
    if isinstance(test, ast.Compare) and len(test.ops) == 1 and type(test.ops[0]) in NEGATED:
        return ast.Compare(test.left, [NEGATED[type(test.ops[0])]()], test.comparators)
    return ast.UnaryOp(ast.Not(), test)
