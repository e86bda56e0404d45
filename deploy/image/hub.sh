#!/bin/sh
# Install jupyterhub-singleuser, and the proxy of the dashboards, in the environment of the copy that contains
# this script:  hub.sh [VERSION]
# VERSION: the version of your Hub, because the major versions must agree; default: the one in
# constraints.txt.
set -eu
cd "$(dirname "$0")/../.."
if [ -n "${1:-}" ]; then
    .venv/bin/python -m pip install --quiet "jupyterhub==$1" jupyter-server-proxy
else
    .venv/bin/python -m pip install --quiet -c constraints.txt jupyterhub jupyter-server-proxy
fi
