"""Planted mistakes of the best compromise, question by question."""

from dlo_lib.grading.lab.mutant_table import mutant_table

MUTANTS = mutant_table("""
    [bubble]
    The bubble is divided by the whole step
        check_alone, check_with_tensor, check_with_copies, check_everything_at_once: a part of the whole step
        (stages - 1) * micro_batch * dp / batch  =>  (stages - 1) / (batch / (dp * micro_batch) + stages - 1)
    Tensor parallelism does not shorten the pipeline
        check_with_tensor, check_everything_at_once: as long as without tensor parallelism
        stages = gpus / (tp * dp)  =>  stages = gpus / dp
    The formula is the printed one
        check_with_copies, check_everything_at_once: as it is printed
        return (stages - 1) * micro_batch * dp / batch  =>  return (stages - 1) * dp * dp / batch
    The largest micro-batch is taken
        check_best_size, check_divides: m + p - 1 times
        min(possible, key=lambda size: (batch // (dp * size) + pp - 1) * seconds[size])  =>  max(possible)
    A micro-batch need not divide the batch
        check_divides: does not divide
        possible = [size for size in seconds if batch % (dp * size) == 0]  =>  possible = list(seconds)
        (batch // (dp * size) + pp - 1)  =>  (batch / (dp * size) + pp - 1)

    [traffic]
    Only the forward of tensor parallelism is counted
        check_tensor, check_step, check_other_step: only the forward is counted
        return 8 * micro_batch  =>  return 4 * micro_batch
    The message of a cut is divided by the ranks
        check_cut, check_step: one activation of b s h
        return micro_batch * seq * hidden  =>  return seq * hidden
    A ring sends the gradients once
        check_gradients, check_step, check_one_stage: a ring over
        return 2 * parameters * (dp - 1) / dp  =>  return parameters * (dp - 1) / dp
    Gradients are reduced for each micro-batch
        check_step: once a step
        "data": data_elements(  =>  "data": (micro_batches if pp > 1 else 1) * data_elements(
    A plan with one stage sends activations
        check_one_stage: has no cut
        pipeline_elements(b, seq, hidden) if pp > 1 else 0  =>  pipeline_elements(b, seq, hidden)

    [crossing]
    Each rank always sends a part
        check_whole: a rank sends
        {"between": elements, "inside": 0}  =>  {"between": elements / tp, "inside": 0}
    The gather is forgotten
        check_parts: a ring gathers
        "inside": elements * (tp - 1) / tp}  =>  "inside": 0}
    It is used with sequence parallelism too
        check_where: its part only
        return pp > 1 and tp > 1 and not sequence_parallel  =>  return pp > 1 and tp > 1

    [memory]
    AdamW needs 12 bytes a parameter
        check_state, check_state_of_one, check_sharded, check_other_state: blocks and one table
        "state": 16 * owned  =>  "state": 12 * owned
    One stage has one table
        check_state_of_one: embedding and head
        (2 if pp == 1 else 1) * table  =>  table
    The copies keep the whole state
        check_sharded, check_other_state: keeps 1/d
        16 * owned / (dp if sharded else 1)  =>  16 * owned
    All micro-batches share one copy of the weights
        check_casts: in flight
        copies = 2 * blocks * block / tp * flight  =>  copies = 2 * blocks * block / tp
    A sharded pipeline keeps bf16 parameters only
        check_gathered: 6 bytes
        copies = 6 * owned  =>  copies = 2 * owned
    Every rank has p micro-batches in flight
        check_waiting: min(m, p - r)
        flight = min(m, pp - rank)  =>  flight = min(m, pp)
    The inputs of a sharded model are in fp32
        check_stored_inputs: sharded 2 h / t
        stored = (2 if sharded else 4) * h / tp  =>  stored = 4 * h / tp
    Interleaved 1F1B has as much in flight as 1F1B
        check_chunks: (v - 1) p
        flight = min(m * v, (v - 1) * pp + 2 * (pp - rank - 1) + 1) / v  =>  flight = min(m, pp - rank)
    The blocks of a rank are rounded down
        check_uneven: the fullest rank
        tokens * stored * blocks * flight  =>  tokens * stored * v * (config.num_layers // (pp * v)) * flight
    The block that is computed again is forgotten
        check_first_rank, check_working: only the last rank
        again = kept if plan["checkpointing"] else 0  =>  again = 0
    Every rank has the head
        check_first_rank: only the last rank
        / tp if last or pp == 1 else 0  =>   / tp
    The logits are in bf16
        check_working, check_first_rank: the logits, or
        logits = (8 if tp > 1 else 12)  =>  logits = (4 if tp > 1 else 6)

    [time]
    Checkpointing costs no time
        check_compute: 8 with checkpointing
        * (4 / 3 if plan["checkpointing"] else 1)  =>
    The stages are taken to be equal
        check_fullest: as with
        flops = 6 * (blocks *  =>  flops = 6 * (config.num_layers / pp *
    Tensor parallelism is always inside a node
        check_tensor_time: link(cluster, 1, t)
        tensor = sent / link(cluster, 1, tp)  =>  tensor = sent / cluster["inside"]
    Chunks do not shrink the bubble
        check_bubble_time: (p - 1) / (m v)
        "bubble": (pp - 1) / v * micro  =>  "bubble": (pp - 1) * micro
    A message has the whole activation
        check_messages: 1/t of an activation
        pipeline_elements(b, seq, h) / tp  =>  pipeline_elements(b, seq, h)
    One stage sends messages too
        check_no_messages: no messages and no bubble
        "messages": messages if pp > 1 else 0  =>  "messages": messages
    The reduction of gradients hides behind nothing
        check_data: 2/3 of a micro-batch
        moved, window = 8 * owned, 2 / 3 * micro  =>  moved, window = 8 * owned, 0
    A sharded pipeline gathers for each micro-batch
        check_sharded_pipeline: once a step
        moved, window = 6 * owned, micro  =>  moved, window = 6 * owned * m, micro
    A sharded model gathers once a step
        check_sharded_alone: and micro-batch
        moved, window = 8 * owned * m, m * micro  =>  moved, window = 8 * owned, m * micro

    [choose]
    Only plans that do not fit are tried
        check_valid, check_first_step, check_second_step, check_last_step, check_other_clusters: the cap is
        > 0.95 * cap  =>  < 1.3 * cap
    The slowest plan that fits is taken
        check_first_step, check_second_step, check_last_step, check_other_clusters: at most 2
        math.inf  =>  0.0
        if seconds < least:  =>  if seconds > least:
    The plan that needs the least memory is taken
        check_second_step, check_first_step, check_last_step, check_other_clusters: at most 1.3
        seconds = sum(step_time(config, plan, batch, seq, cluster).values())  =>
            seconds = max(sum(parts.values()) for parts in ends)
    The plan with the most traffic between copies is taken
        check_last_step, check_first_step, check_second_step, check_other_clusters: at most 1.12
        seconds = sum(step_time(config, plan, batch, seq, cluster).values())  =>
            seconds = -step_time(config, plan, batch, seq, cluster)["data"]

    [configs]
    The global batch is that of one copy
        check_megatron: gives batch
        "--global-batch-size": batch}  =>  "--global-batch-size": batch // plan["dp"]}
    FSDP is combined with a pipeline
        check_switches: should be
        "--use-distributed-optimizer" if pp > 1 else "--use-torch-fsdp2"  =>  "--use-torch-fsdp2"
    Copies that are not sharded are shards
        check_torchtitan: gives shard
        dp if plan["sharded"] else 1  =>  dp
        1 if plan["sharded"] else dp  =>  1
    The local batch has all micro-batches without a pipeline too
        check_local_batch: torchtitan needs local_batch_size
        batch // dp if pipelined else b  =>  batch // dp
""")
