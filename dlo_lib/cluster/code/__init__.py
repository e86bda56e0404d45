"""The code that a job runs: a copy of the user's code and of the library, or one function.

- ``code_copy``: the copy of the user's code
- ``imports``: the modules that a program imports
- ``path_changes``: the folders that it adds to ``sys.path``
- ``module_redirect``: keeps a job's Python to the copy
- ``library``: the library that a job was submitted with
- ``digest``: the hash of a call
- ``function_job``: a function as a job
- ``function_rank``: one rank of it

Imports ``launch`` and ``run``.
"""
