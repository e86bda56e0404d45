"""Answers that communicate in another way than the exercise asks: not at all, or everything with everybody.

The solution's ``dist`` becomes an object that has the functions of torch.distributed.
"""

from __future__ import annotations

import ast

BASE = '''
import torch.distributed as _plain


class _Done:
    """What an asynchronous call returns: it is complete."""

    def wait(self, timeout=None):
        return True

    def is_completed(self):
        return True


class _Communication:
    """torch.distributed, with other collectives."""

    def __getattr__(self, name):
        return getattr(_plain, name)

    def parts(self, tensor, group):
        """Return the tensors of the members of the group, in their order."""
        raise NotImplementedError

    def place(self, rank, group):
        return _plain.get_group_rank(group, rank) if group is not None else rank

    def all_reduce(self, tensor, op=_plain.ReduceOp.SUM, group=None, async_op=False):
        parts = self.parts(tensor, group)
        total = parts[0].clone()
        for part in parts[1:]:
            if op == _plain.ReduceOp.MAX:
                total = total.maximum(part)
            elif op == _plain.ReduceOp.MIN:
                total = total.minimum(part)
            else:
                total = total + part
        if op == _plain.ReduceOp.AVG:
            total = total / len(parts)
        with torch.no_grad():
            tensor.copy_(total)
        return _Done() if async_op else None

    def reduce(self, tensor, dst=0, op=_plain.ReduceOp.SUM, group=None, async_op=False):
        return self.all_reduce(tensor, op, group, async_op)

    def broadcast(self, tensor, src=0, group=None, async_op=False):
        with torch.no_grad():
            tensor.copy_(self.parts(tensor, group)[self.place(src, group)])
        return _Done() if async_op else None

    def all_gather(self, tensors, tensor, group=None, async_op=False):
        for into, part in zip(tensors, self.parts(tensor, group)):
            into.copy_(part)
        return _Done() if async_op else None

    def all_gather_into_tensor(self, output, tensor, group=None, async_op=False):
        with torch.no_grad():
            output.copy_(torch.cat([part.reshape(-1) for part in self.parts(tensor, group)]).view_as(output))
        return _Done() if async_op else None

    def reduce_scatter_tensor(self, output, tensor, op=_plain.ReduceOp.SUM, group=None, async_op=False):
        total = sum(self.parts(tensor, group))
        world, rank = _plain.get_world_size(group), _plain.get_rank(group)
        if op == _plain.ReduceOp.AVG:
            total = total / world
        with torch.no_grad():
            output.copy_(total.reshape(-1).chunk(world)[rank].view_as(output))
        return _Done() if async_op else None

    def all_to_all_single(
        self, output, tensor, output_split_sizes=None, input_split_sizes=None, group=None, async_op=False
    ):
        world, rank = _plain.get_world_size(group), _plain.get_rank(group)
        splits = self.splits(input_split_sizes, len(tensor), group)
        parts = [part.split(sizes)[rank] for part, sizes in zip(self.parts(tensor, group), splits)]
        with torch.no_grad():
            found = torch.cat(parts)
            output[: len(found)].copy_(found[: len(output)])
        return _Done() if async_op else None

    def splits(self, sizes, rows, group):
        raise NotImplementedError
'''
ALONE = (
    BASE
    + '''

class _AloneCommunication(_Communication):
    """Nothing is sent: each rank takes its own tensor for that of the others."""

    def parts(self, tensor, group):
        return [tensor.detach().clone() for _ in range(_plain.get_world_size(group))]

    def splits(self, sizes, rows, group):
        world = _plain.get_world_size(group)
        return [list(sizes) if sizes else [rows // world] * world] * world

    def send(self, *args, **kwargs):
        return None

    recv = send

    def isend(self, *args, **kwargs):
        return _Done()

    irecv = isend

    def batch_isend_irecv(self, operations):
        return [_Done()]


_alone = _AloneCommunication()


'''
)
GATHERED = (
    BASE
    + '''

class _GatheredCommunication(_Communication):
    """Every collective gathers the tensors of all ranks on every rank."""

    def parts(self, tensor, group):
        found = [None] * _plain.get_world_size(group)
        _plain.all_gather_object(found, tensor.detach().clone(), group=group)
        return found

    def splits(self, sizes, rows, group):
        world = _plain.get_world_size(group)
        found = [None] * world
        _plain.all_gather_object(found, list(sizes) if sizes else [rows // world] * world, group=group)
        return found


_gathered = _GatheredCommunication()


'''
)


def communicates(source: str) -> bool:
    """Return whether ``source`` calls a function of ``dist`` that communicates."""
    passive = {"get_rank", "get_world_size", "get_group_rank", "get_global_rank", "get_process_group_ranks"}
    calls = [node.func for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    names = [
        call.attr
        for call in calls
        if isinstance(call, ast.Attribute) and isinstance(call.value, ast.Name) and call.value.id == "dist"
    ]
    return any(name not in passive and name.islower() for name in names)


def collective_only(source: str) -> bool:
    """Return whether ``source`` sends no messages between two ranks, which a gather cannot replace."""
    words = ("isend", "irecv", "dist.send", "dist.recv", "P2POp", "all_to_all(", "scatter(")
    return not any(word in source for word in words)


def through(name: str, source: str) -> str:
    """Return ``source`` with ``name`` instead of the module ``dist`` in calls."""

    class Renamed(ast.NodeTransformer):
        def visit_Call(self, node: ast.Call) -> ast.AST:
            self.generic_visit(node)
            function = node.func
            of_dist = isinstance(function, ast.Attribute) and ast.unparse(function.value) == "dist"
            if isinstance(function, ast.Attribute) and of_dist and not function.attr[0].isupper():
                function.value = ast.copy_location(ast.Name(name, ast.Load()), function.value)
            return node

    return ast.unparse(Renamed().visit(ast.parse(source)))
