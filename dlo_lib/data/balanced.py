"""Balanced sampling: every class occurs equally often in an epoch, although the data set has more of some.

Drawing with replacement by weights (PyTorch's ``WeightedRandomSampler``) is balanced on average only, and
leaves out images by chance. Here the images of a class are repeated in whole passes: no image occurs twice
more often than another one of its class, and the counts of the classes are equal in every epoch.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from dlo_lib.base.errors import UserError
from dlo_lib.data.reproducible import hashes, permutation


def balanced_order(labels: Tensor, *, seed: int, epoch: int = 0, per_class: int | None = None) -> Tensor:
    """Return the indices of one epoch, (classes * per_class,) int64, in random order.

    The order depends only on (``seed``, ``epoch``) and is the same on every machine.

    Args:
        labels: (n,) int64, the class of each element.
        per_class: how often each class occurs. None takes the size of the largest class: smaller classes are
            repeated. A smaller number uses other images of the large classes in each epoch.

    Raises:
        UserError: there are no labels, or ``per_class`` is below 1.
    """
    if labels.dim() != 1 or not len(labels):
        raise UserError(f"labels of shape {tuple(labels.shape)}: give one label for each element")
    if per_class is not None and per_class < 1:
        raise UserError(f"per_class is {per_class}: use at least 1")
    classes = np.asarray(labels.cpu())
    members = [np.flatnonzero(classes == label) for label in np.unique(classes)]
    count = per_class or max(map(len, members))
    chosen = []
    for number, indices in enumerate(members):
        passes = -(-count // len(indices))
        # One permutation for each pass: an element is repeated only after all others of its class.
        keys = hashes(passes * len(indices), seed, epoch, number).reshape(passes, len(indices))
        chosen.append(indices[np.argsort(keys, axis=1, kind="stable")].reshape(-1)[:count])
    order = permutation(count * len(members), seed, epoch)
    return torch.from_numpy(np.concatenate(chosen)[order]).to(labels.device)
