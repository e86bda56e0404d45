"""Communication hooks of DDP that send less than the gradients: low-rank factors, largest elements, signs.

    model = DDP(module, comm_hook=PowerSGD(rank=2, start=100))

A hook keeps an error and, for PowerSGD, factors for each parameter, so it belongs to one model. Save its
``state_dict`` of every rank with the model: without the errors, a resumed run loses what was not sent yet.

The first ``start`` steps have exact sums. Gradients change fast at the beginning of a training, so a tenth of
all steps is usual.

A bucket contains gradients that are divided by the number of ranks N, and a hook replaces it by the sum. The
error of a rank is therefore its part less 1/N of the sum.

Papers: in ``comm.compression``.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dlo_lib.base.errors import UserError
from dlo_lib.comm.compression.error_feedback import ErrorFeedback
from dlo_lib.comm.compression.low_rank import first_factors, is_worth, orthonormal
from dlo_lib.comm.compression.one_bit_mean import OneBitMean
from dlo_lib.comm.compression.sparse import largest, scattered
from dlo_lib.parallel.ddp.comm_hooks import sum_hook
from dlo_lib.parallel.ddp.grad_bucket import GradBucket, PendingWork


class CompressedSum:
    """What the hooks have in common: the steps, and the errors of this rank.

    Args:
        start: the steps with exact sums before the first compression.
        error_feedback: False to lose what a compression leaves out, to compare.
    """

    def __init__(self, start: int, error_feedback: bool) -> None:
        self.start, self.step = start, 0
        self.feedback = ErrorFeedback(error_feedback)

    def __call__(self, bucket: GradBucket) -> PendingWork:
        exact = self.step < self.start
        work = sum_hook(bucket) if exact else self.compressed(bucket)
        self.step += bucket.is_last
        return work

    def compressed(self, bucket: GradBucket) -> PendingWork:
        """Start the approximate sum of ``bucket``."""
        raise NotImplementedError

    def corrected(self, bucket: GradBucket) -> Tensor:
        """Return the bucket with the errors of its parameters, a copy of ``bucket.flat``."""
        flat = bucket.flat.clone()
        for slot in bucket.slots:
            part = bucket.part(flat, slot)
            part.copy_(self.feedback.corrected(slot.name, part))
        return flat

    def keep(self, bucket: GradBucket, corrected: Tensor, sent: Tensor) -> None:
        """Keep what ``sent`` leaves out of ``corrected``, for each parameter."""
        for slot in bucket.slots:
            self.feedback.keep(slot.name, bucket.part(corrected, slot), bucket.part(sent, slot))

    def state_dict(self) -> dict[str, Any]:
        """Return the step and the errors of this rank."""
        return {"step": self.step, "errors": self.feedback.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state of the same rank of a model with the same parameters."""
        self.step = state["step"]
        self.feedback.load_state_dict(state["errors"])


class PowerSGD(CompressedSum):
    """Sums each gradient with two or more dimensions as a matrix of low rank.

    Args:
        rank: the columns of the factors, 1 to 4 in most trainings.
        start: the steps with exact sums before the first compression.
        factor: a matrix is only compressed if its factors have fewer elements by this factor.
        warm_start: whether a step begins with the factors of the previous one.
        error_feedback: False to lose what the factors leave out, to compare.
        batched: whether all gradients of a bucket are one square matrix. That is fewer operations, and a
            worse approximation: a row contains several layers.
        dtype: of the factors that are sent, such as ``torch.float16``; None for that of the gradients.
        eps: against gradients of zeros, for which the factors have no direction.
        seed: of the first factors, equal on all ranks.
    """

    def __init__(
        self,
        rank: int = 1,
        start: int = 0,
        factor: float = 2.0,
        warm_start: bool = True,
        error_feedback: bool = True,
        batched: bool = False,
        dtype: torch.dtype | None = None,
        eps: float = 1e-12,
        seed: int = 0,
    ) -> None:
        if rank < 1:
            raise UserError(f"the rank of PowerSGD is {rank}: choose 1 or more")
        super().__init__(start, error_feedback)
        self.rank, self.factor, self.warm_start = rank, factor, warm_start
        self.batched, self.dtype, self.eps, self.seed = batched, dtype, eps, seed
        self.factors: dict[str, Tensor] = {}
        """The last Q of each parameter, (columns, rank); if batched, of each bucket."""

    def compressed(self, bucket: GradBucket) -> PendingWork:
        return _LowRankSum(self, bucket)

    def first_or_last(self, keys: list[str], batch: Tensor) -> Tensor:
        """Return Q with orthonormal columns for matrices (batch, rows, columns), a key each."""
        if not self.warm_start or any(key not in self.factors for key in keys):
            seed = hash((self.seed, self.step, *batch.shape)) % 2**31  # numbers hash alike on all ranks
            rank = min(self.rank, *batch.shape[1:])
            drawn = first_factors(len(batch), batch.shape[2], rank, seed, batch)
            self.factors |= zip(keys, drawn, strict=True)
        return orthonormal(torch.stack([self.factors[key] for key in keys]), self.eps)

    def state_dict(self) -> dict[str, Any]:
        """Return the step, the factors and the errors of this rank."""
        return {**super().state_dict(), "factors": dict(self.factors)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.factors = {key: factor.clone() for key, factor in state["factors"].items()}


class _LowRankSum:
    """The sum of one bucket: P is on its way when the hook returns, and Q is sent in ``wait``."""

    def __init__(self, hook: PowerSGD, bucket: GradBucket) -> None:
        self._hook, self._bucket = hook, bucket
        self._corrected = hook.corrected(bucket)
        bucket.flat.copy_(self._corrected)
        self._whole: list[Tensor] = []
        """Gradients that are summed exactly."""
        self._groups: list[tuple[list[str], list[Tensor], Tensor]] = []
        """Matrices of one shape: their keys, their gradients, and (batch, rows, columns)."""
        self._divide()
        qs = [hook.first_or_last(keys, batch) for keys, _, batch in self._groups]
        ps = [batch @ q for (_, _, batch), q in zip(self._groups, qs, strict=True)]
        self._ps = _Sum(ps, bucket.group, hook.dtype)
        self._exact = _Sum(self._whole, bucket.group)

    def _divide(self) -> None:
        hook, bucket = self._hook, self._bucket
        if hook.batched:
            side = int((bucket.flat.numel() - 1) ** 0.5) + 1
            square = torch.nn.functional.pad(bucket.flat, (0, side * side - bucket.flat.numel()))
            self._groups.append(([bucket.key], [bucket.flat], square.view(1, side, side)))
            return
        shapes: dict[tuple[int, int], dict[str, Tensor]] = {}
        for slot, gradient in zip(bucket.slots, bucket.gradients, strict=True):
            rows = len(gradient) if gradient.dim() > 1 else 1
            columns = gradient.numel() // rows
            if is_worth(rows, columns, hook.rank, hook.factor):
                shapes.setdefault((rows, columns), {})[slot.name] = gradient
            else:
                self._whole.append(gradient)
        for shape, named in shapes.items():
            batch = torch.stack([gradient.reshape(shape) for gradient in named.values()])
            self._groups.append(([*named], [*named.values()], batch))

    def wait(self) -> None:
        hook, bucket = self._hook, self._bucket
        ps = [orthonormal(p, hook.eps) for p in self._ps.wait()]
        qs = [batch.mT @ p for (_, _, batch), p in zip(self._groups, ps, strict=True)]
        qs = _Sum(qs, bucket.group, hook.dtype).wait()
        for gradient, exact in zip(self._whole, self._exact.wait(), strict=True):
            gradient.copy_(exact)
        for (keys, gradients, _), p, q in zip(self._groups, ps, qs, strict=True):
            # After an overflow or an interrupted pass, the factors of the step before remain.
            for key, factor in zip(keys, q, strict=True):
                hook.factors[key] = torch.where(q.isfinite().all(), factor, hook.factors[key])
            for gradient, product in zip(gradients, p @ q.mT, strict=True):
                gradient.copy_(product.flatten()[: gradient.numel()].view(gradient.shape))
        world = dist.get_world_size(bucket.group)
        hook.keep(bucket, self._corrected, bucket.flat / world)


class _Sum:
    """The sums of some tensors over ranks, in one all-reduce; none if there are no tensors."""

    def __init__(
        self, tensors: list[Tensor], group: dist.ProcessGroup, dtype: torch.dtype | None = None
    ) -> None:
        self._like = tensors
        if tensors:
            self._flat = torch.cat([tensor.flatten() for tensor in tensors]).to(dtype or tensors[0].dtype)
            self._work = dist.all_reduce(self._flat, group=group, async_op=True)

    def wait(self) -> list[Tensor]:
        if not self._like:
            return []
        self._work.wait()
        flat = self._flat.to(self._like[0].dtype)
        parts = flat.split([tensor.numel() for tensor in self._like])
        return [part.view(tensor.shape) for part, tensor in zip(parts, self._like, strict=True)]


class TopK(CompressedSum):
    """Sums the largest elements of each bucket of each rank.

    Args:
        share: the share of the elements that is sent, above 0 and at most 1.
        start: the steps with exact sums before the first compression.
        error_feedback: False to lose the other elements, to compare.
    """

    def __init__(self, share: float, start: int = 0, error_feedback: bool = True) -> None:
        if not 0 < share <= 1:
            raise UserError(f"the share of top-k is {share}: choose a number above 0 and at most 1")
        super().__init__(start, error_feedback)
        self.share = share

    def compressed(self, bucket: GradBucket) -> PendingWork:
        return _TopKSum(self, bucket)


class _TopKSum:
    def __init__(self, hook: TopK, bucket: GradBucket) -> None:
        self._bucket, size = bucket, bucket.flat.numel()
        corrected = hook.corrected(bucket)
        chosen = largest(corrected, max(1, round(hook.share * size)))
        hook.keep(bucket, corrected, scattered(*chosen, size))
        world = dist.get_world_size(bucket.group)
        self._arrived = [part.new_empty(world * len(part)) for part in chosen]
        self._works = [
            dist.all_gather_into_tensor(whole, part, group=bucket.group, async_op=True)
            for whole, part in zip(self._arrived, chosen, strict=True)
        ]

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        values, positions = self._arrived
        self._bucket.flat.copy_(scattered(values, positions, self._bucket.flat.numel()))


class OneBit(CompressedSum):
    """Sums the signs of each bucket, with one scale for each rank and one for each part of the sum. All its
    communication is in ``wait``, so backward does not hide it. The errors are those of buckets: a resumed run
    has them again when its buckets are rebuilt, after its first step.

    Args:
        start: the steps with exact sums before the first compression, at least the one after which DDP
            rebuilds its buckets.
        error_feedback: False to lose what the signs leave out, to compare.

    Raises:
        UserError: ``start`` is less than 1.
    """

    def __init__(self, start: int = 1, error_feedback: bool = True) -> None:
        if start < 1:
            raise UserError(f"start is {start}: choose 1 or more, because buckets are rebuilt after one step")
        super().__init__(start, error_feedback)
        self._means: dict[str, OneBitMean] = {}
        self._loaded: dict[str, dict[str, Tensor]] = {}

    def compressed(self, bucket: GradBucket) -> PendingWork:
        if bucket.key not in self._means:
            self._means[bucket.key] = OneBitMean(bucket.group, self.feedback.enabled)
            self._means[bucket.key].load_state_dict(self._loaded.get(bucket.key, {}))
        return _OneBitSum(self._means[bucket.key], bucket)

    def state_dict(self) -> dict[str, Any]:
        errors = {key: mean.state_dict() for key, mean in self._means.items()}
        return {"step": self.step, "errors": errors}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step, self._loaded = state["step"], state["errors"]
        self._means.clear()


class _OneBitSum:
    def __init__(self, mean: OneBitMean, bucket: GradBucket) -> None:
        self._mean, self._bucket = mean, bucket

    def wait(self) -> None:
        world = dist.get_world_size(self._bucket.group)
        self._bucket.flat.copy_(self._mean(self._bucket.flat) * world)
