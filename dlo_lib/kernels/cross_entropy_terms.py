"""The form of a cross-entropy, which its twin and its kernel share."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from dlo_lib.base.errors import UserError
from dlo_lib.data.tokens import IGNORE_INDEX


class LossReduction(enum.Enum):
    """The combination of the losses of the rows."""

    MEAN = "mean"
    """Over the rows whose target is not ignored; 0 if there is none."""
    SUM = "sum"


@dataclass(frozen=True)
class CrossEntropyTerms:
    """The form of the loss.

    Attributes:
        ignore_index: rows with this target have no loss and no gradient.
        label_smoothing: the part of the target distribution that is uniform, in [0, 1].
        z_loss: the factor of lse^2, 0 or more.
    """

    ignore_index: int = IGNORE_INDEX
    label_smoothing: float = 0.0
    z_loss: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.label_smoothing <= 1:
            raise UserError(f"label_smoothing is {self.label_smoothing}: use a number from 0 to 1")
        if not 0 <= self.z_loss < float("inf"):
            raise UserError(f"z_loss is {self.z_loss}: use 0 or a positive number")
