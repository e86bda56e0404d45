"""What the code of a model finds in place of a parameter that is sharded at this moment.

A forward may read a parameter of another module, for example ``x @ self.embedding.weight.T``. In the forward
of that module the parameter is whole. Outside of it, a rank has only its rows, with which many operations
compute something wrong without an error. An ``AbsentParam`` has the shape and the dtype of the whole
parameter, and refuses every computation.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dlo_lib.base.errors import UserError


class AbsentParam(Tensor):
    """Stands for the parameter ``whole``, without memory.

    Args:
        name: the name of the parameter, for the message.
        whole: has the shape, dtype and device of the whole parameter.

    Raises:
        UserError: an operation needs the values.
    """

    param_name: str

    @staticmethod
    def __new__(cls, name: str, whole: Tensor) -> AbsentParam:
        make: Any = torch.Tensor._make_wrapper_subclass  # type: ignore[attr-defined]
        like = {"dtype": whole.dtype, "device": whole.device, "storage_size": 0}
        self = make(cls, whole.shape, strides=whole.stride(), **like)
        self.param_name = name
        return self

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        tensors = torch.utils._pytree.tree_leaves((args, kwargs))
        name = next(tensor.param_name for tensor in tensors if isinstance(tensor, AbsentParam))
        raise UserError(used_outside(name))

    def __repr__(self) -> str:  # type: ignore[override]
        return f"AbsentParam({self.param_name}, shape={tuple(self.shape)})"


def used_outside(name: str) -> str:
    """Return the message for a parameter that is used where a rank has only its rows."""
    return (
        f"{name} is used outside of the forward of its module, where FSDP has only the rows of this rank: "
        "use it in that forward, or tie the two parameters (a tied parameter is whole in both modules); call "
        "another method of the model by model.call_method(name, ...)"
    )
