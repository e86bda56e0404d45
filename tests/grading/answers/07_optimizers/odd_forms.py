# Right answers that look unlike the solution.


# == the_sum_in_place_of_the_mean: with the rate of torch.optim.SGD


# %% momentum
def momentum(parameter, gradient, state, group):
    state["b"] = group["beta"] * state.get("b", 0.0) + gradient
    parameter.sub_((1 - group["beta"]) * group["lr"] * state["b"])


# == weighted_means: sums of weights in place of powers


# %% adam
def adam_direction(gradient, state, group):
    found = []
    for name, beta, value in zip("mv", group["betas"], (gradient, gradient * gradient)):
        total, weights = state.get(name, (0.0, 0.0))
        state[name] = total, weights = beta * total + value, beta * weights + 1.0
        found.append(total / weights)
    return found[0] / (torch.sqrt(found[1]) + group["eps"])


# == by_singular_values: the polynomial of the singular values


# %% orthogonal
def orthogonalised(matrix, steps=5):
    left, values, right = torch.linalg.svd(matrix / (matrix.norm() + 1e-7), full_matrices=False)
    for _ in range(steps):
        values = 3.4445 * values - 4.775 * values**3 + 2.0315 * values**5
    return left @ torch.diag(values) @ right
