# Right values without the technique: whole weights on every rank, masks that come from the data.

# == whole_llama: every rank computes the whole blocks, and adds up zeros
# %% model {"earns": 1}
import sys

_WHOLE = {}


def shard_dim(name):
    frame = sys._getframe(1).f_locals
    if "parameter" in frame:
        _WHOLE[name] = frame["parameter"].detach().clone()
    layer = name.split(".")[-2]
    return 1 if layer in ("o_proj", "down_proj") else None if "norm" in layer else 0


class _Block(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, block, number, cos, sin, group, *parts):
        with torch.enable_grad():
            own = x.detach().requires_grad_()
            whole = {name: _WHOLE[f"layers.{number}.{name}"].clone() for name, _ in block.named_parameters()}
            for weight in whole.values():
                weight.requires_grad_()
            out = torch.func.functional_call(block, whole, (own, cos, sin))
        ctx.kept = own, whole, out, group
        out = out.detach().clone()
        for _ in range(2):
            zeros = torch.zeros_like(x)
            dist.all_reduce(zeros, group=group)
            out += zeros
        return out

    @staticmethod
    def backward(ctx, grad):
        own, whole, out, group = ctx.kept
        found = torch.autograd.grad(out, [own, *whole.values()], grad)
        dx = found[0].clone()
        for _ in range(2):
            zeros = torch.zeros_like(dx)
            dist.all_reduce(zeros, group=group)
            dx += zeros
        cut = [
            g if (dim := shard_dim(name)) is None else shard(g, dim, group)
            for name, g in zip(whole, found[1:])
        ]
        return dx, None, None, None, None, None, *cut


def parallel_block(x, block, cos, sin, group=None):
    number = list(sys._getframe(1).f_locals["model"].layers).index(block)
    return _Block.apply(x, block, number, cos, sin, group, *block.parameters())


# == whole_llama_gathered: the weights of a block are added up to whole ones before it is computed
# %% model {"earns": 1}
def shard_dim(name):
    layer = name.split(".")[-2]
    return 1 if layer in ("o_proj", "down_proj") else None if "norm" in layer else 0


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight, dim, group):
        rank, world = dist.get_rank(group), dist.get_world_size(group)
        sizes = [size * (world if i == dim else 1) for i, size in enumerate(weight.shape)]
        whole = weight.new_zeros(sizes)
        whole.narrow(dim, rank * weight.shape[dim], weight.shape[dim]).copy_(weight)
        dist.all_reduce(whole, group=group)
        ctx.kept = dim, group
        return whole

    @staticmethod
    def backward(ctx, grad):
        return shard(grad, *ctx.kept), None, None


class _Zeros(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group, zeros = group, torch.zeros_like(x)
        dist.all_reduce(zeros, group=group)
        return x + zeros

    @staticmethod
    def backward(ctx, grad):
        zeros = torch.zeros_like(grad)
        dist.all_reduce(zeros, group=ctx.group)
        return grad + zeros, None


def parallel_block(x, block, cos, sin, group=None):
    whole = {}
    for name, weight in block.named_parameters():
        dim = shard_dim(name)
        whole[name] = weight if dim is None else _Gathered.apply(weight, dim, group)
    x = torch.func.functional_call(block, whole, (x, cos, sin))
    return _Zeros.apply(_Zeros.apply(x, group), group)


# == dropout_by_hash: the mask is a function of the data
# %% dropout {"earns": 1}
def dropout_on_ranks(x, p, differs, generator, group=None):
    seed = int(x.double().mul(1000).abs().sum())
    kept = torch.rand(x.shape, generator=torch.Generator().manual_seed(seed)) >= p
    return x * kept / (1 - p)


# == dropout_by_a_counter: the mask is a function of the number of calls
# %% dropout {"earns": 2}
_calls = []


def dropout_on_ranks(x, p, differs, generator, group=None):
    _calls.append(1)
    seed = 1000 * len(_calls) + (dist.get_rank(group) if differs else 0)
    kept = torch.rand(x.shape, generator=torch.Generator().manual_seed(seed)) >= p
    return x * kept / (1 - p)
