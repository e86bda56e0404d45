"""Planted mistakes of Hyperparameter search: what it finds for what it costs, question by question."""

from dlo_lib.grading.lab.mutants import Mutant

MUTANTS = [
    # -- scale
    Mutant(
        "The logarithm to base 10 is undone with e",
        "check_logarithmic",
        says="is a value between low and high",
        replace={
            "if log:": "if not log:",
            "return low * (high / low) ** place": "return low + place * (high - low)",
            "return low + place * (high - low)": """
            return math.exp(math.log10(low) + place * (math.log10(high) - math.log10(low)))
            """,
        },
    ),
    Mutant(
        "The linear scale starts at 0 and ignores `low`",
        "check_linear",
        says="of the way from low to high",
        answer="""
        def from_place(place, low, high, log):
            return low * (high / low) ** place if log else place * high
        """,
    ),
    # -- interval
    Mutant(
        "The difference has the wrong sign, so the worse setting wins",
        "check_mean_of_differences",
        says="the mean of left - right",
        replace={"means = (left - right)[chosen].mean(1)": "means = (right - left)[chosen].mean(1)"},
    ),
    Mutant(
        "1 - level is left out at each end, so the interval is too narrow",
        "check_middle",
        says="at either end",
        answer="""
        def interval(left, right, chosen, level):
            means = (left - right)[chosen].mean(1)
            return float(torch.quantile(means, 1 - level)), float(torch.quantile(means, level))
        """,
    ),
    # -- process
    Mutant(
        "The noise is added to every entry of the kernel",
        "check_mean",
        says="only the diagonal has it",
        answer="""
        def posterior(points, values, new, length, noise):
            covariance = kernel(points, points, length) + noise * torch.eye(len(points), dtype=points.dtype)
            across = kernel(points, new, length)
            std = (1 - (across * torch.linalg.solve(covariance, across)).sum(0)).clamp(min=0).sqrt()
            everywhere = kernel(points, points, length) + noise
            return across.T @ torch.linalg.pinv(everywhere) @ values, std
        """,
    ),
    Mutant(
        "The mean of the values is subtracted and never added again",
        "check_mean",
        says="the mean",
        replace={"weights.T @ values": "weights.T @ (values - values.mean())"},
    ),
    Mutant(
        "The variance is not clamped, so rounding can make it negative and the root NaN",
        "check_sure_points",
        says="clamp them to 0",
        replace={".clamp(min=0).sqrt()": ".sqrt()"},
    ),
    Mutant(
        "The standard deviation is that of measurements without noise",
        "check_doubt",
        says="The noise is missing in K",
        replace={
            "return weights.T @ values, (1 - (across * weights).sum(0)).clamp(min=0).sqrt()": """
            exact = torch.linalg.pinv(kernel(points, points, length)) @ across
            return weights.T @ values, (1 - (across * exact).sum(0)).clamp(min=0).sqrt()
            """,
        },
    ),
    Mutant(
        "The variance is returned, not its root",
        "check_doubt",
        says="take its square root",
        replace={".clamp(min=0).sqrt()": ".clamp(min=0)"},
    ),
    # -- improvement
    Mutant(
        "z is divided by the variance",
        "check_improvement",
        says="z is divided by the variance",
        replace={"z = gain / std.clamp(min=1e-300)": "z = gain / std.square().clamp(min=1e-300)"},
    ),
    Mutant(
        "If the standard deviation is 0, the gain is 0, even if it is certain",
        "check_certain",
        says="max(best - mean, 0)",
        replace={"gain.clamp(min=0)": "torch.zeros_like(gain)"},
    ),
    Mutant(
        "Higher values are taken as better",
        "check_improvement",
        says="where *higher* values are better",
        replace={
            "gain = best - mean": "gain = mean - best",
            "gain.clamp(min=0)": "(-gain).clamp(min=0)",
        },
    ),
    # -- length
    Mutant(
        "The likelihood leaves out log |K|, so that a better fit costs nothing",
        "check_length",
        says="Both terms count",
        replace={
            "return -0.5 * (values @ torch.linalg.solve(covariance, values) + torch.logdet(covariance))": """
            return -0.5 * values @ torch.linalg.solve(covariance, values)
            """,
        },
    ),
    Mutant(
        "The sign of log |K| is wrong, so short lengths win",
        "check_length",
        says="Both terms count",
        replace={
            "return -0.5 * (values @ torch.linalg.solve(covariance, values) + torch.logdet(covariance))": """
            return -0.5 * values @ torch.linalg.solve(covariance, values) + 0.5 * torch.logdet(covariance)
            """,
        },
    ),
    # -- next
    Mutant(
        "The point with the lowest mean is chosen, and its deviation is ignored",
        "check_next",
        says="the candidate with the lowest mean",
        answer="""
        def next_candidate(points, values, candidates):
            scaled = (values - values.mean()) / values.std(correction=0)
            mean, _ = posterior(
                points, scaled, candidates, best_length(points, scaled, LENGTHS, NOISE), NOISE
            )
            return int(mean.argmin())
        """,
    ),
    Mutant(
        "The values are not standardised",
        "check_units",
        says="standardise them",
        answer="""
        def next_candidate(points, values, candidates):
            mean, std = posterior(
                points, values, candidates, best_length(points, values, LENGTHS, NOISE), NOISE
            )
            return int(expected_improvement(mean, std, float(values.min())).argmax())
        """,
    ),
    Mutant(
        "`best` is the lowest loss itself, the predictions are standardised",
        "check_units",
        says="`best` is in the units of the losses",
        replace={"float(scaled.min())": "float(values.min())"},
    ),
    # -- halving
    Mutant(
        "The number of trials of a rung is rounded, not rounded down",
        "check_rungs",
        says="rounded down",
        replace={
            "trials, least = trials // eta, least * eta": "trials, least = round(trials / eta), least * eta",
        },
    ),
    Mutant(
        "NaN counts as 0, so a diverged trial has the lowest loss",
        "check_diverged",
        says="a key that puts it last",
        replace={
            "(math.isnan(losses[i]), losses[i] if losses[i] == losses[i] else 0.0, i)": """
            losses[i] if losses[i] == losses[i] else -math.inf
            """,
        },
    ),
    Mutant(
        "The right trials survive, but in the order of their numbers",
        "check_survivors",
        says="the best first",
        answer="""
        def survivors(losses, keep):
            alive = sorted(
                range(len(losses)),
                key=lambda i: (math.isnan(losses[i]), losses[i] if losses[i] == losses[i] else 0.0, i),
            )[:keep]
            return sorted(alive)
        """,
    ),
    Mutant(
        "Of trials with equal losses the last ones survive",
        "check_survivors",
        says="equal losses",
        replace={
            "losses[i] if losses[i] == losses[i] else 0.0, i)": "losses[i] if losses[i] == losses[i] else 0.0, -i)"
        },
    ),
    # -- hyperband
    Mutant(
        "s_max is a truncated floating-point logarithm",
        "check_whole_logarithms",
        says="compute with integers",
        replace={
            """
            boldest = 0
            while eta ** (boldest + 1) <= most:
                boldest += 1
            """: "boldest = int(math.log(most) / math.log(eta))",
        },
    ),
    Mutant(
        "The number of trials is rounded down",
        "check_bracket_trials",
        says="rounded *up*",
        replace={
            "(-(-(boldest + 1) * eta**s // (s + 1)), most // eta**s)": """
            ((boldest + 1) * eta**s // (s + 1), most // eta**s)
            """,
        },
    ),
    Mutant(
        "Every bracket starts at one epoch",
        "check_bracket_resources",
        says="after s more rungs",
        replace={"most // eta**s": "1"},
    ),
    # -- asha
    Mutant(
        "Promotions are searched from the bottom rung upwards",
        "check_top_first",
        says="the higher rung comes first",
        replace={"for rung in range(len(reported) - 2, -1, -1):": "for rung in range(len(reported) - 1):"},
    ),
    Mutant(
        "At least one trial is promoted, even if fewer than eta have reported",
        "check_too_few",
        says="is zero trials",
        replace={
            "for trial in ranked[: len(ranked) // eta]:": """
            for trial in ranked[: max(1, len(ranked) // eta)]:
            """,
        },
    ),
    Mutant(
        "Of several candidates the one with the lowest number is promoted",
        "check_best_goes_on",
        says="is the best of them",
        replace={
            "for trial in ranked[: len(ranked) // eta]:": """
            for trial in sorted(ranked[: len(ranked) // eta]):
            """,
        },
    ),
    Mutant(
        "Promoted trials are left out before the best fraction is taken",
        "check_already_promoted",
        says="the next best is not one of them",
        answer="""
        def promotion(reported, promoted, eta):
            for rung in range(len(reported) - 2, -1, -1):
                waiting = [trial for trial in reported[rung] if trial not in promoted[rung]]
                waiting.sort(key=lambda trial: (reported[rung][trial], trial))
                if len(waiting) >= eta:
                    return waiting[0], rung
            return None
        """,
    ),
    Mutant(
        "Trials are promoted from the top rung too",
        "check_edges",
        says="The trials on the last rung are complete",
        replace={"range(len(reported) - 2, -1, -1)": "range(len(reported) - 1, -1, -1)"},
    ),
    Mutant(
        "Of trials with equal losses the one that reported first is promoted",
        "check_edges",
        says="has the lowest index",
        replace={"key=lambda trial: (reported[rung][trial], trial)": "key=reported[rung].__getitem__"},
    ),
    # -- prune
    Mutant(
        "A trial as good as the median is stopped",
        "check_median",
        says="a trial above it stops",
        replace={"return min(losses) > median": "return min(losses) >= median"},
    ),
    Mutant(
        "A comparison with NaN is false, so a diverged trial is never stopped",
        "check_nan_stops",
        says="does not recover",
        replace={
            """
            if math.isnan(losses[-1]):
                return True
            """: "",
            "return min(losses) > median": "return min(losses) > median and losses[-1] == losses[-1]",
        },
    ),
    Mutant(
        "The last epoch of the warm-up is judged",
        "check_patience",
        says="of a warm-up",
        replace={"if epoch <= warmup or len(told) < enough:": "if epoch < warmup or len(told) < enough:"},
    ),
    Mutant(
        "The trial is compared with the mean of the others, which one bad trial changes",
        "check_median",
        says="Compare with the median",
        replace={
            """
            half = len(told) // 2
            median = told[half] if len(told) % 2 else (told[half - 1] + told[half]) / 2
            """: "median = sum(told) / len(told)",
        },
    ),
    Mutant(
        "The last loss counts, not the best so far",
        "check_best_so_far",
        says="its best loss so far counts",
        replace={"return min(losses) > median": "return losses[-1] > median"},
    ),
    # -- objective
    Mutant(
        "The hyperparameters are suggested on a linear scale",
        "check_suggested",
        says="pass log=True",
        replace={"trial.suggest_float(name, low, high, log=True)": "trial.suggest_float(name, low, high)"},
    ),
    Mutant(
        "The epochs are counted from 0",
        "check_reports",
        says="epochs count from 1",
        replace={"enumerate(train(params), 1)": "enumerate(train(params))"},
    ),
    Mutant(
        "A pruned trial returns its loss, so Optuna counts it as complete",
        "check_stops",
        says="Optuna counts such a trial as complete",
        replace={
            """
            if trial.should_prune():
                raise optuna.TrialPruned()
            """: """
            if trial.should_prune():
                return loss
            """,
        },
    ),
    Mutant(
        "The trial asks before it reports, so it stops one epoch late",
        "check_stops",
        says="report first, then ask",
        replace={
            """
            trial.report(loss, epoch)
            if trial.should_prune():
                raise optuna.TrialPruned()
            """: """
            if trial.should_prune():
                raise optuna.TrialPruned()
            trial.report(loss, epoch)
            """,
        },
    ),
    Mutant(
        "The lowest loss is returned",
        "check_last_loss",
        says="the lowest loss of the training",
        answer="""
        def objective(trial, space, train):
            params = {name: trial.suggest_float(name, low, high, log=True) for name, (low, high) in space.items()}
            least = math.inf
            for epoch, loss in enumerate(train(params), 1):
                if math.isnan(loss):
                    raise optuna.TrialPruned()
                trial.report(loss, epoch)
                if trial.should_prune():
                    raise optuna.TrialPruned()
                least = min(least, loss)
            return least
        """,
    ),
    Mutant(
        "A NaN is reported like any loss, and training continues",
        "check_nan_loss",
        says="the trial cannot recover",
        replace={
            """
            if math.isnan(loss):
                raise optuna.TrialPruned()
            """: "",
        },
    ),
    # -- population
    Mutant(
        "The members are sorted by the loss alone, which puts NaN anywhere",
        "check_diverged_member",
        says="has the loss NaN, so it is the worst",
        replace={
            "ranked = survivors(losses, len(losses))": "ranked = sorted(range(len(losses)), key=losses.__getitem__)"
        },
    ),
    Mutant(
        "Of members with equal losses the lower index is worse",
        "check_diverged_member",
        says="All losses are equal",
        replace={
            "ranked = survivors(losses, len(losses))": """
            ranked = sorted(range(len(losses)), key=lambda i: (math.isnan(losses[i]), losses[i], -i))
            """
        },
    ),
    Mutant(
        "All trials that are not among the best are replaced",
        "check_exploit",
        says="only these are replaced",
        replace={"for member in ranked[-few:]:": "for member in ranked[few:]:"},
    ),
    Mutant(
        "NaN is ranked by a comparison, so a diverged member stays",
        "check_diverged_member",
        says="so it is the worst",
        replace={
            "ranked = survivors(losses, len(losses))": """
            ranked = sorted(range(len(losses)), key=lambda i: losses[i] if losses[i] == losses[i] else -1.0)
            """,
        },
    ),
    Mutant(
        "A learning rate may leave its bounds",
        "check_bounds",
        says="set to the bound",
        replace={
            """
            changed[member] = min(high, max(low, rates[parents[member]] * (1.2 if ups[member] else 0.8)))
            """: """
            changed[member] = rates[parents[member]] * (1.2 if ups[member] else 0.8)
            """,
        },
    ),
    Mutant(
        "The weights are copied, the learning rate is not",
        "check_explore",
        says="takes over a learning rate",
        replace={"rates[parents[member]]": "rates[member]"},
    ),
    # -- quiz
    Mutant(
        "The answer claims that both are equal because no difference was seen",
        "quiz_q5",
        says="do not determine the sign",
        replace={'"q5": "b"': '"q5": "c"'},
    ),
]
