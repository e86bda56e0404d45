"""Planted mistakes of model sizes, question by question."""

from dlo_lib.grading.lab.mutant_table import mutant_table

MUTANTS = mutant_table("""
    [llama]
    A tied output has weights
        check_tables: the output has no further weights
        0 if config["tie_word_embeddings"] else table  =>  table
    Keys have as many heads as queries
        check_attention, check_products, check_one_head: keys and values have num_key_value_heads heads
        config["num_key_value_heads"]  =>  config["num_attention_heads"]
    An MLP has two matrices
        check_mlp, check_products, check_one_head: three matrices
        blocks * 3 * h  =>  blocks * 2 * h
    The last norm is forgotten
        check_mlp: one more norm
        "norm": (2 * blocks + 1) * h  =>  "norm": 2 * blocks * h
    A tied output is no product
        check_products, check_one_head: a tied output is a product too
        config["vocab_size"] * config["hidden_size"]  =>  parts["output"]
    Only the shared heads read keys
        check_keys, check_one_head: each query head reads the keys
        width = config["num_attention_heads"] * config["head_dim"]  =>
            width = config["num_key_value_heads"] * config["head_dim"]

    [vit]
    A patch has one colour
        check_patches: the numbers of all its colours
        (config["num_channels"] * patch**2 + 1) * h  =>  (patch**2 + 1) * h
    Attention has no biases
        check_blocks: have a bias each
        4 * (h * h + h)  =>  4 * h * h
    A norm has a scale only
        check_norms: a scale and a bias
        (2 * blocks + 1) * 2 * h  =>  (2 * blocks + 1) * h
    The image has the size of the configuration
        check_image, check_smaller_image: the image has `size` pixels
        (size //  =>  (config["image_size"] //
    FLOPs are counted
        check_image, check_smaller_image: count once here
        return tokens * weights + blocks * 2  =>  return 2 * tokens * weights + blocks * 4

    [coatnet]
    A convolution has a shortcut with weights
        check_stem, check_positions, check_mixed: no shortcut with weights
        if kind != "conv" and channels != width  =>  if channels != width
    The depthwise convolution is an ordinary one
        check_mbconv, check_squeeze, check_mixed: 9 weights for each channel
        9 * inner +  =>  9 * inner**2 +
    The output of attention is forgotten
        check_transformers, check_attention_products, check_mixed: 3 i w + 9 w w
        9 * width**2, 2  =>  8 * width**2, 2
    Squeeze-and-excitation works at each position
        check_squeeze: not at each position
        positions * weights + once  =>  positions * (weights + once)
    A stage works before its stride
        check_positions, check_squeeze, check_attention_products: after its stride
        positions = size * size  =>  positions = (size * stride) ** 2
    The products of attention are forgotten
        check_attention_products: the two products of attention are missing
        once + attention  =>  once

    [law]
    x0 is the loss at 1
        check_line: where the line reaches a loss of 1
        np.exp(-constant / slope)  =>  np.exp(constant)
    The law has no floor
        check_exact, check_relative: the fitted law gives
        np.ones_like(alpha + n), n**-alpha  =>  np.zeros_like(alpha + n), n**-alpha
    The grid ends at 1
        check_exact: the fitted law gives
        np.linspace(0.1, 2, 14)  =>  np.linspace(0.1, 0.9, 7)
        middle + step, 7)  =>  min(middle + step, 1), 7)
    Absolute errors are fitted
        check_relative: divide each row by its loss
        2) / losses[:, None]  =>  2)
        np.linalg.pinv(rows) @ np.ones_like(n)  =>  np.linalg.pinv(rows) @ losses
        [:, :, 0] - 1)  =>  [:, :, 0] - losses)
    The floor may be negative
        check_relative: no loss is negative
        errors[(found[:, 0] < 0) | (found[:, 1:] <= 0).any(1)] = math.inf  =>
    The exponents of the best size are exchanged
        check_best, check_other_budgets: the loss is smallest with
        (flops / 6) ** (beta /  =>  (flops / 6) ** (alpha /
    The tokens are the FLOPs over the parameters
        check_best: cost 6 N D
        return parameters, flops / 6 / parameters  =>  return parameters, flops / parameters

    [interval]
    The interval has all predictions
        check_ends: take quantiles
        [0.05, 0.95]  =>  [0.0, 1.0]
    Runs are drawn without replacement
        check_resampled: draw with replacement
        rng.integers(len(runs), size=len(runs))  =>  rng.permutation(len(runs))
    Columns are resampled, not runs
        check_resampled: keep runs whole
        found.append(predict([runs[row] for row in rows]))  =>
            columns = [[column[row] for row in rng.permutation(rows)] for column in zip(*runs)]
            found.append(predict(list(zip(*columns))))
    The seed is ignored
        check_resampled: use `seed`
        default_rng(seed)  =>  default_rng(0)
    A failed draw is not repeated
        check_left_out: raised a ValueError
        while len(found) < draws:  =>  for _ in range(draws):

    [size]
    A lost run is given up
        check_budget: their cost is refunded
        "lost":  =>  "never":
        ((3, (0.6, 1.7)), (6, (0.5, 1, 2)), (12,  =>  ((3, (0.6, 1, 1.7)), (6, (0.5, 1, 1.4, 2)), (12,
        budget / 61  =>  budget / 69
        len(set(runs)) < 6  =>  len(set(runs)) < 4
        low, high = min(low, 0.96 * loss), max(high, 1.04 * loss)  =>  low, high = 0.955 * loss, 1.045 * loss
    More is asked for than the budget has
        check_budget: runs were refused
        runs = []  =>  runs, _ = [], run(1, int(budget / vocab))
    The final training costs half of the target
        check_target, check_width, check_near, check_close, check_inside, check_other_language: of the target
        tokens = int(target / (6  =>  tokens = int(0.5 * target / (6
    The width of the best small run is taken
        check_width: more is left than with the best width
        width = max(1, round(best_size(fit_law(runs), target)[0] / vocab))  =>
            width = min(runs, key=lambda run: run[2])[0] // vocab // 2
    The loss of the best small run is predicted
        check_near, check_close, check_inside, check_other_language: from the trained one
        loss = predicted(runs)  =>  loss = 1.05 * min(run[2] for run in runs)
        low, high = min(low, 0.96 * loss), max(high, 1.04 * loss)  =>  low, high = 0.97 * loss, 1.03 * loss
    The loss is predicted by a straight line
        check_close, check_near, check_inside, check_other_language: in the mean
        loss = predicted(runs)  =>
            lowest = [min(run[2] for run in part) for part in (runs[:2], runs[2:5], runs[5:])]
            x0, alpha = power_law([3, 6, 12], lowest)
            loss = (x0 * budget / 61 / target) ** alpha
        low, high = min(low, 0.96 * loss), max(high, 1.04 * loss)  =>  low, high = 0.97 * loss, 1.03 * loss
    The lowest loss is multiplied by a constant
        check_close: in the mean
        loss = predicted(runs)  =>  loss = 0.957 * min(run[2] for run in runs)
        low, high = min(low, 0.96 * loss), max(high, 1.04 * loss)  =>  low, high = 0.945 * loss, 1.055 * loss
    The interval has no room for the error of the law
        check_inside: outside of your interval
        low, high = min(low, 0.96 * loss), max(high, 1.04 * loss)  =>
            low, high = 0.9995 * loss, 1.0005 * loss
""")
