"""Vector addition and softmax; and how every fused operation chooses its backend."""

from __future__ import annotations

import pytest
import torch

from dlo_lib.base.errors import UserError
from dlo_lib.kernels import KernelBackend, dispatch, softmax, using, vector_add
from tests.kernels.parity import (  # first: it sets TRITON_INTERPRET
    BACKENDS,
    check,
    dtypes_of,
    random,
    strided,
)


@pytest.mark.parametrize("backend", BACKENDS)
def test_vector_add(backend):
    for dtype in dtypes_of(backend):
        for make, shape in ((random, (1025,)), (strided, (3, 5)), (random, (0,)), (random, ())):
            check(vector_add, torch.add, [make(*shape, dtype=dtype, seed=s) for s in (0, 2)], backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_softmax(backend):
    for dtype in dtypes_of(backend):
        for make, shape in ((random, (3, 17)), (strided, (2, 3, 5)), (random, (0, 4)), (random, (2, 0))):
            check(softmax, lambda x: x.softmax(-1), [make(*shape, dtype=dtype)], backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_softmax_of_large_and_infinite_elements(backend):
    x = torch.tensor([[1e4, -1e4, float("-inf"), 9.9e3], [float("-inf")] * 3 + [0.0]])
    with using(backend):
        torch.testing.assert_close(softmax(x), x.softmax(-1), rtol=1e-6, atol=1e-30)
        assert softmax(torch.full((1, 2), float("-inf"))).isnan().all()


@pytest.mark.parametrize("backend", BACKENDS[1:])
def test_softmax_of_rows_that_do_not_fit_into_a_block(backend, monkeypatch):
    from dlo_lib.kernels.triton_code import softmax as triton_softmax
    from dlo_lib.kernels.triton_code.tuning import trying

    monkeypatch.setattr(triton_softmax, "LONGEST_ROW", 7)
    for dtype, columns in ((torch.float32, 37), (torch.bfloat16, 64), (torch.float16, 5)):
        x = random(2, columns, dtype=dtype)
        x[0, :16] = x[1, 1:3] = float("-inf")  # all of the first block of a row, lanes of the other
        if columns == 5:
            x[0, 3] = 1.0
        with trying("softmax.long", {"LANES": 4}):
            check(softmax, lambda x: x.softmax(-1), [x], backend)


@pytest.mark.parametrize("backend", BACKENDS[1:])
def test_blocks_and_rows_that_are_whole_or_not(backend):
    """A whole block is loaded without a mask; a partial one, and a group that lacks rows, is not."""
    for shape in ((4, 64), (3, 64), (4, 63), (1, 1), (65, 2)):
        x, y = random(*shape), random(*shape, seed=1)
        check(vector_add, torch.add, [x, y], backend)
        check(softmax, lambda x: x.softmax(-1), [x], backend)


@pytest.mark.parametrize("backend", BACKENDS[1:])
def test_softmax_leaves_the_gradient_of_its_output(backend):
    """Autograd may give this gradient to other operations as well."""
    x, grad = random(3, 8).requires_grad_(), random(3, 8, seed=1)
    before = grad.clone()
    with using(backend):
        y = softmax(x)
        of_y = y.detach().clone()
        y.backward(grad, retain_graph=True)
        y.backward(grad)
    assert torch.equal(grad, before)
    assert torch.equal(y, of_y)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: vector_add(torch.ones(3), torch.ones(4)),
            r"x and y have shape \(3,\) and \(4,\): they",
        ),
        (lambda: vector_add(torch.ones(3), torch.ones(3).half()), "x and y have dtype float32 and float16"),
        (
            lambda: vector_add(torch.ones(3).long(), torch.ones(3).long()),
            "x is int64: it should be",
        ),
        (lambda: softmax(torch.ones(())), "x is a scalar"),
    ],
)
def test_wrong_input_is_refused(call, message):
    with pytest.raises(UserError, match=message):
        call()


def test_the_twin_computes_what_triton_cannot(monkeypatch):
    x = torch.ones(2, device="cpu")
    assert dispatch.backend_for(x) is KernelBackend.TORCH
    with using(KernelBackend.TORCH):
        assert dispatch.backend_for(x) is KernelBackend.TORCH
    monkeypatch.setattr(dispatch, "has_triton", lambda: False)
    with pytest.raises(UserError, match=r"pip install 'dlo-lib\[kernels\]'"), using(KernelBackend.TRITON):
        pass
    monkeypatch.setattr(dispatch, "has_triton", lambda: True)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with using(KernelBackend.TRITON):
        assert dispatch.backend_for(x) is KernelBackend.TRITON  # interpreted
        with pytest.raises(UserError, match="compute float32, bfloat16, float16, not float64"):
            softmax(x.double())
        monkeypatch.delenv("TRITON_INTERPRET")
        with pytest.raises(UserError, match="need a CUDA tensor: set TRITON_INTERPRET=1"):
            softmax(x)


@pytest.mark.parametrize("backend", BACKENDS[1:])
def test_a_launch_is_prepared_once_for_a_shape_and_again_for_tried_settings(backend):
    from dlo_lib.kernels.triton_code.launch import recorded
    from dlo_lib.kernels.triton_code.softmax import softmax_forward
    from dlo_lib.kernels.triton_code.tuning import planned, trying, tuned

    x = random(4, 8)
    # a GPU has another table than the interpreter
    rows, half = (tuned("softmax.forward", x.device, block=8, bytes=8 * size)["ROWS"] for size in (4, 2))
    assert rows > 1
    with recorded() as launches:
        softmax_forward(x)
        with trying("softmax.forward", {"ROWS": 1}):
            softmax_forward(x)
        softmax_forward(x.bfloat16())
    assert [launch.arguments["ROWS"] for launch in launches] == [rows, 1, half]
    assert [launch.grid for launch in launches] == [(-(-4 // rows),), (4,), (-(-4 // half),)]

    calls: list[int] = []
    plan = planned(calls.append)
    plan(1), plan(1), plan(2)
    assert calls == [1, 2]
    for _ in range(2):
        with trying("softmax.forward", {"ROWS": 1}):
            plan(2), plan(2)
    plan(2)
    assert calls == [1, 2, 2, 2]
