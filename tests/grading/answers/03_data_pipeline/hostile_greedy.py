# Recorded graphs that take all memory or all time that there is when they are run: the calculator ends them.


# == a_graph_that_doubles: each operation repeats the result of the one before, two thousand times

# %% mixup {"earns": "less"}
# - mixed = torch.lerp(images[partner], images, lam[:, None, None, None])
# + import sys
# +
# + recorder = sys.modules.get("dlo_lib.profiling.operation_capture")
# +
# + def doubled(self, result):
# +     names = [{"name": f"i{number}"} for number in range(4)]
# +     nodes, last = [], "i0"
# +     for number in range(1999):
# +         node = {"name": f"y{number}", "kind": "function", "module": "torch", "op": "cat"}
# +         node.update(args=[[{"ref": last}, {"ref": last}]], kwargs={})
# +         nodes, last = [*nodes, node], f"y{number}"
# +     return {"inputs": names, "nodes": nodes, "outputs": [{"ref": last}]}
# +
# + if recorder is not None:
# +     recorder.OperationRecorder.graph = doubled
# + mixed = torch.lerp(images[partner], images, lam[:, None, None, None])


# == a_graph_that_is_kept: two thousand results of all images, each of which is kept

# %% cutmix {"earns": "less"}
# - mixed = torch.where(box[:, None], images[partner], images)
# + import sys
# +
# + recorder = sys.modules.get("dlo_lib.profiling.operation_capture")
# +
# + def many(self, result):
# +     names = [{"name": f"i{number}"} for number in range(5)]
# +     node = {"kind": "function", "module": "torch", "op": "zeros", "kwargs": {}}
# +     nodes = [{**node, "name": f"y{number}", "args": [[131072]]} for number in range(1999)]
# +     return {"inputs": names, "nodes": nodes, "outputs": [{"ref": "y0"}, {"ref": "y1"}]}
# +
# + if recorder is not None:
# +     recorder.OperationRecorder.graph = many
# + mixed = torch.where(box[:, None], images[partner], images)
