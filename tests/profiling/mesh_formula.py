"""The closed formula for the memory of a rank of a Llama with tensor and context parallelism, a pipeline
(1F1B) and FSDP, in bf16 with fp32 AdamW (fused), for each part that ``measure_memory`` reports.

With t = tp, p = pp, N = dp_shard * cp, m micro-batches of T tokens (seq / cp of one sequence), r the stage of
the rank, Psi_r the parameters of this rank's part of the stage and L_r its blocks; h hidden, f intermediate,
q and k all query and key features, V vocabulary; s = t with sequence parallelism and 1 without, and G = 2 h
with it and 0 without (a whole sequence that was gathered):

    weights 4 Psi_r / N        AdamW 8 Psi_r / N        batch 16 m T
    gathered units   6 Psi_r: 2 for the bf16 parameters, which are kept, and 4 for the accumulated gradients
    cast weights     2 / N of the largest unit (a block or a table): its shard in bf16, sent to the others
    gradients        4 Psi_r / N, or a bf16 gradient while it is computed, where that is larger: of the gate
                     and the up matrix together, 4 h f / t, or of a table, 2 V h / t
    logits and loss  last stage: T (8 V / t + G): the logits and their gradient in fp32, the gathered input

Activations are, for each token, what waits for its backward, and the largest of the temporary tensors:

    block    B = 4 h + 12 h / s + (4 q + 4 k + 8 f) / t, in bf16 except for the input of the two norms. Each
             norm saves its input in fp32, its result without and with the weight: 8 h / s. Without sequence
             parallelism the linears share this result; with it they save the gathered one, G, in place of
             2 h / s.
    waiting  W = F L_r B + 2 h / s F with F = min(m, p - r), where the second term is the inputs of the stage;
             the first stage has tokens instead. Two messages are received in advance, 4 h / s: gradients,
             and on the last stage inputs.
    largest of
             the end of the last MLP in forward      2 h + 2 h / s       its output, and its part
             the start of its backward               G + 2 f / t + 2 h / s
             the backward of the norm before it      22 h / s - 8 f / t - 4 h / s - G: five fp32 tensors and a
                                                     gradient, while the tensors of this MLP are freed
             the backward of the last norm           24 h / s on the last stage: its input and five tensors

With cp, this holds for the ring, which saves its packed keys and values in place of the keys and values.
"""

from __future__ import annotations

from dlo_lib.models import LlamaConfig
from dlo_lib.parallel.pipeline.p2p import AHEAD
from dlo_lib.parallel.pipeline.partition import counted_costs, partition
from dlo_lib.parallel.plan import ParallelPlan
from dlo_lib.profiling import Part


def stage_pieces(config: LlamaConfig, plan: ParallelPlan, seq: int, stage: int) -> range:
    return partition(counted_costs(config, seq), plan.pp)[stage]


def block_parameters(config: LlamaConfig, tp: int) -> int:
    heads = config.head_dim * (2 * config.num_heads + 2 * config.num_kv_heads)
    return config.hidden * (heads + 3 * config.intermediate) // tp + 2 * config.hidden


def parameters_and_blocks(config: LlamaConfig, plan: ParallelPlan, seq: int, stage: int) -> tuple[int, int]:
    """Psi_r and L_r."""
    pieces = stage_pieces(config, plan, seq, stage)
    blocks = sum(1 <= piece <= config.num_layers for piece in pieces)
    table = config.vocab_size * config.hidden // plan.tp
    ends = (0 in pieces) * table + (config.num_layers + 1 in pieces) * (table + config.hidden)
    return blocks * block_parameters(config, plan.tp) + ends, blocks


def activations_per_token(config: LlamaConfig, plan: ParallelPlan, seq: int, stage: int) -> float:
    """The bytes of W and of the largest temporary tensors."""
    _, blocks = parameters_and_blocks(config, plan, seq, stage)
    last = stage == plan.pp - 1
    h, wide = config.hidden, config.intermediate / plan.tp
    part = h / (plan.tp if plan.sequence_parallel else 1)
    gathered = 2 * h if plan.sequence_parallel else 0
    features = (config.num_heads + config.num_kv_heads) * config.head_dim / plan.tp
    in_flight = min(plan.micro_batches, plan.pp - stage)
    block = 4 * h + 12 * part + 4 * features + 8 * wide
    inputs = 0 if stage == 0 else 2 * part * in_flight
    moments = [24 * part] if last else []
    if blocks:
        moments += [
            2 * h + 2 * part,
            gathered + 2 * wide + 2 * part,
            22 * part - 8 * wide - 4 * part - gathered,
        ]
    return in_flight * blocks * block + inputs + AHEAD * 2 * part + max(moments)


def closed_formula(config: LlamaConfig, plan: ParallelPlan, seq: int, rank: int) -> dict[Part, float]:
    """The bytes of each part on ``rank``, for one sequence in a micro-batch."""
    shards, tokens = plan.dp_shard * plan.cp, seq // plan.cp
    stage = rank // (shards * plan.tp)
    parameters, blocks = parameters_and_blocks(config, plan, seq, stage)
    first, last = stage == 0, stage == plan.pp - 1
    table = config.vocab_size * config.hidden // plan.tp
    unit = max(block_parameters(config, plan.tp) if blocks else 0, table if first or last else 0)
    gathered = 2 * config.hidden if plan.sequence_parallel else 0
    in_bf16 = [2 * table] * (first or last) + [4 * config.hidden * config.intermediate // plan.tp] * (
        blocks > 0
    )
    return {
        Part.WEIGHTS: 4 * parameters / shards,
        Part.GRADIENTS: max(4 * parameters / shards, *in_bf16),
        Part.OPTIMIZER_STATE: 8 * parameters / shards,
        Part.STEP_TEMPORARIES: 0,
        Part.CAST_WEIGHTS: 2 * unit / shards,
        Part.UNITS: 6 * parameters,
        Part.ACTIVATIONS: tokens * activations_per_token(config, plan, seq, stage),
        Part.LOGITS_AND_LOSS: tokens * (8 * config.vocab_size / plan.tp + gathered) if last else 0,
        Part.BUFFERS: 16 * plan.micro_batches * tokens,
    }
