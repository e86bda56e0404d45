# The rules of libraries, state outside of `state`, and values that ignore their arguments.


# == adamw_of_pytorch: one step of torch.optim.AdamW, with its state dict in `state`

# %% adamw
def adamw(parameter, gradient, state, group):
    held = torch.nn.Parameter(parameter)
    held.grad = gradient
    options = {name: group[name] for name in ("lr", "betas", "eps", "weight_decay")}
    optimizer = torch.optim.AdamW([held], **options)
    if state:
        optimizer.load_state_dict(state["saved"])
    optimizer.step()
    state["saved"] = optimizer.state_dict()


# == fused_adamw_of_pytorch: the fused operator, which is no function of Python


# %% adamw
def adamw(parameter, gradient, state, group):
    if not state:
        zeros = torch.zeros_like(parameter)
        state.update(m=zeros, v=zeros.clone(), step=torch.zeros((), dtype=torch.float32))
    state["step"] += 1
    beta1, beta2 = group["betas"]
    torch.ops.aten._fused_adamw_(
        [parameter],
        [gradient],
        [state["m"]],
        [state["v"]],
        [],
        [state["step"]],
        lr=group["lr"],
        beta1=beta1,
        beta2=beta2,
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        amsgrad=False,
        maximize=False,
    )


# == sgd_of_pytorch: the function behind torch.optim.SGD


# %% momentum
def momentum(parameter, gradient, state, group):
    from torch.optim.sgd import _single_tensor_sgd

    buffers = [state.get("b")]
    _single_tensor_sgd(
        [parameter],
        [gradient],
        buffers,
        grad_scale=None,
        found_inf=None,
        weight_decay=0.0,
        momentum=group["beta"],
        lr=group["lr"] * (1 - group["beta"]),
        dampening=0.0,
        nesterov=False,
        maximize=False,
        has_sparse_grad=False,
    )
    state["b"] = buffers[0]


# == the_mean_in_a_global: the state is kept by the address of the parameter

# %% momentum
# - if "mean" not in state:
# + state = globals().setdefault("_kept", {}).setdefault(id(parameter), {})
# + if "mean" not in state:


# == never_shown: the careful word for every claim


# %% verdict
def verdict(ours, theirs, bound):
    return "not shown"


# == by_the_means: one seed would be enough for it


# %% verdict
def verdict(ours, theirs, bound):
    return "better" if mean(ours) > mean(theirs) else "worse"


# == one_batch_of_all_parts: the whole batch at once, which needs the memory that parts save


# %% accumulate {"earns": 2}
def accumulated_step(model, loss_of, parts, optimizer, most):
    optimizer.zero_grad()
    loss_of(model, tuple(torch.cat(items) for items in zip(*parts))).backward()
    clip_([parameter.grad for parameter in model.parameters()], most)
    optimizer.step()


# == an_earlier_gradient_is_forged: the parts see a gradient of ones, and one backward follows


# %% accumulate {"earns": 2}
def accumulated_step(model, loss_of, parts, optimizer, most):
    optimizer.zero_grad()
    samples, total = sum(len(part[0]) for part in parts), 0.0
    for part in parts:
        total = total + loss_of(model, part) * len(part[0]) / samples
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
    optimizer.zero_grad()
    total.backward()
    clip_([parameter.grad for parameter in model.parameters()], most)
    optimizer.step()
