"""A TCP proxy that delays, throttles, swallows, resets and cuts, switchable while connections are open."""

import socket
import struct
import threading
import time
from collections.abc import Iterator
from types import TracebackType
from typing import Self

PIECE = 64 << 10
HOLDS = 512 << 10  # bytes that a socket holds back: a link is no reservoir


class Proxy:
    """Listens on a port of 127.0.0.1 and passes on to another; each direction of a connection has a thread.

    Set at any time: `delay` (seconds, each way), `rate` (bytes a second of each direction, 0 for no limit), `hole`
    (everything is swallowed, connections stay open), `refuse` (new connections are reset), `cut_after` (bytes from the
    target after which the connection is reset, None for never; counted from when it is set).
    """

    def __init__(self, port: int) -> None:
        self.target = port
        self.delay = 0.0
        self.rate = 0
        self.hole = False
        self.refuse = False
        self.connections = 0
        self._cut_after: int | None = None
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._closing = False
        self._listener = socket.socket()
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, HOLDS)
        self._listener.bind(("127.0.0.1", 0))
        self._listener.listen()
        self.port: int = self._listener.getsockname()[1]
        self._start(self._accept)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._closing = True
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.reset()
        for thread in self._threads:
            thread.join()

    @property
    def cut_after(self) -> int | None:
        return self._cut_after

    @cut_after.setter
    def cut_after(self, count: int | None) -> None:
        with self._lock:
            self._cut_after = count

    def reset(self) -> None:
        """Ends all connections with a reset."""
        with self._lock:
            for one in self._open:
                _end(one)

    def half_close(self) -> None:
        """Ends the direction towards the client, as a server does that is done."""
        with self._lock:
            for one in self._open:
                if one.getsockname()[1] == self.port:
                    one.shutdown(socket.SHUT_WR)

    def _start(self, target: object, *arguments: object) -> None:
        thread = threading.Thread(target=target, args=arguments, daemon=True)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            try:
                if self.refuse or self._closing:
                    raise OSError
                server = socket.create_connection(("127.0.0.1", self.target), 5)
                server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, HOLDS)
            except OSError:
                _end(client)
                client.close()
                continue
            pair = [client, server]
            with self._lock:
                self._open.update(pair)
            self._start(self._pass, client, server, pair, False)
            self._start(self._pass, server, client, pair, True)

    def _pass(self, source: socket.socket, sink: socket.socket, pair: list[socket.socket], back: bool) -> None:
        try:
            while data := source.recv(PIECE):
                if self.delay:
                    time.sleep(self.delay)
                for piece in self._paced(data):
                    if self.hole:
                        continue
                    if back and self._cuts(len(piece)):
                        for one in pair:
                            _end(one)
                        return
                    sink.sendall(piece)
        except OSError:
            pass
        finally:
            # The other direction ends with this one; who comes last closes.
            with self._lock:
                for one in pair:
                    _shut(one)
                if not self._open.isdisjoint(pair):
                    self._open.difference_update(pair)
                else:
                    for one in pair:
                        one.close()

    def _paced(self, data: bytes) -> Iterator[bytes]:
        while data:
            size = max(1, rate // 50) if (rate := self.rate) else len(data)
            piece, data = data[:size], data[size:]
            if rate:
                time.sleep(len(piece) / rate)
            yield piece

    def _cuts(self, count: int) -> bool:
        with self._lock:
            if self._cut_after is None:
                return False
            self._cut_after -= count
            if self._cut_after > 0:
                return False
            self._cut_after = None
            return True


def _shut(one: socket.socket) -> None:
    try:
        one.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass


def _end(one: socket.socket) -> None:
    """A reset comes of closing with this; until then, what waits on the socket wakes."""
    try:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    except OSError:
        pass
    _shut(one)
