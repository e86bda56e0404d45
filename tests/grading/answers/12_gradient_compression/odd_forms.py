# Answers that are right and look unlike the solution.


# == one_message_for_a_pair: positions travel as the bits of an int32, in one tensor with the values

# %% topk
def largest(x, k):
    order = sorted(range(x.numel()), key=lambda place: abs(float(x[place])), reverse=True)[:k]
    positions = torch.tensor(order, dtype=torch.int64)
    return x.index_select(0, positions), positions


def sparse_mean(values, positions, size):
    world = dist.get_world_size()
    pairs = torch.cat([values.contiguous().view(torch.uint8), positions.to(torch.int32).view(torch.uint8)])
    result = torch.zeros(size, dtype=values.dtype)
    for part in gathered(pairs).chunk(world):
        own, places = part[: values.nbytes].clone(), part[values.nbytes :].clone()
        result.scatter_add_(0, places.view(torch.int32).long(), own.view(values.dtype) / world)
    return result


# == errors_by_sums: the error is all that came less all that was sent


# %% feedback
class ErrorFeedback:
    def __init__(self, compress):
        self.compress, self.came, self.sent = compress, None, None

    def __call__(self, x):
        self.came = x.clone() if self.came is None else self.came + x
        late = self.came if self.sent is None else self.came - self.sent
        now = self.compress(late)
        self.sent = now.clone() if self.sent is None else self.sent + now
        return now

    def state_dict(self):
        return {"came": self.came, "sent": self.sent}

    def load_state_dict(self, state):
        self.came, self.sent = state["came"], state["sent"]


# == lists_of_parts: the exchanges of lists, and decoding by arithmetic


# %% onebit
class OneBitMean:
    def __init__(self):
        self.late, self.late_part = 0, 0

    def __call__(self, x):
        world = dist.get_world_size()
        corrected = x + self.late
        bits, scale = pack(corrected)
        self.late = corrected - unpack(bits, scale)
        whole = torch.empty_like(bits)
        dist.all_to_all_single(whole, bits.contiguous())
        scales = [torch.empty_like(scale) for _ in range(world)]
        dist.all_gather(scales, scale)
        mean = sum(unpack(part, one) for part, one in zip(whole.chunk(world), scales)) / world
        corrected = mean + self.late_part
        bits, scale = pack(corrected)
        self.late_part = corrected - unpack(bits, scale)
        parts, scales = (
            [torch.empty_like(bits) for _ in range(world)],
            [torch.empty_like(scale) for _ in range(world)],
        )
        dist.all_gather(parts, bits)
        dist.all_gather(scales, scale)
        return torch.cat([unpack(part, one) for part, one in zip(parts, scales)])


# == by_qr: the columns by a QR decomposition, and Q is made orthonormal too


# %% powersgd
def orthonormal(matrix):
    return torch.linalg.qr(matrix)[0]


class PowerSGD:
    def __init__(self, q):
        self.state = {"q": q.clone(), "late": None}

    def __call__(self, gradient):
        m = gradient if self.state["late"] is None else gradient + self.state["late"]
        p = m.mm(orthonormal(self.state["q"])) / dist.get_world_size()
        dist.all_reduce(p)
        p = orthonormal(p)
        q = m.t().mm(p) / dist.get_world_size()
        dist.all_reduce(q)
        result = p.mm(q.t())
        self.state = {"q": q, "late": m - result}
        return result


# == reduced_and_gathered: the sum of the warm-up is a reduce-scatter and an all-gather

# %% adam
# - dist.all_reduce(mean)
# + own = mean.new_empty(mean.numel() // dist.get_world_size())
# + dist.reduce_scatter_tensor(own, mean)
# + mean = gathered(own)


# == a_difference_of_times: the step is computed as what is not hidden


# %% pays
def step_seconds(scheme, alpha, beta, backward):
    busy = backward + scheme["coding"]
    sending = scheme["messages"] * alpha + scheme["nbytes"] * beta
    return busy + max(0.0, sending - busy * bool(scheme["hidden"]))
