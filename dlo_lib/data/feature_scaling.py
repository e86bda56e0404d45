"""Feature scaling: inputs with mean 0 and standard deviation 1, from the statistics of the training data.

The statistics are summed batch by batch, and several of them can be merged: workers or ranks each read a
part. Sums of squares lose all digits if the mean is large. Therefore the squared distances from the mean
are kept, and merged with the formula of Chan et al.

Paper: T. F. Chan, G. H. Golub, R. J. LeVeque, Updating formulae and a pairwise algorithm for computing sample
variances (Stanford, 1979).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dlo_lib.base.errors import UserError


@dataclass(frozen=True)
class FeatureStatistics:
    """Statistics of each feature (or channel) of the data read so far, fp64.

    Attributes:
        count: the number of values of each feature.
        mean: (features,) the mean.
        squares: (features,) the sum of the squared distances from the mean.
    """

    count: int
    mean: Tensor
    squares: Tensor

    @classmethod
    def of(cls, batch: Tensor, dim: int = 1) -> FeatureStatistics:
        """Return the statistics of one batch, whose dimension ``dim`` has the features.

        Raises:
            UserError: the batch is empty.
        """
        if not batch.numel():
            raise UserError("an empty batch has no mean: leave it out")
        values = batch.detach().movedim(dim, 0).flatten(1).double()
        mean = values.mean(1)
        return cls(values.shape[1], mean, (values - mean[:, None]).square().sum(1))

    def merged(self, other: FeatureStatistics) -> FeatureStatistics:
        """Return the statistics of both data together.

        Raises:
            UserError: the numbers of features differ.
        """
        if self.mean.shape != other.mean.shape:
            raise UserError(
                f"{len(self.mean)} and {len(other.mean)} features: merge statistics of the same ones"
            )
        count = self.count + other.count
        distance = other.mean - self.mean
        mean = self.mean + distance * (other.count / count)
        squares = self.squares + other.squares + distance.square() * (self.count * other.count / count)
        return FeatureStatistics(count, mean, squares)

    @property
    def std(self) -> Tensor:
        """The standard deviation of each feature, (features,)."""
        return (self.squares / self.count).sqrt()

    def scale(self, x: Tensor, dim: int = 1) -> Tensor:
        """Return ``(x - mean) / std`` in the dtype of ``x``; a constant feature becomes 0.

        The test data use the statistics of the training data as well.
        """
        # Rounding leaves a constant feature a variance of about (eps * mean)**2, which has no meaning.
        eps = torch.finfo(torch.float64).eps
        constant = self.squares / self.count <= (self.count * eps * self.mean).square()
        shape = [-1 if index == dim % x.dim() else 1 for index in range(x.dim())]
        mean, std, constant = (value.to(x.device).view(shape) for value in (self.mean, self.std, constant))
        return torch.where(constant, 0.0, (x.double() - mean) / std).to(x.dtype)
