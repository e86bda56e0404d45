"""PyTorch's ``fully_shard`` for ranks that compute on the CPU.

Without a mesh it takes the GPUs of a machine that has any, one for each rank, and fails if there are fewer.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as _fully_shard


def fully_shard(module: nn.Module, **options: Any) -> None:
    _fully_shard(module, mesh=init_device_mesh("cpu", (dist.get_world_size(),)), **options)
