"""The mixture-of-experts layer equals one that is written out with masks, in outputs and gradients; what is
dropped is counted; the balance losses and the balance bias even out the loads."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from dlo_lib.base.errors import UserError
from dlo_lib.data import batches
from dlo_lib.models import GateWeights, Llama, MoEConfig, MoELayer, model_config
from dlo_lib.models.checkpoint import load_checkpoint, save_checkpoint
from dlo_lib.models.counts import active_parameters, flops_per_token, parameters
from dlo_lib.models.experts import Experts
from dlo_lib.models.hf_config import config_from_hf, config_to_hf
from dlo_lib.models.llama import MLP
from dlo_lib.models.moe import moe_layers, scale_auxiliary_losses, update_balance_bias
from dlo_lib.models.token_dispatch import combine_rows, plan_dispatch, scatter_tokens
from dlo_lib.optim import train_step
from tests.lazy import Lazy
from tests.models.moe_twin import dense_moe

mixtral = Lazy("transformers.models.mixtral.modeling_mixtral")
HIDDEN = 12
PLAIN = MoEConfig(num_experts=6, top_k=2, intermediate=5, balance_loss=0.3, z_loss=0.1)
CONFIGS = {
    "top-2": PLAIN,
    "top-1": replace(PLAIN, top_k=1, gate_weights=GateWeights.SOFTMAX_BEFORE),
    "top-3 before": replace(PLAIN, top_k=3, gate_weights=GateWeights.SOFTMAX_BEFORE),
    "sigmoid, bias": replace(PLAIN, gate_weights=GateWeights.SIGMOID, bias_rate=0.1),
    "shared": replace(PLAIN, shared_intermediate=7),
    "capacity": replace(PLAIN, capacity_factor=0.8),
    "capacity, top-1": replace(
        PLAIN, top_k=1, capacity_factor=1.0, gate_weights=GateWeights.SOFTMAX_BEFORE, shared_intermediate=3
    ),
    "one expert": MoEConfig(num_experts=1, top_k=1, intermediate=5, gate_weights=GateWeights.SOFTMAX_BEFORE),
}


def layer_of(config: MoEConfig, seed: int = 0) -> MoELayer:
    torch.manual_seed(seed)
    sizes = replace(model_config("tiny"), hidden=HIDDEN)
    shared = MLP(sizes, config.shared_intermediate) if config.shared_intermediate else None
    layer = MoELayer(config, HIDDEN, shared).double()
    for param in layer.parameters():
        torch.nn.init.normal_(param, std=0.5)
    if layer.router.balance_bias is not None:
        torch.nn.init.normal_(layer.router.balance_bias, std=0.3)
    return layer


def weights_of(layer: MoELayer) -> dict[str, Tensor]:
    weights: dict[str, Tensor] = dict(layer.named_parameters())
    return weights | {name.removeprefix("router."): value for name, value in layer.named_buffers()}


def gradients_of(layer: MoELayer) -> dict[str, Tensor]:
    found = {name: param.grad for name, param in layer.named_parameters()}
    layer.zero_grad()
    return {name: grad for name, grad in found.items() if grad is not None}


@pytest.mark.parametrize("tokens", [1, 7, 40])
@pytest.mark.parametrize("name", CONFIGS)
def test_outputs_and_gradients_equal_those_of_masks(name, tokens):
    config = CONFIGS[name]
    layer = layer_of(config)
    x = torch.randn(tokens, HIDDEN, dtype=torch.float64, requires_grad=True)
    target = torch.randn(tokens, HIDDEN, dtype=torch.float64)
    (expected,), losses, load = dense_moe(weights_of(layer), config, [x])
    ((expected - target).square().sum() + losses).backward()
    grad_x, x.grad = x.grad, None
    grads = gradients_of(layer)

    out = layer(x)
    (out - target).square().sum().backward()  # the layer adds the gradients of its losses
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(x.grad, grad_x, rtol=0, atol=1e-10)
    torch.testing.assert_close(gradients_of(layer), grads, rtol=0, atol=1e-10)
    assert layer.stats is not None
    assert layer.stats.load.tolist() == load.tolist()
    mine = config.balance_loss * layer.stats.balance_loss + config.z_loss * layer.stats.z_loss
    torch.testing.assert_close(mine, losses.detach(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["top-2", "capacity", "shared"])
def test_no_token_at_all(name):
    layer = layer_of(CONFIGS[name])
    x = torch.zeros(0, HIDDEN, dtype=torch.float64, requires_grad=True)
    layer(x).sum().backward()
    assert x.grad is not None
    assert x.grad.shape == (0, HIDDEN)
    assert not any(grad.any() for grad in gradients_of(layer).values())


def test_an_expert_without_tokens_has_a_gradient_of_zeros():
    layer = layer_of(
        replace(PLAIN, top_k=1, gate_weights=GateWeights.SOFTMAX_BEFORE, balance_loss=0.0, z_loss=0.0)
    )
    layer(torch.randn(2, 2, HIDDEN, dtype=torch.float64)).sum().backward()
    load = layer.stats.load  # type: ignore[union-attr]
    assert (load == 0).any()
    for param in layer.experts.parameters():
        assert [bool(grad.any()) for grad in param.grad] == (load > 0).tolist()  # type: ignore[union-attr]


def test_gradcheck_of_the_whole_layer():
    layer = layer_of(replace(PLAIN, balance_loss=0.0, z_loss=0.0, capacity_factor=1.0))
    x = torch.randn(4, HIDDEN, dtype=torch.float64, requires_grad=True)
    params = [x, *layer.parameters()]
    names = [name for name, _ in layer.named_parameters()]

    def call(x: Tensor, *values: Tensor) -> Tensor:
        return torch.func.functional_call(layer, dict(zip(names, values)), (x,))

    assert torch.autograd.gradcheck(call, params, fast_mode=True)


def test_drops_are_counted_and_first_choices_are_served_first():
    # All tokens choose expert 0 first and expert 1 second, except the last, which chooses them in reverse.
    experts = torch.tensor([[0, 1], [0, 1], [0, 1], [1, 0]])
    plan = plan_dispatch(experts, 3, capacity=2)
    assert plan.counts.tolist() == [2, 2, 0]
    assert plan.kept is not None
    assert plan.kept.tolist() == [[True, True], [True, False], [False, False], [True, False]]
    assert int(plan.dropped) == 4
    tokens = torch.arange(4.0)[:, None]
    rows = scatter_tokens(tokens, plan)
    assert rows.flatten().tolist() == [0, 1, 3, 0]
    assert combine_rows(rows, torch.ones(4, 2), plan).flatten().tolist() == [0, 1, 0, 3]


def test_the_layer_drops_what_exceeds_the_capacity():
    layer = layer_of(replace(PLAIN, capacity_factor=0.5))
    layer(torch.randn(30, HIDDEN, dtype=torch.float64))
    stats = layer.stats
    assert stats is not None
    assert int(stats.load.sum()) == 60
    assert int(stats.dropped) == sum(max(0, count - 5) for count in stats.load.tolist()) > 0


def test_against_the_block_of_transformers():
    config = mixtral.MixtralConfig(
        hidden_size=HIDDEN, intermediate_size=5, num_local_experts=6, num_experts_per_tok=2
    )
    config._experts_implementation = "eager"
    theirs = mixtral.MixtralSparseMoeBlock(config).double()
    ours = layer_of(replace(PLAIN, balance_loss=0.0, z_loss=0.0))
    with torch.no_grad():
        theirs.gate.weight.copy_(ours.router.weight)
        theirs.experts.gate_up_proj.copy_(ours.experts.gate_up.transpose(1, 2))
        theirs.experts.down_proj.copy_(ours.experts.down.transpose(1, 2))
    x = torch.randn(2, 9, HIDDEN, dtype=torch.float64)
    # Their router computes probabilities in fp32, also for float64 tokens.
    torch.testing.assert_close(ours(x), theirs(x), rtol=0, atol=1e-5)


def test_the_balance_loss_is_one_with_equal_loads_and_the_number_of_experts_when_collapsed():
    layer = layer_of(replace(PLAIN, top_k=1, gate_weights=GateWeights.SOFTMAX_BEFORE))
    with torch.no_grad():
        layer.router.weight.zero_()
        layer.router.weight[3, 0] = 1000.0
    x = torch.zeros(8, HIDDEN, dtype=torch.float64)
    x[:, 0] = 1.0
    layer(x)
    assert layer.stats is not None
    assert layer.stats.balance_loss.item() == pytest.approx(6)
    with torch.no_grad():
        layer.router.weight.copy_(1000 * torch.eye(6, HIDDEN))
    layer(torch.eye(6, HIDDEN, dtype=torch.float64))
    assert layer.stats.balance_loss.item() == pytest.approx(1)


@pytest.mark.parametrize("remedy", ["none", "loss", "bias"])
def test_the_remedies_even_out_the_loads(remedy):
    config = replace(
        PLAIN,
        balance_loss=1.0 if remedy == "loss" else 0.0,
        z_loss=0.0,
        bias_rate=0.005 if remedy == "bias" else 0.0,
    )
    layer = layer_of(config)
    if layer.router.balance_bias is not None:
        layer.router.balance_bias.zero_()
    x = torch.randn(120, HIDDEN, dtype=torch.float64) + 0.8  # a common direction, which some experts prefer
    optimizer = torch.optim.SGD([layer.router.weight], lr=0.1)

    def imbalance() -> float:
        layer(x)
        assert layer.stats is not None
        return float(layer.stats.load.max() / layer.stats.load.double().mean())

    before = imbalance()
    for _ in range(100):
        (layer(x).sum() * 0.0).backward()
        optimizer.step()
        optimizer.zero_grad()
        update_balance_bias([layer])
    assert before > 1.8
    assert (
        imbalance() == before if remedy == "none" else imbalance() < 1.6
    )  # the bias alternates around equal loads


def test_the_bias_chooses_and_does_not_weigh():
    layer = layer_of(replace(PLAIN, bias_rate=0.1))
    assert layer.router.balance_bias is not None
    layer.router.balance_bias.zero_()
    layer.router.balance_bias[2] = 100.0
    x = torch.randn(5, HIDDEN, dtype=torch.float64)
    experts, weights, probabilities, _ = layer.router(x)
    assert (experts == 2).any(1).all()
    chosen = probabilities.gather(1, experts)
    torch.testing.assert_close(weights, chosen / chosen.sum(1, keepdim=True))


def test_the_bias_moves_by_its_rate_towards_the_mean_load():
    layer = layer_of(replace(PLAIN, bias_rate=0.25))
    assert layer.router.balance_bias is not None
    layer.router.balance_bias.zero_()
    layer.count_load(torch.tensor([4, 0, 2, 3, 2, 1]))
    update_balance_bias([layer])
    assert layer.router.balance_bias.tolist() == [-0.25, 0.25, 0, -0.25, 0, 0.25]
    assert layer.take_load().tolist() == [0] * 6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("made", ["in the dtype", "converted", "assigned", "replaced"])
def test_the_bias_of_a_narrow_model_takes_small_steps(dtype, made):
    """In bf16, 0.5 + 0.001 is 0.5: the bias would stop there."""
    config = replace(PLAIN, bias_rate=1e-3)
    layer = MoELayer(config, HIDDEN, dtype=dtype) if made == "in the dtype" else layer_of(config)
    if made in ("assigned", "replaced"):
        state = {name: value.to(dtype) for name, value in layer.state_dict().items()}
        layer.load_state_dict(state, assign=True)
    layer.router.balance_bias.fill_(0.501)
    if made == "replaced":
        layer.router.balance_bias = torch.full((6,), 0.501, dtype=dtype)
        update_balance_bias([layer])
        layer.router.balance_bias.fill_(0.501)
    layer.to(dtype=dtype)
    assert layer.router.weight.dtype == dtype
    assert layer.router.balance_bias.dtype == torch.float32
    for _ in range(20):
        layer.count_load(torch.tensor([4, 0, 2, 3, 2, 1]))
        update_balance_bias([layer])
    expected = 0.501 + 0.02 * torch.tensor([-1.0, 1, 0, -1, 0, 1])
    torch.testing.assert_close(layer.router.balance_bias, expected, atol=1e-6, rtol=0)
    layer(torch.randn(5, HIDDEN).to(dtype)).sum().backward()
    assert layer.router(torch.randn(5, HIDDEN).to(dtype))[0].shape == (5, config.top_k)
    layer.to("meta")
    assert layer.router.balance_bias.is_meta
    assert layer.router.balance_bias.dtype == torch.float32


def test_a_repeated_forward_of_checkpointing_counts_the_load_once():
    layer = layer_of(replace(PLAIN, bias_rate=0.1))
    x = torch.randn(9, HIDDEN, dtype=torch.float64, requires_grad=True)
    torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False).sum().backward()
    with torch.no_grad():
        layer(x)
    assert int(layer.take_load().sum()) == 18


def test_the_scale_of_the_losses():
    layer = layer_of(PLAIN)
    x = torch.randn(9, HIDDEN, dtype=torch.float64)
    grads = []
    for scale in (1.0, torch.tensor(4.0)):
        scale_auxiliary_losses([layer], scale)
        (layer(x).sum() * 0.0).backward()
        grads.append(gradients_of(layer)["router.weight"])
    assert grads[0].abs().max() > 0
    torch.testing.assert_close(grads[1], 4 * grads[0])


def test_autocast_routes_in_fp32_and_computes_experts_in_bf16():
    layer = layer_of(CONFIGS["shared"]).float()
    x = torch.randn(50, HIDDEN)
    exact = layer(x)
    load = layer.stats.load  # type: ignore[union-attr]
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(x)
    assert out.dtype is torch.bfloat16
    assert torch.equal(layer.stats.load, load)  # type: ignore[union-attr]
    torch.testing.assert_close(out.float(), exact, rtol=0.05, atol=0.05 * exact.abs().max().item())
    out.float().sum().backward()
    assert {param.grad.dtype for param in layer.parameters()} == {torch.float32}  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"top_k": 7}, "top_k is 7 of 6 experts: use at most 6"),
        ({"top_k": 0}, "top_k is 0: use at least 1"),
        ({"capacity_factor": 0.0}, "capacity_factor is 0.0: use a positive number, or None for no limit"),
        ({"top_k": 1}, "with top_k 1 this weight is always 1, and the router does not learn"),
    ],
)
def test_impossible_choices_are_refused(change, message):
    with pytest.raises(UserError, match=message):
        replace(PLAIN, **change)


def test_the_counts_of_a_llama_with_experts():
    config = model_config("tiny-moe")
    model = Llama(config)
    assert [isinstance(block.mlp, MoELayer) for block in model.layers] == [False, True]
    assert parameters(config) == sum(param.numel() for param in model.parameters())
    experts = model.layers[1].mlp.experts
    unused = sum(param.numel() for param in experts.parameters()) * 6 // 8
    assert active_parameters(config) == parameters(config) - unused

    layer, x = layer_of(CONFIGS["shared"]), torch.randn(10, HIDDEN, dtype=torch.float64, requires_grad=True)
    with FlopCounterMode(display=False) as counted:
        layer(x).sum().backward()
    sizes = replace(config, hidden=HIDDEN, num_layers=1, moe=replace(CONFIGS["shared"], every=1))
    dense = replace(sizes, moe=None)
    difference = flops_per_token(sizes, 8) - flops_per_token(dense, 8)
    assert counted.get_total_flops() == 10 * (difference + 6 * 3 * HIDDEN * dense.intermediate)


def test_a_checkpoint_of_a_llama_with_experts(tmp_path):
    config = replace(model_config("tiny-moe"))
    config = replace(config, moe=replace(config.moe, bias_rate=0.1, gate_weights=GateWeights.SIGMOID))
    assert config_from_hf(json.loads(json.dumps(config_to_hf(config, torch.float32)))) == config
    model = Llama(config)
    model.layers[1].mlp.router.balance_bias.normal_()
    save_checkpoint(model, tmp_path)
    loaded = load_checkpoint(tmp_path)
    assert model.state_dict().keys() == loaded.state_dict().keys()
    for name, value in loaded.state_dict().items():
        assert torch.equal(value, model.state_dict()[name]), name


def test_a_llama_with_experts_learns_text():
    from dlo_lib.data.open import open_dataset

    torch.manual_seed(0)
    model = Llama(replace(model_config("tiny-moe"), num_layers=2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    dataset = open_dataset("python", seq=32)
    stream = batches(dataset, [range(8 * step, 8 * step + 8) for step in range(25)])
    losses = [train_step(model, optimizer, [pair]).loss.item() for pair in stream]
    assert losses[0] > 5
    assert sum(losses[-5:]) / 5 < losses[0] - 1
    (layer,) = moe_layers(model)
    assert layer.stats is not None
    assert int(layer.stats.load.sum()) == 2 * 8 * 32


def test_the_step_averages_the_losses_of_its_micro_batches():
    config = replace(model_config("tiny-moe"))
    torch.manual_seed(0)
    model = Llama(replace(config, moe=replace(config.moe, balance_loss=10.0))).double()
    tokens = torch.randint(257, (4, 9))
    pieces = [(tokens[:2, :-1], tokens[:2, 1:]), (tokens[2:, :-1], tokens[2:, 1:])]
    seen: list[Tensor] = []
    (layer,) = moe_layers(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    optimizer.register_step_pre_hook(lambda *_: seen.append(layer.router.weight.grad.clone()))
    train_step(model, optimizer, pieces)

    auxiliary = []
    for inputs, targets in pieces:
        captured: list[Tensor] = []
        hook = layer.register_forward_pre_hook(lambda _, args, into=captured: into.append(args[0]))
        scale_auxiliary_losses([layer], 0.0)
        logits = model(inputs)
        hook.remove()
        _, losses, _ = dense_moe(weights_of(layer), layer.config, [captured[0].flatten(0, 1)])
        auxiliary.append(losses)
        (F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / 32).backward(
            retain_graph=True
        )
    (torch.stack(auxiliary).mean()).backward()
    torch.testing.assert_close(seen[0], layer.router.weight.grad, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "segments",
    [
        [[3, 0, 5]],
        [[3, 0, 5], [0, 0, 0], [1, 0, 2]],
        [[0, 4, 0], [0, 1, 0]],
        [[0, 0], [0, 0]],
        [[2], [3], [1]],
        [[0, 2], [3, 0], [1, 4], [0, 1]],
    ],
    ids=str,
)
@pytest.mark.parametrize("frozen", ["", "gate_up", "down", "rows"])
def test_experts_of_rows_from_several_sources(segments, frozen):
    """Rows are sorted by source, then by expert. The twin computes each row by itself."""
    torch.manual_seed(0)
    experts = Experts(len(segments[0]), 6, 5, dtype=torch.float64)
    owners = [expert for counts in segments for expert, count in enumerate(counts) for _ in range(count)]
    rows = torch.randn(len(owners), 6, dtype=torch.float64, requires_grad=True)
    leaves = {"rows": rows, "gate_up": experts.gate_up, "down": experts.down}
    if frozen:
        leaves.pop(frozen).requires_grad_(False)

    def of_one(row, expert):
        gate, up = (row @ experts.gate_up[expert]).chunk(2)
        return (F.silu(gate) * up) @ experts.down[expert]

    out = experts(rows, segments)
    # Without any row, the twin has the right shape and depends on a leaf.
    twin = torch.stack([*map(of_one, rows, owners)]) if owners else rows * leaves[min(leaves)].sum()
    torch.testing.assert_close(out, twin, rtol=1e-12, atol=1e-14)
    grad = torch.randn_like(out)
    found = torch.autograd.grad(out, list(leaves.values()), grad)
    expected = torch.autograd.grad(twin, list(leaves.values()), grad, allow_unused=True)
    for leaf, ours, its in zip(leaves.values(), found, expected):
        torch.testing.assert_close(
            ours, torch.zeros_like(leaf) if its is None else its, rtol=1e-10, atol=1e-12
        )
