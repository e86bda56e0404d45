"""The fused operations as operators of PyTorch (``torch.ops.dlo``), for code that ``torch.compile`` traces.

The compiler cannot look into a Triton kernel that ``launch`` starts. An operator is one node of its graph: it
states the shapes and dtypes of its results, and the compiled code calls it with real tensors. It then chooses
the kernel or the twin as a call outside of compiled code does, so that an operator also runs on a CPU. The
autograd functions are traced, and their ``run`` becomes a call of an operator.

Calls outside of compiled code do not pass through here, because PyTorch's dispatcher and its Python wrapper
take longer than a launch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dlo_lib.kernels.cross_entropy import logits_gradient, require_targets, row_losses
from dlo_lib.kernels.cross_entropy_terms import CrossEntropyTerms
from dlo_lib.kernels.dispatch import (
    OPERATORS,
    KernelBackend,
    backend_for,
    backend_for_rows,
    computed_in,
    run,
)
from dlo_lib.kernels.flash_attention import LARGEST_HEAD, attention_backward, attention_forward
from dlo_lib.kernels.grouped_matmul import grouped_forward, grouped_weight_gradient
from dlo_lib.kernels.linear_cross_entropy import chunk_losses, gradient_buffers
from dlo_lib.kernels.rms_norm import rms_norm_backward, rms_norm_forward
from dlo_lib.kernels.rope import rotate
from dlo_lib.kernels.swiglu import swiglu_backward, swiglu_forward

LIBRARY = torch.library.Library("dlo", "DEF")
STRIDES = torch.Tag.needs_exact_strides
TERMS = "int ignore_index, float label_smoothing, float z_loss"


def operator(signature: str, function: Callable[..., Any], shapes: Callable[..., Any]) -> Callable[..., Any]:
    """Define an operator and return it.

    Args:
        signature: its name, parameters and results in the language of PyTorch's schemas.
        function: computes it, on every device.
        shapes: returns tensors without data that have the shapes, dtypes and strides of the results.
    """
    # The strides of a result are those of a parameter, which must be those that the compiler has seen.
    name = LIBRARY.define(signature, tags=(STRIDES,))
    LIBRARY.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"dlo::{name}", shapes, lib=LIBRARY)
    defined: Callable[..., Any] = getattr(torch.ops.dlo, name).default
    return defined


def _twin(
    signature: str,
    module: str,
    twin: Callable[..., Any],
    *like: int,
    backend_of: Callable[[Tensor], KernelBackend] = backend_for,
) -> None:
    """Define the operator of a twin and of its name. Each result has the shape, dtype and strides of a
    parameter, whose number is in ``like``."""

    def function(*args: Any) -> Any:
        results = run(backend_of(args[0]), module, twin, *args)
        if isinstance(results, Tensor):
            return _laid_out(results, args[like[0]])
        return tuple(_laid_out(result, args[number]) for result, number in zip(results, like))

    def shapes(*args: Any) -> Any:
        results = tuple(torch.empty_like(args[number]) for number in like)
        return results if len(results) > 1 else results[0]

    OPERATORS[twin.__name__] = operator(f"{twin.__name__}{signature}", function, shapes)


def _laid_out(result: Tensor, like: Tensor) -> Tensor:
    """Return ``result`` with the strides of ``torch.empty_like(like)``."""
    return result if result.stride() == like.stride() else torch.empty_like(like).copy_(result)


def _norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    y, r = run(backend_for_rows(x), "norms", rms_norm_forward, x, weight, eps)
    return y.contiguous(), r.view(*x.shape[:-1], 1)  # the kernel returns (rows,), the twin (..., 1)


def _norm_shapes(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    y = x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, weight.dtype))
    return y, x.new_empty((*x.shape[:-1], 1), dtype=computed_in(x.dtype))


OPERATORS["rms_norm_forward"] = operator(
    "rms_norm_forward(Tensor x, Tensor weight, float eps) -> (Tensor, Tensor)", _norm, _norm_shapes
)
_twin(
    "(Tensor grad, Tensor x, Tensor weight, Tensor r) -> (Tensor, Tensor)",
    "norms",
    rms_norm_backward,
    1,
    2,
    backend_of=backend_for_rows,
)
_twin("(Tensor x, Tensor cos, Tensor sin, int sign) -> Tensor", "rope", rotate, 0)
_twin("(Tensor gate, Tensor up) -> Tensor", "swiglu", swiglu_forward, 0)
_twin("(Tensor grad, Tensor gate, Tensor up) -> (Tensor, Tensor)", "swiglu", swiglu_backward, 1, 2)


def _backend_of_heads(q: Tensor) -> KernelBackend:
    return backend_for(q) if q.shape[-1] <= LARGEST_HEAD else KernelBackend.TORCH


def _attention(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> tuple[Tensor, Tensor]:
    out, lse = run(_backend_of_heads(q), "flash_attention", attention_forward, q, k, v, is_causal)
    return _laid_out(out, q), lse.contiguous()


OPERATORS["attention_forward"] = operator(
    "attention_forward(Tensor q, Tensor k, Tensor v, bool is_causal) -> (Tensor, Tensor)",
    _attention,
    lambda q, k, v, is_causal: (
        torch.empty_like(q),
        q.new_empty(q.shape[:-1], dtype=computed_in(q.dtype)),
    ),
)
_twin(
    "(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, bool is_causal)"
    " -> (Tensor, Tensor, Tensor)",
    "flash_attention",
    attention_backward,
    1,
    2,
    3,
    backend_of=_backend_of_heads,
)


def _grouped(rows: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    return run(backend_for(rows), "grouped_matmul", grouped_forward, rows, weights, counts).contiguous()


def _grouped_gradient(rows: Tensor, grad: Tensor, counts: Tensor) -> Tensor:
    return run(backend_for(rows), "grouped_matmul", grouped_weight_gradient, rows, grad, counts).contiguous()


OPERATORS["grouped_forward"] = operator(
    "grouped_forward(Tensor rows, Tensor weights, Tensor counts) -> Tensor",
    _grouped,
    lambda rows, weights, counts: rows.new_empty((rows.shape[0], weights.shape[2])),
)
OPERATORS["grouped_weight_gradient"] = operator(
    "grouped_weight_gradient(Tensor rows, Tensor grad, Tensor counts) -> Tensor",
    _grouped_gradient,
    lambda rows, grad, counts: rows.new_empty((counts.shape[0], rows.shape[1], grad.shape[1])),
)


def scalars(terms: CrossEntropyTerms) -> tuple[int, float, float]:
    """Return the terms as an operator receives them."""
    return terms.ignore_index, terms.label_smoothing, terms.z_loss


def _losses(logits: Tensor, targets: Tensor, *terms: Any) -> tuple[Tensor, Tensor]:
    of = CrossEntropyTerms(*terms)
    require_targets(targets, tuple(logits.shape[:-1]), logits.shape[-1], of, "that of logits without vocab")
    return run(backend_for(logits), "cross_entropy", row_losses, logits, targets, of)


def _losses_shapes(logits: Tensor, targets: Tensor, *terms: Any) -> tuple[Tensor, Tensor]:
    losses = logits.new_empty(logits.shape[:1], dtype=computed_in(logits.dtype))
    return losses, torch.empty_like(losses)


def _gradient(scale: Tensor, logits: Tensor, targets: Tensor, lse: Tensor, *terms: Any) -> Tensor:
    args = (scale, logits, targets, lse, CrossEntropyTerms(*terms))
    return run(backend_for(logits), "cross_entropy", logits_gradient, *args).contiguous()


_ROW_LOSSES = operator(
    f"row_losses(Tensor logits, Tensor targets, {TERMS}) -> (Tensor, Tensor)", _losses, _losses_shapes
)
_LOGITS_GRADIENT = operator(
    f"logits_gradient(Tensor scale, Tensor logits, Tensor targets, Tensor lse, {TERMS}) -> Tensor",
    _gradient,
    lambda scale, logits, *_: logits.new_empty(logits.shape),
)
OPERATORS["row_losses"] = lambda logits, targets, terms: _ROW_LOSSES(logits, targets, *scalars(terms))
OPERATORS["logits_gradient"] = lambda scale, logits, targets, lse, terms: _LOGITS_GRADIENT(
    scale, logits, targets, lse, *scalars(terms)
)


def _linear_losses(
    x: Tensor, weight: Tensor, targets: Tensor, ignore_index: int, label_smoothing: float, z_loss: float,
    chunk: int, dtype: torch.dtype, needs_x: bool, needs_w: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    terms = CrossEntropyTerms(ignore_index, label_smoothing, z_loss)
    require_targets(targets, tuple(x.shape[:-1]), weight.shape[0], terms, "that of x without hidden")
    grad_x, grad_w = gradient_buffers(x, weight, needs_x, needs_w)
    narrow, w = x.to(dtype).contiguous(), weight.to(dtype)
    losses = chunk_losses(narrow, w, targets, terms, chunk, grad_x, grad_w, backend_for(narrow))
    none = x.new_empty(0)
    return (
        losses.sum(),
        none if grad_x is None else grad_x,
        torch.empty_like(none) if grad_w is None else grad_w,
    )


def _linear_losses_shapes(
    x: Tensor, weight: Tensor, targets: Tensor, ignore_index: int, label_smoothing: float, z_loss: float,
    chunk: int, dtype: torch.dtype, needs_x: bool, needs_w: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    grad_x = x.new_empty(x.shape if needs_x else 0)
    grad_w = x.new_empty(0)
    if needs_w:
        grad_w = weight.new_empty(weight.shape, dtype=computed_in(weight.dtype))
    return x.new_empty((), dtype=computed_in(dtype)), grad_x, grad_w


def _keep_gradients(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*output[1:])
    ctx.mark_non_differentiable(*output[1:])
    ctx.needs, ctx.dtypes = inputs[-2:], (inputs[0].dtype, inputs[1].dtype)


def _scale_gradients(ctx: Any, scale: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    # In fp32 or wider, because the gradient of the loss is one number that a narrow dtype would round.
    grads = zip(ctx.saved_tensors, ctx.needs, ctx.dtypes)
    scaled = [
        (grad.to(computed_in(grad.dtype)) * scale).to(dtype) if needed else None
        for grad, needed, dtype in grads
    ]
    return *scaled, *[None] * 8


_LINEAR_LOSSES = operator(
    f"linear_losses(Tensor x, Tensor weight, Tensor targets, {TERMS}, int chunk, ScalarType dtype,"
    " bool needs_x, bool needs_w) -> (Tensor, Tensor, Tensor)",
    _linear_losses,
    _linear_losses_shapes,
)
torch.library.register_autograd(
    "dlo::linear_losses", _scale_gradients, setup_context=_keep_gradients, lib=LIBRARY
)


def linear_losses(x: Tensor, weight: Tensor, targets: Tensor, terms: CrossEntropyTerms, chunk: int) -> Tensor:
    """Return the sum of the losses, (), of x (rows, hidden), weight (vocab, hidden) and targets (rows,)."""
    kind, records = x.device.type, torch.is_grad_enabled()
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
    needs = (records and x.requires_grad, records and weight.requires_grad)
    total: Tensor = _LINEAR_LOSSES(x, weight, targets, *scalars(terms), chunk, dtype, *needs)[0]
    return total


OPERATORS["linear_losses"] = linear_losses
