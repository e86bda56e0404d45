"""The sizes of a transformer that its memory and time depend on: a Llama, or the GPT of a published table.

The formulas of the planner take these numbers and no module, so that a table of GPT models can be compared
with them. A GPT has two matrices in its MLP instead of three, and learned positions instead of rotations.
"""

from __future__ import annotations

from dataclasses import dataclass

from dlo_lib.models import LlamaConfig, model_config


@dataclass(frozen=True)
class ModelSizes:
    """A transformer as numbers.

    Attributes:
        hidden, intermediate, layers, heads, kv_heads, head_dim, vocab: as in ``LlamaConfig``. With experts,
            ``intermediate`` is the width that one token uses: the chosen experts and the shared one.
        gated: whether the MLP has three matrices (SwiGLU) instead of two.
        tied: whether the embedding is also the output projection.
        expert_parameters: the parameters of all experts of a layer, 0 without; averaged over the layers.
        top_k: the experts that a token uses.
    """

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    gated: bool = True
    tied: bool = False
    expert_parameters: int = 0
    top_k: int = 0

    @classmethod
    def of(cls, model: str | LlamaConfig | ModelSizes) -> ModelSizes:
        """Return the sizes of a configuration or of its name.

        Raises:
            UserError: the name is unknown.
        """
        if isinstance(model, ModelSizes):
            return model
        config = model_config(model)
        width, experts, top_k = config.intermediate, 0, 0
        if (moe := config.moe) is not None:
            mixed = sum(config.has_experts(layer) for layer in range(config.num_layers))
            used = moe.top_k * moe.intermediate + moe.shared_intermediate
            width = round((mixed * used + (config.num_layers - mixed) * width) / config.num_layers)
            every = mixed * 3 * config.hidden * moe.num_experts * moe.intermediate
            experts, top_k = round(every / config.num_layers), moe.top_k
        return cls(
            config.hidden,
            width,
            config.num_layers,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            config.vocab_size,
            tied=config.tied_embeddings,
            expert_parameters=experts,
            top_k=top_k,
        )

    @classmethod
    def gpt(cls, hidden: int, layers: int, heads: int, vocab: int = 51_200) -> ModelSizes:
        """Return a GPT as in Megatron-LM: four times ``hidden`` in the MLP, all heads with keys, tied."""
        return cls(hidden, 4 * hidden, layers, heads, heads, hidden // heads, vocab, gated=False, tied=True)

    @property
    def queries(self) -> int:
        """The features of all queries."""
        return self.heads * self.head_dim

    @property
    def keys(self) -> int:
        """The features of all keys, which are as many as those of the values."""
        return self.kv_heads * self.head_dim

    @property
    def matrices(self) -> int:
        """The parameters in the matrices of a block that every token uses, without experts that it does not
        use."""
        mlp = (3 if self.gated else 2) * self.hidden * self.intermediate
        return self.hidden * (2 * self.queries + 2 * self.keys) + mlp

    @property
    def block_parameters(self) -> int:
        """The parameters of a block outside its experts."""
        used = 3 * self.hidden * self.intermediate if self.expert_parameters else 0
        return self.matrices - used + 2 * self.hidden

    @property
    def table(self) -> int:
        """The parameters of the embedding."""
        return self.vocab * self.hidden

    @property
    def parameters(self) -> int:
        """All parameters; a tied embedding counts once. Of a model with experts, shared experts and routers
        are left out, and blocks without experts too."""
        tables = self.table * (1 if self.tied else 2)
        return self.layers * (self.block_parameters + self.expert_parameters) + tables + self.hidden

    def flops(self, tokens: float, seq: int) -> float:
        """Return the model FLOPs of forward and backward of ``tokens`` tokens in sequences of ``seq``: three
        times 2 for each parameter of a matrix, and the two products of attention with all ``seq`` keys (PaLM,
        arXiv:2204.02311, appendix B)."""
        products = self.layers * (self.matrices + 2 * seq * self.queries) + self.table
        return 6.0 * tokens * products
