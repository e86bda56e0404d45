"""The scenarios of the checks: each returns the text of a kernel. The judge runs it in its own process."""

from dlo_lib.grading.checks.contract import scenario


@scenario
def text_of_add(student):
    return student.add_kernel.source


@scenario
def text_of_softmax(student):
    return student.softmax_kernel.source


@scenario
def text_of_norm(student):
    return student.rms_norm_kernel.source


@scenario
def text_of_norm_backward(student):
    return student.rms_norm_backward_kernel.source


@scenario
def text_of_loss(student):
    return student.loss_kernel.source


@scenario
def text_of_loss_backward(student):
    return student.loss_backward_kernel.source


@scenario
def text_of_linear_loss(student):
    return student.linear_loss_kernel.source


@scenario
def text_of_attention(student):
    return student.attention_kernel.source


@scenario
def text_of_keys_backward(student):
    return student.keys_backward_kernel.source
