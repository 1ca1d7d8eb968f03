"""A socket whose calls end: by the deadline of the whole, and sooner when nothing moves. All sockets are real."""

import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from engines.redis_server import certificates

from kvcascade.tiers.wire import LATE, SILENT, Silence, TimedSocket, reason_of

SILENCE = 0.8
SIZE = 6 << 20
Pair = tuple[TimedSocket, socket.socket]


@pytest.fixture(scope="module")
def contexts(tmp_path_factory: pytest.TempPathFactory) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    ca, cert, key = certificates(tmp_path_factory.mktemp("certificates"))
    ours, theirs = ssl.create_default_context(cafile=str(ca)), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    theirs.load_cert_chain(cert, key)
    return ours, theirs


@pytest.fixture(params=["tcp", "unix", "tls"])
def pair(request: pytest.FixtureRequest, contexts: tuple[ssl.SSLContext, ssl.SSLContext]) -> Iterator[Pair]:
    """Ours, and the other end, whose buffer is small."""
    if request.param == "unix":
        near, far = socket.socketpair()
    else:
        with socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 10)
            listener.bind(("127.0.0.1", 0))
            listener.listen()
            near = socket.create_connection(listener.getsockname())
            far, _ = listener.accept()
    if request.param == "tls":
        ours, theirs = contexts
        near = ours.wrap_socket(near, server_hostname="127.0.0.1", do_handshake_on_connect=False)
        far = theirs.wrap_socket(far, server_side=True, do_handshake_on_connect=False)
    timed = TimedSocket(near)
    timed.until(time.monotonic() + 60)
    with Running(lambda: isinstance(far, ssl.SSLSocket) and far.do_handshake()):
        timed.secure()
    yield timed, far
    timed.close()
    far.close()


class Running:
    """A thread for as long as the context lasts, and at its end until it ends."""

    def __init__(self, work: Callable[[], object]) -> None:
        self._thread = threading.Thread(target=work)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._thread.join()


def slowly(far: socket.socket, left: int, pause: float) -> None:
    """Reads what comes, now and then, and says so at the end."""
    while left:
        time.sleep(pause)
        for _ in range(8):  # TLS gives 16 KiB at a time
            if left:
                left -= len(far.recv(16 << 10))
    far.sendall(b"all")


def test_what_moves_slowly_is_waited_for_as_long_as_the_deadline_allows(pair: Pair) -> None:
    near, far = pair
    # Several silences in all; the last of them pass while the kernel has all that there is to send.
    with Running(lambda: slowly(far, SIZE, 0.06)):
        near.until(time.monotonic() + 60, SILENCE)
        near.send([bytes(SIZE // 2), bytes(SIZE // 2)])
        answer = bytearray(3)
        near.read_into(memoryview(answer))
    assert answer == b"all"


def test_bytes_that_come_one_by_one_are_no_silence(pair: Pair) -> None:
    near, far = pair

    def trickle() -> None:
        for _ in range(12):
            time.sleep(SILENCE / 4)
            far.sendall(b"x")

    with Running(trickle):
        near.until(time.monotonic() + 60, SILENCE)
        got = bytearray(12)
        near.read_into(memoryview(got))
    assert got == b"x" * 12


def test_a_trickle_ends_at_the_deadline(pair: Pair) -> None:
    near, far = pair
    over = threading.Event()

    def trickle() -> None:
        while not over.wait(SILENCE / 4):
            far.sendall(b"x")

    with Running(trickle):
        near.until(time.monotonic() + 4 * SILENCE, SILENCE)
        with pytest.raises(TimeoutError) as late:
            near.read_into(memoryview(bytearray(1000)))
        over.set()
    assert not isinstance(late.value, Silence) and reason_of(late.value) == LATE


def test_nothing_that_comes_is_silence(pair: Pair) -> None:
    near, _ = pair
    near.until(time.monotonic() + 60, SILENCE)
    with pytest.raises(Silence) as silent:
        near.receive(memoryview(bytearray(10)))
    assert reason_of(silent.value) == SILENT


def test_nobody_who_reads_what_is_sent_is_silence(pair: Pair) -> None:
    near, _ = pair
    near.until(time.monotonic() + 60, SILENCE)
    with pytest.raises(Silence):
        near.send([bytes(64 << 20)])


def test_nobody_who_reads_what_lies_in_the_kernel_is_silence(pair: Pair) -> None:
    """The kernel takes it all; that it has not gone out does not make the answer's silence any longer."""
    near, _ = pair
    near.until(time.monotonic() + 60, SILENCE)
    near.send([bytes(150 << 10)])
    began = time.monotonic()
    with pytest.raises(Silence):
        near.receive(memoryview(bytearray(10)))
    assert time.monotonic() - began < 30


def test_a_deadline_that_has_passed_is_late_before_anything_is_tried(pair: Pair) -> None:
    near, far = pair
    far.sendall(b"here")
    near.until(time.monotonic() - 1)
    with pytest.raises(TimeoutError):
        near.receive(memoryview(bytearray(10)))
    near.until(time.monotonic() + 60)
    got = bytearray(4)
    near.read_into(memoryview(got))
    assert got == b"here"


def test_what_is_cut_from_another_thread_ends_at_once(pair: Pair) -> None:
    near, _ = pair
    near.until(time.monotonic() + 600)

    def cut() -> None:
        time.sleep(0.2)
        near.cut()

    with Running(cut), pytest.raises(OSError):
        near.receive(memoryview(bytearray(10)))


def test_an_end_is_nothing_to_be_idle_with(pair: Pair) -> None:
    near, far = pair
    if isinstance(far, ssl.SSLSocket):
        # Tickets for later sessions, which nobody asked for, come before the first answer.
        far.sendall(b"x")
        near.read_into(memoryview(bytearray(1)))
    assert near.idle()
    far.close()
    for _ in range(1000):
        if not near.idle():
            break
        time.sleep(0.01)
    assert not near.idle()
    with pytest.raises(OSError):
        near.receive(memoryview(bytearray(10)))
    near.close()
    assert not near.idle()
