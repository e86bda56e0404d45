"""A class on a JupyterHub: what ``deploy/hub/jupyterhub_config.py`` and ``dlo course --hub`` make of a site's
``hub.toml``.

The site's file and what follows from it:

- ``settings``: the tables of the file as classes
- ``read_settings``: checks each key and value
- ``rights``: groups, roles and services; it decides who may open what
- ``folders``: the settings of Jupyter, the courses and the exchange
- ``accounts``: Unix accounts of a roster
- ``membership``: keeps the Hub's groups equal to the rosters
- ``lti``: users from Moodle
- ``lti_login``: how they log in
- ``kubernetes``: Helm values

The servers of users:

- ``local_server``: on the Hub's machine
- ``user_group``: the limits of a user there
- ``slurm_server``: as SLURM jobs
- ``slurm_spawner``: batchspawner's class, which remembers why SLURM ended a server

What a student holds in memory:

- ``single_user``: the server
- ``assignment_list``: nbgrader's list of assignments in it
- ``kernel``: the kernel of notebooks
- ``debugger``: the debugger, loaded by its first request
- ``extensions``: the parts of JupyterLab and nbgrader that a role has
- ``dashboards``: TensorBoard and the page of searches behind the server
- ``searches``: the page of Optuna's searches

``dlo doctor --hub`` (``cli.doctor_hub``) tries each right. The room imports ``cluster`` (the names of sites),
``launch``, and ``grading`` (its control groups). The Hub itself needs neither PyTorch nor nbgrader.
"""
