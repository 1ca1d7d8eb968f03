"""Two nodes, bytes from one's slots into the other's: real sockets, real processes, a pattern in every byte."""

import asyncio
import os
import random
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any

import pytest
from engines.peer_node import BLOCK, NAMESPACE, PeerNode, Pool, chain, jobs, node, pattern, serving
from engines.proxy import Proxy

from kvcascade.config.errors import CascadeError, Refused, TierUnavailable
from kvcascade.config.settings import Endpoint, PeerSettings
from kvcascade.daemon import peer_server
from kvcascade.daemon.peer_server import PeerServer
from kvcascade.daemon.peer_wire import Channel, Say
from kvcascade.daemon.peers import TROUBLE_S, VOID, Peers
from kvcascade.daemon.remote import MOST_BLOCKS
from kvcascade.tiers.codec import Codec
from kvcascade.tiers.remote import Secret
from kvcascade.tiers.wire import LATE

pytestmark = pytest.mark.usefixtures("nothing_leaks")

HASHES = chain(16)


def ignore(info: object) -> None:
    pass


@asynccontextmanager
async def asking(
    secret: Secret | None = None, me: Any = None, met: Callable[[Any], None] = ignore, **settings: Any
) -> AsyncIterator[Peers]:
    """The side that fetches; when it has ended, no task of it is left."""
    settings = {"deadline": 5.0, **settings}
    mine = me or node("asking")
    tasks = asyncio.all_tasks()
    async with Peers(PeerSettings(**settings), secret or Secret(), lambda: mine, met=met) as one:
        yield one
    await until(lambda: asyncio.all_tasks() <= tasks)


def intact(fetched: list[Any], reasons: list[str | None]) -> list[int]:
    """The blocks that are said to be good. Each of them must be, in every byte."""
    good = [number for number, reason in enumerate(reasons) if reason is None]
    for number in good:
        job = fetched[number]
        assert job.into == pattern(job.name.block_hash, len(job.into)), f"block {number} holds other bytes"
    return good


async def until(condition: Callable[[], Any]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end, "it did not come to that"
        await asyncio.sleep(0.01)


async def eventually_whole(peers: Peers, endpoint: Endpoint, boot: bytes) -> None:
    """By itself, with nobody's help."""
    end = time.monotonic() + 20
    while True:
        wanted = jobs(HASHES)
        reasons = await peers.fetch(endpoint, boot, wanted, 5.0)
        if len(intact(wanted, reasons)) == len(HASHES):
            return
        assert time.monotonic() < end, reasons
        await asyncio.sleep(0.05)


async def ask(peers: Peers, endpoint: Endpoint, boot: bytes, hashes: list[bytes] = HASHES, wait: float = 0.0) -> int:
    return await peers.ask(endpoint, boot, NAMESPACE, 0, b"".join(hashes), wait=wait, timeout=10.0)


# ---- what should work


@pytest.mark.parametrize("codec", list(Codec))
@pytest.mark.parametrize("secret", [b"", b"a secret of the fleet"])
async def test_blocks_come_from_the_pool_into_the_slots(codec: Codec, secret: bytes) -> None:
    me, hashes, seen = node("source"), chain(12), []
    async with (
        serving(Pool(hashes, 256 << 10), me, Secret(secret), codec=codec) as server,
        asking(Secret(secret)) as peers,
    ):
        assert await ask(peers, server.endpoint, me.boot, [*hashes, *chain(3, "other")]) == 12
        wanted = jobs([*hashes, *chain(3, "other")], 256 << 10)
        reasons = await peers.fetch(server.endpoint, me.boot, wanted, 5.0, observe=lambda *one: seen.append(one))
        # The second of two connections begins behind the eighth block, and so has a prefix of its own.
        assert intact(wanted, reasons) == list(range(12))
        assert reasons[12:] == ["not there"] * 3
        ((count, seconds, first, sent),) = seen
        assert count == sent == 12 * (256 << 10)  # what is noise is not packed
        assert 0 < first <= seconds
        (peer,) = peers.status()
        assert (peer["name"], peer["state"], peer["boot"]) == ("source", "ok", me.boot.hex())
        assert (peer["fetched_blocks"], peer["fetched_bytes"]) == (12, count)
        (caller,) = server.status()["callers"]
        assert (caller["name"], caller["served_blocks"], caller["served_bytes"]) == ("asking", 12, count)


async def test_many_requests_are_in_flight_at_once() -> None:
    hashes = chain(64)
    with PeerNode(hashes) as source:
        async with asking(threads=4) as peers:

            async def one(seed: int) -> None:
                mine = random.Random(seed).choices(hashes, k=24)
                assert await ask(peers, source.endpoint, source.boot, mine) == 24
                wanted = jobs(mine)
                assert intact(wanted, await peers.fetch(source.endpoint, source.boot, wanted, 20.0)) == list(range(24))

            async with asyncio.TaskGroup() as group:
                for seed in range(24):
                    group.create_task(one(seed))
            assert peers.status()[0]["fetched_blocks"] == 24 * 24


async def test_blocks_that_are_still_being_stored_are_waited_for_and_no_longer_than_asked() -> None:
    me, pool = node("source"), Pool(HASHES)
    pool.coming.update(HASHES[5:])
    async with serving(pool, me) as server, asking() as peers:
        assert await ask(peers, server.endpoint, me.boot) == 5
        waiting = asyncio.create_task(ask(peers, server.endpoint, me.boot, wait=20.0))
        await until(lambda: pool.asked == 2)
        # Who waits keeps nobody else waiting.
        assert await ask(peers, server.endpoint, me.boot) == 5
        pool.coming.clear()
        assert await waiting == len(HASHES)
        pool.coming.update(HASHES[5:])
        assert await ask(peers, server.endpoint, me.boot, wait=0.2) == 5


async def test_a_peer_answers_for_itself_alone() -> None:
    """It is asked for what others have, and has nobody to ask (design, section 7)."""
    me, pool = node("source"), Pool(HASHES[:4])
    async with serving(pool, me) as server, asking() as peers:
        wanted = jobs(HASHES)
        reasons = await peers.fetch(server.endpoint, me.boot, wanted, 5.0)
        assert intact(wanted, reasons) == [0, 1, 2, 3]
        assert await ask(peers, server.endpoint, me.boot, chain(3, "foreign")) == 0


# ---- slots that are handed on while they are sent (A13)


async def test_a_slot_that_is_handed_on_before_it_is_read_is_a_miss() -> None:
    me, pool = node("source"), Pool(HASHES)
    pool.after_grant = [HASHES[0]]
    async with serving(pool, me) as server, asking() as peers:
        wanted = jobs(HASHES[:4])
        assert await peers.fetch(server.endpoint, me.boot, wanted, 5.0) == [VOID] * 4
        pool.after_grant = []
        # The connection and the node are none the worse.
        wanted = jobs(HASHES[1:4])
        assert intact(wanted, await peers.fetch(server.endpoint, me.boot, wanted, 5.0)) == [0, 1, 2]
        assert server.status()["counters"]["connections"] == 1
        await until(lambda: len(pool.sent) == 2)
        assert pool.sent == [False, True]


@pytest.mark.parametrize("after", [0.05, 0.5, 1.0])
async def test_a_slot_that_is_handed_on_in_the_middle_of_a_slow_transfer_is_a_miss(after: float) -> None:
    # 16 blocks of 256 KiB at 4 MB/s take a second; the second half's slots become other blocks on the way.
    hashes = chain(16)
    me, pool = node("source"), Pool(hashes, 256 << 10)
    async with serving(pool, me) as server, asking(deadline=20.0, threads=1) as peers:
        with Proxy(server.endpoint.port) as proxy:
            proxy.rate = 4_000_000
            wanted = jobs(hashes, 256 << 10)
            fetching = asyncio.create_task(peers.fetch(Endpoint("127.0.0.1", proxy.port), me.boot, wanted, 20.0))
            await pool.granted.wait()
            await asyncio.sleep(after)
            for one in hashes[8:]:
                pool.hand_on(one)
            reasons = await fetching
            good = intact(wanted, reasons)
            # What lay in the socket's buffers by then was read in time.
            assert good == list(range(len(good)))
            assert set(reasons[len(good) :]) <= {VOID}


# ---- nodes and networks in trouble


async def trouble(peers: Peers, endpoint: Endpoint, boot: bytes, timeout: float = 1.0) -> list[str | None]:
    wanted = jobs(HASHES, BLOCK)
    reasons = await peers.fetch(endpoint, boot, wanted, timeout)
    intact(wanted, reasons)
    before = [bytes(job.into) for job in wanted]
    await asyncio.sleep(0.05)
    # Nobody writes any more: the memory is the caller's again.
    assert [bytes(job.into) for job in wanted] == before
    assert len(reasons) == len(HASHES)
    return reasons


async def test_a_killed_source_costs_misses_and_its_successor_is_another_one() -> None:  # H1
    async with asking() as peers:
        with PeerNode(HASHES) as source:
            await eventually_whole(peers, source.endpoint, source.boot)
            endpoint, boot = source.endpoint, source.boot
            source.kill()
            assert None not in await trouble(peers, endpoint, boot)
            assert peers.status()[0]["state"] == "sick"
            (problem,) = peers.problems()
            assert f" at {endpoint} is left alone: " in problem and peers.status()[0]["name"] in problem
            # Left alone: nothing is even tried.
            assert "left alone" in str((await trouble(peers, endpoint, boot))[0])
        with PeerNode(HASHES, port=endpoint.port) as successor:
            await until(lambda: peers.status()[0]["state"] == "sick")
            await eventually_whole(peers, successor.endpoint, successor.boot)
            assert peers.problems() == []  # the one that was killed is over
            reasons: list[str | None] = [None]
            for _ in range(100):
                reasons = await trouble(peers, endpoint, boot)
                if "started anew" in str(reasons[0]) and "left alone" not in str(reasons[0]):
                    break
                await asyncio.sleep(0.1)
            assert set(reasons) == {"this node was started anew: what is known of it is out of date"}
            assert peers.problems() == []  # whoever has restarted a node need not be told


async def test_a_node_in_trouble_whom_nobody_asks_any_more_is_no_problem_for_long() -> None:
    """It may have been shut down for good, and nobody says so."""
    passed = 0.0
    async with Peers(
        PeerSettings(), Secret(), lambda: node("asking"), clock=lambda: time.monotonic() + passed
    ) as peers:
        with socket.socket() as nobody:
            nobody.bind(("127.0.0.1", 0))  # and does not listen
            assert None not in await trouble(peers, Endpoint(*nobody.getsockname()), b"b" * 16)
        assert len(peers.problems()) == 1
        passed = TROUBLE_S
        assert peers.problems() == [] and peers.status()[0]["state"] == "sick"


async def test_a_stopped_source_is_given_up_at_the_deadline_and_comes_back() -> None:
    with PeerNode(HASHES) as source:
        async with asking() as peers:
            await eventually_whole(peers, source.endpoint, source.boot)
            source.signal(signal.SIGSTOP)
            assert set(await trouble(peers, source.endpoint, source.boot, 0.5)) == {"no answer in time"}
            source.signal(signal.SIGCONT)
            await eventually_whole(peers, source.endpoint, source.boot)


Fault = Callable[[Proxy], None]


def swallow(proxy: Proxy) -> None:
    proxy.hole = True


def refuse(proxy: Proxy) -> None:
    proxy.refuse = True
    proxy.reset()


def slow(proxy: Proxy) -> None:
    proxy.rate = 20_000


def late(proxy: Proxy) -> None:
    proxy.delay = 2.0


@pytest.mark.parametrize("fault", [swallow, refuse, slow, late])
async def test_a_bad_network_costs_misses_until_it_is_good_again(fault: Fault) -> None:
    me = node("source")
    async with serving(Pool(HASHES), me) as server, asking() as peers:
        with Proxy(server.endpoint.port) as proxy:
            endpoint = Endpoint("127.0.0.1", proxy.port)
            await eventually_whole(peers, endpoint, me.boot)
            fault(proxy)
            reasons = await trouble(peers, endpoint, me.boot, 0.95)
            assert None not in reasons[2:]
            assert peers.status()[0]["reason"] in peers.problems()[0]
            with pytest.raises(TierUnavailable, match="left alone"):
                await ask(peers, endpoint, me.boot)
            proxy.hole = proxy.refuse = False
            proxy.rate, proxy.delay = 0, 0.0
            proxy.reset()
            await eventually_whole(peers, endpoint, me.boot)
            assert peers.status()[0]["state"] == "ok"
            assert peers.problems() == []


@asynccontextmanager
async def on_a_slow_link(hashes: list[bytes], rate: int) -> AsyncIterator[tuple[Proxy, Peers, Callable[..., Any]]]:
    """The link to a source with blocks of 256 KiB, who fetches over it, and how; no byte may stand still for 1 s."""
    me = node("source")
    async with (
        serving(Pool(hashes, 256 << 10), me, deadline=1.0) as server,
        asking(threads=1, deadline=1.0) as peers,
    ):
        with Proxy(server.endpoint.port) as proxy:
            proxy.rate = rate
            yield proxy, peers, partial(peers.fetch, Endpoint("127.0.0.1", proxy.port), me.boot)


async def test_a_long_prefix_crosses_a_slow_link_in_its_own_time() -> None:
    """The deadline of an answer is for how long nothing may move, on both sides; the call's own is for the whole."""
    hashes = chain(256)
    async with on_a_slow_link(hashes, 8_000_000) as (_, _, fetch):
        wanted = jobs(hashes, 256 << 10)
        began = time.monotonic()
        assert intact(wanted, await fetch(wanted, 90.0)) == list(range(256))
        assert time.monotonic() - began > 5  # of the settings' deadline: the link was slow indeed


async def test_a_link_that_goes_dead_is_given_up_long_before_the_whole_deadline() -> None:
    hashes = chain(64)
    async with on_a_slow_link(hashes, 4_000_000) as (proxy, peers, fetch):
        wanted = jobs(hashes, 256 << 10)
        fetching = asyncio.create_task(fetch(wanted, 600.0))
        await until(lambda: wanted[2].into == pattern(hashes[2], 256 << 10))
        proxy.hole = True
        async with asyncio.timeout(60):
            reasons = await fetching
        good = intact(wanted, reasons)
        assert good and good == list(range(len(good)))
        assert set(reasons[len(good) :]) == {"no byte moved for too long"}
        assert peers.status()[0]["state"] == "sick"


async def test_a_trickle_ends_with_the_whole_deadline() -> None:
    """Who sends a byte now and then is never silent. What came whole before is good."""
    async with on_a_slow_link(HASHES, 4_000_000) as (proxy, peers, fetch):
        wanted = jobs(HASHES, 256 << 10)
        fetching = asyncio.create_task(fetch(wanted, 6.0))
        await until(lambda: wanted[2].into == pattern(HASHES[2], 256 << 10))
        proxy.rate = 20
        async with asyncio.timeout(60):
            reasons = await fetching
        good = intact(wanted, reasons)
        assert good and good == list(range(len(good)))
        assert set(reasons[len(good) :]) == {"no answer in time"}
        assert peers.status()[0]["state"] == "ok"  # blocks came: slow is not away


async def test_who_takes_nothing_of_what_it_asked_for_is_given_up_by_the_one_that_serves() -> None:
    hashes, me = chain(64), node("source")
    pool = Pool(hashes, 256 << 10)
    async with serving(pool, me, deadline=1.0) as server:
        channel = Channel(socket.create_connection(server.endpoint), Secret())
        channel.until(time.monotonic() + 30)
        await asyncio.to_thread(channel.greet, node("asking"))
        channel.say(Say.FETCH, {"boot": me.boot, "namespace": NAMESPACE, "group": 0, "hashes": b"".join(hashes)})
        await until(lambda: pool.held)
        await until(lambda: not pool.held and not server.status()["connections"])
        assert pool.sent == [False]
        channel.close()


@pytest.mark.parametrize("end", ["reset", "half_close"])
async def test_a_connection_that_ends_in_the_middle_keeps_what_came_whole(end: str) -> None:
    me = node("source")
    async with serving(Pool(HASHES, 256 << 10), me) as server, asking(threads=1) as peers:
        with Proxy(server.endpoint.port) as proxy:
            proxy.rate = 4_000_000
            wanted = jobs(HASHES, 256 << 10)
            fetching = asyncio.create_task(peers.fetch(Endpoint("127.0.0.1", proxy.port), me.boot, wanted, 5.0))
            await asyncio.sleep(0.5)
            getattr(proxy, end)()
            reasons = await fetching
            good = intact(wanted, reasons)
            assert good == list(range(len(good)))
            assert len(good) < len(HASHES)
            assert all(reasons[len(good) :])


@pytest.mark.parametrize(
    "cut", [1, 9, 10, 100, 200, 300, 400, 500, 700, 4096, BLOCK, BLOCK + 700, 5 * BLOCK, 15 * BLOCK]
)
async def test_an_answer_that_is_cut_anywhere_is_good_up_to_there(cut: int) -> None:
    me = node("source")
    async with serving(Pool(HASHES), me) as server, asking(threads=1) as peers:
        with Proxy(server.endpoint.port) as proxy:
            proxy.cut_after = cut
            wanted = jobs(HASHES)
            reasons = await peers.fetch(Endpoint("127.0.0.1", proxy.port), me.boot, wanted, 5.0)
            good = intact(wanted, reasons)
            assert good == list(range(len(good)))
            assert len(good) <= cut // BLOCK
            assert all(reasons[len(good) :])
            await eventually_whole(peers, Endpoint("127.0.0.1", proxy.port), me.boot)


async def test_a_node_that_hangs_keeps_no_thread_from_the_others() -> None:
    me = node("source")
    async with serving(Pool(HASHES), me) as server, asking(deadline=30.0) as peers:
        with Proxy(server.endpoint.port) as proxy:
            proxy.hole = True
            hole = Endpoint("127.0.0.1", proxy.port)
            hung: list[asyncio.Task[Any]] = [
                *(asyncio.create_task(peers.fetch(hole, me.boot, jobs(HASHES), 30.0)) for _ in range(20)),
                *(asyncio.create_task(ask(peers, hole, me.boot)) for _ in range(40)),
                *(asyncio.create_task(ask(peers, hole, me.boot, wait=20.0)) for _ in range(40)),
            ]
            await until(lambda: proxy.connections >= 18)
            await eventually_whole(peers, server.endpoint, me.boot)
            assert await ask(peers, server.endpoint, me.boot) == len(HASHES)
            assert await ask(peers, server.endpoint, me.boot, wait=20.0) == len(HASHES)
            assert not any(one.done() for one in hung)
            for one in hung:
                one.cancel()
            await asyncio.wait(hung)
            # Nobody is blamed for what we gave up ourselves.
            assert all(peer["state"] == "ok" for peer in peers.status())


async def test_a_node_is_left_alone_for_silence_and_not_for_the_hurry_of_who_asks() -> None:
    me = node("source")
    async with serving(Pool(HASHES), me) as server, asking() as peers:
        with Proxy(server.endpoint.port) as proxy:
            way = Endpoint("127.0.0.1", proxy.port)
            await eventually_whole(peers, way, me.boot)
            proxy.delay = 0.3
            assert set(await peers.fetch(way, me.boot, jobs(HASHES), 0.1)) == {LATE}
            with pytest.raises(TierUnavailable, match=LATE):
                await peers.ask(way, me.boot, NAMESPACE, 0, HASHES[0], wait=0.0, timeout=0.1)
            assert peers.status()[0]["state"] == "ok"
            assert await ask(peers, way, me.boot) == len(HASHES)  # with it what was in vain is forgotten
            proxy.hole = True
            for _ in range(100):
                with pytest.raises(TierUnavailable):
                    await peers.ask(way, me.boot, NAMESPACE, 0, HASHES[0], wait=0.0, timeout=0.1)
                if peers.status()[0]["state"] == "sick":
                    break
            assert peers.status()[0]["state"] == "sick"


async def test_a_question_of_more_blocks_than_a_node_asks_for_is_refused() -> None:
    me = node("source")
    pool = Pool(HASHES)
    async with serving(pool, me) as server, asking() as peers:
        most = HASHES + [HASHES[-1]] * (MOST_BLOCKS - len(HASHES))
        assert await ask(peers, server.endpoint, me.boot, most) == MOST_BLOCKS
        with pytest.raises(Refused, match="hashes"):
            await ask(peers, server.endpoint, me.boot, [*most, HASHES[0]])
        assert pool.asked == 1


@pytest.mark.parametrize("after", [0.0, 0.001, 0.01, 0.05, 0.1, 0.2])
async def test_a_cancelled_fetch_lets_go_of_the_memory_at_once(after: float) -> None:
    me = node("source")
    async with serving(Pool(HASHES), me) as server, asking(deadline=30.0) as peers:
        with Proxy(server.endpoint.port) as proxy:
            proxy.rate = 2_000_000
            endpoint = Endpoint("127.0.0.1", proxy.port)
            wanted = jobs(HASHES)
            fetching = asyncio.create_task(peers.fetch(endpoint, me.boot, wanted, 30.0))
            await asyncio.sleep(after)
            fetching.cancel()
            with pytest.raises(asyncio.CancelledError):
                await fetching
            before = [bytes(job.into) for job in wanted]
            await asyncio.sleep(0.1)
            assert [bytes(job.into) for job in wanted] == before
            proxy.rate = 0
            await eventually_whole(peers, endpoint, me.boot)


async def test_closing_ends_what_is_under_way_on_both_sides() -> None:
    me = node("source")
    pool = Pool(HASHES)
    pool.coming.update(HASHES)
    async with serving(pool, me) as server:
        async with asking(deadline=30.0) as peers:
            waiting = asyncio.create_task(ask(peers, server.endpoint, me.boot, wait=30.0))
            await until(lambda: pool.asked)
        with pytest.raises(CascadeError):
            await waiting


async def test_a_server_stops_and_starts_again_at_its_address() -> None:
    me = node("source")
    async with serving(Pool(HASHES), me) as server, asking() as peers:
        endpoint = server.endpoint
        await eventually_whole(peers, endpoint, me.boot)
        await server.stop()
        await server.stop()
        assert None not in await trouble(peers, endpoint, me.boot)
        server.start()
        assert server.endpoint == endpoint
        await eventually_whole(peers, endpoint, me.boot)


async def test_the_cap_on_bandwidth_holds_for_all_connections_together() -> None:
    hashes = chain(24)
    me = node("source")
    async with serving(Pool(hashes, 256 << 10), me, bandwidth=4 << 20) as server, asking(deadline=30.0) as peers:
        wanted = jobs(hashes, 256 << 10)
        began = time.monotonic()
        assert intact(wanted, await peers.fetch(server.endpoint, me.boot, wanted, 30.0)) == list(range(24))
        # Six MiB at four a second. A slow machine can only take longer; the last piece is not paid for in advance.
        assert time.monotonic() - began >= (24 - 2) * (256 << 10) / (4 << 20)


async def test_connections_that_share_a_small_bandwidth_do_not_take_each_other_for_silent() -> None:
    hashes, me = chain(16), node("source")
    async with (
        serving(Pool(hashes, 256 << 10), me, bandwidth=2 << 20) as server,
        asking(threads=16, deadline=1.0) as peers,
    ):
        # Each has to wait for fifteen others, 2 s if blocks went out whole.
        wanted = jobs(hashes, 256 << 10)
        assert intact(wanted, await peers.fetch(server.endpoint, me.boot, wanted, 60.0)) == list(range(16))
        assert server.status()["connections"] == 16


# Names of which no resolver is asked, too: with an empty part, and with one that is too long.
@pytest.mark.parametrize("host", ["no-such-node.invalid", "node..local", "n" * 64 + ".local"])
async def test_a_name_that_has_no_address_is_a_reason(host: str) -> None:
    boot = os.urandom(16)
    async with asking() as peers:
        reasons = await peers.fetch(Endpoint(host, 7400), boot, jobs(HASHES), 5.0)
        assert all(host in str(reason) for reason in reasons)
        with pytest.raises(TierUnavailable, match="left alone"):
            await ask(peers, Endpoint(host, 7400), boot)


async def test_a_node_is_reached_by_its_name() -> None:
    me = node("source")
    async with serving(Pool(HASHES), me) as server, asking() as peers:
        await eventually_whole(peers, Endpoint("localhost", server.endpoint.port), me.boot)


async def test_an_address_of_a_family_that_this_machine_has_not_leaves_the_next_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    resolve = socket.getaddrinfo

    def one_more(*args: Any, **more: Any) -> list[Any]:
        return [(socket.AF_X25, socket.SOCK_STREAM, 0, "", ("1", 1)), *resolve(*args, **more)]

    me = node("source")
    async with serving(Pool(HASHES), me) as server, asking() as peers:
        monkeypatch.setattr(socket, "getaddrinfo", one_more)
        assert await ask(peers, server.endpoint, me.boot) == len(HASHES)


async def test_a_refusal_is_an_answer() -> None:
    me = node("source")
    async with serving(Pool(HASHES), me) as server, asking() as peers:
        with pytest.raises(Refused, match="namespace"):
            await peers.ask(server.endpoint, me.boot, b"short", 0, b"", wait=0.0, timeout=5.0)
        await eventually_whole(peers, server.endpoint, me.boot)
        assert server.status()["counters"]["connections"] <= 2


async def test_connections_that_are_only_kept_for_later_keep_no_node_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that many fetch from has more of them than it may have connections."""
    monkeypatch.setattr(peer_server, "CONNECTIONS", 3)
    async with AsyncExitStack() as stack:
        me = node("source")
        server = await stack.enter_async_context(serving(Pool(HASHES), me))
        nodes = [await stack.enter_async_context(asking(me=node(f"asking{number}"))) for number in range(8)]
        for _ in range(2):
            for one in nodes:
                await eventually_whole(one, server.endpoint, me.boot)
        told = server.status()
        assert told["counters"].get("connections_refused", 0) == 0 and told["counters"]["connections_displaced"] >= 8
        await until(lambda: server.status()["connections"] <= 3)


async def test_who_fetches_says_how_it_had_better_be_packed() -> None:
    """It alone sees how fast the link is."""
    asked: list[Codec | None] = []

    def packs(wanted: Codec | None) -> Codec:
        asked.append(wanted)
        return wanted or Codec.RAW

    me, pool = node("source"), Pool(HASHES)
    for one in HASHES:
        pool._slot(one)[:] = 7
    server = PeerServer(PeerSettings(listen=Endpoint("127.0.0.1", 0)), Secret(), lambda: me, pool, codec=packs)
    async with server, asking() as peers:
        for codec in (None, *Codec):
            told: list[Any] = []
            wanted = jobs(HASHES)
            reasons = await peers.fetch(
                server.endpoint, me.boot, wanted, 5.0, codec=codec, observe=lambda *one, told=told: told.append(one)
            )
            assert reasons == [None] * len(HASHES)
            assert all(set(bytes(job.into)) == {7} for job in wanted)
            ((count, _, _, sent),) = told
            assert (sent < 0.6 * count) == bool(codec)
    assert list(dict.fromkeys(asked)) == [None, *Codec]  # once for each connection
    pool.close()
