"""ResNet for small images: a convolution, stages of basic blocks, a mean over the pixels and a linear layer.

A block computes  relu(x + F(x)),  F = norm(conv(relu(norm(conv(x)))))  with 3 x 3 convolutions. Without skip
connections it computes relu(F(x)) with the same layers, as in the plain networks of the paper. Each stage
after the first halves height and width in the first convolution of its first block. There the skip is a 1 x 1
convolution (option B of the paper), because the shapes differ.

With three stages of n blocks, the depth is 6 n + 2, counted in convolutions and the linear layer. Cost, with
the widths 16, 32, 64: depth 8 has 78,000 parameters and 12 million multiplications per image of 32 x 32.
Backward needs one activation per layer.

Papers: He et al., Deep residual learning for image recognition (arXiv:1512.03385), section 4.2 for small
images; initial weights: He et al. (arXiv:1502.01852); the chaotic loss surface of depth 56 without skips: Li
et al. (arXiv:1712.09913)."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn


class BasicBlock(nn.Module):
    """A block that maps (batch, in_width, height, width) to (batch, width, height / stride, width / stride),
    rounded up.
    """

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
    """A residual network: maps images (batch, channels, height, width) of any size to logits (batch,
    classes).

    Args:
        depth: the number of layers with weights, 2 * stages * n + 2 for n blocks per stage: 8, 14, 20 ... for
            three stages.
        widths: the channels of each stage; their number is the number of stages.
        skip: use skip connections; False gives the plain network with the same layers.

    Raises:
        ValueError: ``depth`` is impossible with this number of stages.
    """

    def __init__(
        self,
        depth: int = 8,
        widths: Sequence[int] = (16, 32, 64),
        *,
        channels: int = 3,
        classes: int = 10,
        skip: bool = True,
    ) -> None:
        super().__init__()
        blocks, left_over = divmod(depth - 2, 2 * len(widths))
        if left_over or blocks < 1:
            depths = ", ".join(str(2 * len(widths) * n + 2) for n in (1, 2, 3))
            raise ValueError(
                f"depth ({depth}) must be 2 plus a multiple of {2 * len(widths)} with {len(widths)} stages: "
                f"{depths} ..."
            )
        self.conv = nn.Conv2d(channels, widths[0], 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(widths[0])
        layers, in_width = [], widths[0]
        for stage, width in enumerate(widths):
            for block in range(blocks):
                layers.append(
                    BasicBlock(in_width, width, stride=2 if stage > 0 and block == 0 else 1, skip=skip)
                )
                in_width = width
        self.blocks = nn.Sequential(*layers)
        self.output = nn.Linear(in_width, classes)
        self._reset()

    def _reset(self) -> None:
        """Use He initialisation, which doubles the variance because relu halves it."""
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
