"""AdamW for all parameters in one kernel, and AdamW that runs inside the backward.

    p <- p (1 - lr wd)        m <- b1 m + (1 - b1) g        v <- b2 v + (1 - b2) g^2
    p <- p - lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)

A step reads p, g, m and v and writes p, m and v: 28 bytes of each fp32 parameter. Written as separate
operators it reads and writes about twice as much, and starts a dozen kernels for each parameter.
``FusedAdamW`` computes all parameters of one dtype in one kernel, which reads the addresses of the tensors
from a table (*multi-tensor*).

``BackwardAdamW`` updates a parameter as soon as the backward has accumulated its gradient, and frees the
gradient. At no time do all gradients exist: of the 4 bytes of each fp32 parameter, the largest gradient
remains. In return, gradients cannot be accumulated over micro-batches, clipped by a global norm, averaged
afterwards, or discarded after an overflow, so that fp16 with a ``GradScaler`` is not possible.

Papers: AdamW (arXiv:1711.05101); the update inside the backward (LOMO, arXiv:2306.09782).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from dlo_lib.base.errors import UserError
from dlo_lib.kernels.dispatch import KernelBackend, backend_for

SCALING = ("grad_scale", "found_inf")
"""The attributes that ``GradScaler.step`` sets for the duration of a step."""
Update = dict[str, Any]
"""The keyword arguments of ``adamw_update`` that are numbers."""


def adamw_update(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    *,
    step: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
) -> None:
    """Update parameters and moments in place, in readable PyTorch, one parameter after the other.

    Args:
        params, grads, exp_avgs, exp_avg_sqs: tensors of one shape at one position of the lists.
        step: the number of this step, from 1.
        lr, beta1, beta2, eps, weight_decay: as in ``torch.optim.AdamW``.
    """
    for param, grad, exp_avg, exp_avg_sq in zip(params, grads, exp_avgs, exp_avg_sqs):
        param.mul_(1 - lr * weight_decay)
        exp_avg.lerp_(grad, 1 - beta1)
        exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        deviation = (exp_avg_sq / (1 - beta2**step)).sqrt_().add_(eps)
        param.addcdiv_(exp_avg, deviation, value=-lr / (1 - beta1**step))


class FusedAdamW(torch.optim.AdamW):
    """``torch.optim.AdamW`` whose step is one Triton kernel for the parameters of each dtype and device.

    Arguments and state are those of ``torch.optim.AdamW``, so that each loads the checkpoints of the other.
    Without Triton the step is PyTorch's fused kernel. Parameters may be fp32, bf16 or fp16; the moments have
    their dtype, as in PyTorch.

    A ``GradScaler`` passes its scale and its overflow flag to the step. The kernel divides the gradients by
    the scale, and after an overflow changes neither parameters nor state. The CPU waits for neither.

    Raises:
        UserError: an option is requested that the kernel does not have (amsgrad, maximize, capturable,
            differentiable, foreach, a tensor as learning rate), by an argument or by the state that is
            loaded; a parameter is a slice with gaps; in ``step``, a gradient is sparse.
    """

    def __init__(self, params: Any, lr: float = 1e-3, **options: Any) -> None:
        _require_kernel(options)
        if isinstance(lr, Tensor):
            raise UserError("lr is a tensor: FusedAdamW needs a number")
        super().__init__(params, lr=lr, **{**options, "fused": True, "foreach": False})
        self._tables: dict[tuple[Any, ...], Any] = {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copy, or a checkpoint, which may be that of an optimiser that is not fused."""
        for group in state["param_groups"]:
            _require_kernel({**group, "foreach": False})
            group.update(fused=True, foreach=False)
        super().__setstate__(state)
        self._step_supports_amp_scaling = True
        self._tables = {}
        for param, values in self.state.items():
            if "step" in values:
                values["step"] = torch.as_tensor(values["step"], dtype=torch.float32, device=param.device)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        for param in self.param_groups[-1]["params"]:
            if torch.empty_like(param, device="meta").stride() != param.stride():
                raise UserError(
                    f"a parameter {tuple(param.shape)} has the strides {param.stride()}, which leave gaps or "
                    "repeat memory: FusedAdamW needs param.contiguous()"
                )

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update all parameters that have a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for number, group in enumerate(self.param_groups):
            for kind, lists in self._batches(group).items():
                scale, found = (_scalar_on(kind[0], getattr(self, name, None)) for name in SCALING)
                if backend_for(lists[0][0]) is KernelBackend.TRITON:
                    from dlo_lib.kernels.triton_code.adamw import Tables, adamw_update

                    tables = self._tables.setdefault((number, *kind), Tables())
                    adamw_update(*lists, **_numbers(group), grad_scale=scale, found_inf=found, tables=tables)
                else:
                    _update_in_pytorch(*lists, numbers=_numbers(group), grad_scale=scale, found_inf=found)
        return loss

    def _batches(self, group: dict[str, Any]) -> dict[tuple[Any, ...], list[list[Tensor]]]:
        """Return for each device and dtypes the parameters, gradients, moments and steps; create the state of
        parameters that have their first gradient."""
        batches: dict[tuple[Any, ...], list[list[Tensor]]] = {}
        for param in group["params"]:
            grad = param.grad
            if grad is None:
                continue
            if grad.layout is not torch.strided:
                raise UserError(
                    f"a parameter {tuple(param.shape)} has a sparse gradient: "
                    "use sparse=False in its embedding"
                )
            strides = param.stride()
            if grad.stride() != strides:  # the elements are read in the order of memory
                grad = param.grad = _in_layout_of(param, grad)
            state = self.state[param]
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32, device=param.device)
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(param), torch.zeros_like(param)
            for name in ("exp_avg", "exp_avg_sq"):
                if state[name].stride() != strides:  # loaded ones may have another layout
                    state[name] = _in_layout_of(param, state[name])
            kind = (param.device, param.dtype, grad.dtype)
            lists = batches.get(kind)
            if lists is None:
                lists = batches[kind] = [[], [], [], [], []]
            values = (param, grad, state["exp_avg"], state["exp_avg_sq"], state["step"])
            for held, value in zip(lists, values):
                held.append(value)
        return batches


def _require_kernel(options: dict[str, Any]) -> None:
    for name in ("amsgrad", "maximize", "capturable", "differentiable", "foreach"):
        if options.get(name):
            raise UserError(f"FusedAdamW has no {name}: use torch.optim.AdamW")


def _update_in_pytorch(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    steps: list[Tensor],
    *,
    numbers: Update,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
) -> None:
    """Update as the kernel does, with PyTorch's fused kernel."""
    torch._foreach_add_(steps, 1)
    if found_inf is not None:  # a sum of flags; PyTorch's kernel compares it with 1
        found_inf = (found_inf != 0).to(torch.float32).reshape(())
    torch._fused_adamw_(
        params, grads, exp_avgs, exp_avg_sqs, [], steps, **numbers,
        amsgrad=False, maximize=False, grad_scale=grad_scale, found_inf=found_inf,
    )  # fmt: skip
    if found_inf is not None:
        torch._foreach_sub_(steps, [found_inf] * len(steps))


def _scalar_on(device: torch.device, value: Tensor | None) -> Tensor | None:
    return None if value is None else value.to(device, torch.float32, non_blocking=True)


def _in_layout_of(param: Tensor, value: Tensor) -> Tensor:
    """Return ``value`` with the strides of ``param``: the elements are read in the order of memory."""
    if value.stride() == param.stride():
        return value
    return torch.empty_like(param, dtype=value.dtype).copy_(value)


def _numbers(group: dict[str, Any]) -> Update:
    beta1, beta2 = group["betas"]
    return {
        "lr": group["lr"],
        "beta1": beta1,
        "beta2": beta2,
        "eps": group["eps"],
        "weight_decay": group["weight_decay"],
    }


class BackwardAdamW:
    """AdamW that updates each parameter during the backward and frees its gradient.

    Args:
        params: the parameters. A hook of each runs when its gradient is complete.
        lr, betas, eps, weight_decay: as in ``torch.optim.AdamW``.

    Attributes:
        lr: the learning rate of the next backward.

    There is no ``step``. Each backward is one step of every parameter that it reaches, and leaves ``.grad``
    None. Call ``remove`` to restore the usual behaviour.
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        self.params = list(params)
        self.lr = lr
        self._rest = {"betas": betas, "eps": eps, "weight_decay": weight_decay}
        self._optimizers = {param: FusedAdamW([param], lr=lr, **self._rest) for param in self.params}
        self._hooks = [param.register_post_accumulate_grad_hook(self._update) for param in self.params]

    def _update(self, param: Tensor) -> None:
        optimizer = self._optimizers[param]
        optimizer.param_groups[0]["lr"] = self.lr
        optimizer.step()
        param.grad = None

    @property
    def state(self) -> dict[Tensor, dict[str, Any]]:
        """The state of each parameter that a backward has reached: step, exp_avg and exp_avg_sq."""
        return {
            param: optimizer.state[param] for param, optimizer in self._optimizers.items() if optimizer.state
        }

    def remove(self) -> None:
        """Remove the hooks. The moments remain."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def state_dict(self) -> list[dict[str, Any]]:
        """Return the states in the order of the parameters."""
        return [self._optimizers[param].state_dict() for param in self.params]

    def load_state_dict(self, states: list[dict[str, Any]]) -> None:
        """Load the result of ``state_dict``.

        Raises:
            UserError: it belongs to another number of parameters.
        """
        if len(states) != len(self.params):
            raise UserError(
                f"{len(states)} states for {len(self.params)} parameters: load those of this model"
            )
        for param, state in zip(self.params, states):
            self._optimizers[param].load_state_dict(state)
