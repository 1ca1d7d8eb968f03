#!/usr/bin/env bash
# Fetches a version's Python code from its wheel, and prints the folder to put in front of the environment that
# install.sh makes: its scheduler and its offloading run without a GPU, though there is no CPU build of it yet. It lies
# beside that environment (70 MB), is fetched once (half a minute), by one at a time, and counts only when it is whole.
#
#   sources.sh 0.33.0
set -euo pipefail
version=$1
cache=${XDG_CACHE_HOME:-$HOME/.cache}/kvcascade/engines
sources=$cache/vllm-$version-sources
mkdir -p "$cache"
exec 9>"$cache/.lock-$version"
flock 9
if [ ! -e "$sources/.complete" ]; then
  echo "fetching the Python code of vLLM $version into $sources" >&2
  rm -rf "$sources" "$sources.wheel"
  "${PYTHON:-python3}" -P -m pip -qq --disable-pip-version-check --no-input download --no-deps --no-cache-dir \
    --only-binary :all: -d "$sources.wheel" "vllm==$version" >&2
  "${PYTHON:-python3}" -P - "$sources.wheel" "$sources" <<'UNPACK'
import pathlib, sys, zipfile
wheel, = pathlib.Path(sys.argv[1]).glob("*.whl")
with zipfile.ZipFile(wheel) as held:
    # The one extension that needs no GPU: the file tier's.
    names = [name for name in held.namelist() if name.endswith((".py", ".json", ".jinja")) or "/fs_io_C" in name]
    held.extractall(sys.argv[2], [name for name in names if name.startswith("vllm/")])
UNPACK
  rm -rf "$sources.wheel"
  touch "$sources/.complete"
fi
echo "$sources"
