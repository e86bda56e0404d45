#!/bin/sh
# Copy the labs to the home folder as `dlo lab` does, then run a command:
#     with_labs.sh jupyterhub-singleuser ...
python -c 'from dlo_lib.cli.workspace import update_workspace; update_workspace()' ||
    echo "with_labs: the labs could not be copied to the home folder" >&2
exec "$@"
