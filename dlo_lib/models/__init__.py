"""Llama and ResNet in plain PyTorch, with parameter counts, FLOP counts and checkpoints.

``llama`` and ``resnet`` hold the models, ``configs`` their named sizes, ``counts`` their parameters and
FLOPs. The room imports no other room.
"""

from dlo_lib.models.configs import CONFIGS, model_config
from dlo_lib.models.llama import Llama, LlamaConfig, RopeScaling
from dlo_lib.models.resnet import ResNet

__all__ = ["CONFIGS", "Llama", "LlamaConfig", "ResNet", "RopeScaling", "model_config"]
