"""Programs that serve HTTP, in process groups of their own: vLLM's OpenAI server, and proxies in front of it."""

import json
import os
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engines.ports import free_port

START_S = 240.0
STOP_S = 60.0


@dataclass(frozen=True)
class Server:
    """A program that listens, or soon will."""

    address: str
    process: "subprocess.Popen[bytes]"
    log: Path

    def wait(self, path: str = "/health") -> None:
        """Returns when it answers."""
        deadline = time.monotonic() + START_S
        while not self._answers(path):
            alive = self.process.poll() is None and time.monotonic() < deadline
            assert alive, self.log.read_text(errors="replace")[-4000:]
            time.sleep(0.2)

    def _answers(self, path: str) -> bool:
        try:
            return bool(self.get(path) is not None)
        except OSError:
            return False

    def get(self, path: str) -> bytes:
        with urllib.request.urlopen(self.address + path, timeout=60) as reply:
            return bytes(reply.read())

    def post(self, path: str, **body: Any) -> bytes:
        """HTTPError for what is not well."""
        request = urllib.request.Request(
            self.address + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as reply:
            return bytes(reply.read())


@contextmanager
def serving(command: Sequence[str | Path], log: Path, **variables: str) -> Iterator[Server]:
    """Starts a command with `--port` added; it is ended with all that it started."""
    port = free_port()
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("KVCASCADE_", "VLLM_"))}
    with log.open("wb") as file:
        process = subprocess.Popen(
            [*command, "--port", str(port)],
            env=environment | variables, stdout=file, stderr=file, start_new_session=True, cwd=log.parent,
        )  # fmt: skip
    try:
        yield Server(f"http://127.0.0.1:{port}", process, log)
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(process.pid, number)
                process.wait(STOP_S)
                break
            except subprocess.TimeoutExpired:
                pass
            except ProcessLookupError:
                process.wait(STOP_S)
                break


def vllm_command(python: Path, model: Path, *flags: str) -> list[str | Path]:
    """vLLM's server for the tiny model."""
    return [
        python, "-P", "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--served-model-name", "tiny",
        "--dtype", "float32", "--enforce-eager", "--max-model-len", "512", "--max-num-seqs", "8", "--block-size", "32",
        "--host", "127.0.0.1", *flags,
    ]  # fmt: skip


def vllm_variables(path: Sequence[Path]) -> dict[str, str]:
    return {
        "PYTHONPATH": os.pathsep.join(map(str, path)), "PYTHONHASHSEED": "0", "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_LOGGING_LEVEL": "WARNING", "HF_HUB_OFFLINE": "1", "VLLM_CPU_OMP_THREADS_BIND": "0-1",
        # As in vllm_engine.py.
        "OMP_WAIT_POLICY": "PASSIVE",
    }  # fmt: skip
