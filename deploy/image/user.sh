#!/bin/sh
# Create the unprivileged user of the image:  user.sh   (as root)
set -eu
useradd --create-home --uid 1000 --shell /bin/bash student
