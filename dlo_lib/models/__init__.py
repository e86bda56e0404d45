"""Llama and ResNet in plain PyTorch, with parameter counts, FLOP counts and checkpoints.

- ``llama``: the decoder and its parts
- ``configs``: named sizes of public models
- ``counts``: parameters and FLOPs
- ``checkpoint``: checkpoints in the layout of Hugging Face
- ``hf_config``: their ``config.json``
- ``resnet``: a network for small images

The mixture of experts of a Llama:

- ``moe``: the layer
- ``router``: chooses the experts of each token
- ``token_dispatch``: sorts tokens by expert
- ``experts``: the networks in stacked matrices

The room imports no other room.
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
