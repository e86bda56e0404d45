"""The messages of older and newer releases of the compiler have the same causes."""

from __future__ import annotations

import pytest

from dlo_lib.profiling.compile_reasons import BreakCause, GuardCause, break_cause, guard_cause


@pytest.mark.parametrize(
    ("words", "cause"),
    [
        ("generic_jump TensorVariable()", BreakCause.BRANCH),
        ("Data-dependent branching\n  Explanation: Detected data-dependent branching", BreakCause.BRANCH),
        ("Tensor.item", BreakCause.OTHER),
        ("Unsupported Tensor.item() call with capture_scalar_outputs=False", BreakCause.SCALAR),
        ("call_method TensorVariable() item () {}", BreakCause.SCALAR),
        (
            "dynamic shape operator: aten.nonzero.default; to enable, set capture_dynamic_output_shape_ops",
            BreakCause.SHAPE,
        ),
        ("Failed to trace builtin operator\n builtin print [<class>] False", BreakCause.OUTPUT),
        ("builtin: print [<class 'ConstantVariable'>] False", BreakCause.OUTPUT),
        ("Attempted to call function marked as skipped", BreakCause.FOREIGN),
        ("Call to `torch._dynamo.graph_break()`", BreakCause.ASKED_FOR),
        ("Dynamo recompile limit exceeded", BreakCause.LIMIT),
        ("torch._dynamo hit config.cache_size_limit (8)", BreakCause.LIMIT),
        ("a message of a later release", BreakCause.OTHER),
    ],
)
def test_a_break_has_one_cause(words, cause):
    assert break_cause(words) is cause


@pytest.mark.parametrize(
    ("guard", "cause"),
    [
        ("0/0: tensor 'x' size mismatch at index 0. expected 3, actual 4", GuardCause.SIZE),
        ("tensor 'L['x']' rank mismatch. expected 1, actual 2", GuardCause.TYPE),
        ("6/2: tensor 'x' dtype mismatch. expected Float, actual Double", GuardCause.TYPE),
        (
            "5/1: s.k == 1 (HINT: torch.compile considers integer attributes of the nn.Module to be static.",
            GuardCause.ATTRIBUTE,
        ),
        ("6/0: scale == 1.0", GuardCause.NUMBER),
        ("GLOBAL_STATE changed: grad_mode", GuardCause.MODE),
        ("BACKEND_MATCH failure: torch.compile detected different backend callables.", GuardCause.BACKEND),
        ("a message of a later release", GuardCause.OTHER),
        (None, GuardCause.UNKNOWN),
    ],
)
def test_a_failed_guard_has_one_cause(guard, cause):
    assert guard_cause(guard) is cause


@pytest.mark.parametrize("cause", [*BreakCause, *GuardCause], ids=str)
def test_every_cause_has_an_explanation_and_a_cure(cause):
    assert cause.explanation
    assert cause.cure
