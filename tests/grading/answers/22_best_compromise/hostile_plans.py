# Plans that are not searched by a cost.


# == always_sharded: every model is sharded over all GPUs, with checkpointing, which is right on fast links

# %% choose {"earns": 0}
def choose(config, cluster, batch, seq, cap):
    return {
        "pp": 1,
        "tp": 1,
        "dp": cluster["gpus"],
        "micro_batch": 1,
        "chunks": 1,
        "sharded": True,
        "checkpointing": True,
    }


# == the_recipe: tensor parallelism fills a node, and the shortest pipeline that fits is taken

# %% choose {"earns": 2}
# - for plan in candidates(config, cluster["gpus"], batch):
# + recipe = [plan for plan in candidates(config, cluster["gpus"], batch) if plan["tp"] == cluster["gpus_per_node"]]
# + for plan in sorted(recipe, key=lambda plan: (plan["pp"], plan["micro_batch"], not plan["checkpointing"])):
# - if seconds < least:
# + if not best:


# == no_room: the first rank alone is looked at, and nothing is left below the cap

# %% choose {"earns": 0}
# - ends = [rank_memory(config, plan, batch, seq, last) for last in (False, True)]
# - if max(sum(parts.values()) for parts in ends) > 0.95 * cap:
# + if rank_memory(config, plan, batch, seq)["state"] > cap:


# == sum_only: the time of a step is right, and all of it is called computation

# %% time {"earns": 0}
# - "compute": compute,
# - "tensor": tensor,
# - "bubble": (pp - 1) / v * micro,
# - "messages": messages if pp > 1 else 0,
# - "data": max(traffic - OVERLAP * window, 0),
# + "compute": m * micro + (pp - 1) / v * micro + messages + max(traffic - OVERLAP * window, 0),
# + "tensor": 0,
# + "bubble": 0,
# + "messages": 0,
# + "data": 0,


# == nothing_computes: all parts but the messages are 0, so that a bubble of 0 is a right share of them


# %% time {"earns": 1}
def step_time(config, plan, batch, seq, cluster):
    moved = 4 * batch / plan["dp"] * plan["chunks"] * pipeline_elements(1, seq, config.hidden) / plan["tp"]
    messages = moved / (MESSAGES * link(cluster, plan["dp"] * plan["tp"], 2)) if plan["pp"] > 1 else 0
    return {"compute": 0, "tensor": 0, "bubble": 0, "messages": messages, "data": 0}
