"""Cross-entropy of a linear layer: one chunk and several, the gradient of the loss, memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from dlo_lib.kernels import CrossEntropyTerms, KernelBackend, LossReduction, linear_cross_entropy, using
from dlo_lib.kernels.cross_entropy import logits_gradient, reduced, row_losses
from dlo_lib.kernels.dispatch import around_twins, has_triton, run
from dlo_lib.profiling.tracker import MemoryTracker
from tests.kernels.parity import BACKENDS, NO_TRITON, TOLERANCE, close, dtypes_of, random

CHUNKS = [8, 16, 3]
"""Rows of a chunk for 8 rows: one chunk, and three."""
TARGETS = [4, -100, 0, 6, 6, 1, -100, 2]


def code():
    import importlib

    return importlib.import_module("dlo_lib.kernels.linear_cross_entropy")


def leaves(dtype=torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    x, w = random(8, 5, dtype=dtype), random(7, 5, dtype=dtype, seed=1)
    return x.requires_grad_(), w.requires_grad_(), torch.tensor(TARGETS)


def exact_gradients(x: Tensor, w: Tensor, targets: Tensor, scale: float) -> tuple[Tensor, ...]:
    wide, weight = (tensor.detach().double().requires_grad_() for tensor in (x, w))
    loss = F.cross_entropy(wide @ weight.T, targets, reduction="sum")
    return torch.autograd.grad(loss * scale, (wide, weight))


@pytest.mark.parametrize("rows", CHUNKS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_gradient_of_the_loss_is_applied_to_both_gradients(backend, rows):
    for dtype in dtypes_of(backend):
        x, w, targets = leaves(dtype)
        with using(backend):
            loss = linear_cross_entropy(x, w, targets, chunk_rows=rows, reduction=LossReduction.SUM)
        mine = torch.autograd.grad(loss * 0.3, (x, w))
        for number, (grad, exact) in enumerate(zip(mine, exact_gradients(x, w, targets, 0.3))):
            assert grad.dtype == dtype
            close(grad, exact, dtype, f"gradient {number}", factor=3)


@pytest.mark.parametrize("rows", [*CHUNKS, None])
def test_the_gradient_of_the_loss_is_not_rounded(rows):
    """1 / 3 in bf16 is 0.3340. Multiplied by it, all gradients would be 0.2 % too large. None: of a CPU."""
    x, w = random(64, 16, dtype=torch.bfloat16), random(64, 16, dtype=torch.bfloat16, seed=1)
    targets = torch.arange(64)
    ratios = []
    for scale in (1 / 3, 1.0):
        leaves = x.clone().requires_grad_(), w.clone().requires_grad_()
        with using(KernelBackend.TORCH) if rows else contextlib.nullcontext():
            chunk = None if rows is None else 8 * rows
            loss = linear_cross_entropy(*leaves, targets, chunk_rows=chunk, reduction=LossReduction.SUM)
        grads = torch.autograd.grad(loss * scale, leaves)
        ratios.append([grad.float().abs().sum().item() for grad in grads])
    for number in range(2):
        assert ratios[0][number] / ratios[1][number] == pytest.approx(1 / 3, rel=5e-4)


@pytest.mark.parametrize("rows", CHUNKS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_graph_that_is_kept_gives_the_same_gradients_again(backend, rows):
    x, w, targets = leaves()
    with using(backend):
        loss = linear_cross_entropy(x, w, targets, chunk_rows=rows)
    first = torch.autograd.grad(loss, (x, w), torch.tensor(0.3), retain_graph=True)
    again = torch.autograd.grad(loss, (x, w), torch.tensor(0.3))
    for one, other in zip(first, again):
        assert torch.equal(one, other)
        assert one.abs().sum() > 0
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(loss, (x, w))


@pytest.mark.parametrize("rows", CHUNKS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_arguments_may_have_gaps_and_are_not_changed(backend, rows):
    wide, weight = random(16, 11)[::2, 1::2], random(7, 10, seed=1)[:, ::2]
    x, w = wide.detach().requires_grad_(), weight.detach().requires_grad_()
    before = x.detach().clone(), w.detach().clone()
    with using(backend):
        loss = linear_cross_entropy(x, w, torch.tensor(TARGETS), chunk_rows=rows, reduction=LossReduction.SUM)
    mine = torch.autograd.grad(loss * 0.3, (x, w))
    for number, exact in enumerate(exact_gradients(x, w, torch.tensor(TARGETS), 0.3)):
        close(mine[number], exact, torch.float32, f"gradient {number}", factor=3)
    assert torch.equal(x, before[0])
    assert torch.equal(w, before[1])


@pytest.mark.parametrize("rows", CHUNKS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_frozen_argument_has_no_gradient(backend, rows):
    for frozen in (0, 1):
        x, w, targets = leaves()
        (x, w)[frozen].requires_grad_(False)
        with using(backend):
            loss = linear_cross_entropy(x, w, targets, chunk_rows=rows, reduction=LossReduction.SUM)
        loss.backward()
        assert (x, w)[frozen].grad is None
        exact = exact_gradients(x, w, targets, 1.0)[1 - frozen]
        close((x, w)[1 - frozen].grad, exact, torch.float32, "gradient", factor=3)


@pytest.mark.parametrize("rows", CHUNKS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_small_gradient_of_the_loss_does_not_underflow_in_fp16(backend, rows):
    """x times 1e-8 is 0 in fp16; the gradient of a weight in fp32 is not."""
    x, w, targets = leaves()
    with using(backend), torch.autocast(x.device.type, torch.float16):
        loss = linear_cross_entropy(x, w, targets, chunk_rows=rows, reduction=LossReduction.SUM)
    mine = torch.autograd.grad(loss * 1e-8, (x, w))
    for number, exact in enumerate(exact_gradients(x, w, targets, 1.0)):
        close(mine[number] * 1e8, exact, torch.float16, f"gradient {number}", factor=5)


@pytest.mark.parametrize("rows", [2, 1])
@pytest.mark.parametrize("backend", BACKENDS)
def test_an_ignored_row_with_infinite_logits_has_no_gradient(backend, rows):
    """0 times the gradient of its logits would be NaN."""
    x = torch.tensor([[1.0, 2.0], [3e38, 3e38]], requires_grad=True)
    w = torch.tensor([[1.0, 2.0], [3.0, 4.0], [0.5, 0.5]], requires_grad=True)
    with using(backend):
        linear_cross_entropy(x, w, torch.tensor([1, -100]), chunk_rows=rows).backward()
    assert x.grad.isfinite().all()
    assert not x.grad[1].any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_without_rows_and_without_targets_the_loss_is_0(backend):
    w = random(7, 5).requires_grad_()
    for rows, targets in ((0, []), (2, [-100, -100])):
        x = random(rows, 5).requires_grad_()
        with using(backend):
            loss = linear_cross_entropy(x, w, torch.tensor(targets, dtype=torch.int64))
        grads = torch.autograd.grad(loss, (x, w))
        assert loss == 0
        assert [grad.shape for grad in grads] == [x.shape, w.shape]
        assert not any(grad.any() for grad in grads)


@pytest.mark.skipif(not has_triton(), reason=NO_TRITON)
@pytest.mark.parametrize("columns", [3, 16, 19, 70])
def test_the_kernel_of_loss_and_gradient_computes_what_its_twin_does(columns):
    from dlo_lib.kernels.triton_code.loss_and_gradient import loss_and_gradient

    for dtype in dtypes_of(KernelBackend.TRITON):
        for terms in (CrossEntropyTerms(), CrossEntropyTerms(1, 0.1, 0.02)):
            logits = random(4, columns, dtype=dtype) * 3
            targets = torch.tensor([1, columns - 1, 0, -100 if terms.ignore_index == -100 else 1])
            mine, theirs = logits.clone(), logits.clone()
            losses, exact = torch.empty(4), torch.empty(4)
            loss_and_gradient(mine, targets, terms, losses)
            code().loss_and_gradient(theirs, targets, terms, exact)
            assert torch.allclose(losses, exact, rtol=1e-5, atol=1e-6)
            # The interpreter cuts numbers off where a GPU rounds them.
            assert torch.allclose(mine, theirs, rtol=0, atol=TOLERANCE[dtype])
            assert not mine[3].any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_wrong_target_makes_the_loss_nan_where_the_host_does_not_wait(backend):
    """The twin too: on a GPU it computes fp64, and an index that does not exist would end the process."""
    targets, terms = torch.tensor([0, 5, -1, -100]), CrossEntropyTerms()
    with using(backend):
        losses = torch.empty(4)
        run(backend, "loss_and_gradient", code().loss_and_gradient, random(4, 5), targets, terms, losses)
        of_rows, lse = run(backend, "cross_entropy", row_losses, random(4, 5), targets, terms)
        args = (torch.ones(4), random(4, 5), targets, lse, terms)
        gradient = run(backend, "cross_entropy", logits_gradient, *args)
    for found in (losses, of_rows):
        assert found.isnan().tolist() == [False, True, True, False]
    assert torch.allclose(gradient[1], random(4, 5)[1].softmax(0), atol=1e-6)


@pytest.mark.parametrize("mean", [True, False])
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_total_of_many_rows(backend, mean):
    """The kernel adds them in blocks of 2048."""
    losses, targets, terms = random(5000).abs(), torch.arange(5000) % 7, CrossEntropyTerms(3)
    losses = torch.where(targets == 3, 0, losses)
    total, count = reduced(losses, targets, terms, mean, backend)
    valid = (targets != 3).sum()
    assert torch.allclose(total.double(), losses.double().sum() / (valid if mean else 1), rtol=1e-6)
    assert count == valid if mean else count is None
    total, count = reduced(losses, torch.full_like(targets, 3), terms, mean, backend)
    assert count == 1 if mean else count is None


def test_chunks_are_equal_multiples_of_a_tile():
    rows_of = code()._rows_of_a_chunk
    assert rows_of(2048, 3072) == 2048
    assert rows_of(3073, 3072) == 1664  # two chunks
    assert rows_of(8192, 3072) == 2816
    assert rows_of(8192, 8192) == 4096
    assert rows_of(1, 64) == 128
    assert rows_of(0, 64) == 128


@pytest.mark.parametrize("rows", CHUNKS)
def test_the_host_never_waits_for_a_result(rows):
    """Fake tensors have no data, so that reading one on the host is an error."""
    with FakeTensorMode(), using(KernelBackend.TORCH), torch.device("cpu"):
        x, w = torch.empty(8, 5, requires_grad=True), torch.empty(7, 5, requires_grad=True)
        loss = linear_cross_entropy(x, w, torch.empty(8, dtype=torch.int64), chunk_rows=rows)
        loss.backward()
        assert w.grad.shape == w.shape


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_memory_is_that_of_one_chunk_and_of_the_gradients(dtype):
    """In bytes: the logits of a chunk, dx, dW in fp32, and with bf16 the gradient that is made from it."""
    rows, hidden, vocab, chunk = 256, 64, 512, 32
    x = random(rows, hidden, dtype=dtype).requires_grad_()
    w = random(vocab, hidden, dtype=dtype, seed=1).requires_grad_()
    tracker = MemoryTracker()
    with around_twins(tracker.one_kernel), using(KernelBackend.TORCH), tracker:
        linear_cross_entropy(x, w, torch.arange(rows), chunk_rows=chunk).backward()
    sizes = [event.bytes for event in tracker.events()]
    inputs = x.nbytes + w.nbytes + 8 * rows  # are counted when they are first read
    peak = max(sum(sizes[: end + 1]) for end in range(len(sizes))) - inputs
    size = x.element_size()
    logits, dx, wide = chunk * vocab * size, rows * hidden * size, vocab * hidden * 4
    backward = dx + wide + (vocab * hidden * size if size < 4 else 0)
    small = 16 * rows
    assert peak <= max(logits + dx + wide, backward) + small
    assert peak >= dx + wide


@pytest.fixture
def wide_products(monkeypatch) -> Iterator[list[str]]:
    """cuBLAS's product of narrow matrices with a sum in fp32, on a CPU; yields the operators that ran."""
    seen: list[str] = []

    def mm(a: Tensor, b: Tensor, out_dtype: torch.dtype, *, out: Tensor) -> Tensor:
        assert out.dtype == out_dtype == torch.float32
        seen.append("mm")
        return out.copy_(a.float() @ b.float())

    def addmm(this: Tensor, a: Tensor, b: Tensor, out_dtype, *, beta=1, alpha=1, out: Tensor) -> Tensor:
        assert this.dtype == out.dtype == out_dtype == torch.float32
        assert this.data_ptr() == out.data_ptr()
        seen.append("addmm")
        return out.add_(a.float() @ b.float())

    library = torch.library.Library("aten", "IMPL")
    library.impl("mm.dtype_out", mm, "CPU")
    library.impl("addmm.dtype_out", addmm, "CPU")
    monkeypatch.setattr(code(), "_has_wide_products", lambda a, out: a.dtype is torch.bfloat16)
    yield seen
    library._destroy()


@pytest.mark.skipif(torch.cuda.is_available(), reason="cuBLAS computes these products")
@pytest.mark.parametrize(("rows", "weight_dtype", "expected"), [
    (8, torch.float32, ["mm", "mm"]),
    (3, torch.float32, ["mm", "mm", "mm", "addmm", "mm", "addmm"]),
    (3, torch.bfloat16, ["mm", "addmm", "addmm"]),
    (8, torch.bfloat16, []),
])  # fmt: skip
def test_products_add_in_fp32(wide_products, rows, weight_dtype, expected):
    autocast = weight_dtype is torch.float32
    x, w, targets = leaves(weight_dtype)
    with using(KernelBackend.TORCH), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = linear_cross_entropy(x, w, targets, chunk_rows=rows, reduction=LossReduction.SUM)
    mine = torch.autograd.grad(loss * 0.3, (x, w))
    assert wide_products == expected
    for number, exact in enumerate(exact_gradients(x, w, targets, 0.3)):
        assert mine[number].dtype == weight_dtype
        close(mine[number], exact, torch.bfloat16, f"gradient {number}", factor=2)
