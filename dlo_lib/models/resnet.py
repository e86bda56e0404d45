"""ResNet for small images: a first convolution, three or so stages of basic blocks, a mean over the pixels, a linear layer.

A block computes  relu(x + F(x)),  F = norm(conv(relu(norm(conv(x))))) with 3 x 3 convolutions; without skip connections it is relu(F(x)),
the same layers and nothing around them, as in the plain networks of the paper. Each stage after the first halves height and width, in the
first convolution of its first block; there the skip is a 1 x 1 convolution (the paper's option B) because the shapes differ.

With n blocks a stage the depth is 6 n + 2, counted in convolutions and the linear layer, for three stages. Cost, with the widths 16, 32,
64: depth 8 has 78,000 parameters and 12 million multiplications per image of 32 x 32; forward and backward hold one activation a layer.

Papers: He et al., Deep residual learning for image recognition (arXiv:1512.03385), section 4.2 for the small ones; initial weights He et
al. (arXiv:1502.01852); without skips the loss surface is chaotic at depth 56, Li et al. (arXiv:1712.09913).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn


class BasicBlock(nn.Module):
    """x (batch, in_width, height, width) to (batch, width, height / stride, width / stride), rounded up."""

    def __init__(self, in_width: int, width: int, stride: int, skip: bool) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_width, width, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.shortcut = _shortcut(in_width, width, stride) if skip else None

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y))
        return F.relu(y if self.shortcut is None else y + self.shortcut(x))


class ResNet(nn.Module):
    """Images (batch, channels, height, width) to logits (batch, classes); any height and width.

    Args:
        depth: number of layers with weights, 2 * stages * n + 2 for n blocks a stage: 8, 14, 20 ... with three stages.
        widths: channels of each stage; their number is the number of stages.
        skip: with skip connections, or the plain network of the same layers.

    Raises:
        ValueError: no such depth with so many stages.
    """

    def __init__(
        self, depth: int = 8, widths: Sequence[int] = (16, 32, 64), *, channels: int = 3, classes: int = 10, skip: bool = True
    ) -> None:
        super().__init__()
        blocks, left_over = divmod(depth - 2, 2 * len(widths))
        if left_over or blocks < 1:
            depths = ", ".join(str(2 * len(widths) * n + 2) for n in (1, 2, 3))
            raise ValueError(f"depth ({depth}) must be 2 plus a multiple of {2 * len(widths)} with {len(widths)} stages: {depths} ...")
        self.conv = nn.Conv2d(channels, widths[0], 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(widths[0])
        layers, in_width = [], widths[0]
        for stage, width in enumerate(widths):
            for block in range(blocks):
                layers.append(BasicBlock(in_width, width, stride=2 if stage > 0 and block == 0 else 1, skip=skip))
                in_width = width
        self.blocks = nn.Sequential(*layers)
        self.output = nn.Linear(in_width, classes)
        self._reset()

    def _reset(self) -> None:
        """He's initial weights: relu halves the variance, and twice it goes in."""
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        x = F.relu(self.norm(self.conv(images)))  # (batch, widths[0], height, width)
        x = self.blocks(x)  # (batch, widths[-1], height / 2^(stages - 1), width / 2^(stages - 1))
        return self.output(x.mean((2, 3)))


def _shortcut(in_width: int, width: int, stride: int) -> nn.Module:
    if in_width == width and stride == 1:
        return nn.Identity()
    return nn.Sequential(nn.Conv2d(in_width, width, 1, stride, bias=False), nn.BatchNorm2d(width))
