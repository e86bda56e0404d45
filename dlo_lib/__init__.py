"""dlo_lib: the library behind the labs of the course *optimised and distributed deep learning*.

Rooms (packages), from the lowest floor to the highest; ``CONTRIBUTING.md`` has the rule of imports:

- ``base``: what every room may import: bad input, files, texts, processes
- ``comm``: calls between ranks: collectives written out, a tracer, an explainer of deadlocks
- ``hardware``: the properties of GPUs and of the nodes that they form
- ``tiles``: an interpreter of Triton's language
- ``launch``: ranks from a notebook, and the rank of this process
- ``models``: Llama and ResNet
- ``data``: data sets, and the sampler that distributes them over ranks
- ``optim``: the training step, learning-rate schedules, low precision
- ``kernels``: fused kernels and their twins
- ``compress``: smaller models: quantization
- ``parallel``: all forms of parallelism
- ``profiling``: memory, time and FLOPs of a step
- ``planner``: time and memory of a plan, the search for the best one, scaling laws
- ``inference``: generation of text: caches, engine, speculative decoding, loads
- ``train``: the training script
- ``grading``: checks, the notebook's side of a lab, the judge and the class
- ``hpo``: hyperparameter search
- ``cluster``: jobs on SLURM
- ``live_ranks``: ranks that live as long as the notebook
- ``hub``: a class on a JupyterHub
- ``labkit``: what the checks and figures of several labs share
- ``cli``: the command `dlo`

Names for programs of users, and for notebooks that students have:

- ``errors``: see ``base``
- ``text``: see ``base``
- ``torch_compat``: see ``base``
- ``progress``: see ``base``
- ``stop``: see ``base``
"""

__version__ = "0.1.0"
