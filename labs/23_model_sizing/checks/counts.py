"""The visible checks of parameters and FLOPs."""

from __future__ import annotations

from dlo_lib.grading.checks.contract import check
from dlo_lib.labkit.compare import entry, is_near, near, wrong_if

from .twins import (
    coatnet_layers,
    drawn_llama,
    drawn_stages,
    drawn_vit,
    llama_parts,
    llama_products,
    vit_parts,
    vit_products,
)

# -- llama


def same_part(t, got: object, want: dict, part: str, what: str, mistakes: dict[str, int], why: str) -> None:
    found = entry(t, got, part, what)
    wrong_if(t, found, want[part], mistakes)
    message = '{what}["{part}"] is {got:,}, a model on the meta device has {want:,}: ' + why
    t.that(found == want[part], message, what=what, part=part, got=found, want=want[part])


@check("llama", points=1)
def check_tables(student, t):
    "The embedding, and the output, tied or not"
    for tied in (False, True):
        config = drawn_llama(t, tie_word_embeddings=tied)
        got, want = student.llama_parameters(config), llama_parts(config)
        what = "llama_parameters(...)"
        same_part(t, got, want, "embedding", what, {}, "V x h")
        told = (
            {"with tie_word_embeddings the output has no further weights": want["embedding"]} if tied else {}
        )
        same_part(t, got, want, "output", what, told, "h x V, or 0 if tied")


@check("llama", points=1)
def check_attention(student, t):
    "Attention with fewer key-value heads"
    config = drawn_llama(t)
    got, want = student.llama_parameters(config), llama_parts(config)
    h, layers, wide = (config[key] for key in ("hidden_size", "num_hidden_layers", "num_attention_heads"))
    wide = wide * config["head_dim"]
    mistakes = {
        "keys and values have num_key_value_heads heads, not num_attention_heads": layers * 4 * h * wide,
        "this takes h x h for queries and output: they are h x (heads x head_dim)": want["attention"]
        + layers * 2 * h * (h - wide),
        "this is the attention of one block": want["attention"] / layers,
    }
    same_part(
        t, got, want, "attention", "llama_parameters(...)", mistakes, "2 h (a d) + 2 h (k d) in a block"
    )


@check("llama", points=1)
def check_mlp(student, t):
    "The MLPs and the norms"
    config = drawn_llama(t)
    got, want = student.llama_parameters(config), llama_parts(config)
    told = {"a gated MLP has three matrices: gate, up and down": want["mlp"] * 2 / 3}
    same_part(t, got, want, "mlp", "llama_parameters(...)", told, "3 h f in a block")
    told = {"one more norm stands at the end of the model": want["norm"] - config["hidden_size"]}
    same_part(t, got, want, "norm", "llama_parameters(...)", told, "2 h in a block, and h")


@check("llama", points=1)
def check_products(student, t):
    "FLOPs of the matrix products, with a tied output too"
    for tied in (False, True):
        config = drawn_llama(t, tie_word_embeddings=tied)
        got = t.number(student.llama_flops(config, 0), "llama_flops(...)")
        want, table = 2 * llama_products(config), config["vocab_size"] * config["hidden_size"]
        mistakes = {
            "the look-up in the embedding computes nothing": want + 2 * table,
            "a tied output is a product too": want - 2 * table,
            "each weight costs a multiplication and an addition": want / 2,
            "this is a training: only the forward is asked for": 3 * want,
        }
        message = "llama_flops(..., seq=0) is {got:,}, the linear layers of the model need {want:,}"
        is_near(t, got, want, message, mistakes)


@check("llama", points=1)
def check_keys(student, t):
    "Each key adds the FLOPs of two products"
    config, seq = drawn_llama(t), t.integer(20, 90)
    found = [t.number(student.llama_flops(config, keys), "llama_flops(...)") for keys in (seq, 2 * seq)]
    each = config["num_hidden_layers"] * config["head_dim"] * seq
    want = 4 * config["num_attention_heads"] * each
    mistakes = {
        "each query head reads the keys, also if heads share them": 4 * config["num_key_value_heads"] * each,
        "q k and (scores) v are two products": want / 2,
    }
    message = "{seq} more keys add {got:,} FLOPs, two products in each block are {want:,}"
    is_near(t, found[1] - found[0], want, message, mistakes, seq=seq)


# -- vit


def vit_case(student, t) -> tuple[object, dict, dict]:
    config = drawn_vit(t)
    return student.vit_parameters(config), vit_parts(config), config


@check("vit", points=1)
def check_patches(student, t):
    "Patches of all colours, and a position for each"
    got, want, config = vit_case(student, t)
    h = config["hidden_size"]
    mistakes = {
        "a patch has the numbers of all its colours": (want["patches"] - h) / config["num_channels"] + h,
        "this layer has a bias": want["patches"] - h,
        "this is P x P x h: the colours and the bias are missing": config["patch_size"] ** 2 * h,
    }
    same_part(t, got, want, "patches", "vit_parameters(...)", mistakes, "(channels P P + 1) h")
    told = {"there is no class token": want["positions"] + h}
    same_part(t, got, want, "positions", "vit_parameters(...)", told, "(S / P)^2 h")


@check("vit", points=1)
def check_blocks(student, t):
    "Attention and MLP, with their biases"
    got, want, config = vit_case(student, t)
    h, f, layers = (config[key] for key in ("hidden_size", "intermediate_size", "num_hidden_layers"))
    told = {"queries, keys, values and output have a bias each": layers * 4 * h * h}
    same_part(t, got, want, "attention", "vit_parameters(...)", told, "4 (h h + h) in a block")
    told = {"both layers have a bias: f and h numbers": layers * 2 * h * f}
    same_part(t, got, want, "mlp", "vit_parameters(...)", told, "2 h f + f + h in a block")


@check("vit", points=1)
def check_norms(student, t):
    "Each norm has a scale and a bias"
    got, want, _ = vit_case(student, t)
    told = {"a norm of a vision transformer has a scale and a bias": want["norm"] / 2}
    same_part(
        t, got, want, "norm", "vit_parameters(...)", told, "two norms in a block, one at the end, 2 h each"
    )


@check("vit", points=2)
def check_image(student, t):
    "The multiply-adds of an image of another size"
    config = drawn_vit(t)
    size = config["image_size"] + config["patch_size"] * t.integer(2, 5)
    got = t.number(student.vit_multiply_adds(config, size), "vit_multiply_adds(...)")
    linear, attention = vit_products(config, size)
    mistakes = {
        "these are FLOPs: one multiplication and its addition count once here": 2 * (linear + attention),
        "the products of attention are missing": linear,
        "attention has two products: q k and (scores) v": linear + attention / 2,
        "the image has `size` pixels, not image_size": sum(vit_products(config, config["image_size"])),
    }
    message = "vit_multiply_adds(..., {size}) is {got:,}, the layers need {want:,}"
    is_near(t, got, linear + attention, message, mistakes, size=size)


# -- coatnet


def same_parameters(student, t, stages: list[tuple], size: int, mistakes: dict[str, int], why: str) -> None:
    got = entry(t, student.coatnet(stages, size), "parameters", "coatnet(...)")
    want = sum(weights for weights, _, _ in coatnet_layers(stages, size))
    wrong = {told: want + more for told, more in mistakes.items()}
    message = "coatnet({stages}, ...) has {want:,} parameters, not {got:,}: " + why
    is_near(t, got, want, message, wrong, stages=stages)


def shortcut(stages: list[tuple], channels: int = 3) -> int:
    return sum(
        a * b for a, b in zip([channels, *(width for _, _, width, _ in stages)], [s[2] for s in stages])
    )


@check("coatnet", points=1)
def check_stem(student, t):
    "Parameters of plain convolutions"
    stages, size = drawn_stages(t, "conv", "conv")
    mistakes = {"a block of convolutions has no shortcut with weights": shortcut(stages)}
    same_parameters(student, t, stages, size, mistakes, "9 i w in each block; the first has 3 channels in")


@check("coatnet", points=1)
def check_mbconv(student, t):
    "Parameters of inverted bottlenecks"
    stages, size = drawn_stages(t, "mbconv", "mbconv")
    inner = [(blocks, 4 * width) for _, blocks, width, _ in stages]
    mistakes = {
        "a depthwise convolution has 9 weights for each channel": sum(b * 9 * (e * e - e) for b, e in inner),
        "the depthwise convolution is missing": -sum(b * 9 * e for b, e in inner),
        "squeeze-and-excitation is missing": -sum(b * 2 * e * (e // 16) for b, e in inner),
        "where the width changes, the shortcut has i w weights": -shortcut(stages),
    }
    why = "i e + 9 e + e w, 2 e (w // 4), and i w where the width changes"
    same_parameters(student, t, stages, size, mistakes, why)


@check("coatnet", points=1)
def check_transformers(student, t):
    "Parameters of transformer blocks"
    stages, size = drawn_stages(t, "transformer", "transformer")
    mistakes = {"where the width changes, the shortcut has i w weights": -shortcut(stages)}
    same_parameters(student, t, stages, size, mistakes, "3 i w + 9 w w, and i w where the width changes")


def positions_case(student, t, *kinds: str) -> tuple[float, list[tuple[int, int, int]]]:
    """The multiply-adds by the student, and the layers."""
    stages, size = drawn_stages(t, *kinds)
    got, layers = student.coatnet(stages, size), coatnet_layers(stages, size)
    right = near(entry(t, got, "parameters", "coatnet(...)"), sum(layer[0] for layer in layers))
    t.that(right, "not tested yet: the parameters are not right, see the first checks")
    return entry(t, got, "multiply_adds", "coatnet(...)"), layers


@check("coatnet", points=1)
def check_positions(student, t):
    "Multiply-adds of convolutions: each weight at each position of its stage"
    got, layers = positions_case(student, t, "conv", "conv")
    want = sum(weights * times for weights, times, _ in layers)
    mistakes = {
        "the weights of a stage work after its stride, at a quarter of the positions": 4 * want,
        "these are FLOPs: a multiplication and its addition count once here": 2 * want,
    }
    is_near(t, got, want, "coatnet(...) counts {got:,} multiply-adds, the layers need {want:,}", mistakes)


@check("coatnet", points=1)
def check_squeeze(student, t):
    "Multiply-adds of inverted bottlenecks: squeeze-and-excitation works once an image"
    got, layers = positions_case(student, t, "mbconv", "mbconv")
    want = sum(weights * times for weights, times, _ in layers)
    mistakes = {
        "squeeze-and-excitation works once an image, not at each position": sum(
            weights * (times if times > 1 else layers[place - 1][1])
            for place, (weights, times, _) in enumerate(layers)
        ),
        "squeeze-and-excitation works too, once an image": sum(w * n for w, n, _ in layers if n > 1),
    }
    message = "coatnet(...) counts {got:,} multiply-adds in inverted bottlenecks, the layers need {want:,}"
    is_near(t, got, want, message, mistakes)


@check("coatnet", points=1)
def check_attention_products(student, t):
    "Multiply-adds of attention"
    got, layers = positions_case(student, t, "transformer", "transformer")
    linear, products = sum(w * times for w, times, _ in layers), sum(extra for _, _, extra in layers)
    mistakes = {
        "the two products of attention are missing: 2 n n w in a block": linear,
        "attention has two products: q k and (scores) v": linear + products / 2,
    }
    message = "coatnet(...) counts {got:,} multiply-adds, with {products:,} of attention it is {want:,}"
    is_near(t, got, linear + products, message, mistakes, products=products)
