"""Cross-entropy, of logits and of a linear layer."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from dlo_lib.base.errors import UserError
from dlo_lib.kernels import CrossEntropyTerms, LossReduction, cross_entropy, linear_cross_entropy, using
from dlo_lib.profiling.tracker import MemoryTracker
from tests.kernels.parity import BACKENDS, check, dtypes_of, random, strided

FORMS = [{}, {"label_smoothing": 0.1, "z_loss": 0.02}]


def targets() -> torch.Tensor:
    return torch.tensor([4, -100, 0, 6, 6])


def reference(logits, targets, label_smoothing=0.0, z_loss=0.0, mean=False):
    flat, targets = logits.flatten(0, -2), targets.flatten()
    losses = F.cross_entropy(flat, targets, label_smoothing=label_smoothing, reduction="none")
    losses = losses + z_loss * torch.where(targets >= 0, flat.logsumexp(-1), 0).square()
    return losses.sum() / ((targets >= 0).sum() if mean else 1)


@pytest.mark.parametrize("form", FORMS, ids=["plain", "smoothed"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_cross_entropy(backend, form):
    for dtype in dtypes_of(backend):
        for make in (random, strided):
            check(
                lambda x: cross_entropy(x, targets(), **form),
                lambda x: reference(x, targets(), mean=True, **form),
                [make(5, 7, dtype=dtype) * 3], backend, factor=2,
            )  # fmt: skip
    check(
        lambda x: cross_entropy(x, targets()[:4].view(2, 2), reduction=LossReduction.SUM, **form),
        lambda x: reference(x, targets()[:4], **form),
        [random(2, 2, 7)], backend,
    )  # fmt: skip


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_without_a_target_and_masked_logits(backend):
    logits = random(2, 9)
    logits[:, :8] = float("-inf")  # the first block of the row
    with using(backend):
        x = logits.clone().requires_grad_()
        cross_entropy(x, torch.tensor([8, -100])).backward()
        assert x.grad.abs().max() < 1e-6
        assert cross_entropy(random(2, 3), torch.tensor([-100, -100])) == 0
        assert cross_entropy(random(0, 3), torch.zeros(0, dtype=torch.int64)) == 0


@pytest.mark.parametrize("backend", BACKENDS[1:])
def test_rows_of_several_blocks_and_wrong_targets_in_the_kernel(backend):
    from dlo_lib.kernels.triton_code import cross_entropy as code
    from dlo_lib.kernels.triton_code.tuning import trying

    tiles = {"LANES": 2}, {"BLOCK": 8}
    with trying("cross_entropy.losses", tiles[0]), trying("cross_entropy.gradient", tiles[1]):
        for dtype, columns in ((torch.float32, 19), (torch.float32, 16), (torch.bfloat16, 40)):
            x = random(5, columns, dtype=dtype)
            x[3, :17] = float("-inf")  # whole blocks, all lanes of the first one
            x[3, 6] = 1.0
            for form in FORMS if columns != 40 else FORMS[:1]:
                rows = slice(0, 3) if form else slice(None)  # a smoothed loss of -inf is infinite
                check(
                    lambda x: cross_entropy(x, targets()[rows], **form),  # noqa: B023
                    lambda x: reference(x, targets()[rows], mean=True, **form),  # noqa: B023
                    [x[rows]], backend, factor=2,
                )  # fmt: skip
    losses, _ = code.row_losses(random(2, 3), torch.tensor([3, 0]), CrossEntropyTerms())
    assert losses.isnan().tolist() == [True, False]


@pytest.mark.parametrize("backend", BACKENDS[1:])
def test_rows_that_begin_at_any_element_in_the_kernel(backend):
    """A block of the losses begins before its row, and one of the gradient ends in the next row."""
    from dlo_lib.kernels.triton_code.tuning import trying

    wanted = torch.tensor([0, -100, 36, -100, 15])  # -100: the row after the block's first is ignored
    with trying("cross_entropy.losses", {"LANES": 2}), trying("cross_entropy.gradient", {"BLOCK": 32}):
        for dtype in dtypes_of(backend):
            for columns in (37, 48):
                for form in FORMS:
                    check(
                        lambda x: cross_entropy(x, wanted, **form),  # noqa: B023
                        lambda x: reference(x, wanted, mean=True, **form),  # noqa: B023
                        [random(5, columns, dtype=dtype) * 3], backend, factor=2,
                    )  # fmt: skip


@pytest.mark.parametrize("backend", BACKENDS[1:])
def test_a_block_of_the_gradient_marks_the_target_of_each_of_its_rows(backend):
    from dlo_lib.kernels.triton_code import cross_entropy as code
    from dlo_lib.kernels.triton_code.tuning import trying

    logits, wanted, terms = torch.zeros(40, 8), torch.arange(-1, 39) % 8, CrossEntropyTerms(ignore_index=7)
    _, lse = code.row_losses(logits, wanted, terms)
    for rows, block in ((40, 8), (39, 4)):
        with trying("cross_entropy.gradient", {"BLOCK": block}):
            args = logits[:rows, : 8 if block == 8 else 7].contiguous(), wanted[:rows], lse[:rows], terms
            grad = code.logits_gradient(torch.ones(rows), *args)
        exact = torch.full_like(grad, 1 / 8).scatter_add_(
            1, wanted[:rows, None].clamp(max=grad.shape[1] - 1), -torch.ones(rows, 1)
        )
        exact[wanted[:rows] == 7] = 0
        assert (grad - exact).abs().max() < 1e-6


@pytest.mark.parametrize("backend", BACKENDS[1:])
def test_the_gradient_is_written_to_the_logits_and_takes_a_scale_of_any_stride(backend):
    from dlo_lib.kernels.triton_code import cross_entropy as code

    logits, wanted, terms = random(5, 11), targets(), CrossEntropyTerms()
    _, lse = code.row_losses(logits, wanted, terms)
    exact = code.logits_gradient(torch.full((5,), 0.5), logits, wanted, lse, terms)
    out = code.logits_gradient(torch.tensor(0.5).expand(5), logits, wanted, lse, terms, logits)
    assert out is logits
    assert torch.equal(logits, exact)


@pytest.mark.parametrize("form", FORMS, ids=["plain", "smoothed"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_linear_cross_entropy(backend, form):
    for dtype in dtypes_of(backend):
        for reduction in LossReduction:
            check(
                lambda x, w: linear_cross_entropy(x, w, targets(), chunk_rows=2, reduction=reduction, **form),  # noqa: B023
                lambda x, w: reference(x @ w.T, targets(), mean=reduction is LossReduction.MEAN, **form),  # noqa: B023
                [strided(5, 3, dtype=dtype), random(7, 3, dtype=dtype, seed=5)], backend, factor=3,
            )  # fmt: skip


@pytest.mark.parametrize("backend", BACKENDS)
def test_linear_cross_entropy_inside_autocast_has_gradients_of_its_inputs(backend):
    x, w = random(5, 3).requires_grad_(), random(7, 3, seed=5).requires_grad_()
    with using(backend), torch.autocast(torch.get_default_device().type, torch.bfloat16):
        linear_cross_entropy(x, w, targets(), chunk_rows=2).backward()
    wide, weight = (tensor.detach().double().requires_grad_() for tensor in (x, w))
    reference(wide @ weight.T, targets(), mean=True).backward()
    for ours, exact in ((x, wide), (w, weight)):
        assert ours.grad.dtype == torch.float32
        assert (ours.grad - exact.grad).abs().max() < 0.02 * exact.grad.abs().max()


def test_linear_cross_entropy_never_stores_the_logits():
    """Forward and backward allocate the gradients, the logits of one chunk and small tensors."""
    rows, hidden, vocab = 256, 8, 512
    x, w = random(rows, hidden).requires_grad_(), random(vocab, hidden, seed=1).requires_grad_()
    every = torch.arange(rows)

    def peak(loss) -> int:
        x.grad = w.grad = None
        tracker = MemoryTracker()
        with tracker:
            loss().backward()
        sizes = [event.bytes for event in tracker.events()]
        return max(sum(sizes[: end + 1]) for end in range(len(sizes)))

    logits = 4 * rows * vocab
    ours = peak(lambda: linear_cross_entropy(x, w, every, chunk_rows=16))
    assert ours < 0.5 * logits
    assert peak(lambda: cross_entropy(x @ w.T, every)) > 2 * logits
    with torch.no_grad():
        assert not linear_cross_entropy(x, w, every).requires_grad


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: cross_entropy(torch.ones(2, 3), torch.tensor([0, 3])),
            "targets contains 3: it should be 0 to 2",
        ),
        (lambda: cross_entropy(torch.ones(2, 3), torch.ones(2)), "targets is float32: it should be int64"),
        (
            lambda: cross_entropy(torch.ones(2, 3), targets()),
            r"targets has shape \(5,\): it should be \(2,\)",
        ),
        (lambda: cross_entropy(torch.ones(5, 7), targets(), label_smoothing=2), "label_smoothing is 2"),
        (lambda: cross_entropy(torch.ones(5, 7), targets(), z_loss=-1), "z_loss is -1"),
        (lambda: linear_cross_entropy(torch.ones(5, 2), torch.ones(7, 3), targets()), r"\(vocab, hidden\)"),
        (
            lambda: linear_cross_entropy(torch.ones(5, 3), torch.ones(7, 3), targets(), chunk_rows=0),
            "chunk_rows is 0: use at least 1",
        ),
    ],
)
def test_wrong_input_is_refused(call, message):
    """On the CPU. On a GPU, whose values the host does not read, a wrong target makes the loss NaN."""
    with torch.device("cpu"), pytest.raises(UserError, match=message):
        call()
