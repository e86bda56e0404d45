"""Judge a submitted notebook: run the checks here and the student's code in the sandbox, and write a report.

One submission:

- ``judge``: turns a notebook into a report
- ``intake``: finds, reads and parses a notebook
- ``cells``: matches its cells with those of the source
- ``given_functions``: the given functions that checks call
- ``attempt``: runs cells, and gives checks their names
- ``judged_ranks``: the workers of a run on ranks
- ``time_budget``: the seconds that a submission may use
- ``own_limits``: the time and memory of the judge itself
- ``calculator``: the process that runs graphs and kernels of a student
- ``report``: the report, as plain values
- ``report_store``: reports on disk

The service:

- ``client``: starts the service and sends submissions
- ``server``: forks a judge for each submission
- ``lab_zygote``: starts the zygote of a lab

In nbgrader's pipeline:

- ``preprocessor``: puts verdicts into the test cells
- ``rebuilt_notebook``: the notebook after grading
- ``grader_lock``: one process grades at a time
- ``environment``: variables of child processes

A class on a cluster:

- ``array``: the job array; it writes the gradebook
- ``array_element``: takes submissions from the queue
- ``work_queue``: the queue as files

The proof of a lab:

- ``lab_proof``: the checks pass the solution and fail each mutant
- ``proof_record``: the record on disk
- ``unused_messages``: questions that ignore what ranks receive
- ``undrawn_values``: arguments that are always the same, constants that earn points

Imports ``checks``, ``switch``, ``sandbox``, ``lab`` and ``comm``. A module that needs torch imports it when
it starts work.
"""
