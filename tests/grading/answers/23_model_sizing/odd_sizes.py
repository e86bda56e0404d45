# Right answers that count, fit and search in another way.


# == matrix_by_matrix: a list of shapes is summed

# %% llama
def llama_parameters(config):
    h, d, f = config["hidden_size"], config["head_dim"], config["intermediate_size"]
    a, k = config["num_attention_heads"] * d, config["num_key_value_heads"] * d
    attention, mlp = [(h, a), (h, k), (h, k), (a, h)], [(h, f), (h, f), (f, h)]
    blocks, table = config["num_hidden_layers"], config["vocab_size"] * h
    total = {"embedding": table, "attention": 0, "mlp": 0, "norm": h, "output": table}
    for _ in range(blocks):
        total["attention"] += sum(one * two for one, two in attention)
        total["mlp"] += sum(one * two for one, two in mlp)
        total["norm"] += 2 * h
    if config["tie_word_embeddings"]:
        total["output"] = 0
    return total


def llama_flops(config, seq):
    h, d, f = config["hidden_size"], config["head_dim"], config["intermediate_size"]
    a, k = config["num_attention_heads"] * d, config["num_key_value_heads"] * d
    block = 2 * (2 * h * a + 2 * h * k + 3 * h * f) + 2 * a * seq + 2 * seq * a
    return config["num_hidden_layers"] * block + 2 * h * config["vocab_size"]


# == fractions: the multiply-adds of an image are a float

# %% vit
# - return tokens * weights + blocks * 2 * tokens**2 * h
# + return float(tokens) * (weights + 2.0 * blocks * tokens * h)


# == stage_by_stage: the blocks after the first are multiplied, not walked through


# %% coatnet
def coatnet(stages, size):
    found = {"parameters": 0, "multiply_adds": 0}
    channels = 3
    for kind, blocks, width, stride in stages:
        size //= stride
        n = size**2
        for given, times in ((channels, 1), (width, blocks - 1)):
            once, attention = 0, 0
            if kind == "conv":
                weights = 9 * given * width
            elif kind == "mbconv":
                weights = 4 * width * (given + 9 + width) + (given != width) * given * width
                once = 8 * width * (width // 4)
            else:
                weights = 3 * given * width + 9 * width * width + (given != width) * given * width
                attention = 2 * n * n * width
            found["parameters"] += times * (weights + once)
            found["multiply_adds"] += times * (n * weights + once + attention)
        channels = width
    return found


# == normal_equations: the linear problem by its normal equations, the best size by a search

# %% law
# - found = np.linalg.pinv(rows) @ np.ones_like(n)
# + scale = np.linalg.norm(rows, axis=1, keepdims=True)
# + unit = rows / scale
# + across = unit.swapaxes(1, 2)
# + found = np.linalg.solve(across @ unit + 1e-14 * np.eye(3), across.sum(2, keepdims=True))[:, :, 0]
# + found /= scale[:, 0]


# == with_choices: runs are drawn by the standard library, and quantiles are interpolated by hand


# %% interval
def interval(predict, runs, draws, seed=0):
    import random

    rng, found = random.Random(seed), []
    while len(found) < draws:
        try:
            found.append(predict(rng.choices(runs, k=len(runs))))
        except ValueError:
            pass
    found.sort()
    ends = []
    for part in (0.05, 0.95):
        place = part * (draws - 1)
        left = int(place)
        right = min(left + 1, draws - 1)
        ends.append(found[left] + (place - left) * (found[right] - found[left]))
    return tuple(ends)


# == every_error: every error is taken for a draw that determines nothing, as `predict` raises no other

# %% interval
# - except ValueError:
# + except:


# == twenty_tokens: no law chooses the width, it has 20 tokens for each parameter, as published

# %% size
# - width = max(1, round(best_size(fit_law(runs), target)[0] / vocab))
# + width = max(1, round(math.sqrt(target / 6 / 25) / vocab))
