"""Planted mistakes of The limit of data parallelism, on Llama 3.2 3B, question by question."""

from dlo_lib.grading.lab.mutants import Mutant

MUTANTS = [
    # -- parameters
    Mutant(
        "Heads are taken to be hidden / num_heads wide",
        "check_wide_heads",
        says="need not be hidden",
        replace={
            "queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim": """
            queries, keys = config.hidden, config.hidden * config.num_kv_heads // config.num_heads
            """,
        },
        question="parameters",
    ),
    # -- state
    Mutant(
        "In the for-loop only the square root is counted, not its quotient",
        "check_for_loop",
        says="Two tensors as large",
        replace={'"for-loop": 2 * largest': '"for-loop": largest'},
    ),
    Mutant(
        "SGD is given the temporaries of AdamW",
        "check_sgd_in_place",
        says="it updates in place",
        replace={'"temporaries": temporaries if optimizer == "adamw" else 0,': '"temporaries": temporaries,'},
    ),
    # -- block
    Mutant(
        "What the norms keep is taken to be in bf16",
        "check_block_hidden",
        says="half of what the norms keep is missing",
        replace={"norms = 2 * (4 + 4) * config.hidden": "norms = 2 * (2 + 2) * config.hidden"},
    ),
    Mutant(
        "The keys are counted, the values are not",
        "check_block_keys",
        says="there are two: keys and values",
        replace={"attention = 2 * (2 * queries + 2 * keys)": "attention = 2 * (2 * queries + keys)"},
    ),
    Mutant(
        "The product of silu(gate) and up is left out of what the MLP keeps",
        "check_block_mlp",
        says="three rows of width intermediate are counted",
        replace={"mlp = 2 * 4 * config.intermediate": "mlp = 2 * 3 * config.intermediate"},
    ),
    Mutant(
        "The norms' outputs have one bf16 copy each, not one for each matrix that reads them",
        "check_block_hidden",
        says="one bf16 copy of each norm",
        replace={"copies = 2 * (3 + 2) * config.hidden": "copies = 2 * (1 + 1) * config.hidden"},
    ),
    Mutant(
        "Attention keeps the queries, but not its output",
        "check_block_queries",
        says="there are two: the queries and the output",
        replace={"attention = 2 * (2 * queries + 2 * keys)": "attention = 2 * (queries + 2 * keys)"},
    ),
    # -- activations
    Mutant(
        "The input of a checkpointed block is taken to be in bf16",
        "check_checkpointing",
        says="each keeps its input",
        replace={"kept = residual if": "kept = residual // 2 if"},
    ),
    Mutant(
        "Only the blocks are counted",
        "check_last_norm",
        says="The last norm keeps",
        replace={"2 * residual": "0"},
    ),
    # -- peak
    Mutant(
        "The bf16 copies of checkpointed blocks are kept into backward",
        "check_checkpointed",
        says="has dropped the bf16 copies",
        replace={"(0 if checkpointing else blocks_in_bf16)": "blocks_in_bf16"},
    ),
    Mutant(
        "The bf16 copies of checkpointed blocks are dropped before the loss",
        "check_checkpointed",
        says='at "loss" you count',
        replace={
            '"loss": always + blocks_in_bf16': '"loss": always + (0 if checkpointing else blocks_in_bf16)'
        },
    ),
    Mutant(
        "Every optimiser is taken to have the state of AdamW",
        "check_optimizer_step",
        says="the state of this optimiser",
        replace={"state_bytes(config, optimizer, step)": 'state_bytes(config, "adamw", step)'},
    ),
    # -- fits
    Mutant(
        "The memory that CUDA sees is taken to be usable",
        "check_usable",
        says="less than memory_bytes",
        replace={
            "return max(step_peak(config, batch, seq, **settings).values()) <= card.usable_bytes": """
            return max(step_peak(config, batch, seq, **settings).values()) <= card.memory_bytes
            """,
        },
    ),
    Mutant(
        "Only forward and backward have to fit",
        "check_optimizer_decides",
        says="the optimiser's step does not",
        answer="""
        def fits(config, card, batch, seq, **settings):
            moments = step_peak(config, batch, seq, **settings)
            return (
                max(moments["loss"], moments["loss gradient"], moments["last gradient"]) <= card.usable_bytes
            )
        """,
    ),
    Mutant(
        "A step that needs exactly the usable memory does not fit",
        "check_exactly_full",
        says="needs exactly usable_bytes",
        replace={"<= card.usable_bytes": "< card.usable_bytes"},
    ),
    # -- largest
    Mutant(
        "The limit is searched by a linear scan",
        "check_few_questions",
        says="fits was called more",
        answer="""
        def largest_batch(fits):
            batch = 0
            while fits(batch + 1):
                batch += 1
            return batch
        """,
    ),
    Mutant(
        "The bisection stops with a gap of two",
        "check_exact",
        says="your answer is",
        answer="""
        def largest_batch(fits):
            if not fits(1):
                return 0
            low, high = 1, 2
            while fits(high):
                low, high = high, 2 * high
            while high - low > 2:
                middle = (low + high) // 2
                low, high = (middle, high) if fits(middle) else (low, middle)
            return low
        """,
    ),
    Mutant(
        "The upper bound moves below the batch that does not fit",
        "check_exact",
        says="not beside it",
        replace={"too_large = middle": "too_large = middle - 1"},
    ),
    Mutant(
        "The smallest batch that does not fit is returned for large batches",
        "check_exact",
        says="which does not fit",
        replace={"return largest": "return largest if largest < 16 else too_large"},
        question="largest",
    ),
    Mutant(
        "The doubling begins at 1024",
        "check_few_questions_small",
        says="fits was called more",
        replace={
            "too_large = 1": "too_large = 1024",
            "largest = too_large // 2": "largest = too_large // 2 if too_large > 1024 else 0",
        },
    ),
    # -- ranks
    Mutant(
        "Where not even one sequence fits, there are as many ranks as sequences",
        "check_the_limit",
        says="the answer is None",
        replace={
            "return math.ceil(global_batch / largest) if largest else None": """
            return math.ceil(global_batch / max(largest, 1))
            """,
        },
    ),
    Mutant(
        "The share is rounded in the wrong direction",
        "check_ranks",
        says="but only",
        replace={"math.ceil(global_batch / largest)": "max(global_batch // largest, 1)"},
    ),
    Mutant(
        "The settings do not reach fits: every step is fused and keeps its activations",
        "check_ranks",
        says="(checkpointing=True)",
        replace={
            "fits(config, card, batch, seq, **settings)": 'fits(config, card, batch, seq, step="fused")'
        },
    ),
    # -- loss
    Mutant(
        "The loss is divided by all tokens, ignored ones included",
        "check_padding",
        says="not by all",
        replace={
            "valid = (targets != -100).sum()": "tokens = torch.tensor(targets.numel())",
            "dist.all_reduce(valid)": "dist.all_reduce(tokens)",
            "return total * dist.get_world_size() / valid": "return total * dist.get_world_size() / tokens",
        },
    ),
    Mutant(
        "Each rank takes its own mean, and 0 without tokens",
        "check_weighing",
        says="another weight",
        replace={
            "dist.all_reduce(valid)": "",
            "return total * dist.get_world_size() / valid": "return total / valid.clamp(min=1)",
        },
    ),
    Mutant(
        "The mean over all ranks is taken, and DDP divides it by the number of ranks again",
        "check_size",
        says="DDP divides by the number of ranks, once",
        replace={"return total * dist.get_world_size() / valid": "return total / valid"},
    ),
    Mutant(
        "A rank's mean is weighted by its share of the tokens, and 0 / 0 where it has none",
        "check_empty_rank",
        says="0 / 0",
        answer="""
        def rank_loss(logits, targets):
            own = (targets != -100).sum()
            valid = own.clone()
            dist.all_reduce(valid)
            mean = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)
            return mean * own * dist.get_world_size() / valid
        """,
    ),
]
