# Right answers that look unlike the solution.


# == smoothed_labels: smoothed labels, a loss five times as large at a fifth of the rate, and tuples

# %% race
ENTRY = {
    "layers": (("conv", 8, 5, 2), ("norm",), ("relu",), ("conv", 16, 3, 2), ("norm",), ("relu",)),
    "batch": 16,
    "rate": 0.1,
    "commit": "abcdef0123456789",
}


def loss(logits, labels):
    return 5 * F.cross_entropy(logits, labels, label_smoothing=0.05)


# == by_the_shapes: PyTorch runs the model on the meta device, and the shapes are counted


# %% flops
def flops(layers, size):
    x, total, first = torch.empty(1, 3, size, size, device="meta"), 0, None
    for kind, *values in layers:
        if kind == "conv":
            weight = torch.empty(values[0], x.shape[1], values[1], values[1], device="meta")
            x = F.conv2d(x, weight, stride=values[2], padding=values[1] // 2)
            cost = 2 * x.numel() * weight[0].numel()
            total, first = total + cost, first or cost
        elif kind == "pool":
            x = F.max_pool2d(x, 2)
    total += 20 * x.shape[1]
    return {"forward": float(total), "backward": 2.0 * total - first}


def affordable(layers, size, budget, batch):
    return max(steps for steps in range(257) if steps * batch * sum(flops(layers, size).values()) <= budget)


# == adam_with_a_line: Adam, whose rate falls on a straight line


# %% update
def update(gradients, states, step, steps, rate):
    updates, kept = [], []
    for g, state in zip(gradients, states):
        m = 0.9 * state.get("m", 0 * g) + 0.1 * g
        v = 0.99 * state.get("v", 0 * g) + 0.01 * g**2
        u = m / (1 - 0.9 ** (step + 1)) / ((v / (1 - 0.99 ** (step + 1))).sqrt() + 1e-8)
        updates.append(rate * (1 - step / steps) * u)
        kept.append({"m": m, "v": v})
    return updates, kept


# == orthogonalised: Muon for matrices and signs for vectors, the state is a tensor


# %% update
def update(gradients, states, step, steps, rate):
    states = [
        0.8 * (state if isinstance(state, torch.Tensor) else 0 * g) + g for g, state in zip(gradients, states)
    ]
    updates = []
    for m in states:
        if m.ndim == 2:
            u, _, v = torch.linalg.svd(m, full_matrices=False)
            updates.append(rate * (1 - step / steps) * u @ v)
        else:
            updates.append(rate * (1 - step / steps) * m.sign())
    return tuple(updates), tuple(states)


# == sgd_of_pytorch: torch.optim makes the step, and its momentum is the state


# %% update
def update(gradients, states, step, steps, rate):
    parameters = [torch.nn.Parameter(torch.zeros_like(gradient)) for gradient in gradients]
    optimizer = torch.optim.SGD(parameters, lr=rate * (1 - step / steps) ** 2, momentum=0.8)
    for parameter, gradient, state in zip(parameters, gradients, states):
        parameter.grad = gradient
        optimizer.state[parameter] = {
            name: value.clone() for name, value in state.items() if value is not None
        }
    optimizer.step()
    return [-p.detach() for p in parameters], [dict(optimizer.state[p]) for p in parameters]


# == shifted_one_by_one: each image is shifted around, and its contrast changes, in a loop


# %% augment
def augment(images, seed):
    import random

    draw, found = random.Random(seed), []
    for image in images:
        moved = image.roll((draw.randint(-2, 2), draw.randint(-2, 2)), (1, 2))
        found.append(moved * draw.uniform(0.7, 1.4))
    return torch.stack(found)


# == the_negatives: half of the images change their sign


# %% augment
def augment(images, seed):
    sign = 1 - 2 * (torch.rand(len(images), generator=torch.Generator().manual_seed(seed)) < 0.5).float()
    return torch.einsum("nchw,n->nchw", images, sign)


# == in_one_place: the interval is written again in each function


# %% fair
def interval(scores):
    import numpy

    half = T95[len(scores) - 1] * numpy.std(scores, ddof=1) / numpy.sqrt(len(scores))
    return [float(numpy.mean(scores) - half), float(numpy.mean(scores) + half)]


def shown(ours, theirs):
    differences = [a - b for a, b in zip(ours, theirs)]
    n, middle = len(differences), math.fsum(differences) / len(differences)
    variance = math.fsum((d - middle) ** 2 for d in differences) / (n - 1)
    return 1 if middle > T95[n - 1] * math.sqrt(variance / n) else 0


def places(board):
    found = dict.fromkeys(board, 1)
    for name in board:
        for other in board:
            found[name] += bool(other != name and shown(board[other], board[name]))
    return found


# == the_values_as_text: a fingerprint of the printed numbers


# %% track
def fingerprint(images, labels):
    text = [str((x.dtype, list(x.shape), x.tolist())) for x in (images, labels)]
    return hashlib.sha256("|".join(text).encode()).hexdigest()


def missing(record):
    found = []
    for name in ("data", "config", "seed", "commit"):
        value = record.get(name)
        if value is None or (name != "seed" and len(value) == 0) or (name == "commit" and "-" in value):
            found += [name]
    return found
