"""The last rank sends the loss back through the pipeline."""

QUESTION = "loop"
LOSES = 2
FAILS = "check_messages_of_the_loop"
SAYS = "are enough"


def run_row(row, forward, backward, inputs, shapes, before, after):
    arrived, gradients, outputs, input_gradients, shape_out, loss = {}, {}, {}, {}, {}, 0.0
    for cell in row:
        _, kind, i = parse(cell)
        if kind == "RECV_F":
            arrived[i] = torch.empty(shapes[i])
            dist.recv(arrived[i], before)
        elif kind == "F":
            output = forward(i, inputs[i] if before is None else arrived.pop(i))
            if after is None:
                loss = loss + output
            else:
                outputs[i], shape_out[i] = output, output.shape
        elif kind == "SEND_F":
            dist.send(outputs.pop(i), after)
        elif kind == "RECV_B":
            gradients[i] = torch.empty(shape_out.pop(i))
            dist.recv(gradients[i], after)
        elif kind == "B":
            gradient = backward(i, None if after is None else gradients.pop(i))
            if before is not None:
                input_gradients[i] = gradient
        elif kind == "SEND_B":
            dist.send(input_gradients.pop(i), before)
    told = torch.as_tensor(loss, dtype=torch.get_default_dtype()).clone()
    if after is not None:
        dist.recv(told, after)
    if before is not None:
        dist.send(told, before)
    return loss
