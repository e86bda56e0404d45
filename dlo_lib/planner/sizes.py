"""The sizes of a transformer that its memory and time depend on: a Llama, or the GPT of a published table.

The formulas of the planner take these numbers and no module, so that a table of GPT models can be compared
with them. A GPT has two matrices in its MLP instead of three, and learned positions instead of rotations.
Where some blocks have experts and others have an MLP, a *block* is the mean of both.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from dlo_lib.models import LlamaConfig, model_config
from dlo_lib.models.router import MoEConfig


@dataclass(frozen=True)
class ModelSizes:
    """A transformer as numbers.

    Attributes:
        hidden, intermediate, layers, heads, kv_heads, head_dim, vocab, moe: as in ``LlamaConfig``.
        gated: whether the MLP has three matrices (SwiGLU) instead of two.
        tied: whether the embedding is also the output projection.
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
    moe: MoEConfig | None = None

    @classmethod
    def of(cls, model: str | LlamaConfig | ModelSizes) -> ModelSizes:
        """Return the sizes of a configuration or of its name.

        Raises:
            UserError: the name is unknown.
        """
        if isinstance(model, ModelSizes):
            return model
        c = model_config(model)
        heads = (c.num_heads, c.num_kv_heads, c.head_dim, c.vocab_size)
        return cls(c.hidden, c.intermediate, c.num_layers, *heads, tied=c.tied_embeddings, moe=c.moe)

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
    def mixed(self) -> float:
        """The part of the blocks that have experts."""
        return 0.0 if self.moe is None else self.layers // self.moe.every / self.layers

    @property
    def kinds(self) -> tuple[ModelSizes, ...]:
        """The model with each of its kinds of blocks in all layers: with experts, and without."""
        if self.moe is None or self.mixed in (0, 1):
            return (self,)
        return replace(self, moe=None), replace(self, moe=replace(self.moe, every=1))

    @property
    def plain(self) -> float:
        """The part of the blocks that have an MLP or a shared expert."""
        return self._mean(1, 0 if self.moe is None else bool(self.moe.shared_intermediate))

    @property
    def top_k(self) -> int:
        """The experts that a token uses, 0 without experts."""
        return 0 if self.moe is None else self.moe.top_k

    @property
    def shared(self) -> float:
        """The width that every rank computes for every token: of the MLP, or of the shared expert."""
        return self._mean(self.intermediate, 0 if self.moe is None else self.moe.shared_intermediate)

    @property
    def width(self) -> float:
        """The width of the MLP that a token uses: with experts, of the chosen ones and the shared one."""
        return self.shared + self._mean(0, 0 if self.moe is None else self.top_k * self.moe.intermediate)

    @property
    def router(self) -> float:
        """The parameters of the router of a block."""
        return self._mean(0, 0 if self.moe is None else self.hidden * self.moe.num_experts)

    @property
    def matrices(self) -> float:
        """The parameters in the matrices of a block that every token uses, without experts that it does not
        use."""
        mlp = (3 if self.gated else 2) * self.hidden * self.width
        return self.hidden * (2 * self.queries + 2 * self.keys) + mlp + self.router

    @property
    def block_parameters(self) -> float:
        """The parameters of a block outside its experts."""
        return self.matrices - 3 * self.hidden * (self.width - self.shared) + 2 * self.hidden

    @property
    def expert_parameters(self) -> float:
        """The parameters of all experts of a block, 0 without."""
        every = 0 if self.moe is None else self.moe.num_experts * self.moe.intermediate
        return self._mean(0, 3 * self.hidden * every)

    @property
    def table(self) -> int:
        """The parameters of the embedding."""
        return self.vocab * self.hidden

    @property
    def parameters(self) -> int:
        """All parameters; a tied embedding counts once."""
        tables = self.table * (1 if self.tied else 2)
        return round(self.layers * (self.block_parameters + self.expert_parameters)) + tables + self.hidden

    def flops(self, tokens: float, seq: int) -> float:
        """Return the model FLOPs of forward and backward of ``tokens`` tokens in sequences of ``seq``: three
        times 2 for each parameter of a matrix, and the two products of attention with all ``seq`` keys (PaLM,
        arXiv:2204.02311, appendix B)."""
        products = self.layers * (self.matrices + 2 * seq * self.queries) + self.table
        return 6.0 * tokens * products

    def _mean(self, plain: float, mixed: float) -> float:
        """The mean over the blocks of a number without and with experts."""
        return plain + self.mixed * (mixed - plain)
