"""Three hints for each question: a nudge, a pointer, a sketch."""

HINTS = {
    "naive": [
        "Stage r lies on rank r. What does a rank do for one micro-batch?",
        "A row holds F and B of micro-batch 0, then of micro-batch 1, ... The waiting comes by itself: a cell begins when what it needs is there.",
        'One list for each rank; in it f"{rank}F{i}" and f"{rank}B{i}" for i from 0 to micro_batches - 1.',
    ],
    "afab": [
        "The cells are those of the naive table, in another order.",
        "Two loops over the micro-batches in a row, one after the other. Does the order within the second loop matter?",
        "[F of all i] + [B of all i]: the same order of micro-batches on every rank.",
    ],
    "one_f_one_b": [
        "Draw the last rank first: it can go back at once. How many forwards must rank r do before its first backward can come?",
        "Rank r needs a warm-up of p - r - 1 forwards (or all of them, if there are fewer micro-batches). Then F, B, F, B, ... and the rest of the backwards.",
        "ahead = min(p - r - 1, m); for done in range(m): a forward of micro-batch done + ahead if there is one, then the backward of done.",
    ],
    "interleaved": [
        "Write two lists for a rank first: the order of its forwards, over all its stages, and the order of its backwards.",
        "Groups of p micro-batches: a group goes through stage r, then r + p, ... The backwards take the same groups, with the rank's last stage first.",
        "ahead = (v - 1) p + 2 (p - r - 1), at most m v; then forwards[done + ahead] if there is one, backwards[done], for done in range(m v).",
    ],
    "memory": [
        "Read a row of the table from the left and count: +1 at a forward, -1 at a backward. Where is the count largest?",
        "AFAB: at the last forward. 1F1B: at the forward of the first turn, so warm-up + 1, unless there are fewer micro-batches.",
        "min(m, p - r) for 1F1B and ZB-H1; min(m v, warm-up + 1) / v for interleaved, with the warm-up that you wrote.",
    ],
    "zb_h1": [
        "Begin with your 1F1B and write I where there is B. Where is each W free to go?",
        "Rank r keeps up to r weight parts open: after the input part of micro-batch i comes the weight part of micro-batch i - r.",
        "As in 1F1B: F of done + ahead, I of done, then W of done - r if done >= r; at the end the W that are left.",
    ],
    "bubble": [
        "Look at a drawing. Add up the white of one rank: before its first cell, between, and after its last.",
        "Filling: p - 1 forwards of one stage. Draining: p - 1 backwards of one stage. In the naive table both happen for each micro-batch.",
        "naive m (p-1)(F+I+W); AFAB and 1F1B without the m; interleaved divided by v; in ZB-H1 each step of the drain has a W to do: F+I-W.",
    ],
    "contest": [
        "`timed(rows, **costs)` and `most_held(rows)` are yours: make several tables, keep those under the cap, return the one with the smallest bubble.",
        "For a cap below p, 1F1B with a shorter warm-up runs: it is slower, but legal. For a cap of p, ZB-H1. With two stages a rank in a V the fill is half as long.",
        "Make the table by playing the clock: whichever rank can begin something first does. First I, then F if the cap allows, then W. "
        "In a V keep one place free for the stage on the way up.",
    ],
    "quiz": [
        "Each answer is in one of your drawings, or in the table of formulas that you wrote.",
        "q1: (p - 1) / m. q2 and q5: the memory tracks below the drawings. q3: count the arrows between ranks.",
        "q4: who uses the result of I, and who that of W?",
    ],
}
