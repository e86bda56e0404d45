"""The three rules for combining pipeline, tensor and data parallelism (arXiv:2104.04473, section 3).

n GPUs as p * t * d; a step of B sequences, b in a micro-batch, m = B / (b d) micro-batches a pipeline.
The bubble is a fraction of the ideal time. Each rule compares two plans with the same n and B.
"""

from __future__ import annotations


def bubble_fraction(pp: int, micro_batches: float) -> float:
    """Return the bubble of 1F1B as a fraction of the ideal time: (p - 1) / m."""
    return (pp - 1) / micro_batches


def tensor_bubble(gpus: int, tp: int, micro_batches: float) -> float:
    """Return the bubble of a model on n = p t GPUs: (n / t - 1) / m. A larger t *shrinks* it, because the
    pipeline is shorter."""
    return bubble_fraction(gpus // tp, micro_batches)


def data_bubble(gpus: int, copies: int, batch: int, micro_batch: int = 1) -> float:
    """Return the bubble without tensor parallelism, p = n / d and m = B / (b d): b (n - d) / B. (A seminar
    text prints (n - d) d / B; with d copies, each pipeline has B / (b d) micro-batches.)"""
    return micro_batch * (gpus - copies) / batch


def tensor_elements(micro_batch: int, seq: int, hidden: int, tp: int, layers: int = 1) -> float:
    """Return the elements that a rank sends for tensor parallelism in forward and backward of a micro-batch:
    8 b s h (t - 1) / t for each layer of its stage. Sequence parallelism sends the same."""
    return 8 * micro_batch * seq * hidden * (tp - 1) / tp * layers


def pipeline_elements(micro_batch: int, seq: int, hidden: int) -> float:
    """Return the elements that cross one cut of a pipeline in one direction for a micro-batch: b s h."""
    return float(micro_batch * seq * hidden)


def data_elements(parameters: float, copies: int) -> float:
    """Return the elements of the all-reduce of gradients in a step: 2 (d - 1) / d * parameters, independent
    of the number of micro-batches."""
    return 2 * (copies - 1) / copies * parameters


def tensor_inside_a_node(tp: int, gpus_per_node: int) -> bool:
    """Rule 1. Use tensor parallelism up to the GPUs of a node, and a pipeline across nodes: a tensor-parallel
    rank sends 8 layers (t - 1) / t times what a cut of the pipeline carries, and does not hide it."""
    return tp <= gpus_per_node


def model_parallel_only_to_fit(fits_with_fewer: bool, copies: int) -> bool:
    """Rule 2. Use as much model parallelism (t p) as the model needs to fit, and data parallelism for the
    rest: data parallelism communicates once a step, and (d - 1) / d hardly grows.

    Args:
        fits_with_fewer: whether half of t p would fit too.
        copies: d; a plan that could have more copies breaks the rule.
    """
    return not fits_with_fewer or copies == 1


def micro_batch_time(micro_batch: int, copies: int, pp: int, batch: int, seconds: float) -> float:
    """Rule 3. Return the time of a step without communication: (B / (b d) + p - 1) * seconds, where
    ``seconds`` is the time of forward and backward of a micro-batch of b sequences. A larger b makes the
    products more efficient and the bubble larger, so that the best b depends on the case."""
    return (batch / (micro_batch * copies) + pp - 1) * seconds
