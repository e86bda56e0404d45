"""Llama and ResNet in plain PyTorch, with parameter counts, FLOP counts and checkpoints.

``llama`` and ``resnet`` hold the models, ``configs`` their named sizes, ``counts`` their parameters and
FLOPs. ``moe`` is the mixture-of-experts layer of a Llama, made of ``router``, ``token_dispatch`` and
``experts``. The room imports no other room.
"""

from dlo_lib.models.configs import CONFIGS, model_config
from dlo_lib.models.llama import Llama, LlamaConfig, RopeScaling
from dlo_lib.models.moe import MoELayer
from dlo_lib.models.resnet import ResNet
from dlo_lib.models.router import GateWeights, MoEConfig

__all__ = [
    "CONFIGS",
    "GateWeights",
    "Llama",
    "LlamaConfig",
    "MoEConfig",
    "MoELayer",
    "ResNet",
    "RopeScaling",
    "model_config",
]
