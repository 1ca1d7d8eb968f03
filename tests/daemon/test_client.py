"""The synchronous and the asyncio client against a daemon that delays, drops, reorders, lies, stops and dies."""

import asyncio
import os
import random
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress

import pytest

from kvcascade.config.errors import CascadeError, DaemonUnavailable, ProtocolError, Refused, TierUnavailable
from kvcascade.daemon.async_client import AsyncClient
from kvcascade.daemon.client import Client, resolve_socket_path
from kvcascade.daemon.protocol import Kind, encode, encode_error, encode_request

pytestmark = pytest.mark.usefixtures("nothing_leaks")

PATIENCE_S = 10.0


def silence(wire, correlation, body):
    """Never answer."""


@pytest.fixture
def client(scripted):
    client = Client(scripted.path, timeout=PATIENCE_S)
    client.connect()
    yield client
    client.close()


def elapsed(act):
    start = time.monotonic()
    result = act()
    return time.monotonic() - start, result


def unavailable(act, match=None):
    with pytest.raises(DaemonUnavailable, match=match):
        act()


def in_threads(count, act):
    """Run act(number) in ``count`` threads; raise what any of them raised."""
    failures = []

    def run(number):
        try:
            act(number)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


# ------------------------------------------------------------------------------------------------- calls and replies


def test_a_call_gets_its_reply(client):
    assert client.call("echo", {"value": [1, {"a": b"x" * 100_000}]}) == {"echo": [1, {"a": b"x" * 100_000}]}


def test_bodies_of_megabytes_go_both_ways_at_once_without_blocking_each_other(client):
    payload = os.urandom(3 << 20)
    in_threads(3, lambda _: client.call("echo", {"value": payload})["echo"] == payload or pytest.fail("mixed up"))


@pytest.mark.parametrize("error", [Refused("no"), ProtocolError("field 'x'"), TierUnavailable("sick")], ids=repr)
def test_the_daemons_errors_are_raised_as_they_are_and_the_connection_goes_on(scripted, client, error):
    # D3: a handler that raised has answered, too.
    scripted.handlers["fail"] = lambda wire, cid, body: wire.raw(encode_error(cid, error))
    with pytest.raises(type(error), match=str(error)):
        client.call("fail")
    scripted.handlers["crash"] = lambda wire, cid, body: wire.raw(encode_error(cid, KeyError("bug")))
    with pytest.raises(CascadeError, match="internal error"):
        client.call("crash")
    assert client.call("echo", {"value": 1}) == {"echo": 1}


def test_a_dropped_reply_ends_with_the_deadline_and_other_calls_go_on(scripted, client):
    # D3
    scripted.handlers["drop"] = silence
    seconds, _ = elapsed(lambda: unavailable(lambda: client.call("drop", timeout=0.1), r"'drop' within 0\.1 s"))
    assert 0.1 <= seconds < 1
    assert client.call("echo", {"value": 1}) == {"echo": 1}


def test_late_replies_are_never_given_to_another_call(scripted, client):
    # C4, D3: threads hammer with deadlines around the daemon's own slowness.
    chance = random.Random(1)
    scripted.handlers["slow"] = lambda wire, cid, body: wire.later(
        chance.uniform(0, 0.02), wire.reply, cid, {"echo": body["value"]}
    )
    outcomes = {"answered": 0, "late": 0}

    def hammer(number):
        mine = random.Random(number)
        for step in range(60):
            value = (number << 32) + step
            try:
                assert client.call("slow", {"value": value}, timeout=mine.uniform(0.001, 0.025)) == {"echo": value}
                outcomes["answered"] += 1
            except DaemonUnavailable:
                outcomes["late"] += 1

    in_threads(8, hammer)
    assert min(outcomes.values()) > 20
    assert client.call("echo", {"value": "after"}) == {"echo": "after"}


def test_replies_in_any_order_reach_the_thread_that_asked(scripted, client):
    held = []

    def hold(wire, cid, body):
        held.append((wire, cid, body["value"]))
        if len(held) == 6:
            random.Random(2).shuffle(held)
            for each, correlation, value in held:
                each.reply(correlation, {"echo": value})
            held.clear()

    scripted.handlers["hold"] = hold

    def ask(number):
        for step in range(30):
            assert client.call("hold", {"value": (number, step)}) == {"echo": [number, step]}

    in_threads(6, ask)


def test_a_reply_sent_twice_is_taken_once(scripted, client):
    scripted.handlers["twice"] = lambda wire, cid, body: [wire.reply(cid, {"n": body["n"]}) for _ in range(2)]
    for number in range(50):
        assert client.call("twice", {"n": number}) == {"n": number}


def test_a_waiting_thread_takes_over_the_reading_when_the_reader_gives_up(scripted, client):
    scripted.handlers["never"] = silence
    scripted.handlers["slow"] = lambda wire, cid, body: wire.later(0.3, wire.reply, cid, {})
    reading = threading.Thread(target=lambda: unavailable(lambda: client.call("never", timeout=0.15)))
    reading.start()
    scripted.wait(lambda it: it.asked("never"))
    assert client.call("slow") == {}
    reading.join()


def test_half_a_frame_at_the_deadline_does_not_lose_the_stream(scripted, client):
    parts = []

    def half(wire, cid, body):
        frame = encode(Kind.REPLY, cid, {"echo": "old"})
        wire.raw(frame[: body["cut"]])
        parts.append((wire, frame[body["cut"] :]))

    scripted.handlers["half"] = half
    for cut in (1, 23, 24, 30):
        unavailable(lambda cut=cut: client.call("half", {"cut": cut}, timeout=0.05))
        wire, rest = parts.pop()
        scripted.run(wire.raw, rest)
        assert client.call("echo", {"value": cut}) == {"echo": cut}


def test_a_post_is_carried_out_and_its_reply_dropped(scripted, client):
    client.post("fenced", {"fence": 7})
    assert client.call("echo", {"value": 1}) == {"echo": 1}
    assert scripted.asked("fenced") == [{"op": "fenced", "fence": 7}]


# ------------------------------------------------------------------------------------------------- a daemon in trouble


def test_no_daemon_is_unavailable_at_once(tmp_path):
    seconds, _ = elapsed(lambda: unavailable(Client(tmp_path / "nobody.sock").connect, r"no daemon at .*nobody\.sock"))
    assert seconds < 1


def test_a_process_that_may_open_no_more_files_finds_no_daemon(scripted):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    held = [os.open(os.devnull, os.O_RDONLY)]
    client = Client(scripted.path)
    resource.setrlimit(resource.RLIMIT_NOFILE, (held[0] + 1, hard))
    try:
        with suppress(OSError):  # lower numbers that were free
            while True:
                held.append(os.open(os.devnull, os.O_RDONLY))
        unavailable(client.connect, "Too many open files")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for number in held:
            os.close(number)
    client.connect()
    assert client.call("echo", {"value": 1}) == {"echo": 1}
    client.close()


def test_calls_before_connect_and_after_close_are_unavailable(scripted):
    client = Client(scripted.path)
    unavailable(lambda: client.call("ping"), "not connected")
    client.connect()
    client.close()
    client.close()
    unavailable(lambda: client.call("ping"), "closed")
    client.connect()
    assert client.call("echo", {"value": 1}) == {"echo": 1}
    client.close()


def test_closing_ends_the_calls_under_way(scripted, client):
    scripted.handlers["never"] = silence
    waiting = [threading.Thread(target=lambda: unavailable(lambda: client.call("never"), "closed")) for _ in range(3)]
    for thread in waiting:
        thread.start()
    scripted.wait(lambda it: len(it.asked("never")) == 3)
    client.close()
    for thread in waiting:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


def test_a_daemon_that_dies_ends_every_call_at_once(scripted, client):
    scripted.handlers["never"] = silence
    waiting = [threading.Thread(target=lambda: unavailable(lambda: client.call("never"))) for _ in range(4)]
    for thread in waiting:
        thread.start()
    scripted.wait(lambda it: len(it.asked("never")) == 4)
    seconds, _ = elapsed(scripted.stop)
    for thread in waiting:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
    assert seconds < PATIENCE_S / 2
    assert not client.connected
    scripted.start()
    unavailable(lambda: client.call("echo"))
    client.connect()
    assert client.call("echo", {"value": 2}) == {"echo": 2}


@pytest.mark.parametrize(
    "garbage",
    [
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        encode(Kind.REPLY, 1, {})[:16] + (2**60).to_bytes(8, "little"),
        encode(Kind.EVENT, 0, {"no": "name"}),
        encode_request(1, "do this"),
        encode(Kind.REPLY, 1, {}, 3),
    ],
    ids=["http", "2^60 bytes", "a nameless event", "a request", "descriptors nobody asked for"],
)
def test_a_daemon_that_breaks_the_protocol_is_cut_off(scripted, client, garbage):
    scripted.handlers["garbage"] = lambda wire, cid, body: wire.raw(garbage)
    unavailable(lambda: client.call("garbage"), "broke the protocol")
    assert not client.connected


def test_a_reply_that_cannot_be_decoded_is_an_error_of_its_call_alone(scripted, client):
    # L6
    body = b"\xa1\x61x" + b"\x81" * 100_000
    scripted.handlers["nested"] = lambda wire, cid, _: wire.raw(
        encode(Kind.REPLY, cid, {})[:16] + len(body).to_bytes(8, "little") + body
    )
    with pytest.raises(ProtocolError, match="deeper"):
        client.call("nested")
    assert client.call("echo", {"value": 1}) == {"echo": 1}


STOPPABLE = """
import socket, sys
from kvcascade.daemon.protocol import FrameDecoder, Kind, encode
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1]); listener.listen(); print("up", flush=True)
peer, _ = listener.accept()
decoder = FrameDecoder()
while data := peer.recv(65536):
    for frame in decoder.feed(data):
        peer.sendall(encode(Kind.REPLY, frame.correlation, {"size": len(frame.body)}))
"""


def test_a_stopped_daemon_costs_each_call_its_deadline_and_is_useful_again_when_woken(tmp_path):
    # D3: SIGSTOP. The last calls find the socket's buffer full.
    path = str(tmp_path / "kv.sock")
    with subprocess.Popen([sys.executable, "-P", "-c", STOPPABLE, path], stdout=subprocess.PIPE) as daemon:
        assert daemon.stdout is not None
        daemon.stdout.readline()
        try:
            with Client(path) as client:
                assert client.call("ping")["size"] > 0
                os.kill(daemon.pid, signal.SIGSTOP)
                for size in (10, 100_000, 100_000, 100_000, 100_000, 10):
                    seconds, _ = elapsed(
                        lambda size=size: unavailable(lambda: client.call("x", {"v": bytes(size)}, timeout=0.1))
                    )
                    assert 0.1 <= seconds < 1
                os.kill(daemon.pid, signal.SIGCONT)
                for size in (0, 500_000, 10):
                    assert size < client.call("x", {"v": bytes(size)}, timeout=PATIENCE_S)["size"] < size + 20
        finally:
            daemon.kill()


def test_a_full_socket_is_pushed_by_many_threads_and_every_frame_goes_out_whole(tmp_path):
    path = str(tmp_path / "kv.sock")
    with subprocess.Popen([sys.executable, "-P", "-c", STOPPABLE, path], stdout=subprocess.PIPE) as daemon:
        assert daemon.stdout is not None
        daemon.stdout.readline()
        try:
            with Client(path) as client:
                os.kill(daemon.pid, signal.SIGSTOP)
                waking = threading.Timer(0.3, os.kill, (daemon.pid, signal.SIGCONT))
                waking.start()

                def ask(number):
                    for step in range(5):
                        size = 20_000 * (number + 1) + step
                        got = client.call("x", {"v": bytes(size)}, timeout=PATIENCE_S)["size"]
                        assert got == len(encode_request(1, "x", {"v": bytes(size)})) - 24

                in_threads(8, ask)
                waking.join()
        finally:
            daemon.kill()


def test_a_call_interrupted_by_a_signal_leaves_the_client_usable(scripted, client):
    scripted.handlers["never"] = silence

    class Interrupted(Exception):
        pass

    def interrupt(*_):
        raise Interrupted

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(Interrupted):
            client.call("never")
    finally:
        signal.signal(signal.SIGALRM, before)
    assert client.call("echo", {"value": 1}) == {"echo": 1}


# ------------------------------------------------------------------------------------------------------------- fork


def test_a_forked_child_loses_the_connection_and_the_parent_goes_on(scripted, client):
    scripted.handlers["slow"] = lambda wire, cid, body: wire.later(0.3, wire.reply, cid, {"n": body["n"]})
    answers = []
    asking = threading.Thread(target=lambda: answers.append(client.call("slow", {"n": 1})))
    asking.start()
    scripted.wait(lambda it: it.asked("slow"))

    # In the middle of a call of another thread, which also reads.
    child = os.fork()
    if child == 0:
        verdict = 1
        try:
            try:
                client.call("echo")
            except DaemonUnavailable as error:
                if "forked" in str(error) and not client.connected:
                    client.connect()
                    if client.call("echo", {"value": "child"}) == {"echo": "child"}:
                        verdict = 0
        finally:
            os._exit(verdict)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    asking.join()
    assert answers == [{"n": 1}]
    assert client.call("echo", {"value": "parent"}) == {"echo": "parent"}
    assert len(scripted.wires) == 2


def test_a_fork_that_python_does_not_see_is_noticed_by_the_process_id(client, monkeypatch):
    monkeypatch.setattr(os, "getpid", lambda: 1)
    unavailable(lambda: client.call("echo"), "forked")
    monkeypatch.undo()
    client.connect()
    assert client.call("echo", {"value": 1}) == {"echo": 1}


# ------------------------------------------------------------------------------------------------------ descriptors


@pytest.fixture
def pipes(scripted):
    """Has "fds" answered with the read ends of fresh pipes; yields how to see which of them are still open."""
    writers = []

    def answer(wire, cid, body):
        readers = []
        for _ in range(body["n"]):
            reader, writer = os.pipe()
            readers.append(reader)
            writers.append(writer)
        wire.reply(cid, {"n": body["n"]}, readers)
        for reader in readers:
            os.close(reader)

    scripted.handlers["fds"] = answer

    def readers_open():
        poller = select.poll()
        for writer in writers:
            poller.register(writer, 0)
        return len(writers) - len(poller.poll(0))

    yield answer, readers_open
    for writer in writers:
        os.close(writer)


def test_descriptors_arrive_once_in_order_and_not_inheritable(scripted, client, pipes):
    _, readers_open = pipes
    body, fds = client.call_with_fds("fds", {"n": 3})
    assert (body, len(fds), readers_open()) == ({"n": 3}, 3, 3)
    assert not any(os.get_inheritable(fd) for fd in fds)
    for fd in fds:
        os.close(fd)
    assert client.call_with_fds("echo", {"value": 1}) == ({"echo": 1}, [])


def test_descriptors_reach_the_call_that_asked_though_another_thread_reads(scripted, client, pipes):
    scripted.handlers["never"] = silence
    reading = threading.Thread(target=lambda: unavailable(lambda: client.call("never", timeout=0.5)))
    reading.start()
    scripted.wait(lambda it: it.asked("never"))

    def ask(number):
        for _ in range(10):
            body, fds = client.call_with_fds("fds", {"n": number})
            assert body == {"n": number} and len(fds) == number
            for fd in fds:
                os.close(fd)

    in_threads(4, ask)
    reading.join()


def test_descriptors_of_a_late_reply_are_closed_and_not_given_to_the_next(scripted, client, pipes):
    answer, readers_open = pipes
    held = []
    scripted.handlers["held"] = lambda wire, cid, body: held.append((wire, cid, body))
    unavailable(lambda: client.call_with_fds("held", {"n": 2}, timeout=0.05))
    scripted.run(lambda: answer(*held[0]))
    body, fds = client.call_with_fds("fds", {"n": 1})
    assert (body, len(fds), readers_open()) == ({"n": 1}, 1, 1)
    os.close(fds[0])


def test_descriptors_of_a_failed_call_are_closed(scripted, client):
    def undecodable(wire, cid, body):
        reader, writer = os.pipe()
        with socket.socket(fileno=os.dup(wire.transport.get_extra_info("socket").fileno())) as raw:
            head = encode(Kind.REPLY, cid, {}, 1)[:16] + (2).to_bytes(8, "little")
            socket.send_fds(raw, [head + b"\xff\xff"], [reader])
        os.close(reader)
        os.close(writer)

    scripted.handlers["undecodable"] = undecodable
    with pytest.raises(ProtocolError):
        client.call_with_fds("undecodable")
    assert client.connected


@pytest.mark.parametrize(("sent", "announced"), [(1, 2), (2, 1), (20, 16)])
def test_descriptors_that_are_not_as_announced_end_the_connection_and_are_closed(scripted, client, sent, announced):
    def lie(wire, cid, body):
        ends = [end for _ in range(sent) for end in os.pipe()]
        with socket.socket(fileno=os.dup(wire.transport.get_extra_info("socket").fileno())) as raw:
            socket.send_fds(raw, [encode(Kind.REPLY, cid, {}, announced)], ends[:sent])
        for end in ends:
            os.close(end)

    scripted.handlers["lie"] = lie
    unavailable(lambda: client.call_with_fds("lie"), "broke the protocol")


# ----------------------------------------------------------------------------------------------------------- events


@pytest.fixture
def listening(scripted):
    client = Client(scripted.path, timeout=PATIENCE_S)
    client.seen = []
    news = threading.Condition()

    def see(event, body):
        with news:
            client.seen.append((event, body.get("n")))
            news.notify_all()

    def wait(count):
        with news:
            assert news.wait_for(lambda: len(client.seen) >= count, PATIENCE_S)
        return client.seen

    client.wait = wait
    client.on_event(see)
    client.connect()
    scripted.wait(lambda it: it.wires)
    yield client
    client.close()


def test_events_are_seen_while_nobody_calls(scripted, listening):
    for number in range(3):
        scripted.run(scripted.wires[0].event, "fence", {"n": number})
        assert listening.wait(number + 1)[-1] == ("fence", number)


def test_events_are_seen_while_a_call_waits_and_among_replies(scripted, listening):
    def answer(wire, cid, body):
        wire.event("fence", {"n": body["n"]})
        wire.later(0.1, wire.reply, cid, {"n": body["n"]})

    scripted.handlers["eventful"] = answer
    in_threads(3, lambda number: listening.call("eventful", {"n": number}))
    assert sorted(n for _, n in listening.wait(3)) == [0, 1, 2]


def test_calls_are_answered_whether_the_watcher_is_reading_or_not(scripted, listening):
    # From one call after the other to pauses longer than the watcher's 50 ms: it steps aside each time.
    for pause in (0, 0.045, 0.05, 0.055, 0.08, 0):
        for number in range(4):
            time.sleep(pause)
            seconds, reply = elapsed(lambda number=number: listening.call("echo", {"value": number}))
            assert reply == {"echo": number}
            assert seconds < 0.5


def test_a_callback_that_raises_disturbs_nobody(scripted, caplog):
    def explode(event, body):
        raise ValueError("a bug of the callback")

    client = Client(scripted.path)
    client.on_event(explode)
    with client:
        scripted.handlers["eventful"] = lambda wire, cid, body: [wire.event("fence", {}), wire.reply(cid, {"n": 1})]
        assert client.call("eventful") == {"n": 1}
        assert client.call("echo", {"value": 1}) == {"echo": 1}
    assert "a bug of the callback" in caplog.text


def test_a_callback_may_post(scripted):
    client = Client(scripted.path)
    client.on_event(lambda event, body: client.post("fenced", {"fence": body["fence"]}))
    with client:
        scripted.wait(lambda it: it.wires)
        scripted.run(scripted.wires[0].event, "fence", {"fence": 5})
        assert scripted.wait(lambda it: it.asked("fenced")) == [{"op": "fenced", "fence": 5}]


def test_an_idle_client_notices_the_daemons_death(scripted, listening):
    scripted.stop()
    end = time.monotonic() + PATIENCE_S
    while listening.connected and time.monotonic() < end:
        time.sleep(0.005)
    assert not listening.connected


# ------------------------------------------------------------------------------------------------------------ asyncio


async def test_the_async_client_answers_many_calls_at_once(scripted):
    scripted.handlers["slow"] = lambda wire, cid, body: wire.later(
        random.Random(body["value"]).uniform(0, 0.05), wire.reply, cid, {"echo": body["value"]}
    )
    async with AsyncClient(scripted.path) as client:
        replies = await asyncio.gather(*(client.call("slow", {"value": number}) for number in range(50)))
        assert replies == [{"echo": number} for number in range(50)]


async def test_the_async_client_never_mixes_up_late_or_cancelled_replies(scripted):
    # C4
    chance = random.Random(3)
    scripted.handlers["slow"] = lambda wire, cid, body: wire.later(
        chance.uniform(0, 0.02), wire.reply, cid, {"echo": body["value"]}
    )
    outcomes = {"answered": 0, "late": 0, "cancelled": 0}
    async with AsyncClient(scripted.path) as client:

        async def ask(number):
            mine = random.Random(number)
            task = asyncio.ensure_future(client.call("slow", {"value": number}, timeout=mine.uniform(0.001, 0.025)))
            if mine.random() < 0.3:
                asyncio.get_running_loop().call_later(mine.uniform(0, 0.02), task.cancel)
            try:
                assert await task == {"echo": number}
                outcomes["answered"] += 1
            except DaemonUnavailable:
                outcomes["late"] += 1
            except asyncio.CancelledError:
                outcomes["cancelled"] += 1

        for batch in range(5):
            await asyncio.gather(*(ask(batch * 100 + number) for number in range(60)))
        assert min(outcomes.values()) > 10
        assert await client.call("echo", {"value": 1}) == {"echo": 1}


async def test_the_async_client_meets_its_deadline_and_goes_on(scripted):
    scripted.handlers["never"] = silence
    async with AsyncClient(scripted.path) as client:
        start = time.monotonic()
        with pytest.raises(DaemonUnavailable, match=r"'never' within 0\.1 s"):
            await client.call("never", timeout=0.1)
        assert time.monotonic() - start < 1
        assert await client.call("echo", {"value": 1}) == {"echo": 1}


async def test_the_async_clients_calls_end_when_the_daemon_dies_and_it_connects_anew(scripted):
    scripted.handlers["never"] = silence
    async with AsyncClient(scripted.path) as client:
        asking = [asyncio.ensure_future(client.call("never")) for _ in range(3)]
        await asyncio.to_thread(scripted.wait, lambda it: len(it.asked("never")) == 3)
        await asyncio.to_thread(scripted.stop)
        for each in asking:
            with pytest.raises(DaemonUnavailable):
                await each
        with pytest.raises(DaemonUnavailable):
            await client.call("echo")
        with pytest.raises(DaemonUnavailable):
            await client.connect()
        await asyncio.to_thread(scripted.start)
        await client.connect()
        assert await client.call("echo", {"value": 1}) == {"echo": 1}


async def test_the_async_client_raises_the_daemons_errors_and_refuses_garbage(scripted):
    scripted.handlers["fail"] = lambda wire, cid, body: wire.raw(encode_error(cid, Refused("no")))
    scripted.handlers["garbage"] = lambda wire, cid, body: wire.raw(b"garbage")
    async with AsyncClient(scripted.path) as client:
        with pytest.raises(Refused, match=r"^no$"):
            await client.call("fail")
        with pytest.raises(DaemonUnavailable, match="broke the protocol"):
            await client.call("garbage")


async def test_the_async_client_sees_events(scripted):
    seen = asyncio.Queue()
    client = AsyncClient(scripted.path)
    client.on_event(lambda event, body: seen.put_nowait((event, body["fence"])))
    async with client:
        await asyncio.to_thread(scripted.wait, lambda it: it.wires)
        scripted.run(scripted.wires[0].event, "fence", {"fence": 1})
        assert await asyncio.wait_for(seen.get(), PATIENCE_S) == ("fence", 1)


# ------------------------------------------------------------------------------------------------------------ address


def test_the_socket_comes_from_the_argument_then_the_environment(monkeypatch):
    monkeypatch.setenv("KVCASCADE_SOCKET", "/env/kv.sock")
    assert str(resolve_socket_path("/arg/kv.sock")) == "/arg/kv.sock"
    assert str(resolve_socket_path()) == "/env/kv.sock"
