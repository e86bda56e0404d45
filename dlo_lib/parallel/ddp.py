"""Data parallelism: every rank holds the whole model, sees its own part of the batch, and the ranks average their gradients.

Gradients are copied as they arrive into buckets, flat tensors ordered as backward produces them, and a full bucket is averaged by an
asynchronous all-reduce while backward computes the gradients of the layers before it. Only the last bucket's communication, and what
did not fit behind the computation, is waited for.

    gradient = sum over ranks of (rank's gradient / N)          divided before the sum: no overflow in fp16, and the division costs
                                                                nothing because it is the copy into the bucket

Bytes sent per rank and step: 2 * B_g * (N-1)/N, with B_g the bytes of all gradients (ring all-reduce), however many micro-batches are
accumulated in ``no_sync``. Memory beside the model's own: with gradients as bucket views none but a bucket in the making, for the
buckets *are* the gradients, and go with ``zero_grad`` unless they are kept; without, B_g more, all the time.

Paper: S. Li et al., PyTorch Distributed: Experiences on Accelerating Data Parallel Training (arXiv:2006.15704).
"""

from __future__ import annotations

import contextlib
import functools
import weakref
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from dlo_lib.errors import UserError
from dlo_lib.parallel.backward_pass import without_sync
from dlo_lib.parallel.buckets import broadcast_packed
from dlo_lib.parallel.comm_hooks import CommHook, sum_hook
from dlo_lib.parallel.join import Joining, Phase
from dlo_lib.parallel.reducer import End, Reducer, from_first

MIB = 2**20


class DDP(nn.Module):
    """``module`` with its gradients averaged over ``group`` at the end of every backward pass.

    Args:
        module: the same on every rank in structure; parameters and buffers take the values of the group's first rank.
            Parameters that do not require gradients when it is wrapped stay out of the communication.
        group: the ranks; None for all.
        bucket_bytes: the most a bucket holds (a larger parameter is a bucket of its own).
        first_bucket_bytes: the same for the first bucket, small so that communication starts early.
        gradient_as_bucket_view: ``.grad`` is a view of the bucket; False keeps buckets and gradients apart and copies back.
        keep_buckets: whether views' buckets keep their memory from ``zero_grad`` to the next backward. None: on CPU only. There, memory
            that was given back costs a page fault for every 4 KiB when it is taken again; an accelerator's caching allocator has
            it back for nothing, and meanwhile forward can use it.
        broadcast_buffers: before each training forward that will be synchronised, persistent buffers (running statistics) take
            the first rank's values. Buffers that are no part of a checkpoint are constants and are sent only once, at the start.
        comm_hook: what sums a bucket over the ranks instead of a plain all-reduce (``parallel.comm_hooks``).
        static_graph: every step uses the same parameters, the same number of times. The first step learns which, and communicates at
            its end; from then on those that no rank uses cost nothing, and parameters reached twice in one backward are right.
        find_unused_parameters: allow parameters that get no gradient. One that some rank used gets the average (a rank without
            contributes zeros); one that no rank used keeps None. Costs one more small all-reduce a step, because a rank cannot
            know by itself what the others used. Without it a missing gradient raises.

    Gradients accumulate as without DDP, in ``no_sync`` (cheap) or with an average per backward (right as well). Backward hooks do all
    the work, so a plain ``loss.backward()`` is enough; ``finish_grad_sync`` is needed only where backward may have reached no
    parameter at all on some rank. After an exception inside backward, zero the gradients before the next one.

    Raises:
        UserError: no process group; ranks hold different modules; a parameter without gradient (see above), unfrozen after wrapping,
            with a sparse gradient, reached twice in one backward (reentrant checkpointing, unless ``static_graph``); a graph that was
            said to be static and is not.
    """

    def __init__(
        self,
        module: nn.Module,
        group: dist.ProcessGroup | None = None,
        *,
        bucket_bytes: int = 25 * MIB,
        first_bucket_bytes: int = 1 * MIB,
        gradient_as_bucket_view: bool = True,
        keep_buckets: bool | None = None,
        broadcast_buffers: bool = True,
        comm_hook: CommHook = sum_hook,
        static_graph: bool = False,
        find_unused_parameters: bool = False,
    ) -> None:
        super().__init__()
        group = group if group is not None else dist.group.WORLD
        if group is None:
            raise UserError("DDP needs a process group: start with torchrun or srun, or call launch.run_ranks")
        self.module = module
        self.group: dist.ProcessGroup = group
        self._bucket_bytes = bucket_bytes
        self._static_graph = static_graph
        trained = [(name, param) for name, param in module.named_parameters() if param.requires_grad]
        self._frozen = [param for param in module.parameters() if not param.requires_grad]
        self._check_same_module([name for name, _ in trained])
        broadcast_packed([*module.parameters(), *module.buffers()], group, bucket_bytes)
        saved = {id(tensor) for tensor in module.state_dict(keep_vars=True).values()} if broadcast_buffers else set()
        self._running_buffers = [buffer for buffer in module.buffers() if id(buffer) in saved]
        self._reducer = Reducer(
            trained,
            group,
            self._device,
            bucket_bytes=bucket_bytes,
            first_bucket_bytes=first_bucket_bytes,
            gradient_as_bucket_view=gradient_as_bucket_view,
            keep_buckets=keep_buckets if keep_buckets is not None else self._device.type == "cpu",
            comm_hook=comm_hook,
            static_graph=static_graph,
            find_unused_parameters=find_unused_parameters,
        )
        weak_reducer = weakref.ref(self._reducer)  # hooks must not keep a discarded DDP alive, or it would go on communicating
        hooks = [
            param.register_post_accumulate_grad_hook(functools.partial(_call_on_gradient, weak_reducer, index))
            for index, (_, param) in enumerate(trained)
        ]
        weakref.finalize(self, lambda: [hook.remove() for hook in hooks])

    @property
    def _device(self) -> torch.device:
        return next(self.module.parameters(), torch.empty(0)).device

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._reducer.recover()
        if not torch.is_grad_enabled():
            return self.module(*args, **kwargs)
        if any(param.requires_grad for param in self._frozen):
            raise UserError("a parameter was unfrozen after DDP had wrapped the module: unfreeze first, then wrap again")
        if self.training and self._reducer.sync and self._running_buffers:
            joining = self._reducer.joining
            source = joining.announce(Phase.BUFFERS).active[0] if joining is not None else 0
            broadcast_packed(self._running_buffers, self.group, self._bucket_bytes, source)
        self._reducer.unsynced = True
        output = self.module(*args, **kwargs)
        if self._static_graph:  # a checkpoint's nested backward ends before the whole: what is done at the end must wait for the latter
            for leaf in tree_leaves(output):
                if isinstance(leaf, Tensor) and leaf.requires_grad:
                    leaf.register_hook(functools.partial(_call_begin, weakref.ref(self._reducer)))
        return output

    def no_sync(self) -> AbstractContextManager[None]:
        """Backward passes inside add to the local gradients without communication; the next one outside averages the sum."""
        return without_sync(self._reducer)

    def finish_grad_sync(self) -> None:
        """Average what is not averaged yet; nothing is left to do after a backward pass outside ``no_sync``."""
        self._reducer.recover()
        if self._reducer.unsynced:
            self._reducer.announce()
            self._reducer.finish()

    @contextlib.contextmanager
    def join(self, *, shadow_step: Callable[[], None] | None = None, divide_by_initial_world_size: bool = True) -> Iterator[None]:
        """For a loop that may be shorter on some ranks: at its end, wait for the others and take part in their communication.

        Args:
            shadow_step: called after each backward of the others with their average in ``.grad``; with the loop's optimiser step and
                ``zero_grad`` in it, parameters and optimiser states stay the same on every rank. None: parameters and buffers are
                copied from a rank that was in the last step; optimiser states of ranks that ended early are behind.
            divide_by_initial_world_size: False: averages are over ranks that still have data.

        Only DDP's own communication is followed: a loop that communicates by itself (a loss, SyncBatchNorm) needs equal numbers of
        batches. What a rank added up in ``no_sync`` and never averaged is lost.
        """
        joining = self._reducer.joining = Joining(self.group, self._device, divide_by_initial_world_size)
        try:
            yield
            self._reducer.recover()
            self._shadow(joining, shadow_step)
        finally:
            self._reducer.joining = None

    def _shadow(self, joining: Joining, step: Callable[[], None] | None) -> None:
        while (announced := joining.announce(Phase.OUT)).phase is not Phase.OUT:
            if announced.phase is Phase.BUFFERS:
                broadcast_packed(self._running_buffers, self.group, self._bucket_bytes, announced.active[0])
                continue
            self.zero_grad()
            self._reducer.finish(End.SHADOW)
            if step is not None:
                step()
        if step is None and joining.last is not None:
            everything = [*self.module.parameters(), *self.module.buffers()]
            broadcast_packed(everything, self.group, self._bucket_bytes, joining.last.active[0])

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own, without a prefix: a checkpoint does not know how it was trained."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.load_state_dict(*args, **kwargs)

    def __getstate__(self) -> Any:
        raise UserError("a DDP cannot be copied or pickled, for it belongs to a process group: copy its .module and wrap the copy")

    def _check_same_module(self, trained: list[str]) -> None:
        layout = [(tuple(tensor.shape), str(tensor.dtype)) for tensor in [*self.module.parameters(), *self.module.buffers()]]
        mine = zlib.crc32(repr((layout, trained)).encode())
        if from_first([mine], self.group, self._device) != [mine]:
            raise UserError("this rank's module differs from the first rank's in its parameters: build the same one on every rank")


def _call_on_gradient(reducer: weakref.ref[Reducer], index: int, param: Tensor) -> None:
    alive = reducer()
    if alive is not None:
        alive.on_gradient(index)


def _call_begin(reducer: weakref.ref[Reducer], _: Tensor) -> None:
    alive = reducer()
    if alive is not None and alive.sync:
        alive.begin()
