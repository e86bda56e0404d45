"""The job script: one template, rendered once for each submission.

- ``work``: what a job runs
- ``template``: the whole script
- ``head``: its options of sbatch
- ``software``: modules, environments and containers
- ``launch_command``: the command that starts the program
- ``ready_made``: writes the scripts of ``slurm/``

Imports ``site``.
"""
