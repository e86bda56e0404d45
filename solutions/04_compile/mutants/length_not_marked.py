"""The compiler is left to find out: two graphs, one for the first length, one for all others."""

QUESTION = "dynamic"
LOSES = 2
FAILS = "check_one_graph_for_all_lengths"
SAYS = "four lengths needed 2 graphs"


def mark_length(batch):
    return batch
