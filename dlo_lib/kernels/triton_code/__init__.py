"""The Triton kernels and the functions that launch them; importing a module here imports Triton.

The autograd functions of ``dlo_lib.kernels`` call the techniques of this room, whose functions take and
return tensors and have no autograd. What they share:

- ``launch``: starts every kernel, so that one place sets the device and the report can record the launches
- ``prepared``: launches whose arguments other than tensors are known
- ``binaries``: starts the compiled binary
- ``tuning``: tile sizes, warps and stages, from ``tuning.toml``
- ``rows``: loads, stores and sums of kernels of rows
- ``products``: the product of two tiles

The techniques:

- ``vector_add``: the smallest kernel
- ``softmax``: the softmax of rows
- ``norms``: RMSNorm and LayerNorm
- ``rope``: rotary positions
- ``swiglu``: the product of SwiGLU
- ``cross_entropy``: losses and gradients of logits
- ``loss_and_gradient``: losses together with their gradient, for a linear layer
- ``grouped_matmul``: the products of experts
- ``flash_attention``: its launches
- ``flash_attention_tiles``: what its kernels share
- ``flash_attention_forward``: the kernel of the forward
- ``flash_attention_backward``: the kernels of the backward
- ``adamw``: all parameters, chunk by chunk

The room imports ``kernels.dispatch`` and ``kernels.cross_entropy_terms``.
"""
