"""``torch.compile`` of fused operations: one graph with the kernels inside, and the values of eager code.

The backend ``aot_eager`` runs the graph that the compiler would receive, forward and backward, operator by
operator, so that results differ from those of eager code by rounding only.
"""

from __future__ import annotations

import inspect
from collections import Counter
from dataclasses import replace
from importlib import import_module

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd

from dlo_lib import kernels
from dlo_lib.base.errors import UserError
from dlo_lib.kernels import (
    FlashAttention,
    KernelBackend,
    cross_entropy,
    fuse,
    grouped_matmul,
    layer_norm,
    library,
    linear_cross_entropy,
    rms_norm,
    rope,
    softmax,
    swiglu,
    using,
    vector_add,
)
from dlo_lib.kernels.cases import CASES as REPORTED
from dlo_lib.kernels.library import LIBRARY
from dlo_lib.models import Llama, LlamaConfig
from dlo_lib.parallel.compile import compile_blocks
from tests.kernels.parity import BACKENDS, TOLERANCE, random

CONFIG = LlamaConfig(
    vocab_size=67, hidden=24, intermediate=40, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=6
)


@pytest.fixture(autouse=True)
def empty_caches():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class Seen:
    """A backend that counts our operators in the graphs of forwards and backwards."""

    def __init__(self):
        self.operators: Counter[str] = Counter()
        self.graphs = 0
        self.backend = aot_autograd(fw_compiler=self._count)

    def _count(self, module, inputs):
        self.graphs += 1
        for node in module.graph.nodes:
            if getattr(node.target, "namespace", "") == LIBRARY.ns:
                self.operators[node.target._opname] += 1
        return module.forward


def compiled(function, seen=None, **options):
    backend = "aot_eager" if seen is None else seen.backend
    return torch.compile(function, backend=backend, fullgraph=True, **options)


def gradients(function, inputs):
    """Return the result and the gradients of the inputs that have one."""
    leaves = [x.detach().clone().requires_grad_(x.is_floating_point()) for x in inputs]
    out = function(*leaves)
    grad = random(*out.shape, dtype=out.dtype, seed=5)
    wanted = [x for x in leaves if x.requires_grad]
    return [out.detach(), *torch.autograd.grad(out, wanted, grad)]


LOSSES = {"ignore_index": -100, "label_smoothing": 0.1, "z_loss": 0.01}
TARGETS, COUNTS = [3, -100, 0, 7, 2, 9], [2, 0, 4]
OPERATORS = "PyTorch's operators"
CASES = {
    "vector_add": (vector_add, [(5, 8), (5, 8)], OPERATORS),
    "softmax": (softmax, [(5, 8)], OPERATORS),
    "layer_norm": (layer_norm, [(5, 8), (8,), (8,)], OPERATORS),
    "rms_norm": (rms_norm, [(2, 3, 8), (8,)], {"rms_norm_forward": 1, "rms_norm_backward": 1}),
    "rope": (lambda x: rope(x, *x.new_ones(2, 3, 8)), [(1, 2, 3, 8)], {"rotate": 2}),
    "swiglu": (swiglu, [(5, 8), (5, 8)], {"swiglu_forward": 1, "swiglu_backward": 1}),
    "flash_attention": (
        lambda q, k, v: FlashAttention.apply(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), True),
        [(1, 5, 4, 8), (1, 5, 2, 8), (1, 5, 2, 8)],
        {"attention_forward": 1, "attention_backward": 1},
    ),
    "cross_entropy": (
        lambda x, targets: cross_entropy(x, targets, **LOSSES),
        [(6, 10), TARGETS],
        {"row_losses": 1, "logits_gradient": 1},
    ),
    "linear_cross_entropy": (
        lambda x, w, targets: linear_cross_entropy(x, w, targets, chunk_rows=4, **LOSSES),
        [(6, 4), (10, 4), TARGETS],
        {"linear_losses": 1},
    ),
    "grouped_matmul": (
        grouped_matmul,
        [(6, 4), (3, 4, 5), COUNTS],
        {"grouped_forward": 2, "grouped_weight_gradient": 1},
    ),
}


def inputs_of(name, dtype=torch.float64):
    """Return the inputs of a case; a list holds whole numbers."""
    return [
        torch.tensor(shape) if isinstance(shape, list) else random(*shape, dtype=dtype, seed=seed)
        for seed, shape in enumerate(CASES[name][1])
    ]


def test_every_operation_is_in_the_report_and_compiled_here():
    """AdamW is the step of an optimiser, without a backward; ``fuse`` and ``using`` are no operations."""
    functions = {name for name in kernels.__all__ if inspect.isfunction(getattr(kernels, name))}
    operations = functions - {"adamw_update", "fuse", "using"}
    assert {name.partition(",")[0] for name in REPORTED} - {"adamw"} == operations
    assert CASES.keys() == operations


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("in_library", [False, True], ids=["as it is", "all in the library"])
def test_an_operation_is_one_graph_with_its_kernels_inside(name, in_library, monkeypatch):
    function, _, operators = CASES[name]
    if in_library:
        monkeypatch.setattr("dlo_lib.kernels.dispatch.LIBRARY_WHEN_COMPILING", frozenset(CASES))
    elif name in ("rms_norm", "rope", "swiglu"):
        operators = OPERATORS
    seen = Seen()
    actual = gradients(compiled(function, seen), inputs_of(name))
    for ours, exact in zip(actual, gradients(function, inputs_of(name)), strict=True):
        torch.testing.assert_close(ours, exact, rtol=1e-12, atol=1e-12)
    assert seen.operators == ({} if operators is OPERATORS else operators)
    assert seen.graphs == 2  # forward and backward


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case[2] is not OPERATORS])
def test_compiled_code_calls_the_backend_in_use(name, backend, monkeypatch):
    """The graph is the same, and the operator chooses when it runs."""
    used = set()
    run = library.run

    def watched(backend, module, *args):
        if module:  # a part that has a kernel
            used.add(backend)
        return run(backend, module, *args)

    monkeypatch.setattr(library, "run", watched)
    monkeypatch.setattr("dlo_lib.kernels.dispatch.LIBRARY_WHEN_COMPILING", frozenset(CASES))
    if name == "linear_cross_entropy":
        monkeypatch.setattr(import_module("dlo_lib.kernels.linear_cross_entropy"), "run", watched)
    function = compiled(CASES[name][0])
    with using(backend):
        actual = gradients(function, inputs_of(name, torch.float32))
    assert used == {backend}
    for ours, exact in zip(actual, gradients(CASES[name][0], inputs_of(name)), strict=True):
        torch.testing.assert_close(ours, exact.float(), rtol=2e-5, atol=2e-5)


def operator_cases():
    """Return the arguments of each operator: contiguous tensors, and some with other strides."""
    x, w, rows = random(2, 3, 8), random(8, seed=1), random(2, 3, 1, seed=2).abs()
    q, k = random(1, 5, 4, 8).transpose(1, 2), random(1, 5, 2, 8, seed=1).transpose(1, 2)
    angles, terms = random(5, 4, seed=3), (-100, 0.1, 0.01)
    logits, targets, counts = random(6, 10), torch.tensor(TARGETS), torch.tensor(COUNTS)
    lse = logits.logsumexp(-1)
    by_expert, weights = random(6, 4), random(3, 4, 5)
    return {
        "rms_norm_forward": (x, w, 1e-5),
        "rms_norm_backward": (x, random(3, 2, 8).transpose(0, 1), w, rows),
        "rotate": (q, angles, angles, -1),
        "swiglu_forward": (x, random(2, 3, 8, seed=4)),
        "swiglu_backward": (x, random(2, 3, 8, seed=4), x + 1),
        "attention_forward": (q, k, k, True),
        "attention_backward": (q, q + 1, k, k, q, random(1, 4, 5), True),
        "grouped_forward": (by_expert, weights, counts),
        "grouped_weight_gradient": (by_expert, random(6, 5), counts),
        "row_losses": (logits, targets, *terms),
        "logits_gradient": (random(6), logits, targets, lse, *terms),
        "linear_losses": (by_expert, random(10, 4), targets, *terms, 4, torch.bfloat16, True, False),
    }


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_compiler_receives_the_shapes_and_strides_of_the_results(backend):
    cases = operator_cases()
    assert cases.keys() == {name.removeprefix("dlo::") for name in LIBRARY._op_defs}
    with using(backend):
        for name, args in cases.items():
            checks = ("test_schema", "test_faketensor")
            torch.library.opcheck(getattr(torch.ops.dlo, name).default, args, test_utils=checks)


def _llama(seed=0, **changes):
    torch.manual_seed(seed)
    return fuse(Llama(replace(CONFIG, **changes)).double())


def _batch(length):
    tokens = torch.randint(CONFIG.vocab_size, (2, length + 1))
    targets = tokens[:, 1:].clone()
    targets[0, 2:4] = -100
    return tokens[:, :-1], targets


def _loss_and_gradients(model, call, batch):
    model.zero_grad()
    loss = call(*batch)
    loss.backward()
    return {"loss": loss.detach()} | {name: param.grad for name, param in model.named_parameters()}


def _same(actual, expected, tolerance):
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        error = (actual[name] - value).abs().max()
        assert error <= tolerance * value.abs().max(), f"{name}: {error / value.abs().max()}"


@pytest.mark.parametrize("tied", [False, True])
def test_a_fused_llama_is_one_graph_for_all_lengths(tied):
    model, seen = _llama(tied_embeddings=tied), Seen()
    call = compiled(model, seen, dynamic=True)
    for length in (9, 12):
        batch = _batch(length)
        _same(_loss_and_gradients(model, call, batch), _loss_and_gradients(model, model, batch), 1e-12)
    assert seen.graphs == 2
    # On a CPU the logits are stored, as in eager code.
    on_a_cpu = {"row_losses": 1, "logits_gradient": 1}
    assert seen.operators == ({"linear_losses": 1} if batch[0].is_cuda else on_a_cpu)


def test_a_fused_llama_is_compiled_inside_autocast():
    model = _llama().float()
    call, batch = compiled(model), _batch(9)
    with torch.autocast(torch.get_default_device().type, torch.bfloat16):
        actual = _loss_and_gradients(model, call, batch)
        expected = _loss_and_gradients(model, model, batch)
    assert actual["loss"].dtype is torch.float32
    _same(actual, expected, 10 * TOLERANCE[torch.bfloat16])


def test_blocks_are_compiled_with_their_kernels():
    model, other, seen = _llama(), _llama(), Seen()
    assert compile_blocks(model, backend=seen.backend, fullgraph=True) == 1
    for length in (9, 12):
        batch = _batch(length)
        _same(_loss_and_gradients(model, model, batch), _loss_and_gradients(other, other, batch), 1e-12)
    assert seen.graphs <= 4  # one for the first length, and one for all others


def test_compiled_code_refuses_targets_when_it_runs():
    call = compiled(lambda x, targets: cross_entropy(x, targets))
    logits = random(2, 5)
    if logits.is_cuda:
        pytest.skip("targets are not checked on a GPU, because it would wait for them")
    call(logits, torch.tensor([0, 4]))
    with pytest.raises(UserError, match="targets contains 5: it should be 0 to 4, or -100"):
        call(logits, torch.tensor([0, 5]))


def test_a_second_derivative_is_refused():
    x, w, ones = random(2, 8).requires_grad_(), random(8), torch.ones(2, 8, requires_grad=True)
    with using(KernelBackend.TORCH):
        (grad,) = torch.autograd.grad(rms_norm(x, w), x, ones, create_graph=True)
        with pytest.raises(RuntimeError, match="trying to differentiate twice"):
            grad.sum().backward()
