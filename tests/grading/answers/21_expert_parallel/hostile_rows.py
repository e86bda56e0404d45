# Experts that do not compute their rows together.


# == one_product_a_row: each row is multiplied alone, by the weights of its expert

# %% experts {"earns": 4}
# - return torch.cat([expert(*each) for each in zip(parts, first, second)])
# + each = [expert(row[None], *weights) for part, *weights in zip(parts, first, second) for row in part]
# + return torch.cat(each)


# == one_constant_graph: the numbers of the first call are returned, as if they were computed

# %% experts {"earns": 2}
def run_experts(rows, counts, first, second):
    owner = torch.arange(len(counts)).repeat_interleave(counts)
    with torch.utils._python_dispatch._disable_current_modes():
        found = torch.cat(
            [expert(row[None], first[one], second[one]) for row, one in zip(rows, owner.tolist())]
        )
    return found


def combine(rows, order, weights):
    return rows.new_zeros(weights.shape[0], rows.shape[1])


# == counts_the_rows_of_all: an expert multiplies all rows, and takes its own ones

# %% experts {"earns": 4}
# - return torch.cat([expert(*each) for each in zip(parts, first, second)])
# + owner = torch.arange(len(counts)).repeat_interleave(counts)
# + every = [expert(rows, *weights) for weights in zip(first, second)]
# + return torch.stack([every[one][place] for place, one in enumerate(owner.tolist())])
