"""The Triton kernels and the functions that launch them; importing a module here imports Triton.

Each module has the name of its technique in ``dlo_lib.kernels``, whose autograd functions call it. Its
functions take and return tensors and have no autograd. ``launch`` starts every kernel, so that one place
sets the device and the report can record the launches. The room imports ``kernels.dispatch``.
"""
