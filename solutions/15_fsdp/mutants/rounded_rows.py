"""What was computed with is written back into the row."""

QUESTION = "reshard"
LOSES = 1
FAILS = "check_row_untouched"
SAYS = "not what it was"


def reshard(unit: Unit) -> None:
    if unit.is_whole:
        own = pack([whole.data for whole in unit.wholes], dist.get_world_size())[dist.get_rank()]
        unit.row.copy_(own)
    for whole in unit.wholes:
        whole.untyped_storage().resize_(0)
    put(unit, False)
