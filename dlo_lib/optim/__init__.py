"""The training step and what it is made of."""

from dlo_lib.optim.step import IGNORE_INDEX, Phase, Precision, StepResult, train_step

__all__ = ["IGNORE_INDEX", "Phase", "Precision", "StepResult", "train_step"]
