"""The optimisers of the library take the steps of their papers, which twins compute in float64 (Lion:
``test_lion``)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

from dlo_lib.base.errors import UserError
from dlo_lib.optim import muon as muon_module
from dlo_lib.optim.adafactor import Adafactor
from dlo_lib.optim.adamw_8bit import AdamW8bit, code_book, dequantised, quantised
from dlo_lib.optim.lamb import LAMB
from dlo_lib.optim.lars import LARS
from dlo_lib.optim.muon import LARGE_SIDE, Muon, orthogonalised
from dlo_lib.optim.schedule_free import ScheduleFreeAdamW
from dlo_lib.optim.soap import SOAP

Array = NDArray[np.float64]
Twin = Iterator[Array]
"""Receives a gradient and a learning rate, and gives the parameter."""

SHAPES = ((5, 3), (5, 3), (3, 6), (4,), (), (2, 3, 2))
SQUARES = ((4, 4), (4, 4), (3, 3), (4,))
"""For bases of both sides: one gradient of (5, 3) leaves two dimensions without a direction."""
DECAY, EPS, BETAS = 0.3, 1e-3, (0.8, 0.9)


def norm(x: Array) -> float:
    return float(np.sqrt((x * x).sum()))


def adam(g: Array, m: Array, v: Array, t: int) -> tuple[Array, Array, Array]:
    m = BETAS[0] * m + (1 - BETAS[0]) * g
    v = BETAS[1] * v + (1 - BETAS[1]) * g * g
    return m / (1 - BETAS[0] ** t) / (np.sqrt(v / (1 - BETAS[1] ** t)) + EPS), m, v


def lamb(p: Array) -> Any:
    m, v, t = 0 * p, 0 * p, 0
    while True:
        g, lr = yield p
        t += 1
        u, m, v = adam(g, m, v, t)
        u = u + DECAY * p
        p = p - lr * (norm(p) / norm(u) if p.ndim > 1 else 1.0) * u


def lars(p: Array, nesterov: bool) -> Any:
    m = 0 * p
    while True:
        g, lr = yield p
        ratio = 0.1 * norm(p) / (norm(g) + DECAY * norm(p)) if p.ndim > 1 else 1.0
        u = ratio * (g + DECAY * p)
        m = 0.9 * m + u
        p = p - lr * (u + 0.9 * m if nesterov else m)


def newton_schulz(x: Array) -> Array:
    x = x / norm(x)
    for _ in range(5):
        x = 3.4445 * x - 4.775 * (x @ x.T) @ x + 2.0315 * (x @ x.T) @ (x @ x.T) @ x
    return x


def muon(p: Array, nesterov: bool, spectral: bool) -> Any:
    m, v, t = 0 * p, 0 * p, 0
    while True:
        g, lr = yield p
        t += 1
        p = p * (1 - lr * DECAY)
        if p.ndim < 2:
            u, m, v = adam(g, m, v, t)
            p = p - lr * u
            continue
        m = 0.95 * m + 0.05 * g
        u = (0.05 * g + 0.95 * m if nesterov else m).reshape(len(g), -1)
        rows, columns = u.shape
        factor = np.sqrt(max(1, rows / columns)) if spectral else 0.2 * np.sqrt(max(rows, columns))
        p = p - lr * factor * newton_schulz(u).reshape(p.shape)


def adafactor(p: Array, d: float) -> Any:
    """V is an outer product, computed element by element."""
    rows, columns, variance, t = 0.0, 0.0, 0 * p, 0
    while True:
        g, lr = yield p
        t += 1
        share = t**-0.8
        length = max(0.5, float(np.sqrt((p * p).mean()))) * min(lr, 1 / np.sqrt(t))
        p = p * (1 - lr * DECAY)
        if p.ndim > 1:
            rows = (1 - share) * rows + share * (g * g).mean(-1)
            columns = (1 - share) * columns + share * (g * g).mean(-2)
            v = np.einsum("...i,...j->...ij", rows, columns)
            v = v / np.maximum(np.asarray(rows).mean(-1), EPS)[..., None, None]
        else:
            v = variance = (1 - share) * variance + share * g * g
        u = g / np.sqrt(np.maximum(v, EPS * EPS))
        p = p - length * u / max(1.0, float(np.sqrt((u * u).mean())) / d)


def schedule_free(p: Array) -> Any:
    x, z, v, rates = p, p, 0 * p, []
    while True:
        g, lr = yield (1 - BETAS[0]) * z + BETAS[0] * x
        y = (1 - BETAS[0]) * z + BETAS[0] * x
        rates.append(lr * min(1, (len(rates) + 1) / 3))
        v = BETAS[1] * v + (1 - BETAS[1]) * g * g
        z = z - rates[-1] * (g / (np.sqrt(v / (1 - BETAS[1] ** len(rates))) + EPS) + DECAY * y)
        c = rates[-1] ** 2 / sum(rate**2 for rate in rates)
        x = (1 - c) * x + c * z


def soap(p: Array, max_side: int) -> Any:
    shape, t = p.shape, 0
    if p.ndim < 2:
        m, v = 0 * p, 0 * p
        while True:
            g, lr = yield p
            t += 1
            u, m, v = adam(g, m, v, t)
            p = p * (1 - lr * DECAY) - lr * u
    g, lr = yield p
    g = g.reshape(len(g), -1)
    sides = [0.1 * g @ g.T, 0.1 * g.T @ g]
    bases = [np.linalg.eigh(s)[1][:, ::-1] if len(s) <= max_side else np.eye(len(s)) for s in sides]
    m, v = 0 * g, 0 * g
    while True:
        g, lr = yield p
        g = g.reshape(len(g), -1)
        t += 1
        left, right = bases
        m = BETAS[0] * m + (1 - BETAS[0]) * g
        v = BETAS[1] * v + (1 - BETAS[1]) * (left.T @ g @ right) ** 2
        mean = left.T @ m @ right / (1 - BETAS[0] ** t)
        u = left @ (mean / (np.sqrt(v / (1 - BETAS[1] ** t)) + EPS)) @ right.T
        p = p * (1 - lr * DECAY) - lr * u.reshape(shape)
        sides = [0.9 * sides[0] + 0.1 * g @ g.T, 0.9 * sides[1] + 0.1 * g.T @ g]
        if t % 2 == 0:
            bases = [np.linalg.qr(s @ b)[0] if len(s) <= max_side else b for s, b in zip(sides, bases)]


ADAM: dict[str, Any] = {"betas": BETAS, "eps": EPS}
CASES: dict[str, tuple[Callable[..., torch.optim.Optimizer], Callable[[Array], Any]]] = {
    "adafactor": (partial(Adafactor, eps=(EPS, 0.5)), partial(adafactor, d=1.0)),
    "adafactor, one by one": (
        partial(Adafactor, eps=(EPS, 0.5), d=0.3, foreach=False),
        partial(adafactor, d=0.3),
    ),
    "lamb": (partial(LAMB, **ADAM), lamb),
    "lamb, one by one": (partial(LAMB, **ADAM, foreach=False), lamb),
    "lars": (partial(LARS, trust=0.1), partial(lars, nesterov=False)),
    "lars, nesterov": (partial(LARS, trust=0.1, nesterov=True, foreach=False), partial(lars, nesterov=True)),
    "muon": (partial(Muon, **ADAM, dtype=torch.float64), partial(muon, nesterov=True, spectral=False)),
    "muon, spectral": (
        partial(Muon, **ADAM, dtype=torch.float64, nesterov=False, scale="spectral", foreach=False),
        partial(muon, nesterov=False, spectral=True),
    ),
    "schedule-free": (partial(ScheduleFreeAdamW, **ADAM, warmup_steps=3), schedule_free),
    "soap": (partial(SOAP, **ADAM, basis_beta=0.9, every=2), partial(soap, max_side=99)),
    "soap, short sides": (
        partial(SOAP, **ADAM, basis_beta=0.9, every=2, max_side=4),
        partial(soap, max_side=4),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_every_step_is_that_of_the_paper(name: str):
    make, twin = CASES[name]
    shapes = SQUARES if name == "soap" else SHAPES
    draw = np.random.default_rng(0)
    values = [np.asarray(draw.normal(size=shape)) for shape in shapes]
    params = [nn.Parameter(torch.tensor(value)) for value in values]
    twins = [twin(value) for value in values]
    for each in twins:
        next(each)
    optimizer = make([{"params": params[:2]}, {"params": params[2:]}], lr=0.1, weight_decay=DECAY)
    for step in range(7):
        if step == 3:  # a resumed run
            saved = optimizer.state_dict()
            optimizer = make([{"params": params[:2]}, {"params": params[2:]}], lr=9.0)
            optimizer.load_state_dict(saved)
        rate = 0.1 / (1 + step)
        for group in optimizer.param_groups:
            group["lr"] = rate  # a schedule
        grads = [np.asarray(draw.normal(size=shape)) for shape in shapes]
        for param, grad in zip(params, grads):
            param.grad = torch.tensor(grad)
        optimizer.step()
        for param, each, grad in zip(params, twins, grads):
            np.testing.assert_allclose(param.detach().numpy(), each.send((grad, rate)), rtol=1e-9, atol=1e-9)
            np.testing.assert_array_equal(param.grad.numpy(), grad)


@pytest.mark.parametrize("name", CASES)
def test_a_parameter_without_a_gradient_stays_and_a_sparse_gradient_is_refused(name: str):
    make, _ = CASES[name]
    frozen, trained = nn.Parameter(torch.ones(3, 2)), nn.Parameter(torch.ones(3, 2))
    optimizer = make([frozen, trained], lr=0.5, weight_decay=0.1)

    def closure() -> Any:
        optimizer.zero_grad()
        loss = (trained * torch.arange(6).view(3, 2)).square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 55
    optimizer.step(closure)  # SOAP does not move in its first step
    assert torch.equal(frozen, torch.ones(3, 2))
    assert not torch.equal(trained, torch.ones(3, 2))
    trained.grad = torch.eye(3)[:, :2].to_sparse()
    with pytest.raises(UserError, match="sparse=False"):
        optimizer.step()


def test_zero_weights_and_zero_gradients_have_the_ratio_one():
    for make in (partial(LAMB, weight_decay=0.0), LARS):
        params = [nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.ones(2, 2))]
        params[0].grad, params[1].grad = torch.ones(2, 2), torch.zeros(2, 2)
        make(params, lr=0.5).step()
        torch.testing.assert_close(params[0].detach(), torch.full((2, 2), -0.5), rtol=1e-4, atol=0)
        assert torch.equal(params[1].detach(), torch.ones(2, 2))


def test_orthogonalised_matrices_keep_their_directions_and_lose_their_singular_values():
    generator = torch.Generator().manual_seed(0)
    for shape in ((32, 8), (8, 32), (3, 16, 16)):
        matrices = torch.randn(shape, generator=generator)
        u, values, v = torch.linalg.svd(matrices, full_matrices=False)
        got = orthogonalised(matrices).float()
        kept = u.mT @ got @ v.mT
        diagonal = kept.diagonal(dim1=-2, dim2=-1)
        assert diagonal[values > 0.1 * values.amax(-1, keepdim=True)].min() > 0.6
        assert diagonal.max() < 1.25
        assert (kept - torch.diag_embed(diagonal)).abs().max() < 0.05


@pytest.mark.parametrize(("rows", "columns"), [(LARGE_SIDE, 200), (200, LARGE_SIDE)])
def test_large_matrices_that_a_cpu_computes_one_by_one_give_what_a_batch_gives(
    rows: int, columns: int, monkeypatch: pytest.MonkeyPatch
):
    matrices = torch.randn(2, rows, columns, dtype=torch.float64)
    got = orthogonalised(matrices, dtype=torch.float64)
    one = orthogonalised(matrices[0], dtype=torch.float64)
    monkeypatch.setattr(muon_module, "LARGE_SIDE", 1000)
    batch = orthogonalised(matrices, dtype=torch.float64)
    torch.testing.assert_close(got, batch, rtol=0, atol=1e-12)
    torch.testing.assert_close(one, batch[0], rtol=0, atol=1e-12)


@pytest.mark.skipif(
    not hasattr(torch.optim, "Muon"), reason="NOT TESTED HERE: torch.optim.Muon (PyTorch 2.9 or later)"
)
@pytest.mark.parametrize(("scale", "name"), [("adamw", "match_rms_adamw"), ("spectral", "original")])
def test_muon_is_that_of_pytorch(scale: str, name: str):
    generator = torch.Generator().manual_seed(0)
    mine, theirs = ([nn.Parameter(torch.ones(6, 4)), nn.Parameter(torch.ones(4, 6))] for _ in range(2))
    options: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.3}
    one, other = Muon(mine, scale=scale, **options), torch.optim.Muon(theirs, adjust_lr_fn=name, **options)
    for _ in range(3):
        for my_param, its in zip(mine, theirs):
            my_param.grad = its.grad = torch.randn(its.shape, generator=generator)
        one.step()
        other.step()
    for my_param, its in zip(mine, theirs):
        torch.testing.assert_close(my_param, its, rtol=0, atol=0.01)  # bf16


@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_adafactor_is_that_of_pytorch_step_by_step(dtype: torch.dtype, foreach: bool):
    """Also with rows without a gradient, a parameter of zeros, large gradients and another rate in each
    step."""
    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]
    start[1].zero_()
    mine, theirs = ([nn.Parameter(value.clone()) for value in start] for _ in range(2))
    options: dict[str, Any] = {"weight_decay": 0.3, "foreach": foreach}
    one, other = Adafactor(mine, **options), torch.optim.Adafactor(theirs, **options)
    close = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.02}[dtype]
    for step in range(6):
        for my_param, its in zip(mine, theirs):
            grad = (torch.randn(its.shape, generator=generator) * 10.0 ** (step - 3)).to(dtype)
            if grad.ndim > 1:
                grad[0] = 0
            my_param.grad, its.grad = grad, grad.clone()
        for optimizer in (one, other):
            optimizer.param_groups[0]["lr"] = 0.1 / (1 + step)
            optimizer.step()
        for my_param, its in zip(mine, theirs):
            torch.testing.assert_close(my_param, its, rtol=close, atol=close)
            held, peer = one.state[my_param], other.state[its]
            assert held.keys() == peer.keys()
            for key, value in peer.items():
                torch.testing.assert_close(held[key], value, rtol=close, atol=0)


def test_the_state_of_adafactor_is_a_row_and_a_column():
    param = nn.Parameter(torch.ones(300, 200))
    param.grad = torch.ones(300, 200)
    optimizer = Adafactor([param])
    optimizer.step()
    assert sum(value.numel() for value in optimizer.state[param].values()) == 300 + 200 + 1


def test_a_group_may_leave_muon_and_an_unknown_scale_is_one_line():
    embedding, matrix = nn.Parameter(torch.ones(3, 2)), nn.Parameter(torch.ones(3, 2))
    optimizer = Muon([{"params": [embedding], "muon": False}, {"params": [matrix]}], lr=0.1)
    embedding.grad = matrix.grad = torch.randn(3, 2)
    optimizer.step()
    assert set(optimizer.state[embedding]) == {"step", "exp_avg", "exp_avg_sq"}
    assert set(optimizer.state[matrix]) == {"momentum_buffer"}
    with pytest.raises(UserError, match="choose adamw or spectral"):
        Muon([matrix], scale="rms")


def test_the_code_books_are_those_of_the_paper():
    for signed in (True, False):
        book = code_book(signed)
        assert book.shape == (256,)
        assert bool((book.diff() > 0).all())
        assert book[-1] == 1
        assert 0 in book
        assert book[0] == (0 if not signed else pytest.approx(-0.9929688))
    draw = torch.Generator().manual_seed(0)
    values = torch.randn(3, 100, generator=draw) * torch.logspace(-4, 0, 100)
    numbers, scales = quantised(values, signed=True)
    assert numbers.shape == (2, 256)
    assert numbers.dtype == torch.uint8
    assert scales.shape == (2, 1)
    back = dequantised(numbers, scales, True, values.shape)
    largest = values.flatten()[:256].abs().max()
    assert (back - values).abs().max() < 0.01 * largest  # the widest step of the signed book is 1/64
    tenth = values.abs() < 0.001 * largest
    assert (back - values)[tenth].abs().max() < 1e-4 * largest  # small values are finer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_8_bits_follow_adamw_and_resume_bit_for_bit(dtype: torch.dtype):
    generator = torch.Generator().manual_seed(0)
    shapes = ((80, 64), (80, 64), (10, 10))
    start = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    runs = [[nn.Parameter(value.clone()) for value in start] for _ in range(3)]
    kinds: tuple[Callable[..., torch.optim.Optimizer], ...] = (AdamW8bit, AdamW8bit, torch.optim.AdamW)
    optimizers = [kind(params, lr=0.01) for kind, params in zip(kinds, runs)]
    for step in range(6):
        if step == 3:
            saved = optimizers[1].state_dict()
            optimizers[1] = AdamW8bit(runs[1])
            optimizers[1].load_state_dict(saved)
        grads = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
        for params, optimizer in zip(runs, optimizers):
            for param, grad in zip(params, grads):
                param.grad = grad.clone()
            optimizer.step()
    for whole, resumed, exact, begin in zip(*runs, start):
        assert torch.equal(whole, resumed)
        moved = (exact - begin).float()
        difference = (whole - exact).float().norm() / moved.norm()
        assert difference < (0.03 if dtype == torch.float32 else 0.15)
    state = optimizers[0].state
    assert set(state[runs[0][2]]) == {"step", "exp_avg", "exp_avg_sq"}  # too small
    kept = {name: value for name, value in state[runs[0][0]].items() if value.ndim}
    assert sum(value.nbytes for value in kept.values()) == 2 * 80 * 64 * (1 + 4 / 256)


def test_the_schedule_free_parameters_hold_the_average_in_evaluation():
    param = nn.Parameter(torch.zeros(2))
    optimizer = ScheduleFreeAdamW([param], lr=0.1, eps=0.0, betas=(0.5, 0.9))
    iterates = []
    for _ in range(4):
        param.grad = torch.tensor([1.0, -2.0])
        optimizer.step()
        iterates.append(optimizer.state[param]["z"].clone())
    training = param.detach().clone()
    optimizer.eval()
    torch.testing.assert_close(param.detach(), torch.stack(iterates).mean(0))
    with pytest.raises(UserError, match=r"call optimizer\.train\(\)"):
        optimizer.step()
    again = ScheduleFreeAdamW([param])
    again.load_state_dict(optimizer.state_dict())
    again.train()
    again.train()
    torch.testing.assert_close(param.detach(), training)
    with pytest.raises(UserError, match=r"betas\[0\] is 0"):
        ScheduleFreeAdamW([param], betas=(0.0, 0.9))
