"""Fused kernels: Triton on a GPU, each with a readable PyTorch twin that runs everywhere else.

A file is one technique: its idea, its paper, the twin, the autograd function and the public function. Begin
with the first two of the list.

- ``vector_add``: the smallest kernel, which shows the form of this room
- ``dispatch``: chooses between Triton, the twin and PyTorch's operators for each call
- ``softmax``: in one pass
- ``rms_norm``: in one pass
- ``layer_norm``: in one pass
- ``rope``: rotary positions
- ``swiglu``: the product of SwiGLU
- ``cross_entropy``: the loss of logits
- ``cross_entropy_terms``: the form that the twin and the kernel share
- ``linear_cross_entropy``: the loss of a linear layer, chunk by chunk
- ``grouped_matmul``: the products of experts
- ``flash_attention``: attention by tiles
- ``adamw``: AdamW in one kernel, or inside the backward

What uses them:

- ``llama``: puts them into a Llama
- ``library``: registers them as operators of PyTorch
- ``cases``: every operation at the sizes of Llamas
- ``report``: what the compiler allocates for each
- ``record``: the same for every rule of ``tuning.toml``, kept in a file
- ``triton_code``: the kernels, imported with the first call that needs them

Triton is optional (``pip install 'dlo-lib[kernels]'``) and slow to import. The room imports ``models``,
``data`` and ``hardware``.
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
