"""dlo_lib: the library behind the labs of the course *optimised and distributed deep learning*.

Rooms (packages), from the lowest floor to the highest; ``CONTRIBUTING.md`` has the rule of imports:

- ``comm``: calls between ranks: collectives written out, a tracer, an explainer of deadlocks
- ``hardware``: the properties of GPUs
- ``tiles``: an interpreter of Triton's language
- ``launch``: ranks from a notebook, and the rank of this process
- ``models``: Llama and ResNet
- ``data``: data sets, and the sampler that distributes them over ranks
- ``optim``: the training step, learning-rate schedules, low precision
- ``kernels``: fused kernels and their twins
- ``parallel``: all forms of parallelism
- ``profiling``: memory, time and FLOPs of a step
- ``train``: the training script
- ``grading``: checks, the notebook's side of a lab, the judge and the class
- ``hpo``: hyperparameter search
- ``cluster``: jobs on SLURM
- ``live_ranks``: ranks that live as long as the notebook
- ``hub``: a class on a JupyterHub
- ``labkit``: what the checks and figures of several labs share
- ``cli``: the command `dlo`

Modules that every room may import:

- ``errors``: ``UserError``, and the exit statuses of commands
- ``usage``: bad input of a command as one line
- ``text``: the message catalogue
- ``files``: files that are complete or absent
- ``locks``: a lock on a file
- ``ownership``: one run owns one folder
- ``lifetime``: a process that ends with its parent
- ``interpreter``: Python for a process of the library
- ``one_thread``: numpy without the threads of OpenBLAS
- ``worker_start``: how the workers of a ``DataLoader`` start
- ``ranks_idle``: how long idle ranks are kept
- ``stop``: a run that is asked to stop
- ``progress``: how far a run is
- ``rank_failures``: the failures of a job's ranks
- ``torch_version``: the supported releases of PyTorch
- ``torch_compat``: the differences between them
- ``markup``: HTML for notebooks and slides
- ``notebook_figure``: a figure with an alternative text
- ``drawing``: the palette and the shared parts of figures
"""

__version__ = "0.1.0"
