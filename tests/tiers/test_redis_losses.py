"""A Redis that is there and has lost what it held, in whole or in part: the tier says since when nothing is sure."""

import asyncio
import time
from collections.abc import Iterator

import pytest
from engines.redis_server import RedisCluster, RedisServer, serve, serve_cluster, serve_watched
from engines.redis_tier import fetches, name, opened, sends

from kvcascade.tiers import redis as redis_module
from kvcascade.tiers.redis import RedisTier


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with serve() as one:
        yield one


@pytest.fixture
def cluster() -> Iterator[RedisCluster]:
    with serve_cluster() as one:
        yield one


async def until_lost(tier: RedisTier, losses: int = 1) -> None:
    for _ in range(400):
        if tier.counters["data_losses"] >= losses and tier.available:
            return
        await asyncio.sleep(0.05)
    raise AssertionError(tier.status())


async def test_what_is_lost_is_noticed_once(server: RedisServer) -> None:
    async with opened(server.url) as tier:
        before = time.monotonic()
        server.client().flushall()
        await until_lost(tier)
        assert before < tier.lost_at < time.monotonic()
        assert tier.status()["lost_s"] < 30
        server.kill()
        server.start()
        await until_lost(tier, 2)
        await asyncio.sleep(redis_module.PROBE_S + 0.5)
        assert tier.counters["data_losses"] == 2


async def test_a_restart_that_keeps_the_data_loses_nothing(server: RedisServer) -> None:
    async with opened(server.url) as tier:
        server.client().save()
        failures = tier.counters["failures"]
        server.kill()
        for _ in range(400):
            if tier.counters["failures"] > failures:
                break
            await asyncio.sleep(0.05)
        server.start()
        for _ in range(400):
            if tier.available:
                break
            await asyncio.sleep(0.05)
        assert tier.available
        assert not tier.counters["data_losses"] and tier.lost_at == float("-inf")


async def test_a_mark_that_somebody_spoils_is_no_loss_and_does_no_harm(server: RedisServer) -> None:
    async with opened(server.url) as tier:
        client = server.client()
        for spoil in (
            lambda: client.set("kvcascade:mark:0", bytes(5 << 20)),
            lambda: client.lpush("kvcascade:mark:0", 1),
        ):
            client.delete("kvcascade:mark:0")
            spoil()
            await asyncio.sleep(redis_module.PROBE_S + 0.3)
            assert tier.available and await tier.store(sends(range(2)), 5) == [None] * 2


async def test_what_redis_evicts_is_noticed(server: RedisServer) -> None:
    # G4: under load and allkeys-lru, blocks go at any moment.
    client = server.client()
    client.config_set("maxmemory-policy", "allkeys-lru")
    async with opened(server.url) as tier:
        assert tier.evicted_at == float("-inf")
        client.config_set("maxmemory", client.info("memory")["used_memory"] + (1 << 20))
        for first in range(0, 64, 8):
            await tier.store(sends(range(first, first + 8)), 5)
        for _ in range(400):
            if tier.evicted_at > 0:
                break
            await asyncio.sleep(0.05)
        assert tier.status()["evicted"] > 0 and not tier.counters["data_losses"]
        client.config_set("maxmemory", 0)  # or the answers themselves would cost more blocks their place
        there = await tier.renew([name(number) for number in range(64)])
        assert True in there and False in there
        assert [reason is None for reason in await tier.fetch(fetches(range(64)), 5)] == there


async def test_a_shard_of_a_cluster_that_lost_its_data_is_noticed(cluster: RedisCluster) -> None:
    async with opened(cluster.url) as tier:
        assert sum(len(node.client().keys("kvcascade:mark:*")) for node in cluster.nodes) == 3
        cluster.nodes[1].client().flushall()
        await until_lost(tier)


async def test_a_fail_over_to_a_replica_that_had_nothing_is_noticed() -> None:
    with serve_watched() as watched:
        async with opened(watched.url) as tier:
            # It goes on as if it had all: a replica whose data was lost on the way.
            replica = watched.replica.client()
            for _ in range(400):
                if replica.exists("kvcascade:mark:0"):
                    break
                await asyncio.sleep(0.05)
            replica.config_set("replica-read-only", "no")
            replica.flushall()
            await asyncio.to_thread(watched.fail_over)
            await until_lost(tier)
            assert await tier.store(sends(range(2)), 5) == [None] * 2
