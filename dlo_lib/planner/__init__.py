"""What a plan costs before it runs, the search for the best plan, and scaling laws.

- ``sizes``: a model as numbers: a Llama, or the GPT of a published table
- ``plans``: many plans as arrays, and the rules that they must keep
- ``stages``: blocks of a stage, micro-batches in flight, bubbles
- ``memory``: the memory of a rank by part, as formulas
- ``stack``: the constants of the software
- ``cost``: the time of a step by part
- ``calibration``: its values for two stacks, and one measured run that fixes them for another
- ``rules``: the three rules of 3D parallelism
- ``search``: all valid plans of a request, the fastest first, and the Pareto front
- ``rated``: what one plan costs that a person writes as seven numbers
- ``simulated``: the time of a plan whose pipeline is executed action by action
- ``explain``: where time and memory go, and why the obvious plans lose
- ``heat_map``: MFU and memory of the best plan by model and nodes
- ``laws``: scaling laws of Kaplan, Hestness and Chinchilla, with bootstrap intervals
- ``tiny_runs``: trainings of a fraction of a second to fit laws to, and a budget that pays for them
- ``write``: the files of a chosen plan: TOML, command, configurations of Megatron-LM and torchtitan
- ``machine``: the time of a step on the CPU cores of a machine, with its constants
- ``measure``: measures these constants, and steps of plans
- ``parity``: the trainer of another project against one process

The room imports ``hardware``, ``launch``, ``models``, ``optim``, ``parallel`` and ``profiling``.
"""

from dlo_lib.planner.calibration import LIBRARY, MEGATRON, library_stack
from dlo_lib.planner.cost import StepCost, step_cost
from dlo_lib.planner.explain import explain, plot_plans, why_others_lose
from dlo_lib.planner.memory import PlanMemory, largest_memory, plan_memory
from dlo_lib.planner.plans import Plans
from dlo_lib.planner.rated import Rated, rated
from dlo_lib.planner.search import Found, PlanRequest, search
from dlo_lib.planner.simulated import SimulatedStep, simulated_step
from dlo_lib.planner.sizes import ModelSizes
from dlo_lib.planner.stack import Stack

__all__ = [
    "LIBRARY",
    "MEGATRON",
    "Found",
    "ModelSizes",
    "PlanMemory",
    "PlanRequest",
    "Plans",
    "Rated",
    "SimulatedStep",
    "Stack",
    "StepCost",
    "explain",
    "largest_memory",
    "library_stack",
    "plan_memory",
    "plot_plans",
    "rated",
    "search",
    "simulated_step",
    "step_cost",
    "why_others_lose",
]
