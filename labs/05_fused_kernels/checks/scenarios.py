"""The scenarios of the checks: each returns the text of a kernel, None for a function without @triton.jit.
The judge runs it in its own process."""

from dlo_lib.grading.checks.contract import scenario


@scenario
def text_of_add(student):
    return getattr(student.add_kernel, "source", None)


@scenario
def text_of_softmax(student):
    return getattr(student.softmax_kernel, "source", None)


@scenario
def text_of_norm(student):
    return getattr(student.rms_norm_kernel, "source", None)


@scenario
def text_of_norm_backward(student):
    return getattr(student.rms_norm_backward_kernel, "source", None)


@scenario
def text_of_loss(student):
    return getattr(student.loss_kernel, "source", None)


@scenario
def text_of_loss_backward(student):
    return getattr(student.loss_backward_kernel, "source", None)


@scenario
def text_of_linear_loss(student):
    return getattr(student.linear_loss_kernel, "source", None)


@scenario
def text_of_attention(student):
    return getattr(student.attention_kernel, "source", None)


@scenario
def text_of_keys_backward(student):
    return getattr(student.keys_backward_kernel, "source", None)
