#!/usr/bin/env bash
# Makes a virtual environment that tests or the bench run another project in, and prints where it is. It lies outside
# the clone, under a name that changes with the files that define it, so that it is made once: by one at a time, and it
# counts only when it is whole.
#
#   environment.sh NAME REQUIREMENTS PROOF   PROOF: Python code that runs in it if it is whole
#   FIND=1 environment.sh ...                makes nothing; fails where there is none
set -euo pipefail
name=$1 requirements=$2 proof=$3
key=$(cat "${BASH_SOURCE[0]}" "$requirements" <(echo "$proof") | sha256sum | cut -c1-12)
cache=${XDG_CACHE_HOME:-$HOME/.cache}/kvcascade/engines
venv=$cache/$name-$key
if [ -n "${FIND:-}" ]; then
  [ -e "$venv/.complete" ] || exit 1
  echo "$venv"
  exit
fi
mkdir -p "$cache"
exec 9>"$cache/.lock"
flock 9
if [ ! -e "$venv/.complete" ]; then
  echo "making the environment with $name in $venv" >&2
  rm -rf "$venv"
  "${PYTHON:-python3}" -m venv "$venv" >&2
  "$venv/bin/python" -P -m pip -qq --disable-pip-version-check --no-input install --no-deps -r "$requirements" >&2
  "$venv/bin/python" -P -c "$proof" >&2
  touch "$venv/.complete"
fi
echo "$venv"
