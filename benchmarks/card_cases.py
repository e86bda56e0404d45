"""The operations of the table of a GPU: ours, PyTorch's operators, the peers, and what each must move or
multiply at least."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from dlo_lib import kernels
from dlo_lib.kernels.llama import summed_cross_entropy
from dlo_lib.models import llama
from dlo_lib.optim import step

Action = Callable[..., Tensor]
HEADS, KV_HEADS, HEAD_DIM = 24, 8, 128
EXPERTS, WIDE, HIDDEN = 8, 8192, 3072
EPSILON = 1e-5


@dataclass(frozen=True)
class Case:
    """An operation at one size.

    Attributes:
        operation, size: as the table names them.
        ours, eager: the functions; eager is the reference.
        shapes: of the floating-point inputs, all of which require a gradient.
        moved: elements that the forward and the backward must read and write, or None if products limit it.
        multiplied: floating-point operations of the products forward and backward, or None.
        compiled: whether ``torch.compile`` of eager is a peer.
        peers: the other peers by name.
        writes_input: peers that write over their first input, which then is a copy in each repetition.
        transposed: whether inputs have the layout (batch, seq, heads, dim) in memory.
        scales: of the inputs; empty: 1.
    """

    operation: str
    size: str
    ours: Action
    eager: Action
    shapes: tuple[tuple[int, ...], ...]
    moved: tuple[int, int] | None = None
    multiplied: tuple[int, int] | None = None
    compiled: bool = False
    peers: dict[str, Action] = field(default_factory=dict)
    writes_input: tuple[str, ...] = ()
    transposed: bool = False
    scales: tuple[float, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.operation}, {self.size}"

    def inputs(self, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
        """Return normal inputs that require a gradient, the same in each process."""
        generator = torch.Generator(device).manual_seed(0)
        made = [torch.randn(shape, dtype=dtype, device=device, generator=generator) for shape in self.shapes]
        for x, scale in zip(made, self.scales):
            x.mul_(scale)
        if self.transposed:
            made = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in made]
        return [x.requires_grad_() for x in made]


def cases(dtype: torch.dtype, device: torch.device, largest: int = 16384) -> list[Case]:
    """Return all cases, those of the sizes of a training step first.

    Args:
        largest: rows of the largest size; the sizes of a test are smaller.
    """
    sizes = [(2048, 3072), (16384, 4096), (16384, 8192), (256, 1024)]
    sizes = [(rows, columns) for rows, columns in sizes if rows <= largest]
    losses = [(2048, 128_256), (8192, 128_256), (256, 32_768)]
    losses = [(rows, vocab) for rows, vocab in losses if rows <= largest and largest > 2048]
    if not sizes:
        sizes, losses = [(16, 256)], [(16, 96)]
    made = [case for rows, columns in sizes for case in _rows_cases(rows, columns, dtype, device)]
    made += [case for rows, vocab in losses for case in _losses(rows, vocab, dtype, device)]
    for seq in sorted({min(2048, largest), min(16384, largest)}):
        made += [_attention(seq, is_causal, dtype, device) for is_causal in (True, False)]
        made += [_attention(seq, True, dtype, device, 32, 64)] if seq == 2048 else []
        made.append(_grouped_matmul(seq, dtype, device))
    return made


def _rows_cases(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> list[Case]:
    """Return the operations on rows: each element is read or written once."""
    liger = _liger()
    heads = columns // HEAD_DIM
    cos, sin = _angles(rows, dtype, device)
    keys = torch.zeros(1, 1, rows, HEAD_DIM, device=device, dtype=dtype)
    n, shape, size = rows * columns, (rows, columns), f"{rows} × {columns}"
    of_liger: dict[str, dict[str, Action]] = {}
    if liger is not None:
        of_liger = {
            "softmax": {"Liger": liger.liger_softmax},
            "rms_norm": {"Liger": lambda x, w: liger.liger_rms_norm(x, w, EPSILON, in_place=False)},
            "layer_norm": {"Liger": lambda x, w, b: liger.liger_layer_norm(x, w, b, EPSILON)},
            "rope": {"Liger": lambda x: liger.liger_rope(x, keys, cos, sin)[0]},
            "swiglu": {"Liger": liger.liger_swiglu},
        }
    made: list[tuple[str, Action, Action, tuple[tuple[int, ...], ...], tuple[int, int]]] = [
        ("vector_add", kernels.vector_add, torch.add, (shape, shape), (3 * n, 0)),
        ("softmax", kernels.softmax, partial(torch.softmax, dim=-1), (shape,), (2 * n, 3 * n)),
        (
            "rms_norm",
            lambda x, w: kernels.rms_norm(x, w, EPSILON),
            lambda x, w: llama.rms_norm(x, w, EPSILON),
            (shape, (columns,)),
            (2 * n, 3 * n),
        ),
        (
            "layer_norm",
            lambda x, w, b: kernels.layer_norm(x, w, b, EPSILON),
            lambda x, w, b: F.layer_norm(x, (columns,), w, b, EPSILON),
            (shape, (columns,), (columns,)),
            (2 * n, 3 * n),
        ),
        (
            "rope",
            lambda x: kernels.rope(x, cos, sin),
            lambda x: llama.apply_rope(x, cos, sin),
            ((1, heads, rows, HEAD_DIM),),
            (2 * n, 2 * n),
        ),
        ("swiglu", kernels.swiglu, lambda a, b: F.silu(a) * b, (shape, shape), (3 * n, 5 * n)),
    ]
    return [
        Case(
            name,
            size,
            ours,
            eager,
            shapes,
            moved,
            compiled=rows > 1024 and columns <= 4096,
            peers=of_liger.get(name, {}),
            transposed=name == "rope",
        )
        for name, ours, eager, shapes, moved in made
    ]


def _losses(rows: int, vocab: int, dtype: torch.dtype, device: torch.device) -> list[Case]:
    targets = torch.randint(vocab, (rows,), device=device, generator=torch.Generator(device).manual_seed(1))
    liger = _liger()
    n, hidden = rows * vocab, HIDDEN if rows >= 256 else 64
    products = 2 * rows * hidden * vocab
    loss, linear = {}, {}
    if liger is not None:
        loss["Liger"] = lambda x: liger.liger_cross_entropy(x, targets, reduction="sum")
        linear["Liger"] = lambda x, w: liger.liger_fused_linear_cross_entropy(x, w, targets)
    return [
        Case(
            "cross_entropy",
            f"{rows} × {vocab}",
            lambda x: summed_cross_entropy(x[None], targets[None]),
            lambda x: step.summed_cross_entropy(x[None], targets[None]),
            ((rows, vocab),),
            (n, 2 * n),
            compiled=rows > 1024,
            peers=loss,
            writes_input=("Liger",),
        ),
        Case(
            "linear_cross_entropy",
            f"{rows} × {hidden} × {vocab}",
            lambda x, w: kernels.linear_cross_entropy(x, w, targets),
            lambda x, w: step.summed_cross_entropy((x @ w.T)[None], targets[None]) / rows,
            ((rows, hidden), (vocab, hidden)),
            multiplied=(products, 2 * products),
            compiled=rows > 1024,
            peers=linear,
            scales=(1.0, hidden**-0.5),
        ),
    ]


def _attention(
    seq: int,
    is_causal: bool,
    dtype: torch.dtype,
    device: torch.device,
    heads: int = HEADS,
    head_dim: int = HEAD_DIM,
) -> Case:
    forward = 4 * heads * seq * seq * head_dim // (2 if is_causal else 1)
    kv = (1, KV_HEADS, seq, head_dim)
    return Case(
        f"flash_attention, {'causal' if is_causal else 'full'}",
        f"{seq} × {heads}/{KV_HEADS} × {head_dim}",
        lambda q, k, v: kernels.FlashAttention.apply(q, k, v, is_causal),  # always the kernel
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=True),
        ((1, heads, seq, head_dim), kv, kv),
        multiplied=(forward, forward * 5 // 2),
        compiled=seq == 2048 and is_causal,
        peers=_sdpa_backends(device, dtype, is_causal, heads, head_dim),
        transposed=True,
    )


def _sdpa_backends(
    device: torch.device, dtype: torch.dtype, is_causal: bool, heads: int, head_dim: int
) -> dict[str, Action]:
    """Return the backends of PyTorch's attention that run on the device, with the keys and values repeated
    where a backend refuses grouped queries."""
    backends = {"FLASH": SDPBackend.FLASH_ATTENTION, "cuDNN": SDPBackend.CUDNN_ATTENTION}
    q = torch.zeros(1, heads, 128, head_dim, device=device, dtype=dtype)
    k = torch.zeros(1, KV_HEADS, 128, head_dim, device=device, dtype=dtype)
    found: dict[str, Action] = {}
    for name, backend in backends.items():
        for suffix, action in (("", _attend_with), (", kv repeated", _attend_repeated)):
            peer = partial(action, backend, is_causal)
            try:
                peer(q, k, k)
            except RuntimeError:
                continue
            found[name + suffix] = peer
            break
    return found


def _attend_with(backend: SDPBackend, is_causal: bool, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=True)


def _attend_repeated(backend: SDPBackend, is_causal: bool, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    groups = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)


def _grouped_matmul(rows: int, dtype: torch.dtype, device: torch.device) -> Case:
    uneven = 16 if rows > 1024 else 1
    counts = torch.full((EXPERTS,), rows // EXPERTS, device=device)
    counts[0], counts[1] = counts[0] + uneven, counts[1] - uneven
    sizes = counts.tolist()
    ends = counts.cumsum(0).to(torch.int32)
    hidden, wide = (HIDDEN, WIDE) if rows > 1024 else (64, 128)

    def loop(x: Tensor, w: Tensor) -> Tensor:
        return torch.cat([part @ weight for part, weight in zip(x.split(sizes), w)])

    products = 2 * rows * hidden * wide
    peers: dict[str, Action] = {}
    if hasattr(F, "grouped_mm") and dtype is torch.bfloat16 and device.type == "cuda":
        peers["F.grouped_mm"] = lambda x, w: F.grouped_mm(x, w, offs=ends)
    return Case(
        "grouped_matmul",
        f"{rows} × {hidden} × {wide}, {EXPERTS} experts",
        lambda x, w: kernels.grouped_matmul(x, w, counts),
        loop,
        ((rows, hidden), (EXPERTS, hidden, wide)),
        multiplied=(products, 2 * products),
        compiled=rows == 2048,
        peers=peers,
    )


def _angles(rows: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    angles = torch.outer(
        torch.arange(rows, device=device), torch.linspace(1, 0.01, HEAD_DIM // 2, device=device)
    )
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def _liger():  # type: ignore[no-untyped-def]
    """Return the functions of Liger-Kernel, or None where it is not installed or there is no GPU."""
    if not torch.cuda.is_available() or importlib.util.find_spec("liger_kernel") is None:
        return None
    import liger_kernel.transformers.functional as functional

    return functional
