"""``--fp8``: the products are those that ``optim.precision`` emulates, and a run learns what it learns in
bf16."""

from __future__ import annotations

import pytest
import torch

from dlo_lib.base.errors import UserError
from dlo_lib.launch import run_ranks
from dlo_lib.models import Llama, model_config
from dlo_lib.optim.fp8_blocks import use_fp8
from dlo_lib.optim.precision import ScaledLinear, fp8_matmul, scaled_matmul
from dlo_lib.train import TrainConfig, prepare, read_metrics, train
from dlo_lib.train.__main__ import parse


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_products_are_those_of_the_emulation(dtype):
    torch.manual_seed(0)
    x, grad = torch.randn(2, 16, 64).bfloat16(), torch.randn(2, 16, 48).bfloat16()
    weight = torch.randn(48, 64).to(dtype)
    found = []
    for product in (scaled_matmul, fp8_matmul, torch.nn.functional.linear):
        inputs = x.clone().requires_grad_(), weight.clone().requires_grad_()
        same = inputs[1] if product is not torch.nn.functional.linear else inputs[1].bfloat16()
        out = product(inputs[0], same)
        out.backward(grad)
        found.append([out.detach(), inputs[0].grad, inputs[1].grad])
    for ours, emulated, exact in zip(*found):
        assert ours.dtype == emulated.dtype == exact.dtype
        torch.testing.assert_close(ours, emulated, rtol=2e-2, atol=1e-2)
        assert 0.01 < (ours.float() - exact.float()).norm() / exact.float().norm() < 0.1, "8 bits round"


@pytest.mark.parametrize("shapes", [((15, 32), (16, 32)), ((16, 40), (16, 40)), ((16, 32), (24, 32))])
def test_sizes_that_the_products_do_not_have_are_refused(shapes):
    with pytest.raises(UserError, match="multiples of 16"):
        scaled_matmul(*(torch.zeros(shape, dtype=torch.bfloat16) for shape in shapes))


def test_the_products_compile_to_one_graph():
    inputs = torch.randn(2, 16, 64).bfloat16(), torch.randn(48, 64).requires_grad_()
    compiled = torch.compile(scaled_matmul, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(*inputs), scaled_matmul(*inputs))


def test_only_the_linear_layers_of_blocks_change_and_no_parameter():
    model = Llama(model_config("tiny-moe"))
    before = {name: id(parameter) for name, parameter in model.named_parameters()}
    use_fp8(model)
    assert {name: id(parameter) for name, parameter in model.named_parameters()} == before
    changed = [name for name, module in model.named_modules() if isinstance(module, ScaledLinear)]
    assert len(changed) == 4 + 3 + 4 + 3, "attention, MLP, attention, shared expert"
    assert not isinstance(model.lm_head, ScaledLinear)


def trained(configs: list[TrainConfig]) -> list[list[float]]:
    prepare.require_fp8 = lambda device: None  # a CPU computes these products, slowly
    return [[line.loss for line in read_metrics(train(config).out)] for config in configs]


def test_a_run_learns_what_it_learns_in_bf16(small_run):
    options = {"model": "tiny", "precision": "bf16", "parallel": "fsdp"}
    configs = [small_run("bf16", **options), small_run("fp8", fp8=True, checkpointing=True, **options)]
    bf16, fp8 = run_ranks(trained, 2, configs, timeout=200)[0]
    assert 0 < abs(fp8[-1] - bf16[-1]) < 0.05 * (bf16[0] - bf16[-1])


def test_runs_without_8_bits_are_refused(small_run):
    with pytest.raises(UserError, match="add --precision bf16"):
        parse(["--fp8"])
    with pytest.raises(UserError, match="leave --fp8 out, or use --tp 1"):
        parse(["--fp8", "--precision", "bf16", "--tp", "2"])
    with pytest.raises(UserError, match="batch x seq is 1 x 100: use another --seq"):
        parse(["--fp8", "--precision", "bf16", "--batch", "1", "--seq", "100"])
    if not torch.cuda.is_available():
        with pytest.raises(UserError, match="needs a GPU with 8-bit tensor cores"):
            train(small_run(fp8=True, precision="bf16"))
