"""Applies a plan of styles to a model, in place: modules are replaced by modules that hold this rank's part.

    parallelize_tensor(model, group, {
        "layers.*.mlp.up_proj": ColumnParallel(),
        "layers.*.mlp.down_proj": RowParallel(),
    })

The code and the class of the model do not change. It must compute with the sizes of its tensors instead of
the sizes in its configuration, for example ``view(batch, seq, -1, head_dim)`` for any number of heads.

A part is cut from the value of the whole parameter, so the same seed gives the same initial weights on any
number of ranks. A model on the meta device is cut without storage, and a rank computes one whole parameter at
a time (``fsdp.deferred_init``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch.distributed as dist
from torch import nn

from dlo_lib.base.errors import UserError
from dlo_lib.parallel.materialize import Values
from dlo_lib.parallel.tensor.exchange import TensorGroup
from dlo_lib.parallel.tensor.layout import ParamCutter, TensorLayout
from dlo_lib.parallel.tensor.style import TensorStyle

Styles = Mapping[str, TensorStyle]
"""The style of each module whose name matches a pattern. An asterisk matches one part of a name, and "" is
the model itself. The styles are applied in the order of the mapping."""


def parallelize_tensor(
    model: nn.Module,
    group: dist.ProcessGroup,
    styles: Styles,
    *,
    sequence_parallel: bool = False,
    async_tp: bool = False,
    values: Values | None = None,
) -> TensorLayout:
    """Cut ``model`` over the ranks of ``group``, in place; called by every rank. Modules without a style
    remain whole on every rank.

    Args:
        model: the model, equal on every rank.
        group: the ranks; all of them process the same data.
        styles: by patterns of names.
        sequence_parallel: whether the modules between a row linear and a column linear compute on parts of
            the sequence.
        async_tp: whether the parts of the sequence travel during the products of the linears (``async_tp``);
            needs ``sequence_parallel``.
        values: returns the value of a parameter, for a model on the meta device; None for the values of the
            model.

    Returns the layout of the parameters, for ``TensorParallel``.

    Raises:
        UserError: a pattern matches no module, a style refuses a module, or ``async_tp`` is without
            ``sequence_parallel``.
    """
    if async_tp and not sequence_parallel:
        raise UserError(
            "asynchronous tensor parallelism cuts the gathers of sequence parallelism: "
            "add sequence_parallel, or leave async_tp out"
        )
    cutter = ParamCutter(TensorGroup(group), sequence_parallel, async_tp, values)
    for pattern, style in styles.items():
        matches = re.compile(re.escape(pattern).replace(r"\*", r"[^.]+")).fullmatch
        names = [name for name, _ in model.named_modules(remove_duplicate=False) if matches(name)]
        if not names:
            last = pattern.rpartition(".")[2]
            near = [name for name, _ in model.named_modules() if name.rpartition(".")[2] == last]
            hint = f"did you mean {near[0]}?" if near else "see model.named_modules()"
            raise UserError(f"no module is named {pattern}: {hint}")
        for name in names:
            module = model.get_submodule(name)
            new = style.apply(cutter, name, module)
            if new is not module:
                parent, _, child = name.rpartition(".")
                model.get_submodule(parent)._modules[child] = new.train(module.training)
    return cutter.layout(model)
