# Answers that do not count, fit, resample or ask.


# == total_only: the parameters are right in the sum, and all of them are called MLP

# %% llama {"earns": 3}
# - "embedding": table,
# + "embedding": 0,
# - "attention": blocks * 2 * h * (queries + keys),
# + "attention": 0,
# - "mlp": blocks * 3 * h * config["intermediate_size"],
# + "mlp": blocks * (2 * h * (queries + keys) + 3 * h * config["intermediate_size"]) + 2 * table,
# - products = parts["attention"] + parts["mlp"] + config["vocab_size"] * config["hidden_size"]
# + products = parts["mlp"] - config["vocab_size"] * config["hidden_size"]


# == of_the_name: the numbers of the model that everybody counts

# %% vit {"earns": 0}
def vit_parameters(config):
    parts = {"patches": 980096, "positions": 425984, "attention": 531947520, "mlp": 1309095936}
    return parts | {"norm": 322816}


def vit_multiply_adds(config, size):
    return 482_000_000_000


# == twelve_squares: every block is 12 squares of its width


# %% coatnet {"earns": 0}
def coatnet(stages, size):
    parameters = multiply_adds = 0
    for _, blocks, width, stride in stages:
        size //= stride
        parameters += blocks * 12 * width**2
        multiply_adds += blocks * 12 * width**2 * size**2
    return {"parameters": parameters, "multiply_adds": multiply_adds}


# == the_published_law: nothing is fitted, Chinchilla's constants are returned

# %% law {"earns": 2}
# - slope, constant = np.polyfit(np.log(x), np.log(losses), 1)
# + slope, constant = -0.076, 0.076 * math.log(8.8e13)
# - return tuple(float(value) for value in best[1:])
# + return 1.69, 406.4, 0.34, 410.7, 0.28


# == five_percent: the interval is the mean of all runs and 5 %, without a draw


# %% interval {"earns": 0}
def interval(predict, runs, draws, seed=0):
    middle = predict(runs)
    return 0.95 * middle, 1.05 * middle


# == the_same_draw: the same resampled runs are predicted from again and again

# %% interval {"earns": 1}
# - rows = rng.integers(len(runs), size=len(runs))
# + rows = np.random.default_rng(seed).integers(len(runs), size=len(runs))
# - continue
# + found.append(found[-1] if found else 2.5)


# == nothing_is_trained: twenty tokens for each parameter, and a loss that is often near


# %% size {"earns": "less"}
def choose_size(run, vocab, budget, target):
    width = max(1, round(math.sqrt(target / 6 / 20) / vocab))
    tokens = int(target / (6 * vocab * width))
    return {"width": width, "tokens": tokens, "loss": 2.3, "low": 2.17, "high": 2.43}


# == one_large_run: one run of the most FLOPs that it may cost, and its loss is predicted


# %% size {"earns": "less"}
def choose_size(run, vocab, budget, target):
    width = max(1, round(math.sqrt(target / 6 / 20) / vocab))
    answer = run(width, int(0.2 * budget / (6 * vocab * width)))
    loss = answer["loss"] or 2.3
    tokens = int(target / (6 * vocab * width))
    return {"width": width, "tokens": tokens, "loss": loss, "low": 0.95 * loss, "high": 1.05 * loss}


# == asks_for_the_target: the final training itself is asked for


# %% size {"earns": "less"}
def choose_size(run, vocab, budget, target):
    width = max(1, round(math.sqrt(target / 6 / 20) / vocab))
    tokens = int(target / (6 * vocab * width))
    loss = run(width, tokens)["loss"]
    return {"width": width, "tokens": tokens, "loss": loss, "low": loss, "high": loss}


# == one_width_one_factor: one width for every language, and a constant times the loss of one run


# %% size {"earns": "less"}
def choose_size(run, vocab, budget, target):
    for tokens in range(256, 262):
        while run(1, tokens)["status"] == "lost":
            pass
    while (answer := run(24, int(0.19 * budget / (6 * vocab * 24))))["status"] == "lost":
        pass
    tokens, loss = int(target / (6 * vocab * 40)), 0.94 * answer["loss"]
    return {"width": 40, "tokens": tokens, "loss": loss, "low": 0.955 * loss, "high": 1.045 * loss}


# == fitted_by_the_library: the laws of `dlo_lib.planner.laws` are returned


# %% law {"earns": 0}
def power_law(x, losses):
    from dlo_lib.planner.laws import fit_power_law

    law = fit_power_law(x, losses)
    return law.scale ** (1 / law.exponent), law.exponent


def fit_law(runs):
    from dlo_lib.planner.laws import fit_chinchilla

    law = fit_chinchilla(*zip(*runs))
    return law.floor, law.a, law.alpha, law.b, law.beta


def best_size(law, flops):
    from dlo_lib.planner.laws import ChinchillaLaw

    return ChinchillaLaw(*law).best(flops)
