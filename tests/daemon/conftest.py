"""A daemon whose answers a test writes: real sockets and descriptors, and every misbehaviour that a client may meet."""

import asyncio
import gc
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvcascade.daemon.protocol import FrameDecoder, Kind, decode_body, encode, encode_event

PATIENCE_S = 10.0

Handler = Callable[["Wire", int, dict[str, Any]], None]


class Wire(asyncio.Protocol):
    """The daemon's end of one connection."""

    def __init__(self, daemon: "ScriptedDaemon") -> None:
        self.daemon = daemon
        self.decoder = FrameDecoder()
        self.transport: Any = None

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self.daemon.note(connected=self)

    def connection_lost(self, error: Exception | None) -> None:
        self.daemon.note(lost=self)

    def data_received(self, data: bytes) -> None:
        for frame in self.decoder.feed(data):
            body = decode_body(frame.body)
            self.daemon.note(request=(body["op"], body))
            self.daemon.handlers.get(body["op"], echo)(self, frame.correlation, body)

    def reply(self, correlation: int, body: Mapping[str, Any], fds: Sequence[int] = ()) -> None:
        if fds:
            # Neither asyncio's nor uvloop's transport can send descriptors.
            with socket.socket(fileno=os.dup(self.transport.get_extra_info("socket").fileno())) as raw:
                socket.send_fds(raw, [encode(Kind.REPLY, correlation, body, len(fds))], list(fds))
        else:
            self.transport.write(encode(Kind.REPLY, correlation, body))

    def raw(self, data: bytes) -> None:
        self.transport.write(data)

    def event(self, name: str, body: Mapping[str, Any]) -> None:
        self.transport.write(encode_event(name, body))

    def later(self, seconds: float, act: Callable[..., Any], *args: Any) -> None:
        self.daemon.loop.call_later(seconds, act, *args)


def echo(wire: Wire, correlation: int, body: dict[str, Any]) -> None:
    wire.reply(correlation, {"echo": body.get("value")})


def silence(wire: Wire, correlation: int, body: dict[str, Any]) -> None:
    """Never answer."""


class ScriptedDaemon:
    """Serves ``path`` on a loop in a thread of its own. ``handlers`` say what an operation does; the others echo."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.handlers: dict[str, Handler] = {}
        self.wires: list[Wire] = []
        self.lost = 0
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self._news = threading.Condition()
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="scripted-daemon")
        self._thread.start()
        self._server: asyncio.Server | None = None
        self.start()

    def start(self) -> None:
        self._server = self._await(self.loop.create_unix_server(lambda: Wire(self), str(self.path)))

    def stop(self) -> None:
        """Die as a killed daemon does: every connection is cut, the socket stays behind."""

        async def cut() -> None:
            assert self._server is not None
            self._server.close()
            for wire in self.wires:
                wire.transport.abort()
            self.wires.clear()

        self._await(cut())
        self.path.unlink(missing_ok=True)

    def close(self) -> None:
        self.stop()
        # One turn more, so that aborted transports close their sockets.
        self._await(asyncio.sleep(0))
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()

    def _await(self, what: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(what, self.loop).result(PATIENCE_S)

    def run(self, act: Callable[..., Any], *args: Any) -> None:
        """Have ``act(*args)`` done on the loop, and wait for it."""

        async def once() -> None:
            act(*args)

        self._await(once())

    def note(
        self, *, connected: Wire | None = None, lost: Wire | None = None, request: tuple[str, Any] | None = None
    ) -> None:
        with self._news:
            if connected is not None:
                self.wires.append(connected)
            if lost is not None:
                self.lost += 1
            if request is not None:
                self.requests.append(request)
            self._news.notify_all()

    def wait(self, condition: Callable[["ScriptedDaemon"], Any]) -> Any:
        """Wait until ``condition(self)`` holds, re-asked at each request, connection and loss."""
        with self._news:
            assert self._news.wait_for(lambda: condition(self), PATIENCE_S), "it did not come to that"
            return condition(self)

    def asked(self, op: str) -> list[dict[str, Any]]:
        return [body for name, body in list(self.requests) if name == op]


def descriptors_open() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def eventually(condition: Callable[[], Any]) -> Any:
    """Wait for what no event of ours tells, e.g. the kernel's or another thread's doing."""
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(0.002)
    return condition()


@pytest.fixture
def scripted(tmp_path: Path) -> Iterator[ScriptedDaemon]:
    daemon = ScriptedDaemon(tmp_path / "kv.sock")
    yield daemon
    daemon.close()


@pytest.fixture
def nothing_leaks() -> Iterator[None]:
    """No descriptor and no thread outlives the test."""
    gc.collect()
    before = descriptors_open()
    threads = set(threading.enumerate())
    yield
    gc.collect()
    eventually(lambda: descriptors_open() <= before)
    eventually(lambda: set(threading.enumerate()) <= threads)
