"""Models written out in full."""

from dlo_lib.models.configs import CONFIGS, model_config
from dlo_lib.models.llama import Llama, LlamaConfig, RopeScaling

__all__ = ["CONFIGS", "Llama", "LlamaConfig", "RopeScaling", "model_config"]
