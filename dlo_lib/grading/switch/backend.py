# mypy: disable-error-code="override,assignment,call-arg,attr-defined"
"""The switch as a backend of ``torch.distributed``: calls of the labs and of PyTorch's DDP, FSDP2 and DTensor
become messages to the judge.

``join`` makes it the default group of this process; new sub-groups and meshes use it too. All operations are
asynchronous, and torch waits for those that it calls synchronously. Operations that this module does not
define raise, because the registered backend refuses every call.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from dlo_lib.base.torch_compat import refusing_backend
from dlo_lib.comm.calls import Kind, require_peer
from dlo_lib.grading.switch.link import CommunicationError, Link, SwitchWork

NAME = "switch"
REDUCTIONS = {kind: name for name, kind in dist.ReduceOp.RedOpType.__members__.items()}
NO_TIMEOUT = timedelta(days=1)  # the judge enforces deadlines
Outputs = Sequence[Sequence[Tensor]]


def join(link: Link, rank: int, world: int) -> None:
    """Make the switch the default process group of this process; destroy a previous one first."""
    if dist.is_initialized():
        dist.barrier()  # another rank may still be joining it
        link.left = dist.group.WORLD  # its connections stay open until slower ranks have left
        dist.destroy_process_group()
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu"])
    dist.init_process_group(
        NAME,
        store=dist.HashStore(),
        rank=rank,
        world_size=world,
        timeout=NO_TIMEOUT,
        pg_options=link,
    )


def _create(options: Any, link: Link | None) -> SwitchGroup:
    if link is None:  # a sub-group uses the same link
        parent = dist.distributed_c10d._get_default_group()
        assert isinstance(parent, SwitchGroup)
        link = parent.link
    members = list(options.global_ranks_in_group) or list(range(options.group_size))
    return SwitchGroup(link, options.group_rank, members)


class SwitchGroup(dist.ProcessGroup):
    """A process group on the switch. ``members``: global ranks in the order of the group.

    Operations have both the old and the new names and arguments of torch, because its functions, its C++ code
    and the functional collectives call different ones. torch's type stubs have overloads that never reach a
    subclass.
    """

    def __init__(self, link: Link, rank: int, members: Sequence[int]) -> None:
        super().__init__(rank, len(members))
        self.link, self.members = link, tuple(members)
        # torch stores a group's name in a registered backend; this one refuses every operation not defined
        # below.
        self._name_backend = refusing_backend(rank, len(members))
        self._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.CUSTOM, self._name_backend)
        self._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)  # 2.15 reads it

    def getBackendName(self) -> str:
        return NAME

    # -- one tensor for all ranks

    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None) -> SwitchWork:
        name, tensors_sent = _reduction(opts, tensors)
        return self._call(Kind.ALL_REDUCE, tensors_sent, tensors, reduction=name, opts=opts)

    allreduce_coalesced = allreduce

    def broadcast(self, tensors: Sequence[Tensor], opts: Any = None) -> SwitchWork:
        root = opts.rootRank if opts is not None else 0
        mine = self.rank() == root
        return self._call(
            Kind.BROADCAST,
            tensors if mine else (),
            () if mine else tensors,
            peer=root,
            opts=opts,
            value=tensors,
        )

    def reduce(self, tensors: Sequence[Tensor], opts: Any) -> SwitchWork:
        name, sent = _reduction(opts, tensors)
        into = tensors if self.rank() == opts.rootRank else ()
        return self._call(Kind.REDUCE, sent, into, peer=opts.rootRank, reduction=name, opts=opts)

    def barrier(self, opts: Any = None) -> SwitchWork:
        return self._call(Kind.BARRIER, (), (), opts=opts)

    # -- all-gather

    def allgather(self, outputs: Outputs, inputs: Sequence[Tensor], opts: Any = None) -> SwitchWork:
        return self._call(
            Kind.ALL_GATHER,
            inputs,
            [tensor for tensors in outputs for tensor in tensors],
            opts=opts,
            value=outputs[0],
        )

    def allgather_coalesced(self, outputs: Outputs, inputs: Sequence[Tensor], opts: Any = None) -> SwitchWork:
        # torch passes the outputs by rank.
        by_input = [tensors[index] for index in range(len(inputs)) for tensors in outputs]
        return self._call(Kind.ALL_GATHER, inputs, by_input, opts=opts)

    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> SwitchWork:
        parts = [part for output in outputs for part in self._parts(output)]
        return self._call(Kind.ALL_GATHER, inputs, parts, opts=opts, value=outputs, whole=outputs)

    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> SwitchWork:
        self._require_concatenated("all_gather_into_tensor: the output", output, tensor)
        return self.all_gather_single_coalesced([output], [tensor], opts)

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced

    # -- reduce-scatter

    def reduce_scatter(self, outputs: Sequence[Tensor], inputs: Outputs, opts: Any = None) -> SwitchWork:
        return self._reduce_scatter(outputs, [tensor for tensors in inputs for tensor in tensors], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> SwitchWork:
        return self._reduce_scatter(
            outputs, [part for tensor in inputs for part in self._parts(tensor)], opts
        )

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> SwitchWork:
        self._require_concatenated("reduce_scatter_tensor: the input", tensor, output)
        return self.reduce_scatter_single_coalesced([output], [tensor], opts)

    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _reduce_scatter(self, outputs: Sequence[Tensor], parts: Sequence[Tensor], opts: Any) -> SwitchWork:
        name, sent = _reduction(opts, parts)
        return self._call(Kind.REDUCE_SCATTER, sent, outputs, reduction=name, opts=opts)

    # -- gather, scatter, all-to-all

    def gather(self, outputs: Outputs, inputs: Sequence[Tensor], opts: Any) -> SwitchWork:
        into = outputs[0] if self.rank() == opts.rootRank else ()
        return self._call(Kind.GATHER, inputs, into, peer=opts.rootRank, opts=opts)

    def gather_single(self, output: Tensor, tensor: Tensor, opts: Any) -> SwitchWork:
        root = self.rank() == opts.rootRank
        whole, into = ([output], self._parts(output)) if root else ((), ())
        return self._call(
            Kind.GATHER, [tensor], into, peer=opts.rootRank, opts=opts, value=whole, whole=whole
        )

    def scatter(self, outputs: Sequence[Tensor], inputs: Outputs, opts: Any) -> SwitchWork:
        sent = inputs[0] if self.rank() == opts.rootRank else ()
        return self._call(Kind.SCATTER, sent, outputs, peer=opts.rootRank, opts=opts)

    def alltoall(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None) -> SwitchWork:
        return self._call(Kind.ALL_TO_ALL, inputs, outputs, opts=opts)

    def alltoall_base(
        self, output: Tensor, tensor: Tensor, output_splits: Any, input_splits: Any, opts: Any = None
    ) -> SwitchWork:
        _require_contiguous("all_to_all_single", [tensor, output])
        sent = self._split("input", tensor, input_splits)
        into = self._split("output", output, output_splits)
        return self._call(Kind.ALL_TO_ALL, sent, into, opts=opts, value=[output], whole=[output])

    all_to_all_single = alltoall_base

    # -- messages

    def send(self, tensors: Sequence[Tensor], peer: int, tag: int = 0) -> SwitchWork:
        _require_contiguous("send", tensors)
        return self._call(Kind.SEND, tensors, (), peer=peer, tag=tag)

    def recv(self, tensors: Sequence[Tensor], peer: int, tag: int = 0) -> SwitchWork:
        _require_contiguous("recv", tensors)
        return self._call(Kind.RECV, (), tensors, peer=peer, tag=tag)

    def recv_anysource(self, tensors: Sequence[Tensor], tag: int = 0) -> SwitchWork:
        _require_contiguous("recv", tensors)
        return self._call(Kind.RECV_ANY, (), tensors, tag=tag)

    # -- not supported

    def monitored_barrier(self, *_: Any, **__: Any) -> NoReturn:
        raise CommunicationError("the switch has no monitored_barrier: use barrier")

    def _start_coalescing(self, *_: Any) -> None:
        """Do nothing: each call is sent separately."""

    def _end_coalescing(self, *_: Any) -> SwitchWork:
        return SwitchWork(self.link, ())

    # -- inside

    def _call(
        self, kind: Kind, sent: Sequence[Tensor], into: Sequence[Tensor],
        *, peer: int = -1, tag: int = 0, reduction: str = "", opts: Any = None, value: Sequence[Tensor] = (),
        whole: Sequence[Tensor] = (),
    ) -> SwitchWork:  # fmt: skip
        for tensor in whole:
            if not tensor.is_contiguous():
                raise CommunicationError(f"{kind.value} needs a contiguous output")
        require_peer(kind, self.rank(), peer, self.size())
        seq = self.link.post(
            kind, self.group_name, self.members, sent, into,
            peer=self.members[peer] if peer >= 0 else -1, tag=tag, reduction=reduction,
            is_async=opts is not None and opts.asyncOp,
        )  # fmt: skip
        return SwitchWork(self.link, [seq], value or into)

    def _require_concatenated(self, name: str, whole: Tensor, part: Tensor) -> None:
        """Refuse the shapes that gloo refuses: what passes a check must run in the notebook too."""
        rows, *rest = part.shape or (1,)
        want = (self.size() * rows, *rest)
        if tuple(whole.shape) == want:
            return
        numbers = math.prod(want)
        if whole.numel() == numbers:
            cure = "pass it with .view(-1)" if not rest else f"pass it with .view{want}"
        elif whole.numel() < numbers and name.endswith("input"):
            cure = f"it has {whole.numel()} numbers instead of {numbers}, so append zeros (padding)"
        else:
            cure = f"it has {whole.numel()} numbers instead of {numbers}"
        raise CommunicationError(
            f"{name} has shape {tuple(whole.shape)}. With gloo it must be the {self.size()} parts of "
            f"shape {tuple(part.shape)} one after the other, {want}: {cure}"
        )

    def _parts(self, tensor: Tensor) -> list[Tensor]:
        """Return a part for each member, in order."""
        if tensor.numel() % self.size():
            raise CommunicationError(
                f"a tensor of shape {tuple(tensor.shape)} cannot be divided among {self.size()} ranks"
            )
        return list(tensor.detach().reshape(self.size(), -1).unbind(0))

    def _split(self, name: str, tensor: Tensor, sizes: Sequence[int]) -> list[Tensor]:
        """Return the rows for each member, equal numbers if ``sizes`` is empty."""
        if not sizes:
            if tensor.shape[0] % self.size():
                raise CommunicationError(
                    f"{tensor.shape[0]} rows cannot be divided among {self.size()} ranks: give split sizes"
                )
            sizes = [tensor.shape[0] // self.size()] * self.size()
        if len(sizes) != self.size():
            raise CommunicationError(
                f"the number of sizes of the {name} of all_to_all_single is {len(sizes)}, and the number of "
                f"ranks in its group {self.size()}: give the group for whose ranks the sizes are"
            )
        if sum(sizes) != tensor.shape[0]:
            raise CommunicationError(
                f"the {name} of all_to_all_single has {tensor.shape[0]} rows, and its sizes add up to "
                f"{sum(sizes)}: the third argument has the rows that are received, the fourth those that are "
                "sent"
            )
        return list(tensor.detach().split(list(sizes)))


def _require_contiguous(name: str, tensors: Sequence[Tensor]) -> None:
    """Refuse what gloo refuses. Its collectives accept any strides, except the all-to-all of one tensor; its
    messages do not."""
    if not all(tensor.is_contiguous() for tensor in tensors):
        cure = "receive into a new tensor, then copy it" if name == "recv" else "send tensor.contiguous()"
        raise CommunicationError(f"{name}: input tensor has to be contiguous: {cure}")


def _reduction(opts: Any, tensors: Sequence[Tensor]) -> tuple[str, Sequence[Tensor]]:
    """Return the name of the reduction and the tensors to send for it."""
    if opts is None:
        return "SUM", tensors
    op = opts.reduceOp
    name = REDUCTIONS[op.op]
    if name == "PREMUL_SUM":
        return name, [tensor.detach() * op.__getstate__()[1] for tensor in tensors]
    return name, tensors
