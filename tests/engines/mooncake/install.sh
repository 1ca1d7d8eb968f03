#!/usr/bin/env bash
# Makes the virtual environment with Mooncake's transfer engine that `make bench` compares fetches from peers with (half
# a minute, 170 MB), and prints where it is. Its wheel takes some libraries from the system.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
"$here/../environment.sh" mooncake-0.3.13 "$here/requirements.txt" 'from mooncake.engine import TransferEngine' || {
  [ -n "${FIND:-}" ] || echo 'Mooncake needs libraries of the system: apt-get install libcurl4 libibverbs1 libnuma1' >&2
  exit 1
}
