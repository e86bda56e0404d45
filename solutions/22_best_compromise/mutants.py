"""Planted mistakes of the best compromise, question by question."""

from dlo_lib.grading.lab.mutants import Mutant

MUTANTS = [
    # -- bubble
    Mutant(
        "The bubble is divided by the whole step",
        "check_alone",
        says="as a part of the whole step",
        answer="""
        def bubble(gpus, tp, dp, batch, micro_batch=1):
            stages = gpus / (tp * dp)
            return (stages - 1) / (batch / (dp * micro_batch) + stages - 1)
        """,
        also=("check_with_tensor", "check_with_copies", "check_everything_at_once"),
    ),
    Mutant(
        "Tensor parallelism does not shorten the pipeline",
        "check_with_tensor",
        says="as long as without tensor parallelism",
        replace={"stages = gpus / (tp * dp)": "stages = gpus / dp"},
        also=("check_everything_at_once",),
    ),
    Mutant(
        "The formula is the printed one",
        "check_with_copies",
        says="as it is printed",
        replace={"return (stages - 1) * micro_batch * dp / batch": "return (stages - 1) * dp * dp / batch"},
        also=("check_everything_at_once",),
    ),
    Mutant(
        "The largest micro-batch is taken",
        "check_best_size",
        says="m + p - 1 times",
        replace={
            "return min(possible, key=lambda size: (batch // (dp * size) + pp - 1) * seconds[size])": """
            return max(possible)
            """,
        },
        also=("check_divides",),
    ),
    Mutant(
        "A micro-batch need not divide the batch",
        "check_divides",
        says="does not divide",
        replace={
            "possible = [size for size in seconds if batch % (dp * size) == 0]": "possible = list(seconds)",
            "(batch // (dp * size) + pp - 1)": "(batch / (dp * size) + pp - 1)",
        },
    ),
    # -- traffic
    Mutant(
        "Only the forward of tensor parallelism is counted",
        "check_tensor",
        says="only the forward is counted",
        replace={"return 8 * micro_batch": "return 4 * micro_batch"},
        also=("check_step", "check_other_step"),
    ),
    Mutant(
        "The message of a cut is divided by the ranks",
        "check_cut",
        says="one activation of b s h",
        replace={"return micro_batch * seq * hidden\n": "return seq * hidden\n"},
        also=("check_step",),
    ),
    Mutant(
        "A ring sends the gradients once",
        "check_gradients",
        says="a ring over",
        replace={"return 2 * parameters * (dp - 1) / dp": "return parameters * (dp - 1) / dp"},
        also=("check_step", "check_one_stage"),
    ),
    Mutant(
        "Gradients are reduced for each micro-batch",
        "check_step",
        says="once a step",
        replace={
            '"data": data_elements(parameters / (pp * tp), dp),': """
            "data": (micro_batches if pp > 1 else 1) * data_elements(parameters / (pp * tp), dp),
            """,
        },
    ),
    Mutant(
        "A plan with one stage sends activations",
        "check_one_stage",
        says="has no cut",
        replace={"pipeline_elements(b, seq, hidden) if pp > 1 else 0": "pipeline_elements(b, seq, hidden)"},
        question="traffic",
    ),
    # -- crossing
    Mutant(
        "Each rank always sends a part",
        "check_whole",
        says="a rank sends",
        answer="""
        def crossing(elements, tp, scatter_gather):
            return {
                "between": elements / tp,
                "inside": elements * (tp - 1) / tp if scatter_gather else 0,
            }
        """,
    ),
    Mutant(
        "The gather is forgotten",
        "check_parts",
        says="a ring gathers",
        replace={'"inside": elements * (tp - 1) / tp}': '"inside": 0}'},
    ),
    Mutant(
        "It is used with sequence parallelism too",
        "check_where",
        says="its part only",
        replace={"return pp > 1 and tp > 1 and not sequence_parallel": "return pp > 1 and tp > 1"},
    ),
    # -- memory
    Mutant(
        "AdamW needs 12 bytes a parameter",
        "check_state",
        says="blocks and one table",
        replace={'"state": 16 * owned': '"state": 12 * owned'},
        also=("check_state_of_one", "check_sharded", "check_other_state"),
    ),
    Mutant(
        "One stage has one table",
        "check_state_of_one",
        says="embedding and head",
        replace={
            "owned = (blocks * block + (2 if pp == 1 else 1) * table) / tp": "owned = (blocks * block + table) / tp"
        },
        question="memory",
    ),
    Mutant(
        "The copies keep the whole state",
        "check_sharded",
        says="keeps 1/d",
        replace={"16 * owned / (dp if sharded else 1)": "16 * owned"},
        also=("check_other_state",),
    ),
    Mutant(
        "All micro-batches share one copy of the weights",
        "check_casts",
        says="in flight",
        replace={"copies = 2 * blocks * block / tp * flight": "copies = 2 * blocks * block / tp"},
    ),
    Mutant(
        "A sharded pipeline keeps bf16 parameters only",
        "check_gathered",
        says="6 bytes",
        replace={"copies = 6 * owned": "copies = 2 * owned"},
    ),
    Mutant(
        "Every rank has p micro-batches in flight",
        "check_waiting",
        says="min(m, p - r)",
        replace={"flight = min(m, pp - rank)": "flight = min(m, pp)"},
    ),
    Mutant(
        "The inputs of a sharded model are in fp32",
        "check_stored_inputs",
        says="sharded 2 h / t",
        replace={"stored = (2 if sharded else 4) * h / tp": "stored = 4 * h / tp"},
    ),
    Mutant(
        "Interleaved 1F1B has as much in flight as 1F1B",
        "check_chunks",
        says="(v - 1) p",
        replace={
            "flight = min(m * v, (v - 1) * pp + 2 * (pp - rank - 1) + 1) / v": "flight = min(m, pp - rank)"
        },
    ),
    Mutant(
        "The blocks of a rank are rounded down",
        "check_uneven",
        says="the fullest rank",
        replace={"most_blocks(config, plan, seq), b * seq": "v * (config.num_layers // (pp * v)), b * seq"},
    ),
    Mutant(
        "The block that is computed again is forgotten",
        "check_first_rank",
        says="only the last rank",
        replace={'again = kept if plan["checkpointing"] else 0': "again = 0"},
        also=("check_working",),
    ),
    Mutant(
        "Every rank has the head",
        "check_first_rank",
        says="only the last rank",
        replace={" / tp if last or pp == 1 else 0": " / tp"},
        question="memory",
    ),
    Mutant(
        "The logits are in bf16",
        "check_working",
        says="the logits, or",
        replace={"logits = (8 if tp > 1 else 12)": "logits = (4 if tp > 1 else 6)"},
        also=("check_first_rank",),
    ),
    # -- time
    Mutant(
        "Checkpointing costs no time",
        "check_compute",
        says="8 with checkpointing",
        replace={' * (4 / 3 if plan["checkpointing"] else 1)': ""},
    ),
    Mutant(
        "The stages are taken to be equal",
        "check_fullest",
        says="as with",
        replace={
            "m, blocks = batch // (dp * b), most_blocks(config, plan, seq)": "m, blocks = batch // (dp * b), config.num_layers / pp"
        },
        question="time",
    ),
    Mutant(
        "Tensor parallelism is always inside a node",
        "check_tensor_time",
        says="link(cluster, 1, t)",
        replace={"tensor = sent / link(cluster, 1, tp)": 'tensor = sent / cluster["inside"]'},
    ),
    Mutant(
        "Chunks do not shrink the bubble",
        "check_bubble_time",
        says="(p - 1) / (m v)",
        replace={'"bubble": (pp - 1) / v * micro': '"bubble": (pp - 1) * micro'},
    ),
    Mutant(
        "A message has the whole activation",
        "check_messages",
        says="1/t of an activation",
        replace={"pipeline_elements(b, seq, h) / tp": "pipeline_elements(b, seq, h)"},
    ),
    Mutant(
        "One stage sends messages too",
        "check_no_messages",
        says="no messages and no bubble",
        replace={'"messages": messages if pp > 1 else 0': '"messages": messages'},
    ),
    Mutant(
        "The reduction of gradients hides behind nothing",
        "check_data",
        says="2/3 of a micro-batch",
        replace={"moved, window = 8 * owned, 2 / 3 * micro": "moved, window = 8 * owned, 0"},
    ),
    Mutant(
        "A sharded pipeline gathers for each micro-batch",
        "check_sharded_pipeline",
        says="once a step",
        replace={"moved, window = 6 * owned, micro": "moved, window = 6 * owned * m, micro"},
    ),
    Mutant(
        "A sharded model gathers once a step",
        "check_sharded_alone",
        says="and micro-batch",
        replace={"moved, window = 8 * owned * m, m * micro": "moved, window = 8 * owned, m * micro"},
    ),
    # -- choose: a bad search loses all steps
    Mutant(
        "Only plans that do not fit are tried",
        "check_valid",
        says="the cap is",
        replace={"> 0.95 * cap": "< 1.3 * cap"},
        also=("check_first_step", "check_second_step", "check_last_step", "check_other_clusters"),
    ),
    Mutant(
        "The slowest plan that fits is taken",
        "check_first_step",
        says="at most 2",
        replace={"math.inf": "0.0", "if seconds < least:": "if seconds > least:"},
        question="choose",
        also=("check_second_step", "check_last_step", "check_other_clusters"),
    ),
    Mutant(
        "The plan that needs the least memory is taken",
        "check_second_step",
        says="at most 1.3",
        replace={
            "seconds = sum(step_time(config, plan, batch, seq, cluster).values())": """
            seconds = max(sum(parts.values()) for parts in ends)
            """,
        },
        also=("check_first_step", "check_last_step", "check_other_clusters"),
    ),
    Mutant(
        "The plan with the most traffic between copies is taken",
        "check_last_step",
        says="at most 1.12",
        replace={
            "seconds = sum(step_time(config, plan, batch, seq, cluster).values())": """
            seconds = -step_time(config, plan, batch, seq, cluster)["data"]
            """,
        },
        also=("check_first_step", "check_second_step", "check_other_clusters"),
    ),
    # -- configs
    Mutant(
        "The global batch is that of one copy",
        "check_megatron",
        says="gives batch",
        replace={'"--global-batch-size": batch,': '"--global-batch-size": batch // plan["dp"],'},
    ),
    Mutant(
        "FSDP is combined with a pipeline",
        "check_switches",
        says="should be",
        replace={'"--use-distributed-optimizer" if pp > 1 else "--use-torch-fsdp2"': '"--use-torch-fsdp2"'},
    ),
    Mutant(
        "Copies that are not sharded are shards",
        "check_torchtitan",
        says="gives shard",
        replace={'dp if plan["sharded"] else 1': "dp", '1 if plan["sharded"] else dp': "1"},
    ),
    Mutant(
        "The local batch has all micro-batches without a pipeline too",
        "check_local_batch",
        says="it needs local_batch_size",
        replace={"batch // dp if pipelined else b": "batch // dp"},
    ),
]
