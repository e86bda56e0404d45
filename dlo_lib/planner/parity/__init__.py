"""The trainer of another project against one process: is it equal, and if not, which factor is wrong?

``parity`` runs a few steps of a trainer on ranks, in float64, and the same steps in one process, its *twin*.
Gradients and updates of each parameter must be equal. Where they are not, the twin computes what known faults
would give (gradients of the last micro-batch only, a mean of means, the loss with padding, each use of a tied
weight), and the fault whose gradients are those of the trainer is named.

- ``script``: the trainer: a file with ``build()``, or a script of torchrun with two marked lines
- ``float64``: lets a trainer compute in float64, without autocast and dropout
- ``trial``: the trainer on a rank, and what it records there
- ``marked``: a script of torchrun on a rank: its marked lines, and its twin
- ``twin``: the trainer in one process
- ``parts``: which part of a parameter a rank holds
- ``directions``: the gradients of known faults
- ``verdict``: compares one step, and names the fault
- ``compare``: ``parity``, all of this for each step

Differential testing of trainers: TTrace (arXiv:2506.09280). The cost is that of the steps on ranks, and for
each step about (2 + ranks) * (micro-batches + 2) backward passes of the twin: use a small configuration.

The room imports ``base``, ``launch`` and PyTorch.
"""

from dlo_lib.planner.parity.compare import ParityReport, judge, parity
from dlo_lib.planner.parity.verdict import ParityFinding, TrainerFault

__all__ = ["ParityFinding", "ParityReport", "TrainerFault", "judge", "parity"]
