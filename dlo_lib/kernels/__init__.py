"""Fused kernels: Triton on a GPU, each with a readable PyTorch twin that runs everywhere else.

A file of this room is one technique: its idea, its paper, the twin, the autograd function and the public
function. ``dispatch`` chooses between the twin and Triton for each call; ``triton_code`` holds the kernels,
which are imported with the first call that needs them, because Triton is optional
(``pip install 'dlo-lib[kernels]'``) and slow to import. The room imports ``models`` and ``data``.
"""

from dlo_lib.kernels import library  # noqa: F401 - defines the operators of compiled code
from dlo_lib.kernels.adamw import BackwardAdamW, FusedAdamW, adamw_update
from dlo_lib.kernels.cross_entropy import cross_entropy
from dlo_lib.kernels.cross_entropy_terms import CrossEntropyTerms, LossReduction
from dlo_lib.kernels.dispatch import KernelBackend, using
from dlo_lib.kernels.flash_attention import FlashAttention, flash_attention
from dlo_lib.kernels.grouped_matmul import grouped_matmul
from dlo_lib.kernels.layer_norm import layer_norm
from dlo_lib.kernels.linear_cross_entropy import linear_cross_entropy
from dlo_lib.kernels.llama import FusedOperation, Kernels, LossHead, fuse
from dlo_lib.kernels.rms_norm import rms_norm
from dlo_lib.kernels.rope import rope
from dlo_lib.kernels.softmax import softmax
from dlo_lib.kernels.swiglu import swiglu
from dlo_lib.kernels.vector_add import vector_add

__all__ = [
    "BackwardAdamW",
    "CrossEntropyTerms",
    "FlashAttention",
    "FusedAdamW",
    "FusedOperation",
    "KernelBackend",
    "Kernels",
    "LossHead",
    "LossReduction",
    "adamw_update",
    "cross_entropy",
    "flash_attention",
    "fuse",
    "grouped_matmul",
    "layer_norm",
    "linear_cross_entropy",
    "rms_norm",
    "rope",
    "softmax",
    "swiglu",
    "using",
    "vector_add",
]
