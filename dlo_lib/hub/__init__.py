"""A class on a JupyterHub: what ``deploy/hub/jupyterhub_config.py`` and ``dlo course --hub`` make of a site's
``hub.toml``.

``settings`` reads the file; ``rights`` turns it into groups, roles and services; ``folders`` writes the
settings of Jupyter and prepares courses and exchange; ``local_server`` and ``slurm_server`` start the
servers of users; ``kubernetes`` writes Helm values; ``doctor`` tries each right. What a student holds in
memory is decided in ``single_user`` (the server), ``assignment_list`` (nbgrader in it), ``kernel`` and
``debugger``. The room imports cluster (the names of sites) and the control groups of grading. The Hub itself
needs neither PyTorch nor nbgrader.
"""
