"""ResNet for small images: depths and sizes of the paper, networks without skips, any image size."""

import pytest
import torch
from torch import nn

from dlo_lib.models.resnet import BasicBlock, ResNet


def layers_with_weights(model: nn.Module) -> int:
    """Return the number of convolutions and linear layers on the main path."""
    named = model.named_modules()
    return sum(isinstance(module, (nn.Conv2d, nn.Linear)) for name, module in named if "shortcut" not in name)


@pytest.mark.parametrize(
    ("depth", "widths"), [(8, (16, 32, 64)), (20, (16, 32, 64)), (6, (4, 8)), (4, (7,)), (10, (4, 4, 8, 8))]
)
@pytest.mark.parametrize("skip", [True, False])
def test_depth_counts_the_layers_with_weights(depth, widths, skip):
    assert layers_with_weights(ResNet(depth, widths, skip=skip)) == depth


def test_a_plain_network_has_the_same_layers_without_shortcuts():
    with_skip, plain = ResNet(14, (4, 8, 12)).state_dict(), ResNet(14, (4, 8, 12), skip=False).state_dict()
    assert {name: value.shape for name, value in plain.items()} == {
        name: value.shape for name, value in with_skip.items() if "shortcut" not in name
    }
    assert any("shortcut" in name for name in with_skip)


def test_resnet_20_has_the_parameters_of_the_paper():
    model = ResNet(20)
    projections = sum(p.numel() for name, p in model.named_parameters() if "shortcut" in name)
    assert sum(p.numel() for p in model.parameters()) - projections == 269_722, "0.27 million, table 6"


@pytest.mark.parametrize("size", [(32, 32), (8, 8), (5, 9), (1, 1)])
def test_any_image_size_is_accepted(size):
    model = ResNet(channels=2, classes=7).eval()
    assert model(torch.randn(3, 2, *size)).shape == (3, 7)


def test_later_stages_halve_the_image():
    model = ResNet(14, (4, 8, 12))
    x, shapes = torch.randn(2, 4, 9, 16), []
    for block in model.blocks:
        x = block(x)
        shapes.append(tuple(x.shape[1:]))
    assert shapes == [(4, 9, 16)] * 2 + [(8, 5, 8)] * 2 + [(12, 3, 4)] * 2


def test_a_block_with_a_zero_branch_is_the_identity_only_with_a_skip():
    x = torch.randn(2, 6, 4, 4).relu()
    for skip, expected in ((True, x), (False, torch.zeros_like(x))):
        block = BasicBlock(6, 6, 1, skip)
        nn.init.zeros_(block.norm2.weight)
        assert torch.equal(block(x), expected)


def test_gradients_reach_the_first_layer_of_a_deep_network_only_with_skips():
    """In evaluation mode with initial statistics, gradients vanish in a plain network of 38 layers."""
    images, norms = torch.randn(4, 3, 8, 8), {}
    for skip in (True, False):
        torch.manual_seed(0)
        model = ResNet(38, (4, 8, 8), skip=skip)
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                nn.init.constant_(module.weight, 0.3)
        model.eval()(images).sum().backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
        norms[skip] = model.conv.weight.grad.norm()
    assert norms[True] > 1e6 * norms[False]


def test_an_impossible_depth_raises_with_possible_ones():
    with pytest.raises(
        ValueError, match=r"depth \(9\) must be 2 plus a multiple of 6 with 3 stages: 8, 14, 20"
    ):
        ResNet(9)
    with pytest.raises(ValueError, match="multiple of 6"):
        ResNet(2)
