"""What the checks compare with: models on the meta device, drawn laws, and trained models."""

from __future__ import annotations

import math

import torch
from torch import nn

from dlo_lib.grading.checks.twins import twin
from dlo_lib.models import Llama, LlamaConfig
from dlo_lib.planner.tiny_runs import TinyLanguage

OF_LLAMA = {
    "embed_tokens": "embedding",
    "self_attn": "attention",
    "mlp": "mlp",
    "norm": "norm",
    "lm_head": "output",
}


def drawn_llama(t, **fixed) -> dict:
    """A configuration in which all sizes differ and hidden is not heads x head_dim."""
    kv_heads = t.integer(2, 4)
    sizes = {
        "vocab_size": 2 * t.integer(150, 400) + 1,
        "hidden_size": 8 * t.integer(5, 9),
        "intermediate_size": 2 * t.integer(60, 99),
        "num_hidden_layers": t.integer(3, 6),
        "num_attention_heads": kv_heads * t.integer(2, 4),
        "num_key_value_heads": kv_heads,
        "head_dim": 2 * t.integer(6, 9),
        "tie_word_embeddings": t.choice([False, True]),
    }
    return sizes | fixed


def on_meta(config: dict) -> Llama:
    """The Llama of a configuration, without memory."""
    with torch.device("meta"):
        return Llama(
            LlamaConfig(
                vocab_size=config["vocab_size"],
                hidden=config["hidden_size"],
                intermediate=config["intermediate_size"],
                num_layers=config["num_hidden_layers"],
                num_heads=config["num_attention_heads"],
                num_kv_heads=config["num_key_value_heads"],
                head_dim=config["head_dim"],
                tied_embeddings=config["tie_word_embeddings"],
            )
        )


def llama_parts(config: dict) -> dict[str, int]:
    """The parameters of the built model by part."""
    found = dict.fromkeys(OF_LLAMA.values(), 0)
    for name, weight in on_meta(config).named_parameters():
        found[next(part for word, part in OF_LLAMA.items() if word in name)] += weight.numel()
    return found


def llama_products(config: dict) -> int:
    """The weights of all linear layers of the built model, and of the output."""
    config = config | {"tie_word_embeddings": False}
    return sum(module.weight.numel() for module in on_meta(config).modules() if isinstance(module, nn.Linear))


def drawn_vit(t) -> dict:
    heads, patch = t.integer(2, 4), 2 * t.integer(2, 5)
    return {
        "hidden_size": heads * 8 * t.integer(2, 4),
        "intermediate_size": 2 * t.integer(70, 120),
        "num_hidden_layers": t.integer(3, 6),
        "num_attention_heads": heads,
        "image_size": patch * t.integer(4, 7),
        "patch_size": patch,
        "num_channels": t.choice([2, 4, 5]),
    }


def numbers_of(*modules: nn.Module) -> int:
    return sum(weight.numel() for module in modules for weight in module.parameters())


def vit_parts(config: dict) -> dict[str, int]:
    """The parameters of PyTorch's layers by part."""
    h, layers, patch = config["hidden_size"], config["num_hidden_layers"], config["patch_size"]
    with torch.device("meta"):
        block = nn.TransformerEncoderLayer(h, config["num_attention_heads"], config["intermediate_size"])
        first, last = nn.Conv2d(config["num_channels"], h, patch, patch), nn.LayerNorm(h)
        tokens = first(torch.empty(1, config["num_channels"], config["image_size"], config["image_size"]))
    return {
        "patches": numbers_of(first),
        "positions": tokens.numel(),
        "attention": layers * numbers_of(block.self_attn),
        "mlp": layers * numbers_of(block.linear1, block.linear2),
        "norm": layers * numbers_of(block.norm1, block.norm2) + numbers_of(last),
    }


def vit_products(config: dict, size: int) -> tuple[int, int]:
    """Multiply-adds of one image in linear layers, and in the products of attention."""
    h, layers, patch = config["hidden_size"], config["num_hidden_layers"], config["patch_size"]
    with torch.device("meta"):
        first = nn.Conv2d(config["num_channels"], h, patch, patch, bias=False)
        queries = first(torch.empty(1, config["num_channels"], size, size)).flatten(2).transpose(1, 2)
        scores = queries @ queries.transpose(1, 2)
    a_block = [(h, 3 * h), (h, h), (h, config["intermediate_size"]), (config["intermediate_size"], h)]
    weights = first.weight.numel() + layers * sum(math.prod(shape) for shape in a_block)
    return queries.shape[1] * weights, 2 * layers * scores.numel() * h


def drawn_stages(t, *kinds: str, stride: int = 2) -> tuple[list[tuple], int]:
    """Stages whose widths all differ, and the side of an image that they divide."""
    widths = t.shuffled([12, 20, 28, 36, 44])
    stages = [(kind, t.integer(2, 4), width, stride) for kind, width in zip(kinds, widths)]
    return stages, 2 ** len(kinds) * t.integer(3, 5)


def coatnet_layers(stages: list[tuple], size: int) -> list[tuple[int, int, int]]:
    """(weights, how often each is used, multiply-adds without weights) of each layer on the meta device."""
    layers, image = [], torch.empty(1, 3, size, size, device="meta")

    def conv(wide: int, kernel: int = 1, **options) -> None:
        layer = nn.Conv2d(wide, options.pop("out", wide), kernel, bias=False, device="meta", **options)
        layers.append((layer.weight.numel(), math.prod(image.shape[2:]), 0))

    for kind, blocks, width, stride in stages:
        image = image[:, :, ::stride, ::stride]
        for _ in range(blocks):
            given = image.shape[1]
            image = image[:, :1].expand(-1, width, -1, -1)
            if kind == "conv":
                conv(given, 3, out=width)
                continue
            if kind == "mbconv":
                conv(given, out=4 * width)
                conv(4 * width, 3, groups=4 * width)
                conv(4 * width, out=width)
                layers.append((2 * 4 * width * (width // 4), 1, 0))
            else:
                for out in (width, width, width):
                    conv(given, out=out)
                conv(width, out=9 * width)  # the output and both matrices of the MLP
                layers.append((0, 0, 2 * math.prod(image.shape[2:]) ** 2 * width))
            if given != width:
                conv(given, out=width)
    return layers


def law_at(law: tuple, n: float, d: float) -> float:
    e, a, alpha, b, beta = law
    return e + a * n**-alpha + b * d**-beta


def drawn_law(t, beta: float | None = None) -> tuple[float, float, float, float, float]:
    """A law whose two terms are alike at a million parameters and 20 million tokens."""
    alpha, beta = t.uniform(0.25, 0.6), beta or t.uniform(0.25, 0.6)
    both = t.uniform(0.3, 0.6)
    return t.uniform(0.8, 2.0), both * 1e6**alpha, alpha, both * t.uniform(0.7, 1.4) * 2e7**beta, beta


def drawn_runs(t, law: tuple, noise: float) -> list[tuple[float, float, float]]:
    """Ten runs on three budgets, with relative errors."""
    runs = []
    for number in range(10):
        n = 1e5 * 10 ** (0.5 * (number // 3)) * 2.0 ** (number % 3 - 1)
        d = 20 * n * 4.0 ** (1 - number % 3) * t.uniform(0.8, 1.25)
        runs.append((n, d, law_at(law, n, d) * (1 + noise * t.uniform(-1, 1))))
    return runs


@twin
def least_squares(runs: list, relative: bool = True, floor: float = 1.0) -> tuple:
    """The law with the smallest sum of relative, or absolute, squared errors, by solving a grid at once; with
    ``floor`` 0 it has no floor."""
    n, d, losses = torch.tensor(runs, dtype=torch.float64).T
    weight = 1 / losses if relative else torch.ones_like(losses)
    alphas = betas = torch.linspace(0.05, 2.4, 48, dtype=torch.float64)
    for _ in range(5):
        alpha, beta = (grid.flatten() for grid in torch.meshgrid(alphas, betas, indexing="ij"))
        columns = [
            torch.full((len(alpha), len(n)), floor, dtype=n.dtype),
            n ** -alpha[:, None],
            d ** -beta[:, None],
        ]
        rows = torch.stack(columns, -1)[..., floor == 0 :] * weight[:, None]
        wanted = (losses * weight)[:, None].expand(len(alpha), -1, -1)
        found = torch.linalg.lstsq(rows, wanted).solution
        errors = ((rows @ found - wanted) ** 2).sum((1, 2))
        best = int(torch.where((found >= 0).all(1)[:, 0], errors, torch.inf).argmin())
        step = float(alphas[1] - alphas[0])
        near = torch.linspace(-step, step, 9, dtype=torch.float64)
        alphas, betas = ((grid[best] + near).clamp(min=0.01) for grid in (alpha, beta))
    *e, a, b = found[best, :, 0].tolist()
    return e[0] if e else 0.0, a, float(alpha[best]), b, float(beta[best])


# -- languages


REGIMES = {  # vocabulary / 2, budget / vocabulary^2, scale of the logits
    "hungry": (80, 90, 3.5e4, 4.5e4, 2.3, 3.6),  # for the width only: the law is 3 % off here
    "far": (72, 78, 0.95e5, 1.2e5, 2.3, 3.6),  # from the entropy
    "near": (22, 26, 1.5e6, 2e6, 2.3, 3.6),
    "flat": (46, 58, 2e5, 2.8e5, 1.2, 1.7),
}


def drawn_language(t, regime: str) -> tuple[tuple[int, int, float, float], float]:
    """The arguments of a language, and a budget for runs on it."""
    least, most, low, high, *scale = REGIMES[regime]
    vocab = 2 * t.integer(least, most)
    language = vocab, t.integer(1, 10**9), t.uniform(0.45, 0.6), t.uniform(*scale)
    return language, vocab**2 * t.uniform(low, high)


@twin
def trained_loss(language: tuple, width: int, tokens: int, seed: int = 1) -> float:
    """The loss of a training, by default of the final one."""
    return TinyLanguage(*language).train(width, tokens, seed)


class Language(TinyLanguage):
    """A language that trains each size once: the answers to one class's checks ask for many equal runs."""

    def __init__(self, language: tuple) -> None:
        super().__init__(*language)
        self.language = language

    def train(self, width: int, tokens: int, seed: int = 0) -> float:
        return trained_loss(self.language, width, tokens, seed)


@twin
def least_loss(language: tuple, flops: float) -> tuple[float, float]:
    """The smallest loss of four widths around the bottom of the valley, and the entropy."""
    middle = math.sqrt(flops / 6 / 20) / language[0]
    model = TinyLanguage(*language)
    tried = [max(1, round(middle * factor)) for factor in (0.6, 0.85, 1.2, 1.6)]
    losses = [model.train(width, int(flops / model.flops(width, 1)), seed=2) for width in tried]
    return min(losses), model.entropy
