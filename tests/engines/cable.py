"""Two machines and the cable between them: network namespaces, a veth pair, and `tc` that shapes it. Needs root."""

import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

ADDRESSES = {"a": "10.213.78.1", "b": "10.213.78.2"}
BURST_S = 1e-3  # what may pass at once, in the link's time
MIN_BURST = 128 << 10  # bytes: a whole packet of the kernel's own segmentation, and its headers
QUEUE_MS = 50  # what waits longer is dropped, as in a switch
_numbers = itertools.count()

# Serves bytes by their count, over any number of connections.
RAW_SENDER = """
import socket, sys, threading
def serve(one):
    piece = memoryview(bytearray(1 << 20))
    while order := one.recv(8, socket.MSG_WAITALL):
        left = int.from_bytes(order, "little")
        while left:
            left -= one.send(piece[:left])
listener = socket.create_server((sys.argv[1], int(sys.argv[2])))
print("ready", flush=True)
while True:
    threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()
"""

# Asks for them over two connections, a thread each; prints the seconds.
RAW_RECEIVER = """
import socket, sys, threading, time
def receive(one, count):
    one.sendall(count.to_bytes(8, "little"))
    while count:
        count -= one.recv_into(into, min(count, len(into)))
into = bytearray(1 << 20)
pair = [socket.create_connection((sys.argv[1], int(sys.argv[2]))) for _ in range(2)]
count = int(sys.argv[3]) // 2
for part in (count // 4, count):  # the first opens the windows, as those of connections that are in use are
    threads = [threading.Thread(target=receive, args=(one, part)) for one in pair]
    began = time.perf_counter()
    for thread in threads: thread.start()
    for thread in threads: thread.join()
print(time.perf_counter() - began)
"""


class NoCable(Exception):
    """Why there can be none here."""


@dataclass(frozen=True, slots=True)
class Cable:
    """`spaces` and `devices` by machine, a and b."""

    spaces: dict[str, str]
    devices: dict[str, str]

    def on(self, machine: str, *command: str) -> list[str]:
        """The command that runs `command` there."""
        return ["ip", "netns", "exec", self.spaces[machine], *command]

    def shape(self, bits: float) -> None:
        """As much a second in each direction, from now on."""
        burst = max(MIN_BURST, int(bits / 8 * BURST_S))
        for name, device in self.devices.items():
            run(
                *("tc", "-n", self.spaces[name], "qdisc", "replace", "dev", device, "root", "tbf"),
                *("rate", f"{bits:.0f}bit", "burst", str(burst), "latency", f"{QUEUE_MS}ms"),
            )

    def sent(self) -> int:
        """Bytes that machine a has sent over the cable."""
        shown = run("ip", "-n", self.spaces["a"], "-json", "-s", "link", "show", "dev", self.devices["a"])
        told: list[dict[str, Any]] = json.loads(shown)
        return int(told[0]["stats64"]["tx"]["bytes"])

    @contextmanager
    def raw_sender(self, port: int) -> Iterator[None]:
        command = self.on("a", sys.executable, "-c", RAW_SENDER, ADDRESSES["a"], str(port))
        with subprocess.Popen(command, stdout=subprocess.PIPE) as sender:
            try:
                assert sender.stdout is not None
                sender.stdout.readline()
                yield
            finally:
                sender.kill()

    def raw(self, port: int, count: int) -> float:
        """Seconds in which `count` bytes come from a `raw_sender`."""
        return float(run(*self.on("b", sys.executable, "-c", RAW_RECEIVER, ADDRESSES["a"], str(port), str(count))))


@contextmanager
def cable() -> Iterator[Cable]:
    """NoCable where this is not possible. All is gone when it ends."""
    if os.geteuid() != 0:
        raise NoCable("network namespaces need root")
    for program in ("ip", "tc"):
        if shutil.which(program) is None:
            raise NoCable(f"{program} is not installed")
    mark = f"{os.getpid()}-{next(_numbers)}"
    made = Cable({name: f"kvl-{name}-{mark}" for name in ADDRESSES}, {name: f"kvl{name}{mark}" for name in ADDRESSES})
    try:
        try:
            for space in made.spaces.values():
                run("ip", "netns", "add", space)
            run("ip", "link", "add", made.devices["a"], "type", "veth", "peer", "name", made.devices["b"])
            for name, space in made.spaces.items():
                run("ip", "link", "set", made.devices[name], "netns", space)
                run("ip", "-n", space, "addr", "add", f"{ADDRESSES[name]}/24", "dev", made.devices[name])
                run("ip", "-n", space, "link", "set", made.devices[name], "up")
                run("ip", "-n", space, "link", "set", "lo", "up")
            made.shape(10e9)
        except subprocess.CalledProcessError as error:
            raise NoCable(f"{' '.join(error.cmd)}: {error.stderr.strip()}") from error
        yield made
    finally:
        for space in made.spaces.values():
            subprocess.run(["ip", "netns", "delete", space], capture_output=True)


def run(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
