"""Models written out in full."""

from dlo_lib.models.configs import CONFIGS, model_config
from dlo_lib.models.llama import Llama, LlamaConfig, RopeScaling
from dlo_lib.models.resnet import ResNet

__all__ = ["CONFIGS", "Llama", "LlamaConfig", "ResNet", "RopeScaling", "model_config"]
