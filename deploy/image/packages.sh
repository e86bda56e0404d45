#!/bin/sh
# Install the Debian packages of a list in this folder and clean up:  packages.sh LIST   (as root)
set -eu
packages=$(sed 's/#.*//' "$(dirname "$0")/$1")
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
# shellcheck disable=SC2086  # one word per package
apt-get install -y -qq --no-install-recommends $packages >/dev/null
apt-get clean
rm -rf /var/lib/apt/lists/*
