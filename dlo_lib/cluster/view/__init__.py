"""Views of a job in a notebook.

- ``views``: what the views read
- ``dashboard``: metrics in one figure
- ``curve_styles``: the colours of a sweep
- ``live``: a table and the loss so far

Imports ``hardware``, ``run``, ``slurm`` and ``train``.
"""
