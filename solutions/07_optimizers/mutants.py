"""Planted mistakes of Optimisers, question by question."""

from dlo_lib.grading.lab.mutant_table import mutant_table

MUTANTS = mutant_table(
    """
[momentum]
The gradients are summed, as in torch.optim.SGD
    check_momentum: The gradients are summed
    state["mean"].lerp_(gradient, 1 - group["beta"])  =>  state["mean"].mul_(group["beta"]).add_(gradient)
[adam]
Only the mean is corrected, as on some slides
    check_direction: The average of the squares is not corrected
    state["v"] / (1 - beta2 ** state["step"])  =>  state["v"]
The constant is inside the root
    check_epsilon: eps is inside the root
    (corrected_v.sqrt() + group["eps"])  =>  (corrected_v + group["eps"]).sqrt()
[adamw]
The decay is added to the gradient
    check_decoupled: The averages see the decay
    adam_direction(gradient, state, group)  =>
        adam_direction(gradient + group["weight_decay"] * parameter, state, group)
    parameter *= 1 - group["lr"] * group["weight_decay"]  =>
[clip]
The norm after clipping is returned
    check_norm: This is the norm after clipping
    return norm  =>  return min(norm, most)
Each gradient is clipped by its own norm
    check_scaled: One norm for all gradients
    gradient *= most / norm  =>  gradient *= min(1.0, most / gradient.norm().item())
Short gradients are stretched to the bound
    check_short: and are now longer
    if norm > most:  =>  if norm > 0:
[accumulate]
All parts weigh the same
    check_accumulated: A mean of means
    loss_of(model, part) * len(part[0]) / samples  =>  loss_of(model, part) / len(parts)
Each part is clipped
    check_clipped_once: clipped after each part
    (loss_of(model, part) * len(part[0]) / samples).backward()  =>
        (loss_of(model, part) * len(part[0]) / samples).backward()
        clip_([parameter.grad for parameter in model.parameters()], most)
One backward for the sum of the losses, so all graphs are alive
    check_part_by_part: call backward for each part
    for part in parts:  =>  if parts:
    (loss_of(model, part) * len(part[0]) / samples).backward()  =>
        sum(loss_of(model, part) * len(part[0]) / samples for part in parts).backward()
[layers]
The ratio of LARS lacks the decay in its denominator
    check_lars: The denominator of the ratio
    (slope + decay * weight)  =>  slope
LAMB decays as AdamW, outside of the norm
    check_lamb: The decay belongs to the update
    update = adam_direction(gradient, state, group) + group["weight_decay"] * parameter  =>
        update = adam_direction(gradient, state, group)
    parameter -= group["lr"] * rescaled * update  =>
        parameter -= group["lr"] * (rescaled * update + group["weight_decay"] * parameter)
LARS rescales vectors too
    check_vectors: has the ratio 1
    if parameter.ndim > 1 and weight > 0 and slope > 0:  =>  if weight > 0 and slope > 0:
A matrix of zeros has the ratio 0
    check_zeros: A matrix of zeros never moves
    if parameter.ndim > 1 and size > 0 and length > 0 else 1.0  =>  if parameter.ndim > 1 else 1.0
[lion]
The average moves before the sign is taken
    check_lion: take the old one
    update = state["mean"].lerp(gradient, 1 - beta1).sign()  =>
        state["mean"].lerp_(gradient, 1 - beta2)
        update = state["mean"].lerp(gradient, 1 - beta1).sign()
    state["mean"].lerp_(gradient, 1 - beta2)  =>
[orthogonal]
The norm has no constant, so zeros become NaN
    check_zero: For a matrix of zeros
    (x.norm() + 1e-7)  =>  x.norm()
The matrix of the caller is divided
    check_orthogonal: The matrix of the caller has changed
    x = x / (x.norm() + 1e-7)  =>  x /= x.norm() + 1e-7
[muon]
The momentum does not look ahead
    check_muon: Look one step ahead
    gradient.lerp(state["mean"], group["beta"]).flatten(1)  =>  state["mean"].flatten(1)
Vectors are orthogonalised as matrices of one row
    check_muon_vectors: the value after step
    if parameter.ndim < 2:  =>  if False:
    .flatten(1)  =>  .reshape(len(parameter) if parameter.ndim > 1 else 1, -1)
[verdict]
The difference is divided by the spread alone, whatever the number of runs
    check_verdict: differ by
    abs(difference) <= bound * s * math.sqrt(1 / n + 1 / m)  =>  abs(difference) <= bound * s
A spread is estimated from three runs
    check_few_seeds: a claim needs at least 5 of each
    if min(n, m) < 5:  =>  if min(n, m) < 2:
A spread of 0 makes every difference certain
    check_copies: so the seed changes nothing
    s == 0 or abs(difference)  =>  abs(difference)
"""
)
