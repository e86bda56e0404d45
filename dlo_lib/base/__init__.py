"""What every room may import: bad input, files, texts, processes, the releases of PyTorch, figures.

Bad input, files and texts:

- ``errors``: ``UserError``, and the exit statuses of commands
- ``usage``: bad input of a command as one line
- ``text``: the message catalogue
- ``files``: files that are complete or absent
- ``provenance``: what another person needs to repeat a run
- ``intervals``: the interval of a mean, and of the difference of pairs
- ``locks``: a lock on a file
- ``ownership``: one run owns one folder
- ``temporary_folders``: temporary folders, and the removal of those of killed processes

Processes:

- ``lifetime``: a process that ends with its parent
- ``interpreter``: Python for a process of the library
- ``cores``: the CPU cores that a process may use
- ``one_thread``: numpy without the threads of OpenBLAS
- ``garbage``: imports without the garbage collector
- ``huge_pages``: memory in huge pages, which makes a fork cheaper
- ``worker_start``: how the workers of a ``DataLoader`` start
- ``ranks_idle``: how long idle ranks are kept
- ``stop``: a run that is asked to stop
- ``progress``: how far a run is
- ``rank_failures``: the failures of a job's ranks

PyTorch:

- ``torch_version``: the supported releases
- ``torch_compat``: the differences between them
- ``operation_capture``: the operations that a function runs, in order, as plain data

Pages and figures:

- ``markup``: HTML for notebooks and slides
- ``notebook_figure``: a figure with an alternative text
- ``drawing``: the palette and the shared parts of figures

It imports no room.
"""
