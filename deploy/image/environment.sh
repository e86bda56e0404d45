#!/bin/sh
# Install the Python packages of the course in the copy that contains this script (PyTorch: CPU build by
# default):
#     environment.sh        (as the owner of that copy; users can only read it)
set -eu
cd "$(dirname "$0")/../.."
# Users cannot write .pyc files beside the library, so compile them here.
TORCH=${TORCH:-cpu} UV_COMPILE_BYTECODE=1 python3 deploy/setup_env.py --extras labs
.venv/bin/python -m compileall -q dlo_lib
# In a container, a server on the loopback interface cannot be reached from the host, which chooses published
# ports.
if [ "$(id -u)" = 0 ]; then
    mkdir -p /etc/jupyter
    echo '{"ServerApp": {"ip": "0.0.0.0"}}' >/etc/jupyter/jupyter_server_config.json
fi
