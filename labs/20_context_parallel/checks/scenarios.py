"""Scenarios that run with the student's code on every rank. They contain no expected value."""

# ruff: noqa: F821 - torch is defined where these run

from __future__ import annotations

from dlo_lib.grading.checks.contract import scenario


@scenario
def block_alone(student, q, k, v, mask):
    """``block_attention``, with an error at a call of an attention that PyTorch has."""
    from torch.overrides import TorchFunctionMode

    class NoReadyAttention(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            name = getattr(function, "__name__", "") or str(function)
            if "attention" in name:
                raise RuntimeError(f"block_attention calls {name}: no ready attention")
            return function(*args, **(kwargs or {}))

    with NoReadyAttention():
        return student.block_attention(q, k, v, mask)


@scenario
def forward(student, rank, world, q, k, v, positions):
    """The output and the log-sum-exp of this rank."""
    return student.ring_forward(q, k, v, positions)


def with_gradients(out, grad, *leaves):
    """A result and the gradients of ``leaves``, None if the graph of the result does not begin there."""
    if not isinstance(out, torch.Tensor) or not out.requires_grad or out.shape != grad.shape:
        return out, None
    out.backward(grad)
    return out.detach(), [leaf.grad for leaf in leaves]


@scenario
def gradients_of(student, rank, world, q, k, v, grad, positions):
    """The output of ring attention, and the gradients of this rank's q, k and v."""
    own = [tensor.requires_grad_() for tensor in (q, k, v)]
    return with_gradients(student.ring_attention(*own, positions), grad, *own)


@scenario
def share_of_loss(student, rank, world, logits, targets):
    """This rank's share of the loss, and the gradient of its logits."""
    share = student.context_loss(logits.requires_grad_(), targets)
    return with_gradients(share, torch.ones((), dtype=logits.dtype), logits)


@scenario
def whole_step(student, rank, world, sizes, state, tokens, positions, padding):
    """A step of a Llama: the loss, and the gradients by name."""
    from dlo_lib.models.llama import Llama, LlamaConfig

    model = Llama(LlamaConfig(**sizes), dtype=torch.float64)
    model.load_state_dict(state)
    loss = student.context_step(model, tokens, positions, padding)
    return loss, {name: parameter.grad for name, parameter in model.named_parameters()}


@scenario
def exchanged_and_returned(student, rank, world, x):
    """A tensor after ``sequence_to_heads``, and after ``heads_to_sequence`` of the result."""
    heads = student.sequence_to_heads(x)
    return heads, student.heads_to_sequence(heads)


@scenario
def ulysses_step(student, rank, world, q, k, v, grad):
    """The output of the all-to-all form, and the gradients of this rank's q, k and v."""
    own = [tensor.requires_grad_() for tensor in (q, k, v)]
    return with_gradients(student.ulysses_attention(*own), grad, *own)
