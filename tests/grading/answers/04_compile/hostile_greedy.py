# Recorded graphs that take all memory or all time that there is when they are run: the calculator ends them.


# == attention_of_all_pairs: the recorded graph computes the attention of 65,536 elements

# %% clip {"earns": "less"}
import dlo_lib.profiling.compile_capture as _capture


def _recorded(self, module, example_inputs):
    def node(name, op, *args, module="torch"):
        return {
            "name": name,
            "kind": "function",
            "module": module,
            "op": op,
            "args": list(args),
            "kwargs": {},
        }

    one = {"ref": "q"}
    nodes = [
        node("q", "zeros", [1, 131072, 1]),
        node("y", "scaled_dot_product_attention", one, one, one, module="torch.nn.functional"),
    ]
    names = [{"name": "a"}, {"name": "b"}]
    self.graphs.append({"inputs": names, "nodes": nodes, "outputs": [{"ref": "y"}]})
    self.calls.append({"graph": 0, "args": [{"input": "gradient"}, {"input": "limit"}]})
    return module.forward


_capture.GraphRecorder.__call__ = _recorded


def clip(gradient, limit):
    norm = gradient.norm()
    return gradient * torch.where(norm > limit, limit / norm, 1.0)
