"""What the time of a step depends on besides model, plan and machine: the software.

Five constants say how much of the hardware the software reaches. They are fitted to one published table
(``calibration``), within bounds that physics sets, and none belongs to a single run. The other fields
say what the software does; they are known, not fitted.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

CONSTANTS = ("matmul", "depth", "memory", "links", "sends")
BOUNDS = {
    "matmul": (0.5, 0.9),
    "depth": (100.0, 400.0),
    "memory": (0.8, 0.9),
    "links": (0.7, 0.85),
    "sends": (0.1, 0.5),
}
"""The physical range of each constant: a product reaches at most the clock that the power allows; a tile
fills its pipeline within some hundred terms; a copy reaches 80 to 90 % of the memory's rate, NCCL's
collectives 70 to 85 % of their links; messages between two stages, which wait for both, less than half."""


@dataclass(frozen=True)
class Stack:
    """A software stack.

    Attributes:
        matmul: the part of the peak that a large matrix product reaches.
        depth: the number of terms of a sum at which a product reaches half of that.
        memory: the part of the memory's rate that elementwise kernels reach.
        links: the part of the links' rate that collectives reach.
        sends: the part of the rate between nodes that messages between stages reach.
        slowdown: the factor on all computation, from one measured run (``anchored``).
        spread: the relative error of a predicted time, as a 90 % interval: measured on runs that the
            constants were not fitted to.
        launch: seconds of a block and pass in which the device waits for kernels.
        flash: the rate of fused attention relative to that of large products; None if attention writes its
            scores to memory.
        grad_bytes: bytes of an element of a gradient on the wire.
        overlap: the part of the backward that hides the reduction of gradients, 0 to 1.
        balanced: whether a pipeline balances the head against the blocks.
        hides_tensor: whether the all-reduce of the gradient of a column linear's input, or its
            reduce-scatter, travels during the product of the gradient of the weight.
        fused_norms: whether norms are one kernel each where the other operations are eager.
        scatter_gather: whether each rank of tp sends its part of an activation to the next stage, where all
            gather it (arXiv:2104.04473, section 4.1).
    """

    matmul: float
    depth: float
    memory: float
    links: float
    sends: float
    slowdown: float = 1.0
    spread: float = 0.15
    launch: float = 1e-4
    flash: float | None = 0.6
    grad_bytes: int = 4
    overlap: float = 0.8
    balanced: bool = True
    hides_tensor: bool = False
    fused_norms: bool = False
    scatter_gather: bool = True

    def anchored(self, predicted: float, measured: float, spread: float = 0.11) -> Stack:
        """Return the stack whose prediction of one run is its measurement.

        Args:
            predicted, measured: the seconds of the computation of a step of that run, without exposed
                communication.
            spread: the relative error of other runs: 90 % of the anchored published runs are within it.
        """
        return replace(self, slowdown=self.slowdown * measured / predicted, spread=spread)
