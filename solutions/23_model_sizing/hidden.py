"""Hidden checks of model sizes: the visible ideas with other sizes; the answers of the quiz."""

from __future__ import annotations

from dlo_lib.grading.checks.contract import check
from dlo_lib.grading.checks.quiz import Answer
from dlo_lib.labkit.compare import entry, near

from .checks.laws import Case, split
from .checks.twins import (
    coatnet_layers,
    drawn_law,
    drawn_llama,
    drawn_stages,
    drawn_vit,
    llama_products,
    vit_products,
)


@check("llama", points=1)
def check_one_head(student, t):
    "FLOPs with one key-value head"
    config, seq = drawn_llama(t, num_key_value_heads=1, tie_word_embeddings=True), t.integer(9, 70)
    heads = config["num_attention_heads"] * config["head_dim"]
    want = 2 * llama_products(config) + 4 * config["num_hidden_layers"] * heads * seq
    got = t.number(student.llama_flops(config, seq), "llama_flops(...)")
    t.that(near(got, want), "with one key-value head the FLOPs are wrong")


@check("vit", points=1)
def check_smaller_image(student, t):
    "The multiply-adds of a smaller image"
    config = drawn_vit(t)
    size = config["patch_size"] * t.integer(2, 3)
    got = t.number(student.vit_multiply_adds(config, size), "vit_multiply_adds(...)")
    t.that(
        near(got, sum(vit_products(config, size))), "a smaller image needs another number of multiply-adds"
    )


@check("coatnet", points=1)
def check_mixed(student, t):
    "The parameters of a stage that keeps the size of the image"
    stages, size = drawn_stages(t, "conv", "mbconv", "transformer", stride=t.choice([1, 2]))
    got = entry(t, student.coatnet(stages, size), "parameters", "coatnet(...)")
    want = sum(weights for weights, _, _ in coatnet_layers(stages, size))
    t.that(near(got, want), "the parameters of mixed stages are wrong")


@check("law", points=1)
def check_other_budgets(student, t):
    "The best size for small budgets"
    for _ in range(3):
        law, flops = drawn_law(t), 10 ** t.uniform(9, 12)
        n = t.number(t.items(student.best_size(law, flops), 2, "best_size(...)")[0], "the parameters")
        t.that(near(n, split(law, flops), 0.01), "for a small budget the size is not the best one")


@check("size", points=1, seconds=60)
def check_other_language(student, t):
    "The predicted loss is within 5 % on another language"
    t.that(abs(Case(student, t).error()) <= 0.05, "the predicted loss is too far from the trained one")


# -- quiz

ANSWERS = {
    "q1": Answer("c", "the look-up computes nothing, but the same weights are the product of the output"),
    "q2": Answer("a", "N grows as C to the power beta / (alpha + beta) = 1/2, and so does D"),
    "q3": Answer("d", "a floor bends the true curve above the line"),
    "q4": Answer("b", "the law counts the FLOPs of the training only"),
}
