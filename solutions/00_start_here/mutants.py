"""The mutants of this lab: wrong solutions, each a patch of the reference solution, and the checks that fail for it."""

from dlo_lib.grading.lab.mutants import Mutant

ALL_OF_MEAN = ("check_any_number_of_ranks", "check_one_all_reduce")

MUTANTS = [
    Mutant(
        "The sum is returned",
        "check_mean",
        says="returns the sum over the 4 ranks",
        replace={"return x / dist.get_world_size()": "return x"},
        also=ALL_OF_MEAN,
    ),
    Mutant(
        "The ranks do not communicate",
        "check_mean",
        says="returns its own numbers",
        answer="""
        def mean_over_ranks(x):
            return x.clone()
        """,
        also=ALL_OF_MEAN,
    ),
    Mutant(
        "The number of ranks is typed in",
        "check_any_number_of_ranks",
        says="divides by 4, but there are 3 ranks",
        replace={"dist.get_world_size()": "4"},
    ),
    Mutant(
        "The result of the all-reduce, None, is divided",
        "check_mean",
        says="returns None, because it changes x itself",
        answer="""
        def mean_over_ranks(x):
            return dist.all_reduce(x) / dist.get_world_size()
        """,
        also=ALL_OF_MEAN,
    ),
    Mutant(
        "The sum goes to rank 0 only",
        "check_mean",
        says="rank 0 has the mean, rank 1 has not",
        replace={"dist.all_reduce(x)": "dist.reduce(x, 0)"},
        also=ALL_OF_MEAN,
    ),
    Mutant(
        "The number of ranks is found by a second all-reduce",
        "check_one_all_reduce",
        says="in 2 calls: one all-reduce of",
        replace={
            "return x / dist.get_world_size()": """
                ranks = torch.ones(())
                dist.all_reduce(ranks)
                return x / ranks
            """,
        },
    ),
    Mutant(
        "Everything is gathered on every rank",
        "check_one_all_reduce",
        says="calls all_gather",
        answer="""
        def mean_over_ranks(x):
            parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
            dist.all_gather(parts, x)
            return sum(parts) / len(parts)
        """,
    ),
    Mutant(
        "Every optimiser keeps two tensors",
        "check_sgd",
        says="this counts 2 tensors of optimiser state",
        replace={"2 + moments": "4"},
    ),
    Mutant(
        "The state of the optimiser is counted twice",
        "check_adamw",
        says="is counted twice",
        replace={"2 + moments": "2 + 2 * moments"},
        also=("check_sgd",),
    ),
    Mutant(
        "Weights and gradients are multiplied by the moments",
        "check_sgd",
        says="this counts 2 tensors as large as the weights",
        replace={"2 + moments": "2 * moments"},
    ),
    Mutant(
        "The gradients are forgotten",
        "check_adamw",
        says="the gradients are missing",
        replace={"2 + moments": "1 + moments"},
        also=("check_sgd",),
    ),
    Mutant(
        "GB instead of GiB",
        "check_adamw",
        says="this is in GB",
        replace={"2**30": "1e9"},
        also=("check_sgd",),
    ),
    Mutant(
        "Wrong answer to the quiz",
        "quiz_q2",
        says="the batch changes only activations and logits",
        replace={'"c"': '"a"'},
    ),
]
