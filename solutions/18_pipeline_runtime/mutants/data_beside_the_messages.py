"""Nothing is received: messages of the right size hold zeros, the data passes beside them."""

QUESTION = "loop"
LOSES = 2
FAILS = "check_received_is_used"
SAYS = "data that arrives must be used"


def run_row(row, forward, backward, inputs, shapes, before, after):
    arrived, gradients, outputs, input_gradients, shape_out, loss = {}, {}, {}, {}, {}, 0.0
    me, world = dist.get_rank(), dist.get_world_size()
    pairs = [dist.new_group([rank, rank + 1]) for rank in range(world - 1)]

    def send(tensor, to):
        dist.send(torch.zeros_like(tensor), to)
        dist.broadcast(tensor.contiguous(), me, group=pairs[min(me, to)])

    def receive(shape, source):
        tensor = torch.empty(shape)
        dist.recv(tensor, source)
        dist.broadcast(tensor, source, group=pairs[min(me, source)])
        return tensor

    for cell in row:
        _, kind, i = parse(cell)
        if kind == "RECV_F":
            arrived[i] = receive(shapes[i], before)
        elif kind == "F":
            output = forward(i, inputs[i] if before is None else arrived.pop(i))
            if after is None:
                loss = loss + output
            else:
                outputs[i], shape_out[i] = output, output.shape
        elif kind == "SEND_F":
            send(outputs.pop(i), after)
        elif kind == "RECV_B":
            gradients[i] = receive(shape_out.pop(i), after)
        elif kind == "B":
            gradient = backward(i, None if after is None else gradients.pop(i))
            if before is not None:
                input_gradients[i] = gradient
        elif kind == "SEND_B":
            send(input_gradients.pop(i), before)
    return loss
