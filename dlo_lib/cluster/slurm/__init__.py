"""The commands of SLURM, and what their answers say.

- ``commands``: all commands; only this module calls them
- ``invocation``: one command, and whether its answer is one
- ``states``: the states of a job
- ``answers``: what an answer says about a job
- ``accounting``: how jobs ended, and what they used
- ``details``: a job as the controller describes it
- ``snapshot``: one query that several processes share

Imports ``site``.
"""
