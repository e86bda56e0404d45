"""What the checks, the figures and the cells of several labs need: each thing is here once.

``UserError``, ``tr`` and ``columns`` are those of ``base``.

Checks:

- ``compare``: results beside those of twins and of known mistakes
- ``traffic``: what passed between the ranks of a run
- ``messages``: who sends to whom, in how many rounds
- ``order``: the order of what happened in a run
- ``memory``: what a rank holds at a mark
- ``race``: a training of a declared model, which the check makes itself
- ``race_board``: the references on its leaderboard

Cells and figures:

- ``figures``: the style of all figures
- ``drawn_programs``: traces of trainings whose bottleneck is drawn
- ``predictions``: numbers that students write before a measurement
- ``predicted_bars``: bars with these numbers
- ``side_by_side``: the student's form beside the standard library's
- ``explore``: a figure with sliders
- ``plan_panel``: parallel plans as bars, with sliders or beside the planner's
- ``player``: buttons that play a slider
- ``process_memory``: the memory of a piece of code
- ``measured_step``: one step of a form on a rank
- ``at_scale``: the request for a cluster
- ``stored_results``: results that were measured elsewhere

A student's copy has this room; it holds no answer of any lab. Imports ``grading``, ``cluster``, ``comm``,
``planner``, ``profiling`` and ``data``.
"""

from dlo_lib.base.errors import UserError
from dlo_lib.base.text import columns, tr

__all__ = ["UserError", "columns", "tr"]
