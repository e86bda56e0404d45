"""The causes of graph breaks and recompilations of ``torch.compile``, with explanations and cures.

Dynamo reports *graph breaks*, where it leaves the execution to Python, and *failed guards*, which are
assumptions of a graph that are no longer true. The messages are written for compiler engineers and change
with each release. This module classifies them by the words that all releases use. For a message that it does
not recognise, the report contains the message of the compiler.

Reference: J. Ansel et al., PyTorch 2: Faster Machine Learning Through Dynamic Python Bytecode Transformation
and Graph Compilation (ASPLOS 2024); "Working with Graph Breaks" and "Dealing with Recompilations" in
PyTorch's documentation. Cost: none.
"""

from __future__ import annotations

import re
from enum import Enum


class BreakCause(Enum):
    """The cause of a graph break: ``explanation`` and ``cure``."""

    BRANCH = (
        "the branch depends on the values of a tensor, which are unknown during compilation",
        "compute both sides and choose with torch.where, or clamp",
    )
    SCALAR = (
        "a tensor is converted to a Python number, and the graph ends where the number is needed",
        "keep it a tensor of shape (), and convert it once, outside of the compiled code",
    )
    SHAPE = (
        "the shape of a result depends on the values of a tensor",
        "keep the full shape and mask: torch.where(mask, x, 0) instead of x[mask]",
    )
    OUTPUT = (
        "printing and logging run in Python, between two graphs",
        "return the values and print them outside of the compiled code",
    )
    FOREIGN = (
        "the compiler cannot trace the called function",
        "use a function of torch, move the call out, or make it a custom operator (torch.library)",
    )
    ASKED_FOR = (
        "the code requests it with torch.compiler.disable or graph_break",
        "keep it, or remove the call",
    )
    LIMIT = (
        "the same code was compiled too often (recompile_limit, 8 by default): "
        "inputs that fit no graph run in eager mode",
        "read which guards failed, and avoid their failure",
    )
    OTHER = (
        "the compiler does not trace this Python code",
        "read the compiler's message, and run with TORCH_LOGS=graph_breaks",
    )

    def __init__(self, explanation: str, cure: str) -> None:
        self.explanation = explanation
        self.cure = cure


class GuardCause(Enum):
    """The assumption of a graph that failed: ``explanation`` and ``cure``."""

    SIZE = (
        "the size of a tensor has changed",
        "torch._dynamo.mark_dynamic(x, dim) before the first call, or pad to a few sizes",
    )
    TYPE = (
        "the number of dimensions, the dtype, the device or requires_grad of a tensor has changed",
        "make the inputs equal in these properties before the call",
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
        "grad mode, autocast, the number of threads or another global setting has changed",
        "compile and call under the same settings",
    )
    BACKEND = (
        "the same code was compiled with another backend object",
        "create the backend once and pass the same object",
    )
    OTHER = (
        "another guard failed",
        "read the compiler's message, and run with TORCH_LOGS=recompiles_verbose",
    )
    UNKNOWN = (
        "this version of torch does not report which guard failed",
        "run with TORCH_LOGS=recompiles",
    )

    def __init__(self, explanation: str, cure: str) -> None:
        self.explanation = explanation
        self.cure = cure


# The first match counts. The order matters, because a message may match several patterns: for example,
# `.item()` may be called within a branch, and the message of a jump contains the type of the variable.
BREAKS = (
    (BreakCause.LIMIT, r"(?:recompile|cache_size)_limit|recompile limit"),
    (
        BreakCause.ASKED_FOR,
        r"torch\.compiler\.disable|_dynamo\.disable|graph_break\(\)|Call to `torch\._dynamo\.graph_break",
    ),
    (
        BreakCause.OUTPUT,
        r"builtin operator `?print|builtin:? print|BuiltinVariable\(print\)|logging|warnings",
    ),
    (
        BreakCause.SHAPE,
        r"nonzero|[Dd]ynamic shape operator|dynamic output shape|masked_select|\bunique\b"
        r"|capture_dynamic_output_shape",
    ),
    (
        BreakCause.SCALAR,
        r"\.item\(|_local_scalar_dense|\.tolist\(|capture_scalar_outputs|TensorVariable\(\) (?:item|tolist)",
    ),
    (BreakCause.BRANCH, r"generic_jump|[Dd]ata-dependent (?:branching|jump|control flow|assert)"),
    (
        BreakCause.FOREIGN,
        r"skipped|SkipFunctionVariable|[Ss]kip(?:s|ped)? (?:function|calling)"
        r"|C/C\+\+ (?:function|extension)|pybind",
    ),
)
GUARDS = (
    (GuardCause.SIZE, r"size mismatch|stride mismatch|\.size\(\)\[|\.shape\[|symbolic shape|dynamic ind"),
    (GuardCause.TYPE, r"rank mismatch|dtype mismatch|dispatch key|requires_grad|device|tensor.*mismatch"),
    (GuardCause.BACKEND, r"BACKEND_MATCH|check_current_backend|different backend"),
    (
        GuardCause.MODE,
        r"GLOBAL_STATE|grad_mode|autocast|num_threads|___check_global_state|torch_function_mode|deterministic",
    ),
    (
        GuardCause.ATTRIBUTE,
        r"attributes? of the nn\.Module|self\b[^=]*==|\._modules\[|___check_obj_id|__dict__",
    ),
    (GuardCause.NUMBER, r"==|___as_tensor|is_integer|float"),
)


def break_cause(reason: str) -> BreakCause:
    """Return the cause of a graph break from the message of the compiler.

    >>> break_cause("generic_jump TensorVariable()").name
    'BRANCH'
    """
    return next((cause for cause, pattern in BREAKS if re.search(pattern, reason)), BreakCause.OTHER)


def guard_cause(reason: str | None) -> GuardCause:
    """Return the cause of a recompilation from the message about the failed guard; None if there is no
    message.

    >>> guard_cause("0/0: tensor 'x' size mismatch at index 0. expected 3, actual 4").name
    'SIZE'
    """
    if not reason:
        return GuardCause.UNKNOWN
    return next((cause for cause, pattern in GUARDS if re.search(pattern, reason)), GuardCause.OTHER)
