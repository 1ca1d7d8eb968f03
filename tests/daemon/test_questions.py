"""What a node asks Redis and other nodes where one of them is in trouble: all parts are real."""

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from engines.node import TOKENS, Engine, Node, hashes, pattern
from engines.redis_server import RedisServer, serve
from engines.redis_tier import SECRET, opened

from kvcascade.config.errors import TierUnavailable
from kvcascade.config.settings import ClusterSettings, Endpoint, PeerSettings
from kvcascade.daemon.fleet import Fleet, NodeInfo
from kvcascade.daemon.peers import Peers
from kvcascade.daemon.remote import Question, Remote, answers
from kvcascade.daemon.sources import PeerSource, RedisSource
from kvcascade.daemon.together import MOST, Together
from kvcascade.daemon.transfer import Transfer
from kvcascade.tiers.redis import RedisTier
from kvcascade.tiers.remote import BlockName, Send

BLOCKS = 4


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with serve() as one:
        yield one


@pytest.fixture
def hole() -> Iterator[Endpoint]:
    """A node that takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as one:
        yield Endpoint(*one.getsockname())


def info(name: str, address: Endpoint | None) -> NodeInfo:
    return NodeInfo(name, name.encode() * 16, address, "1", "sha256_cbor", "tagged-0.31", bytes(32))


@dataclass(frozen=True, slots=True)
class Asking:
    """The node that asks."""

    engine: Engine
    remote: Remote
    peers: Peers
    redis: RedisTier

    async def answered(self, path: tuple[int, ...]) -> Question:
        asked = self.remote.ask(self.engine.attachment, self.engine.space, hashes(path), 0)
        assert asked is not None
        await asyncio.wait([asked.task])
        return asked


@asynccontextmanager
async def asking(server: RedisServer, **limits: Any) -> AsyncIterator[Asking]:
    node = Node(slabs=8)
    transfer = Transfer(node.residency)
    me = info("b", None)
    async with (
        opened(server.url) as redis,
        Fleet(redis, SECRET, me, entry_ttl=60, timeout=5) as fleet,
        transfer,
        Peers(PeerSettings(), SECRET, lambda: me) as peers,
        Remote(
            ClusterSettings(**limits),
            node.cache,
            transfer,
            [RedisSource(redis), PeerSource(peers, fleet, SECRET)],
            clock=time.monotonic,
        ) as remote,
    ):
        yield Asking(node.engine(), remote, peers, redis)
    node.expect_sound()
    node.close()


@asynccontextmanager
async def named(
    server: RedisServer, one: Asking, address: Endpoint, paths: list[tuple[int, ...]]
) -> AsyncIterator[None]:
    """Redis has the blocks of the paths, and the directory says that the node at the address has them too."""
    space = one.engine.space
    jobs, widths = [], []
    for path in paths:
        for end in range(1, len(path) + 1):
            name = BlockName(space.fingerprint, 0, hashes(path[:end])[-32:])
            jobs.append(Send(name, b"", memoryview(pattern(space, path[:end]).tobytes()), 2))
            widths.append(name.block_hash)
    async with opened(server.url) as redis:
        assert set(await redis.store(jobs, 10)) == {None}
        async with Fleet(redis, SECRET, info("a", address), entry_ttl=60, timeout=5) as fleet:
            fleet.announce(space.fingerprint, 0, widths)
            await until(lambda: fleet.counters["entries_written"] == len(widths))
            yield


async def until(condition: Callable[[], Any]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end, "it did not come to that"
        await asyncio.sleep(0.01)


async def test_a_node_that_hangs_takes_nothing_of_redis_from_an_engine_that_computes_quickly(
    server: RedisServer, hole: Endpoint
) -> None:
    # G1: there is so little time that a source may have all of it but for the rest that is left to use the answers.
    paths = [(number, *range(1, BLOCKS)) for number in range(100, 140)]
    async with asking(server) as one, named(server, one, hole, paths):
        one.remote.prefill(one.engine.attachment).observe(BLOCKS * TOKENS, 0.5, 0)
        answers = []
        for path in paths:
            question = await one.answered(path)
            answers.append(question.decision is not None and question.decision.blocks == BLOCKS)
            if [peer["state"] for peer in one.peers.status()] == ["sick"]:
                break
        assert any(answers)  # until then the node was waited for
        assert len(answers) < len(paths)


async def test_a_source_that_fails_as_nobody_expects_keeps_no_answer_from_use(caplog: pytest.LogCaptureFixture) -> None:
    async def told() -> int:
        return 7

    async def fails(error: Exception) -> int:
        raise error

    given, errors = await answers([fails(UnicodeError("label empty")), told(), fails(TierUnavailable("away"))])
    assert (given, [str(error) for error in errors]) == ([7], ["label empty", "away"])
    assert "a source failed" in caplog.text and "UnicodeError" in caplog.text


async def test_sources_that_do_not_answer_in_time_are_errors_and_go_on_no_longer() -> None:
    ended = asyncio.Event()

    async def told() -> int:
        return 7

    async def hangs() -> int:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        raise AssertionError

    given, errors = await answers([hangs(), told()], 0.05)
    assert (given, [str(error) for error in errors]) == ([7], ["no answer in time"])
    assert ended.is_set()


async def test_blocks_that_are_no_chain_are_asked_for_together(server: RedisServer, hole: Endpoint) -> None:
    paths = [(number,) for number in range(300, 400)]
    async with asking(server) as one, named(server, one, hole, paths[:30:2]):
        server.client().config_resetstat()
        questions = [one.remote.ask(one.engine.attachment, one.engine.space, hashes(path), 0) for path in paths]
        tasks = [question.task for question in questions if question is not None]
        assert len(tasks) == len(paths)
        await asyncio.wait(tasks)
        found = [number for number, one in enumerate(questions) if one and one.decision and one.decision.blocks]
        assert found == list(range(0, 30, 2))
        stats = server.client().info("commandstats")
        # Of the directory, and of nodes' records.
        assert stats["cmdstat_exists"]["calls"] == len(paths)
        assert stats["cmdstat_mget"]["calls"] < 20
        assert one.redis.available


async def test_answers_that_are_asked_for_together_reach_who_asked_for_each() -> None:
    asked: list[list[int]] = []

    async def squares(keys: Sequence[int], timeout: float) -> list[int]:
        asked.append(list(keys))
        await asyncio.sleep(0.01)
        if -1 in keys:
            raise TierUnavailable("away")
        return [key * key for key in keys]

    together = Together(squares)
    many = 2 * MOST + 3
    tasks = [asyncio.create_task(together.one(key, 1.0)) for key in range(many)]
    await asyncio.sleep(0)
    tasks[5].cancel()
    told = await asyncio.gather(*tasks, return_exceptions=True)
    assert [one for key, one in enumerate(told) if key != 5] == [key * key for key in range(many) if key != 5]
    assert [len(keys) for keys in asked] == [MOST, MOST, 3]
    failed = await asyncio.gather(together.one(-1, 1.0), together.one(2, 1.0), return_exceptions=True)
    assert [str(one) for one in failed] == ["away", "away"]
    assert await together.one(7, 1.0) == 49
