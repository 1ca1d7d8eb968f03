"""Real redis-servers for tests: on loopback ports and in folders of their own, ended by their pid."""

import contextlib
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import redis
from engines.ports import free_port

START_S = 60.0


@dataclass(frozen=True)
class Certificates:
    """Of an authority, and of a server on 127.0.0.1 that it signed; who connects shows the latter too."""

    ca: Path
    cert: Path
    key: Path

    @property
    def options(self) -> tuple[str, ...]:
        files = {"tls-ca-cert-file": self.ca, "tls-cert-file": self.cert, "tls-key-file": self.key}
        return ("tls-replication", "yes", *(word for option, file in files.items() for word in (option, str(file))))

    @property
    def settings(self) -> dict[str, str]:
        return {"tls_ca": str(self.ca), "tls_cert": str(self.cert), "tls_key": str(self.key)}


class RedisServer:
    """One redis-server; `start`, `kill`, `stop` and `resume` it at will. Its data lies in memory alone.

    With `tls` its port speaks nothing else.
    """

    def __init__(
        self,
        folder: Path,
        *arguments: str,
        port: int | None = None,
        password: str = "",
        tls: Certificates | None = None,
    ) -> None:
        self.tls = tls
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

    def start(self, *config: str) -> None:
        """`config`: a file in the place of our own options."""
        self.folder.mkdir(exist_ok=True)
        command = ["redis-server", *config]
        if not config:
            command += ["--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
            command += ["--dir", str(self.folder), "--unixsocket", str(self.socket)]
            command += ["--repl-diskless-sync-delay", "0"]
            if self.password:
                command += ["--requirepass", self.password, "--masterauth", self.password]
            if self.tls is not None:
                words = ["port", "0", "tls-port", str(self.port), *self.tls.options]
                command += [word for option in pairs(words) for word in (f"--{option[0]}", option[1])]
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
        tls: dict[str, Any] = {}
        if self.tls is not None:
            files = {"ssl_ca_certs": self.tls.ca, "ssl_certfile": self.tls.cert, "ssl_keyfile": self.tls.key}
            tls = {"ssl": True, **{option: str(file) for option, file in files.items()}}
        return redis.Redis(host="127.0.0.1", port=self.port, password=self.password or None, protocol=2, **tls)

    def await_master(self) -> None:
        """Until a replica has what its master has."""
        await_(lambda: self.client().info("replication")["master_link_status"] == "up", "the replica has no master")

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


class RedisCluster:
    """Three masters with all slots between them, the first three nodes, and a replica for each where there are any."""

    def __init__(self, folder: Path, *, replicas: bool = False) -> None:
        self.nodes = []
        self.ports: dict[int, int] = {}  # as which nodes are known to clients, where not by their own
        for number in range(6 if replicas else 3):
            self.nodes.append(
                RedisServer(
                    folder / f"node{number}",
                    *("--cluster-enabled", "yes", "--cluster-require-full-coverage", "no"),
                    *("--cluster-node-timeout", "2000", "--cluster-port", str(free_port())),
                )
            )

    @property
    def url(self) -> str:
        ports = (self.ports.get(number, node.port) for number, node in enumerate(self.nodes))
        return "redis+cluster://" + ",".join(f"127.0.0.1:{port}" for port in ports)

    def announce(self, number: int, port: int) -> None:
        """Clients are told to reach a node at another port, a proxy's; before `start`."""
        self.ports[number] = port
        self.nodes[number].arguments += ("--cluster-announce-port", str(port))

    def start(self) -> None:
        for node in self.nodes:
            node.start()
        first = self.nodes[0].client()
        for number, node in enumerate(self.nodes[:3]):
            low, high = 16384 * number // 3, 16384 * (number + 1) // 3 - 1
            node.client().execute_command("CLUSTER", "ADDSLOTSRANGE", low, high)
            node.client().execute_command("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
        for node in self.nodes[1:]:
            bus = int(node.arguments[node.arguments.index("--cluster-port") + 1])
            first.execute_command("CLUSTER", "MEET", "127.0.0.1", node.port, bus)
        await_(lambda: all(self._settled(node) for node in self.nodes), "the cluster does not come about")
        masters = [node.client().execute_command("CLUSTER", "MYID") for node in self.nodes[:3]]
        for master, replica in zip(masters, self.nodes[3:], strict=False):
            replica.client().execute_command("CLUSTER", "REPLICATE", master)
        for replica in self.nodes[3:]:
            replica.await_master()

    def _settled(self, node: RedisServer) -> bool:
        text = node.client().execute_command("CLUSTER", "INFO")
        state = (
            text
            if isinstance(text, dict)
            else dict(line.split(":", 1) for line in text.decode().splitlines() if ":" in line)
        )
        return state["cluster_state"] == "ok" and state["cluster_known_nodes"] == str(len(self.nodes))

    def kill(self) -> None:
        for node in self.nodes:
            node.kill()


def await_(condition: Callable[[], bool], trouble: str) -> None:
    end = time.monotonic() + START_S
    while not condition():
        if time.monotonic() > end:
            raise RuntimeError(trouble)
        time.sleep(0.05)


@contextlib.contextmanager
def serve_cluster(
    *, replicas: bool = False, prepare: Callable[[RedisCluster], None] = lambda _: None
) -> Iterator[RedisCluster]:
    """A cluster for as long as the context lasts; `prepare` is called before it starts."""
    with tempfile.TemporaryDirectory(prefix="kvc-redis-") as folder:
        cluster = RedisCluster(Path(folder), replicas=replicas)
        prepare(cluster)
        try:
            cluster.start()
            yield cluster
        finally:
            cluster.kill()


class Watched:
    """A master, a replica of it, and one Sentinel that makes the replica master when the master is gone.

    `password` is that of master and replica. With `tls` all three speak nothing else, or all but a plain Sentinel.
    """

    def __init__(
        self,
        folder: Path,
        password: str = "",
        sentinel_password: str = "",
        tls: Certificates | None = None,
        *,
        plain_sentinel: bool = False,
    ) -> None:
        self.master = RedisServer(folder / "master", password=password, tls=tls)
        replica_of = ("--replicaof", "127.0.0.1", str(self.master.port))
        self.replica = RedisServer(folder / "replica", *replica_of, password=password, tls=tls)
        self.sentinel = RedisServer(
            folder / "sentinel", port=free_port(), password=sentinel_password, tls=None if plain_sentinel else tls
        )
        self._config = folder / "sentinel.conf"

    @property
    def url(self) -> str:
        scheme = "redis" if self.master.tls is None else "rediss"
        return f"{scheme}+sentinel://127.0.0.1:1,127.0.0.1:{self.sentinel.port}/fleet"

    def start(self) -> None:
        self.master.start()
        self.replica.start()
        self.replica.await_master()
        ports = ["port", "0", "tls-port"] if self.sentinel.tls else ["port"]
        tls = self.master.tls.options if self.master.tls else ()
        lines = [" ".join(option) for option in pairs([*ports, str(self.sentinel.port), *tls])]
        lines += ["bind 127.0.0.1", f"dir {self._config.parent}"]
        lines += [f"sentinel monitor fleet 127.0.0.1 {self.master.port} 1"]
        lines += ["sentinel down-after-milliseconds fleet 500", "sentinel failover-timeout fleet 2000"]
        if self.master.password:
            lines.append(f"sentinel auth-pass fleet {self.master.password}")
        if self.sentinel.password:
            lines.append(f"requirepass {self.sentinel.password}")
        self._config.write_text("\n".join(lines) + "\n")
        self.sentinel.arguments = ("--sentinel",)
        self.sentinel.start(str(self._config))
        found = partial(self.sentinel.client().execute_command, "SENTINEL", "REPLICAS", "fleet")
        await_(lambda: bool(found()), "the sentinel does not find the replica")

    def fail_over(self) -> None:
        """Kills the master, and waits until the replica has its place."""
        self.master.kill()
        await_(lambda: self.replica.client().info("replication")["role"] == "master", "nobody was made master")

    def kill(self) -> None:
        for server in (self.sentinel, self.replica, self.master):
            server.kill()


@contextlib.contextmanager
def serve_watched(
    password: str = "",
    sentinel_password: str = "",
    tls: Certificates | None = None,
    *,
    plain_sentinel: bool = False,
) -> Iterator[Watched]:
    """A master with a replica and a Sentinel for as long as the context lasts."""
    with tempfile.TemporaryDirectory(prefix="kvc-redis-") as folder:
        watched = Watched(Path(folder), password, sentinel_password, tls, plain_sentinel=plain_sentinel)
        try:
            watched.start()
            yield watched
        finally:
            watched.kill()


def pairs(words: Sequence[str]) -> list[tuple[str, str]]:
    return list(zip(words[::2], words[1::2], strict=True))


def certificates(folder: Path) -> tuple[Path, Path, Path]:
    """A certificate authority's certificate, and a certificate for 127.0.0.1 with its key."""
    ca, ca_key, cert, key = (folder / name for name in ("ca.pem", "ca.key", "cert.pem", "cert.key"))
    request, extensions = folder / "cert.csr", folder / "extensions"
    extensions.write_text("subjectAltName=IP:127.0.0.1,DNS:localhost\n")
    ec = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    for command in (
        ("req", "-x509", *ec, "-keyout", ca_key, "-out", ca, "-days", "2", "-subj", "/CN=tests"),
        ("req", *ec, "-keyout", key, "-out", request, "-subj", "/CN=127.0.0.1"),
        (
            "x509",
            "-req",
            "-in",
            request,
            "-CA",
            ca,
            "-CAkey",
            ca_key,
            "-out",
            cert,
            "-days",
            "2",
            "-extfile",
            extensions,
        ),
    ):
        subprocess.run(["openssl", *map(str, command)], check=True, capture_output=True)
    return ca, cert, key
