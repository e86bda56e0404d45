"""Why ``torch.compile`` stopped or began again, in words, and what to do about it.

Dynamo reports two things: a *graph break*, where Python had to go on by itself, and a *failed guard*, an assumption of a graph that no
longer holds. Both come as text for compiler engineers that changes with each release; here each is put into one of a few causes by the
words that all releases use, with a cure. What is not recognised keeps the compiler's own words.

Reference: J. Ansel et al., PyTorch 2: Faster Machine Learning Through Dynamic Python Bytecode Transformation and Graph Compilation
(ASPLOS 2024); "Working with Graph Breaks" and "Dealing with Recompilations" in PyTorch's documentation. Cost: none.
"""

from __future__ import annotations

import re
from enum import Enum


class BreakCause(Enum):
    """What a graph cannot hold: ``explanation`` and ``cure``."""

    BRANCH = (
        "the branch depends on the values of a tensor, which are not known while the graph is made",
        "compute both sides and choose with torch.where, or clamp",
    )
    SCALAR = (
        "a tensor became a Python number: the graph ends where the number is needed",
        "keep it a tensor of shape (); convert once, outside of what is compiled",
    )
    SHAPE = (
        "the shape of a result depends on the values of a tensor",
        "keep the full shape and mask: torch.where(mask, x, 0) instead of x[mask]",
    )
    OUTPUT = (
        "printing and logging are done by Python, between two graphs",
        "return what you want to see and print it outside of what is compiled",
    )
    FOREIGN = (
        "the function called is none of Python or torch that the compiler can look into",
        "use torch's own function, move the call out, or make it a custom operator (torch.library)",
    )
    ASKED_FOR = (
        "the code asks for it: torch.compiler.disable or graph_break",
        "leave it, or remove the mark",
    )
    LIMIT = (
        "the same code was compiled too often (recompile_limit, 8 by default): for inputs that no graph fits it runs eagerly",
        "read which guards failed, and keep them from failing",
    )
    OTHER = (
        "the compiler met Python that it does not trace",
        "read the compiler's own words, and TORCH_LOGS=graph_breaks",
    )

    def __init__(self, explanation: str, cure: str) -> None:
        self.explanation = explanation
        self.cure = cure


class GuardCause(Enum):
    """Which assumption of a graph did not hold: ``explanation`` and ``cure``."""

    SIZE = (
        "a tensor came with another size",
        "torch._dynamo.mark_dynamic(x, dim) before the first call, or pad to a few sizes",
    )
    TYPE = (
        "a tensor came with another number of dimensions, another dtype or device, or with another requires_grad",
        "make inputs alike before the call",
    )
    NUMBER = (
        "a Python number that the graph holds as a constant has changed",
        "pass it as a tensor of shape ()",
    )
    ATTRIBUTE = (
        "an attribute of a module, a constant for the graph, has changed or differs between modules",
        "keep it in a buffer, a tensor of shape (), or outside of forward",
    )
    MODE = (
        "gradients, autocast, threads or another global setting changed",
        "compile and call under the same settings",
    )
    BACKEND = (
        "the same code was compiled with another backend object",
        "make the backend once and pass the same one",
    )
    OTHER = (
        "another guard failed",
        "read the compiler's own words, and TORCH_LOGS=recompiles_verbose",
    )
    UNTOLD = (
        "this version of torch does not say which guard failed",
        "run with TORCH_LOGS=recompiles",
    )

    def __init__(self, explanation: str, cure: str) -> None:
        self.explanation = explanation
        self.cure = cure


# The first that is found counts: `.item()` may be called within a branch, and a message of a jump names the variable's type.
BREAKS = (
    (BreakCause.LIMIT, r"(?:recompile|cache_size)_limit|recompile limit"),
    (BreakCause.ASKED_FOR, r"torch\.compiler\.disable|_dynamo\.disable|graph_break\(\)|Call to `torch\._dynamo\.graph_break"),
    (BreakCause.OUTPUT, r"builtin operator `?print|builtin:? print|BuiltinVariable\(print\)|logging|warnings"),
    (BreakCause.SHAPE, r"nonzero|[Dd]ynamic shape operator|dynamic output shape|masked_select|\bunique\b|capture_dynamic_output_shape"),
    (BreakCause.SCALAR, r"\.item\(|_local_scalar_dense|\.tolist\(|capture_scalar_outputs|TensorVariable\(\) (?:item|tolist)"),
    (BreakCause.BRANCH, r"generic_jump|[Dd]ata-dependent (?:branching|jump|control flow|assert)"),
    (BreakCause.FOREIGN, r"skipped|SkipFunctionVariable|[Ss]kip(?:s|ped)? (?:function|calling)|C/C\+\+ (?:function|extension)|pybind"),
)
GUARDS = (
    (GuardCause.SIZE, r"size mismatch|stride mismatch|\.size\(\)\[|\.shape\[|symbolic shape|dynamic ind"),
    (GuardCause.TYPE, r"rank mismatch|dtype mismatch|dispatch key|requires_grad|device|tensor.*mismatch"),
    (GuardCause.BACKEND, r"BACKEND_MATCH|check_current_backend|different backend"),
    (GuardCause.MODE, r"GLOBAL_STATE|grad_mode|autocast|num_threads|___check_global_state|torch_function_mode|deterministic"),
    (GuardCause.ATTRIBUTE, r"attributes? of the nn\.Module|self\b[^=]*==|\._modules\[|___check_obj_id|__dict__"),
    (GuardCause.NUMBER, r"==|___as_tensor|is_integer|float"),
)


def break_cause(reason: str) -> BreakCause:
    """The cause of a graph break, from the compiler's words for it.

    >>> break_cause("generic_jump TensorVariable()").name
    'BRANCH'
    """
    return next((cause for cause, pattern in BREAKS if re.search(pattern, reason)), BreakCause.OTHER)


def guard_cause(reason: str | None) -> GuardCause:
    """The cause of a recompilation, from the guard that failed; None where the compiler does not tell it.

    >>> guard_cause("0/0: tensor 'x' size mismatch at index 0. expected 3, actual 4").name
    'SIZE'
    """
    if not reason:
        return GuardCause.UNTOLD
    return next((cause for cause, pattern in GUARDS if re.search(pattern, reason)), GuardCause.OTHER)
