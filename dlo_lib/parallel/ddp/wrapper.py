"""Data parallelism: each rank holds the whole model and processes a different part of the batch. The ranks
average their gradients.

Gradients are copied into buckets, which are flat tensors in the order in which backward computes the
gradients. A full bucket is averaged by an asynchronous all-reduce, while backward computes the gradients of
the previous layers. At the end of backward, the rank waits for the communication that does not overlap with
computation.

    gradient = sum over ranks of (gradient of the rank / N)

The division comes before the sum, which prevents an overflow in fp16. It is part of the copy into the bucket,
so it does not read the memory again.

Bytes sent per rank and step: 2 * B_g * (N-1)/N (ring all-reduce), with B_g the bytes of all gradients,
independently of the number of micro-batches that are accumulated in ``no_sync``. Additional memory: none if
the gradients are views of the buckets, because the buckets *are* the gradients; ``zero_grad`` frees them
unless they are kept. Without views, B_g bytes at all times.

Paper: S. Li et al., PyTorch Distributed: Experiences on Accelerating Data Parallel Training
(arXiv:2006.15704).
"""

from __future__ import annotations

import contextlib
import functools
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dlo_lib.base.errors import UserError
from dlo_lib.parallel.backward_pass import without_sync
from dlo_lib.parallel.ddp.comm_hooks import CommHook, sum_hook
from dlo_lib.parallel.ddp.join import JoinContext, JoinPhase
from dlo_lib.parallel.ddp.reducer import GradAllReduce, PassEnd, broadcast_ints
from dlo_lib.parallel.held_params import HeldModule, refuse_max_norm
from dlo_lib.parallel.nested import tensors_in
from dlo_lib.parallel.protocol import (
    MemoryObserver,
    ModuleWrapper,
    ParamShard,
    process_group,
    whole_params,
)
from dlo_lib.parallel.sharding.buckets import broadcast_packed

MIB = 2**20


class DDP(ModuleWrapper):
    """Averages the gradients of ``module`` over ``group`` at the end of every backward pass.

    Args:
        module: has the same structure on every rank. Its parameters and buffers take the values of the first
            rank of the group. Parameters that do not require gradients when the module is wrapped are not
            communicated.
        group: the ranks; None for all ranks.
        bucket_bytes: the largest size of a bucket. A larger parameter is a bucket by itself.
        first_bucket_bytes: the largest size of the first bucket. It is small, so that communication starts
            early.
        gradient_as_bucket_view: True makes ``.grad`` a view of the bucket. False stores buckets and gradients
            separately, and copies the averages to the gradients.
        keep_buckets: whether buckets that gradients view keep their memory between ``zero_grad`` and the next
            backward; None: on the CPU only. On the CPU, newly allocated memory costs a page fault for each 4
            KiB. The caching allocator of an accelerator reuses the block, and forward can use it in the
            meantime.
        broadcast_buffers: before each training forward that synchronises, set the persistent buffers (running
            statistics) to the values of the first rank. Buffers that are not part of a checkpoint are
            constants and are sent once, when the module is wrapped.
        comm_hook: sums a bucket over the ranks, in place of the all-reduce (``ddp.comm_hooks``).
        static_graph: declares that every step uses the same parameters, the same number of times. The first
            step records them and communicates at its end. Afterwards, parameters that no rank uses are not
            communicated, and a parameter may be reached several times in one backward.
        find_unused_parameters: allows parameters without a gradient. If at least one rank used the parameter,
            it gets the average, in which ranks without a gradient count as zeros; otherwise it keeps None.
            The cost is one additional small all-reduce per step, because the ranks exchange which parameters
            they used. If False, a missing gradient raises an error.
        reduced_over: for parameters that only some ranks of ``group`` hold (the experts of
            ``parallel.expert``), these ranks. Their gradients are summed over these ranks only, and divided
            by the number of ranks of ``group``.

    Gradients accumulate as without DDP, either in ``no_sync``, or with one average per backward, which sends
    more bytes. Backward hooks communicate, so ``loss.backward()`` is sufficient. ``finish_grad_sync`` is
    needed only if backward may reach no parameter at all on a rank. After an exception inside backward, zero
    the gradients before the next backward.

    Raises:
        UserError: there is no process group; the ranks hold different modules; a parameter has no gradient
            (see ``find_unused_parameters``), is new or unfrozen after wrapping, has a sparse gradient, or is
            reached twice in one backward (reentrant checkpointing without ``static_graph``); the graph is not
            static although ``static_graph`` is True; an embedding has ``max_norm``.
    """

    holds_every_param = True
    takes_added_grads = True

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
        reduced_over: Mapping[nn.Parameter, dist.ProcessGroup] | None = None,
    ) -> None:
        super().__init__()
        group = process_group(group, "DDP")
        refuse_max_norm(module)
        self.module = module
        self._held = HeldModule(module, list(module.parameters()), "DDP")
        self.reduced_over = dict(reduced_over or {})
        self.group: dist.ProcessGroup = group
        self._bucket_bytes = bucket_bytes
        self._static_graph = static_graph
        trained = [(name, param) for name, param in module.named_parameters() if param.requires_grad]
        self._frozen = [param for param in module.parameters() if not param.requires_grad]
        self._check_same_module([name for name, _ in trained])
        shared = [param for param in module.parameters() if param not in self.reduced_over]
        broadcast_packed([*shared, *module.buffers()], group, bucket_bytes)
        for holders in dict.fromkeys(self.reduced_over.values()):
            held = [param for param, ranks in self.reduced_over.items() if ranks is holders]
            broadcast_packed(held, holders, bucket_bytes)
        state = module.state_dict(keep_vars=True) if broadcast_buffers else {}
        persistent = {id(tensor) for tensor in state.values()}
        buffers = {
            id(buffer): (inner, name)
            for inner in module.modules()
            for name, buffer in inner._buffers.items()
            if buffer is not None and id(buffer) in persistent
        }
        self._running_buffers = list(buffers.values())  # their places, because a cast makes new tensors
        self._reducer = GradAllReduce(
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
            reduced_over=self.reduced_over,
        )
        # Hooks use a weak reference, because otherwise they would keep a discarded DDP communicating.
        weak_reducer = weakref.ref(self._reducer)
        hooks = [
            param.register_post_accumulate_grad_hook(
                functools.partial(_call_on_gradient, weak_reducer, index)
            )
            for index, (_, param) in enumerate(trained)
        ]
        weakref.finalize(self, lambda: [hook.remove() for hook in hooks])

    @property
    def _device(self) -> torch.device:
        return next(self.module.parameters(), torch.empty(0)).device

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            self._held.check()
        self._reducer.recover()
        if not torch.is_grad_enabled():
            return self.module(*args, **kwargs)
        if any(param.requires_grad for param in self._frozen):
            raise UserError(
                "a parameter was unfrozen after DDP had wrapped the module: unfreeze first, then wrap again",
            )
        if self.training and self._reducer.sync and self._running_buffers:
            context = self._reducer.join_context
            source = context.announce(JoinPhase.BUFFERS).active[0] if context is not None else 0
            self._broadcast_buffers(source)
        self._reducer.unsynced = True
        output = self.module(*args, **kwargs)
        if self._static_graph:
            # Begin the pass with the gradient of the output. Otherwise the nested backward of a reentrant
            # checkpoint could begin it, and its end would count as the end of the whole pass.
            for tensor in tensors_in(output):
                if tensor.requires_grad:
                    tensor.register_hook(functools.partial(_call_begin, weakref.ref(self._reducer)))
        return output

    def no_sync(self) -> AbstractContextManager[None]:
        """Backward passes inside the context accumulate local gradients without communication. The next
        backward pass outside averages their sum."""
        return without_sync(self._reducer)

    def finish_grad_sync(self) -> None:
        """Average the gradients that are not averaged yet. After a backward pass outside ``no_sync`` there
        are none."""
        self._reducer.recover()
        if self._reducer.unsynced:
            self._reducer.announce()
            self._reducer.finish()

    def shards(self) -> list[ParamShard]:
        """Return the parameters of the module, which are whole on every rank."""
        return whole_params(self.module)

    def unwrapped(self) -> list[nn.Module]:
        return [self.module]

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale the gradients so that their norm is at most ``max_norm``, without communication.

        Returns the norm before scaling, ().
        """
        return nn.utils.clip_grad_norm_(self.module.parameters(), max_norm, norm_type)

    def observe_memory(self, observer: MemoryObserver) -> None:
        """Report nothing: the parameters are whole, and the gradients are found through ``.grad``."""

    @contextlib.contextmanager
    def join(
        self,
        *,
        shadow_step: Callable[[], None] | None = None,
        divide_by_initial_world_size: bool = True,
    ) -> Iterator[None]:
        """A context for training loops of unequal length. At the end of its loop, a rank takes part in the
        communication of the other ranks until all loops have ended.

        Args:
            shadow_step: called after each backward of the other ranks, with their average in ``.grad``. If it
                runs the optimiser step and ``zero_grad`` of the loop, the parameters and the optimiser state
                remain equal on all ranks. None: the parameters and buffers are copied at the end from a rank
                that took part in the last step, and the optimiser state of ranks that ended earlier is
                outdated.
            divide_by_initial_world_size: False averages over the ranks that have data.

        Only the communication of DDP is followed. A loop with other communication (of a loss, of
        ``SyncBatchNorm``) needs equal numbers of batches. Gradients that a rank accumulated in ``no_sync``
        and did not average are lost.

        Raises:
            UserError: ``reduced_over`` was given, because such a model communicates in forward.
        """
        if self.reduced_over:
            raise UserError("experts exchange tokens in forward: give all ranks equal numbers of batches")
        context = self._reducer.join_context = JoinContext(
            self.group,
            self._device,
            divide_by_initial_world_size,
        )
        try:
            yield
            self._reducer.recover()
            self._shadow(context, shadow_step)
        finally:
            self._reducer.join_context = None

    def _shadow(self, context: JoinContext, step: Callable[[], None] | None) -> None:
        while (state := context.announce(JoinPhase.OUT)).phase is not JoinPhase.OUT:
            if state.phase is JoinPhase.BUFFERS:
                self._broadcast_buffers(state.active[0])
                continue
            self.zero_grad()
            self._reducer.finish(PassEnd.SHADOW)
            if step is not None:
                step()
        if step is None and context.last is not None:
            tensors = [*self.module.parameters(), *self.module.buffers()]
            broadcast_packed(tensors, self.group, self._bucket_bytes, context.last.active[0])

    def _broadcast_buffers(self, source: int) -> None:
        """Set the running buffers to the values of rank ``source`` of the group."""
        found = [inner._buffers.get(name) for inner, name in self._running_buffers]
        buffers = [buffer for buffer in found if buffer is not None]
        broadcast_packed(buffers, self.group, self._bucket_bytes, source)

    def _check_same_module(self, trained: list[str]) -> None:
        tensors = [*self.module.parameters(), *self.module.buffers()]
        layout = [(tuple(tensor.shape), str(tensor.dtype)) for tensor in tensors]
        mine = zlib.crc32(repr((layout, trained)).encode())
        if broadcast_ints([mine], self.group, self._device) != [mine]:
            raise UserError(
                "this rank's module differs from the first rank's in its parameters: "
                "build the same module on every rank",
            )


def _call_on_gradient(reducer: weakref.ref[GradAllReduce], index: int, param: Tensor) -> None:
    alive = reducer()
    if alive is not None:
        alive.on_gradient(index)


def _call_begin(reducer: weakref.ref[GradAllReduce], _: Tensor) -> None:
    alive = reducer()
    if alive is not None and alive.sync:
        alive.begin()
