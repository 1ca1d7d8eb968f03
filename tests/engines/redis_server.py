"""Real redis-servers for tests: on loopback ports and in folders of their own, ended by their pid."""

import contextlib
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import redis

START_S = 20.0


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


class RedisServer:
    """One redis-server; `start`, `kill`, `stop` and `resume` it at will. Its data lies in memory alone."""

    def __init__(self, folder: Path, *arguments: str, port: int | None = None, password: str = "") -> None:
        self.folder = folder
        self.port = free_port() if port is None else port
        self.password = password
        self.arguments = arguments
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def socket(self) -> Path:
        return self.folder / "redis.sock"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self, program: str = "redis-server") -> None:
        self.folder.mkdir(exist_ok=True)
        command = [program]
        if program == "redis-server":
            command += ["--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
            command += ["--dir", str(self.folder), "--unixsocket", str(self.socket)]
            if self.password:
                command += ["--requirepass", self.password]
        command += self.arguments
        log = (self.folder / "log").open("ab")
        with log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        self.await_answer()

    def await_answer(self) -> None:
        end = time.monotonic() + START_S
        while True:
            try:
                with socket.create_connection(("127.0.0.1", self.port), timeout=1):
                    return
            except OSError:
                if time.monotonic() > end or (self._process is not None and self._process.poll() is not None):
                    raise RuntimeError((self.folder / "log").read_text()) from None
                time.sleep(0.02)

    def client(self) -> redis.Redis:
        return redis.Redis(host="127.0.0.1", port=self.port, password=self.password or None, protocol=2)

    def kill(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)
            self._process.kill()
            self._process.wait()
            self._process = None

    def stop(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)


@contextlib.contextmanager
def serve(*arguments: str, password: str = "") -> Iterator[RedisServer]:
    """A redis-server for as long as the context lasts."""
    with tempfile.TemporaryDirectory(prefix="kvc-redis-") as folder:
        server = RedisServer(Path(folder), *arguments, password=password)
        server.start()
        try:
            yield server
        finally:
            server.kill()
