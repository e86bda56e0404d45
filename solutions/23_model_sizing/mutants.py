"""Planted mistakes of model sizes, question by question."""

from dlo_lib.grading.lab.mutants import Mutant

MUTANTS = [
    # -- llama
    Mutant(
        "A tied output has weights",
        "check_tables",
        says="the output has no further weights",
        replace={'0 if config["tie_word_embeddings"] else table': "table"},
    ),
    Mutant(
        "Keys have as many heads as queries",
        "check_attention",
        says="keys and values have num_key_value_heads heads",
        replace={'config["num_key_value_heads"]': 'config["num_attention_heads"]'},
        also=("check_products", "check_one_head"),
    ),
    Mutant(
        "An MLP has two matrices",
        "check_mlp",
        says="three matrices",
        replace={"blocks * 3 * h": "blocks * 2 * h"},
        also=("check_products", "check_one_head"),
    ),
    Mutant(
        "The last norm is forgotten",
        "check_mlp",
        says="one more norm",
        replace={'"norm": (2 * blocks + 1) * h': '"norm": 2 * blocks * h'},
        question="llama",
    ),
    Mutant(
        "A tied output is no product",
        "check_products",
        says="a tied output is a product too",
        replace={'config["vocab_size"] * config["hidden_size"]': 'parts["output"]'},
        also=("check_one_head",),
    ),
    Mutant(
        "Only the shared heads read keys",
        "check_keys",
        says="each query head reads the keys",
        replace={
            'width = config["num_attention_heads"] * config["head_dim"]': (
                'width = config["num_key_value_heads"] * config["head_dim"]'
            )
        },
        also=("check_one_head",),
    ),
    # -- vit
    Mutant(
        "A patch has one colour",
        "check_patches",
        says="the numbers of all its colours",
        replace={'(config["num_channels"] * patch**2 + 1) * h': "(patch**2 + 1) * h"},
    ),
    Mutant(
        "Attention has no biases",
        "check_blocks",
        says="have a bias each",
        replace={"4 * (h * h + h)": "4 * h * h"},
    ),
    Mutant(
        "A norm has a scale only",
        "check_norms",
        says="a scale and a bias",
        replace={"(2 * blocks + 1) * 2 * h": "(2 * blocks + 1) * h"},
        question="vit",
    ),
    Mutant(
        "The image has the size of the configuration",
        "check_image",
        says="the image has `size` pixels",
        replace={"(size //": '(config["image_size"] //'},
        question="vit",
        also=("check_smaller_image",),
    ),
    Mutant(
        "FLOPs are counted",
        "check_image",
        says="count once here",
        replace={"return tokens * weights + blocks * 2": "return 2 * tokens * weights + blocks * 4"},
        also=("check_smaller_image",),
    ),
    # -- coatnet
    Mutant(
        "A convolution has a shortcut with weights",
        "check_stem",
        says="no shortcut with weights",
        replace={'if kind != "conv" and channels != width': "if channels != width"},
        also=("check_positions", "check_mixed"),
    ),
    Mutant(
        "The depthwise convolution is an ordinary one",
        "check_mbconv",
        says="9 weights for each channel",
        replace={"9 * inner +": "9 * inner**2 +"},
        also=("check_squeeze", "check_mixed"),
    ),
    Mutant(
        "The output of attention is forgotten",
        "check_transformers",
        says="3 i w + 9 w w",
        replace={"9 * width**2, 2": "8 * width**2, 2"},
        also=("check_attention_products", "check_mixed"),
    ),
    Mutant(
        "Squeeze-and-excitation works at each position",
        "check_squeeze",
        says="not at each position",
        replace={"positions * weights + once": "positions * (weights + once)"},
    ),
    Mutant(
        "A stage works before its stride",
        "check_positions",
        says="after its stride",
        replace={"positions = size * size": "positions = (size * stride) ** 2"},
        also=("check_squeeze", "check_attention_products"),
    ),
    Mutant(
        "The products of attention are forgotten",
        "check_attention_products",
        says="the two products of attention are missing",
        replace={"once + attention": "once"},
    ),
    # -- law
    Mutant(
        "x0 is the loss at 1",
        "check_line",
        says="where the line reaches a loss of 1",
        replace={"np.exp(-constant / slope)": "np.exp(constant)"},
    ),
    Mutant(
        "The law has no floor",
        "check_exact",
        says="the fitted law gives",
        replace={"np.ones_like(n), n**-alpha": "np.zeros_like(n), n**-alpha"},
        also=("check_relative",),
    ),
    Mutant(
        "The grid ends at 1",
        "check_exact",
        says="the fitted law gives",
        replace={
            "np.linspace(0.1, 2, 14)": "np.linspace(0.1, 0.9, 7)",
            "middle + step, 7)": "min(middle + step, 1), 7)",
        },
    ),
    Mutant(
        "Absolute errors are fitted",
        "check_relative",
        says="divide each row by its loss",
        replace={
            "1) / losses[:, None]": "1)",
            "np.linalg.lstsq(rows, np.ones_like(n), rcond=None)": "np.linalg.lstsq(rows, losses, rcond=None)",
            "(e, a, b) - 1)": "(e, a, b) - losses)",
        },
    ),
    Mutant(
        "The floor may be negative",
        "check_relative",
        says="no loss is negative",
        replace={" and e >= 0 and a > 0 and b > 0": ""},
    ),
    Mutant(
        "The exponents of the best size are exchanged",
        "check_best",
        says="the loss is smallest with",
        replace={"(flops / 6) ** (beta /": "(flops / 6) ** (alpha /"},
        also=("check_other_budgets",),
    ),
    Mutant(
        "The tokens are the FLOPs over the parameters",
        "check_best",
        says="cost 6 N D",
        replace={"return parameters, flops / 6 / parameters": "return parameters, flops / parameters"},
    ),
    # -- interval
    Mutant(
        "The interval has all predictions",
        "check_ends",
        says="take quantiles",
        replace={"[0.05, 0.95]": "[0.0, 1.0]"},
    ),
    Mutant(
        "Runs are drawn without replacement",
        "check_resampled",
        says="draw with replacement",
        replace={"rng.integers(len(runs), size=len(runs))": "rng.permutation(len(runs))"},
    ),
    Mutant(
        "Columns are resampled, not runs",
        "check_resampled",
        says="keep runs whole",
        replace={
            "found.append(predict([runs[row] for row in rows]))": """
            columns = [[column[row] for row in rng.permutation(rows)] for column in zip(*runs)]
            found.append(predict(list(zip(*columns))))
            """
        },
    ),
    Mutant(
        "The seed is ignored",
        "check_resampled",
        says="use `seed`",
        replace={"default_rng(seed)": "default_rng(0)"},
    ),
    Mutant(
        "A failed draw is not repeated",
        "check_left_out",
        says="raised a ValueError",
        replace={"while len(found) < draws:": "for _ in range(draws):"},
    ),
    # -- size
    Mutant(
        "A lost run is given up",
        "check_budget",
        says="their cost is refunded",
        replace={
            '"lost":': '"never":',
            "((3, (0.6, 1.7)), (6, (0.5, 1, 2)), (12,": "((3, (0.6, 1, 1.7)), (6, (0.5, 1, 1.4, 2)), (12,",
            "budget / 61": "budget / 69",
            "len(set(runs)) < 6": "len(set(runs)) < 4",
            "low, high = min(low, 0.96 * loss), max(high, 1.04 * loss)": "low, high = 0.955 * loss, 1.045 * loss",
        },
    ),
    Mutant(
        "More is asked for than the budget has",
        "check_budget",
        says="runs were refused",
        replace={"runs = []": "runs, _ = [], run(1, int(budget / vocab))"},
    ),
    Mutant(
        "The final training costs half of the target",
        "check_target",
        says="of the target",
        replace={"tokens = int(target / (6": "tokens = int(0.5 * target / (6"},
        also=("check_width", "check_near", "check_close", "check_inside", "check_other_language"),
    ),
    Mutant(
        "The width of the best small run is taken",
        "check_width",
        says="more is left than with the best width",
        replace={
            "width = max(1, round(best_size(fit_law(runs), target)[0] / vocab))": (
                "width = min(runs, key=lambda run: run[2])[0] // vocab // 2"
            )
        },
    ),
    Mutant(
        "The loss of the best small run is predicted",
        "check_near",
        says="from the trained one",
        replace={
            "loss = predicted(runs)": "loss = 1.05 * min(run[2] for run in runs)",
            "low, high = min(low, 0.96 * loss), max(high, 1.04 * loss)": "low, high = 0.97 * loss, 1.03 * loss",
        },
        also=("check_close", "check_inside", "check_other_language"),
    ),
    Mutant(
        "The loss is predicted by a straight line",
        "check_close",
        says="in the mean",
        replace={
            "loss = predicted(runs)": """
            lowest = [min(run[2] for run in part) for part in (runs[:2], runs[2:5], runs[5:])]
            x0, alpha = power_law([3, 6, 12], lowest)
            loss = (x0 * budget / 61 / target) ** alpha
            """,
            "low, high = min(low, 0.96 * loss), max(high, 1.04 * loss)": "low, high = 0.97 * loss, 1.03 * loss",
        },
        also=("check_near", "check_inside", "check_other_language"),
    ),
    Mutant(
        "The lowest loss is multiplied by a constant",
        "check_close",
        says="in the mean",
        replace={
            "loss = predicted(runs)": "loss = 0.957 * min(run[2] for run in runs)",
            "low, high = min(low, 0.96 * loss), max(high, 1.04 * loss)": "low, high = 0.945 * loss, 1.055 * loss",
        },
    ),
    Mutant(
        "The interval has no room for the error of the law",
        "check_inside",
        says="outside of your interval",
        replace={
            "low, high = min(low, 0.96 * loss), max(high, 1.04 * loss)": (
                "low, high = 0.9995 * loss, 1.0005 * loss"
            )
        },
    ),
]
