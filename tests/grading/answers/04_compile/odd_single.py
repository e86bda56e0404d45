# Single answers that are right and look unlike the solution.


# == decorated_by_torch

# %% clip
@torch.no_grad()
def clip(gradient: Tensor, limit: Tensor) -> Tensor:
    return gradient * torch.clamp(limit / gradient.norm(), max=1.0)


# == compiled


# %% clip
@torch.compile(mode="max-autotune", fullgraph=True)
def clip(gradient: Tensor, limit: Tensor) -> Tensor:
    return gradient * torch.clamp(limit / gradient.norm(), max=1.0)


# == step_decorated_by_torch


# %% optimizer
@torch.no_grad()
def adamw(parameter, gradient, first, second, step, lr):
    first = torch.lerp(gradient, first, BETA1)
    second = torch.lerp(gradient.square(), second, BETA2)
    denominator = (second / (1 - BETA2**step)).sqrt().add(EPS)
    return parameter * (1 - lr * DECAY) - lr * (first / (1 - BETA1**step)) / denominator, first, second
