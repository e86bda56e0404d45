"""Planted mistakes of Pipeline schedules as tables, question by question."""

from dlo_lib.grading.lab.mutants import Mutant

MUTANTS = [
    # -- naive
    Mutant(
        "The next forward starts before the last micro-batch has come back",
        "check_one_at_a_time",
        says="Without a pipeline the next micro-batch begins",
        replace={'i in range(micro_batches) for kind in "FB"': 'kind in "FB" for i in range(micro_batches)'},
    ),
    Mutant(
        "Micro-batches are counted from 1, so the last one is left out",
        "check_one_at_a_time",
        says="micro-batch goes through every stage",
        replace={"range(micro_batches) for": "range(max(1, micro_batches - 1)) for"},
    ),
    # -- afab
    Mutant(
        "The table is that of 1F1B",
        "check_forwards_first",
        says="only when all its forwards are done",
        replace={
            """
            return [[f"{rank}{kind}{i}" for kind in "FB" for i in range(micro_batches)] for rank in range(ranks)]
            """: """
            rows = []
            for rank in range(ranks):
                ahead = min(ranks - rank - 1, micro_batches)
                row = [f"{rank}F{i}" for i in range(ahead)]
                for done in range(micro_batches):
                    row += [f"{rank}F{done + ahead}"] * (done + ahead < micro_batches) + [f"{rank}B{done}"]
                rows.append(row)
            return rows
            """,
        },
    ),
    Mutant(
        "The backward of the last micro-batch is missing",
        "check_afab_fills_and_drains",
        says="has to be flushed",
        replace={
            """
            return [[f"{rank}{kind}{i}" for kind in "FB" for i in range(micro_batches)] for rank in range(ranks)]
            """: """
            return [
                [f"{rank}F{i}" for i in range(micro_batches)]
                + [f"{rank}B{i}" for i in range(micro_batches - 1)]
                for rank in range(ranks)
            ]
            """,
        },
    ),
    Mutant(
        "The last rank goes back through the micro-batches in the reverse order, the others do not",
        "check_afab_fills_and_drains",
        says="All ranks must take the micro-batches in the same order",
        answer="""
        def afab_rows(ranks, micro_batches):
            rows = [
                [f"{rank}{kind}{i}" for kind in "FB" for i in range(micro_batches)] for rank in range(ranks)
            ]
            rows[-1][micro_batches:] = reversed(rows[-1][micro_batches:])
            return rows
        """,
    ),
    # -- one_f_one_b
    Mutant(
        "All forwards are warm-up, which needs the memory of AFAB",
        "check_1f1b_memory",
        says="A rank begins its backwards as early as possible",
        replace={
            "ahead = min(ranks - rank - 1, micro_batches)": "ahead = micro_batches",
            """
            if done + ahead < micro_batches:
                row.append(f"{rank}F{done + ahead}")
            row.append(f"{rank}B{done}")
            """: 'row += [f"{rank}F{done + ahead}"] * (done + ahead < micro_batches) + [f"{rank}B{done}"]',
        },
    ),
    Mutant(
        "The warm-up is longer than the number of micro-batches",
        "check_1f1b_bubble",
        says="counted from 0",
        replace={
            "ahead = min(ranks - rank - 1, micro_batches)": "ahead = ranks - rank - 1",
            """
            if done + ahead < micro_batches:
                row.append(f"{rank}F{done + ahead}")
            row.append(f"{rank}B{done}")
            """: 'row += [f"{rank}F{done + ahead}"] * (done + ahead < micro_batches) + [f"{rank}B{done}"]',
        },
    ),
    Mutant(
        "The warm-up is one forward too short, so ranks wait for the last one",
        "check_1f1b_bubble",
        says="before a rank's first backward",
        replace={
            "ahead = min(ranks - rank - 1, micro_batches)": """
            ahead = min(max(ranks - rank - 2, 0), micro_batches)
            """,
            """
            if done + ahead < micro_batches:
                row.append(f"{rank}F{done + ahead}")
            row.append(f"{rank}B{done}")
            """: 'row += [f"{rank}F{done + ahead}"] * (done + ahead < micro_batches) + [f"{rank}B{done}"]',
        },
    ),
    Mutant(
        "There is no drain, so the backwards of the warm-up are missing",
        "check_1f1b_bubble",
        says="has to be flushed",
        replace={
            """
            for done in range(micro_batches):
                if done + ahead < micro_batches:
                    row.append(f"{rank}F{done + ahead}")
                row.append(f"{rank}B{done}")
            """: """
            for done in range(micro_batches - ahead):
                row += [f"{rank}F{done + ahead}"] * (done + ahead < micro_batches) + [f"{rank}B{done}"]
            """,
        },
    ),
    # -- interleaved
    Mutant(
        "There are always two stages per rank",
        "check_interleaved_bubble",
        says="is missing on rank",
        replace={
            "stages = range(rank, ranks * per_rank, ranks)": "stages = (rank, rank + ranks)",
            "(per_rank - 1) * ranks + 2 * (ranks - rank - 1)": "ranks + 2 * (ranks - rank - 1)",
        },
    ),
    Mutant(
        "Backwards go through three stages of a rank in the order of the forwards",
        "check_interleaved_bubble",
        says="Backwards go from the last stage to the first",
        replace={"reversed(stages)": "(reversed(stages) if per_rank == 2 else stages)"},
    ),
    Mutant(
        "All forwards come first, with every micro-batch in memory",
        "check_interleaved_memory",
        says="one backward follows each forward",
        replace={
            "warm_up = min(len(forwards), (per_rank - 1) * ranks + 2 * (ranks - rank - 1))": """
            warm_up = len(forwards)
            """,
        },
    ),
    Mutant(
        "With three stages per rank the warm-up is that of plain 1F1B",
        "check_interleaved_bubble",
        says="cannot be carried out",
        replace={
            "warm_up = min(len(forwards), (per_rank - 1) * ranks + 2 * (ranks - rank - 1))": """
            warm_up = min(len(forwards), (per_rank - 1) * ranks + 2 * (ranks - rank - 1))
            warm_up = warm_up if per_rank == 2 else ranks - rank - 1
            """,
        },
    ),
    Mutant(
        "The extra warm-up is half of Megatron's, which is enough only for free messages",
        "check_messages_are_hidden",
        says="the extra forwards hide the messages",
        replace={
            "(per_rank - 1) * ranks + 2 * (ranks - rank - 1)": "(per_rank - 1) * ranks + (ranks - rank - 1)"
        },
    ),
    Mutant(
        "With many micro-batches the backwards go through the stages in the order of the forwards",
        "check_interleaved_memory",
        says="what it holds is tested when it runs",
        replace={"reversed(stages)": "(stages if micro_batches > 4 * ranks else reversed(stages))"},
    ),
    # -- memory
    Mutant(
        "Stages are counted as whole ranks, without the factor 1/v",
        "check_held_interleaved",
        says="a stage has 1/v of the layers",
        replace={
            "return min(micro_batches * per_rank, (per_rank - 1) * ranks + 2 * after + 1) / per_rank": """
            return min(micro_batches * per_rank, (per_rank - 1) * ranks + 2 * after + 1)
            """,
            """
            return {"naive": 1, "AFAB": micro_batches}.get(schedule, min(micro_batches, after + 1))
            """: """
            return {
                "naive": 1,
                "AFAB": micro_batches,
                "1F1B": min(micro_batches, after + 1),
                "ZB-H1": min(micro_batches, after + 1),
            }[schedule]
            """,
        },
    ),
    Mutant(
        "The formula for 1F1B gives more micro-batches than there are",
        "check_held_few",
        says="never holds more than the m micro-batches",
        replace={"min(micro_batches, after + 1)": "after + 1"},
    ),
    Mutant(
        "The formula gives every rank the memory of the first",
        "check_held_1f1b",
        says="They depend on the rank",
        answer="""
        def held(schedule, ranks, micro_batches, per_rank, rank):
            if schedule == "interleaved":
                return (
                    min(micro_batches * per_rank, (per_rank - 1) * ranks + 2 * (ranks - rank - 1) + 1)
                    / per_rank
                )
            after = 0 if micro_batches <= 2 else rank
            return {"naive": 1, "AFAB": micro_batches}.get(schedule, min(micro_batches, ranks - rank + after))
        """,
    ),
    Mutant(
        "The formula for 1F1B is the length of the warm-up",
        "check_held_1f1b",
        says="the warm-up alone",
        replace={
            "min(micro_batches, after + 1)": "min(micro_batches, after + 1 if micro_batches < ranks else max(after, 1))"
        },
    ),
    # -- zb_h1
    Mutant(
        "The deferred weight parts are never done",
        "check_weights_fill_the_bubble",
        says="Without its weight part",
        replace={
            """
            for done in range(micro_batches):
                if done + ahead < micro_batches:
                    row.append(f"{rank}F{done + ahead}")
                row.append(f"{rank}I{done}")
                if done >= rank:
                    row.append(f"{rank}W{done - rank}")
            row += [f"{rank}W{i}" for i in range(max(0, micro_batches - rank), micro_batches)]
            """: """
            for done in range(micro_batches):
                row += [f"{rank}F{done + ahead}"] * (done + ahead < micro_batches) + [f"{rank}I{done}"]
                row += [f"{rank}W{done - rank}"] * (done >= rank)
            """,
        },
    ),
    Mutant(
        "The warm-up is that of ZB-H2, with twice the forwards",
        "check_zb_h1_memory",
        says="only the weight parts move",
        answer="""
        def zb_h1_rows(ranks, micro_batches):
            rows = []
            for rank in range(ranks):
                ahead, late = min(2 * (ranks - rank - 1), micro_batches), rank
                row = [f"{rank}F{i}" for i in range(ahead)]
                for done in range(micro_batches):
                    row += [f"{rank}F{done + ahead}"] * (done + ahead < micro_batches) + [f"{rank}I{done}"]
                    row += [f"{rank}W{done - late}"] * (done >= late)
                rows.append(row + [f"{rank}W{i}" for i in range(max(0, micro_batches - late), micro_batches)])
            return rows
        """,
    ),
    Mutant(
        "Each weight part comes right after its input part, so nothing is deferred",
        "check_weights_fill_the_bubble",
        says="keeps its last r weight parts for the drain",
        answer="""
        def zb_h1_rows(ranks, micro_batches):
            rows = []
            for rank in range(ranks):
                ahead, late = min(ranks - rank - 1, micro_batches), 0
                row = [f"{rank}F{i}" for i in range(ahead)]
                for done in range(micro_batches):
                    row += [f"{rank}F{done + ahead}"] * (done + ahead < micro_batches) + [f"{rank}I{done}"]
                    row += [f"{rank}W{done - late}"] * (done >= late)
                rows.append(row + [f"{rank}W{i}" for i in range(max(0, micro_batches - late), micro_batches)])
            return rows
        """,
    ),
    Mutant(
        "Every rank defers one weight part more than its drain needs",
        "check_few_open",
        says="needs only r of them",
        answer="""
        def zb_h1_rows(ranks, micro_batches):
            rows = []
            for rank in range(ranks):
                ahead, late = min(ranks - rank - 1, micro_batches), rank + 1
                row = [f"{rank}F{i}" for i in range(ahead)]
                for done in range(micro_batches):
                    row += [f"{rank}F{done + ahead}"] * (done + ahead < micro_batches) + [f"{rank}I{done}"]
                    row += [f"{rank}W{done - late}"] * (done >= late)
                rows.append(row + [f"{rank}W{i}" for i in range(max(0, micro_batches - late), micro_batches)])
            return rows
        """,
    ),
    Mutant(
        "The weight parts of the drain begin at a negative micro-batch if there are few",
        "check_few_weight_parts",
        says="write stage, kind",
        replace={
            "range(max(0, micro_batches - rank), micro_batches)": "range(micro_batches - rank, micro_batches)"
        },
    ),
    # -- bubble
    Mutant(
        "The bubble of the naive table is counted once and not for every micro-batch",
        "check_waiting_naive",
        says="for every micro-batch",
        replace={"return micro_batches * others * both": "return others * both"},
    ),
    Mutant(
        "The formula holds only when the three parts cost the same",
        "check_waiting_zb_h1",
        says="right only if F = I = W",
        replace={"return others * (forward + input_gradient - weight_gradient)": "return others * forward"},
    ),
    Mutant(
        "The factor 1/v is left out of the formula",
        "check_waiting_interleaved",
        says="a stage has 1/v of the layers",
        replace={"return others * both / per_rank": "return others * both"},
    ),
    # -- start
    Mutant(
        "An input that has not run counts as there from the beginning",
        "check_inputs_are_there",
        says="return None while an input is missing",
        replace={
            """
            if cell not in ended:
                return None
            """: "",
            "ended[cell] +": "ended.get(cell, 0.0) +",
        },
    ),
    Mutant(
        "An input part waits for the next stage only, and not for its forward",
        "check_inputs_are_there",
        says="which has not run",
        replace={'"I": [(stage, "F"), (stage + 1, "I")]': '"I": [(stage + 1, "I")]'},
    ),
    Mutant(
        "A message takes time even between two stages of one rank",
        "check_start_times",
        says="from the same rank",
        replace={
            "(send if placement[source] != placement[stage] else 0.0)": "(send if source != stage else 0.0)"
        },
    ),
    Mutant(
        "The cell starts when its inputs are there, although its rank is busy",
        "check_start_times",
        says="still busy",
        replace={"start = free[placement[stage]]": "start = 0.0"},
    ),
    Mutant(
        "The first stage waits for a stage before it",
        "check_start_times",
        says="The first stage has no stage before it",
        replace={
            """
            if not 0 <= source < len(placement):
                continue
            """: "",
        },
    ),
    # -- contest
    Mutant(
        "A cap of one micro-batch is taken to be two",
        "check_under_the_cap",
        says="1 is the most allowed. That is the cap",
        replace={
            "line, vee = list(range(ranks)), [*range(ranks), *reversed(range(ranks))]": """
            cap = max(cap, 2)
            line, vee = list(range(ranks)), [*range(ranks), *reversed(range(ranks))]
            """,
        },
    ),
    Mutant(
        "There is one stage per rank, even with spare memory",
        "check_spare_memory",
        says="Two half stages per rank",
        replace={"for placement in (line, vee):": "for placement in (line,):"},
    ),
    Mutant(
        "Under a small cap the first stage of a rank may fill the memory that its second stage needs",
        "check_under_the_cap",
        says="No cell can start",
        replace={
            "placement[stage:].count(placement[stage])": "(placement[stage:].count(placement[stage]) if cap >= 2 else 1)"
        },
    ),
    Mutant(
        "With fewer micro-batches than ranks the naive table is used",
        "check_few_in_the_contest",
        says="1F1B fits this cap",
        replace={
            "line, vee = list(range(ranks)), [*range(ranks), *reversed(range(ranks))]": """
            if micro_batches < ranks:
                return naive_rows(ranks, micro_batches)
            line, vee = list(range(ranks)), [*range(ranks), *reversed(range(ranks))]
            """,
        },
    ),
    Mutant(
        "Under a tight cap no weight part is deferred",
        "check_tight_cap",
        says="A tight cap blocks forwards",
        replace={
            """
            line, vee = list(range(ranks)), [*range(ranks), *reversed(range(ranks))]
            """: """
            if cap < ranks:
                rows = []
                for rank in range(ranks):
                    ahead = min(ranks - rank - 1, int(cap) - 1, micro_batches)
                    row = [f"{rank}F{i}" for i in range(ahead)]
                    for done in range(micro_batches):
                        row += [f"{rank}F{done + ahead}"] * (done + ahead < micro_batches) + [
                            f"{rank}B{done}"
                        ]
                    rows.append(row)
                return rows
            line, vee = list(range(ranks)), [*range(ranks), *reversed(range(ranks))]
            """,
        },
    ),
    Mutant(
        "1F1B is used where it just fits, with whole backwards",
        "check_split_backward",
        says="split the backward",
        replace={
            "line, vee = list(range(ranks)), [*range(ranks), *reversed(range(ranks))]": """
            if cap == ranks:
                return one_f_one_b_rows(ranks, micro_batches)
            line, vee = list(range(ranks)), [*range(ranks), *reversed(range(ranks))]
            """,
        },
    ),
]
