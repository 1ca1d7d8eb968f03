"""The Redis tier on a cluster, behind Sentinel, and over TLS: real servers, really killed."""

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from engines.proxy import Proxy
from engines.redis_server import (
    Certificates,
    RedisCluster,
    RedisServer,
    certificates,
    free_port,
    serve,
    serve_cluster,
    serve_watched,
)
from engines.redis_tier import SECRET, SIZE, available, check, fetches, name, opened, sends, settings
from redis.crc import key_slot

from kvcascade.config.errors import ConfigError, TierUnavailable
from kvcascade.tiers.redis import RedisTier


@pytest.fixture
def cluster() -> Iterator[RedisCluster]:
    with serve_cluster() as one:
        yield one


def place(tier: RedisTier, number: int) -> int:
    """Which of the three masters had a block's slot at the start."""
    return key_slot(tier.key_of(name(number))) * 3 // 16384


async def test_a_cluster_has_the_blocks_on_all_its_nodes(cluster: RedisCluster) -> None:
    async with opened(cluster.url) as tier:
        assert await tier.store(sends(range(60)), 5) == [None] * 60
        assert {place(tier, n) for n in range(60)} == {0, 1, 2}
        assert all(node.client().dbsize() for node in cluster.nodes)
        assert await tier.present([name(n) for n in range(70)], 5) == 60
        jobs = fetches(range(60))
        reasons = await tier.fetch(jobs, 5)
        assert reasons == [None] * 60
        check(jobs, reasons, range(60))
        await tier.write([(b"a%d" % n, b"%d" % n) for n in range(30)], 10, 5)
        assert await tier.read([b"a%d" % n for n in range(31)], 5) == [b"%d" % n for n in range(30)] + [None]
        assert list(tier.status()["nodes"].values()) == [None] * 3


async def test_one_node_of_a_cluster_that_dies_takes_its_own_blocks_alone(cluster: RedisCluster) -> None:
    """An error of one node in a batch: positions stay, others' bytes are true, the circuit of one node is its own."""
    async with opened(cluster.url) as tier:
        await tier.store(sends(range(60)), 5)
        victim = (place(tier, 0) + 1) % 3
        dead = [n for n in range(60) if place(tier, n) == victim]
        cluster.nodes[victim].kill()
        for _ in range(3):
            jobs = fetches(range(60))
            reasons = await tier.fetch(jobs, 5)
            assert [n for n, reason in enumerate(reasons) if reason] == dead
            check(jobs, reasons, range(60))
            assert tier.available
        assert await tier.present([name(n) for n in range(60)], 5) == dead[0]
        with pytest.raises(TierUnavailable):
            await tier.present([name(dead[0])], 5)
        reasons = await tier.store(sends(range(60)), 5)
        assert [n for n, reason in enumerate(reasons) if reason] == dead
        assert sum(reason is not None for reason in tier.status()["nodes"].values()) <= 1
        cluster.nodes[victim].start()
        for _ in range(200):
            if (await tier.store(sends(range(60)), 5)) == [None] * 60:
                break
            await asyncio.sleep(0.1)
        assert await tier.fetch(fetches(range(60)), 5) == [None] * 60


async def caught_up(master: RedisServer) -> None:
    """Until the replica has all that was written by now. WAIT would tell of what its own connection wrote."""
    written = master.client().info("replication")["master_repl_offset"]
    for _ in range(200):
        replica = master.client().info("replication").get("slave0", {})
        if replica.get("state") == "online" and replica["offset"] >= written:
            return
        await asyncio.sleep(0.1)
    pytest.fail(f"the replica is behind: {replica}, {written}")


async def test_a_replica_takes_the_place_of_a_master_that_dies() -> None:
    """Service goes on meanwhile: the prefix ends at the first block that only the dead one had."""
    with serve_cluster(replicas=True) as cluster:
        async with opened(cluster.url) as tier:
            assert await tier.store(sends(range(60)), 30) == [None] * 60
            for master in cluster.nodes[:3]:
                await caught_up(master)
            victim = (place(tier, 0) + 1) % 3
            dead = [n for n in range(60) if place(tier, n) == victim]
            cluster.nodes[victim].kill()
            jobs = fetches(range(60))
            reasons = await tier.fetch(jobs, 30)
            assert [n for n, reason in enumerate(reasons) if reason] == dead
            check(jobs, reasons, range(60))
            assert await tier.present([name(n) for n in range(60)], 5) == dead[0]
            assert tier.available
            rounds = 0
            while reasons != [None] * 60:
                assert (rounds := rounds + 1) < 300, reasons
                await asyncio.sleep(0.1)
                jobs = fetches(range(60))
                reasons = await tier.fetch(jobs, 30)
                assert {n for n, reason in enumerate(reasons) if reason} <= set(dead)
                check(jobs, reasons, range(60))
            assert cluster.nodes[3 + victim].client().info("replication")["role"] == "master"
            assert await tier.present([name(n) for n in range(60)], 5) == 60
            assert await tier.store(sends(range(60, 80)), 30) == [None] * 20
            # The old master comes back as a replica of the new one, and changes nothing.
            cluster.nodes[victim].start()
            jobs = fetches(range(80))
            reasons = await tier.fetch(jobs, 30)
            assert reasons == [None] * 80
            check(jobs, reasons, range(80))


def swallow(proxy: Proxy) -> None:
    proxy.hole = True


def delay(proxy: Proxy) -> None:
    proxy.delay = 4.0


def trickle(proxy: Proxy) -> None:
    proxy.rate = 20


def reset(proxy: Proxy) -> None:
    proxy.refuse = True
    proxy.reset()


def half_close(proxy: Proxy) -> None:
    proxy.refuse = True
    proxy.half_close()


@pytest.mark.parametrize("fault", [swallow, delay, trickle, reset, half_close])
async def test_a_bad_way_to_one_node_of_a_cluster_costs_its_own_blocks_alone(
    fault: Callable[[Proxy], None], caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever happens to its answers, the others' blocks come, and each at its own position."""
    with contextlib.ExitStack() as stack:

        def prepare(cluster: RedisCluster) -> None:
            proxy = stack.enter_context(Proxy(cluster.nodes[1].port))
            cluster.announce(1, proxy.port)
            proxies.append(proxy)

        proxies: list[Proxy] = []
        cluster = stack.enter_context(serve_cluster(prepare=prepare))
        (proxy,) = proxies
        async with opened(cluster.url, deadline="3s") as tier:
            assert await tier.store(sends(range(60)), 30) == [None] * 60
            assert proxy.connections
            bad = [n for n in range(60) if place(tier, n) == 1]
            fault(proxy)
            # At first nobody knows of it; then the node is left alone.
            told: list[str] = []
            for _ in range(4):
                jobs = fetches(range(60))
                reasons = await tier.fetch(jobs, 3)
                check(jobs, reasons, range(60))
                assert [n for n, reason in enumerate(reasons) if reason] == bad
                reasons = await tier.store(sends(range(60)), 3)
                assert [n for n, reason in enumerate(reasons) if reason] == bad
                assert await tier.present([name(n) for n in range(60)], 5) == bad[0] > 0
                assert tier.available
                told += tier.problems()
            assert any(one.startswith(f"redis node 127.0.0.1:{proxy.port} is left alone: ") for one in told)
            proxy.hole = proxy.refuse = False
            proxy.rate, proxy.delay = 0, 0.0
            proxy.reset()
            for _ in range(300):
                jobs = fetches(range(60))
                reasons = await tier.fetch(jobs, 3)
                check(jobs, reasons, range(60))
                if reasons == [None] * 60:
                    break
                await asyncio.sleep(0.1)
            assert reasons == [None] * 60
            assert tier.problems() == []
    assert "Exception" not in caplog.text


@pytest.mark.parametrize("endpoint", ["ip", "unknown-endpoint"])
async def test_slots_that_move_are_followed(
    cluster: RedisCluster, endpoint: str, caplog: pytest.LogCaptureFixture
) -> None:
    # A node of an unknown endpoint is reached at the host of the one that names it.
    for node in cluster.nodes:
        node.client().config_set("cluster-preferred-endpoint-type", endpoint)
    async with opened(cluster.url) as tier:
        await tier.store(sends(range(20)), 5)
        number = next(n for n in range(20) if place(tier, n) == 0)
        key = tier.key_of(name(number))
        slot = key_slot(key)
        source, target = cluster.nodes[0].client(), cluster.nodes[1].client()
        ids = [node.client().execute_command("CLUSTER", "MYID").decode() for node in cluster.nodes]
        target.execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", ids[0])
        source.execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", ids[1])
        source.execute_command("MIGRATE", "127.0.0.1", cluster.nodes[1].port, key, 0, 5000)

        async def all_there() -> None:
            jobs = fetches(range(20))
            reasons = await tier.fetch(jobs, 5)
            assert reasons == [None] * 20
            check(jobs, reasons, range(20))
            assert await tier.present([name(n) for n in range(20)], 5) == 20

        await all_there()  # ASK
        assert await tier.store(sends(range(20)), 5) == [None] * 20
        for node in cluster.nodes:
            node.client().execute_command("CLUSTER", "SETSLOT", slot, "NODE", ids[1])
        await all_there()  # MOVED
        assert await tier.store(sends(range(20)), 5) == [None] * 20
        assert tier.available
        assert "Exception" not in caplog.text


async def test_connections_to_nodes_that_are_gone_are_closed() -> None:
    # Where pods change their addresses nodes come back at others, for ever.
    with ExitStack() as stack:
        proxy = stack.enter_context(Proxy(0))

        def prepare(cluster: RedisCluster) -> None:
            proxy.target = cluster.nodes[0].port
            cluster.announce(0, proxy.port)

        cluster = stack.enter_context(serve_cluster(prepare=prepare))
        cluster.ports.clear()
        async with opened(cluster.url, threads=1) as tier:
            assert await tier.store(sends(range(20)), 5) == [None] * 20
            assert await tier.present([name(n) for n in range(20)], 5) == 20
            before = connections(proxy.port)
            assert before >= 3  # those of the threads: each closes its own, when it is asked for something
            cluster.nodes[0].client().config_set("cluster-announce-port", cluster.nodes[0].port)
            proxy.refuse = True
            proxy.half_close()
            reasons: list[str | None] = []
            for _ in range(500):
                reasons = await tier.fetch(fetches(range(20)), 5)
                await tier.store(sends(range(20)), 5)
                with suppress(TierUnavailable):
                    await tier.present([name(n) for n in range(20)], 5)
                if reasons == [None] * 20 and not connections(proxy.port):
                    break
                await asyncio.sleep(0.05)
            assert reasons == [None] * 20
            assert not connections(proxy.port)
            assert tier.available


def connections(port: int) -> int:
    """Of this process to a port."""
    listed = [line.split() for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]]
    ours = {str(one.readlink()) for one in Path("/proc/self/fd").iterdir() if one.is_symlink()}
    return sum(one[2].endswith(f":{port:04X}") and f"socket:[{one[9]}]" in ours for one in listed)


async def test_a_cluster_away_at_the_start_and_back_later() -> None:
    with serve_cluster() as cluster:
        for node in cluster.nodes:
            node.kill()
        async with opened(cluster.url) as tier:
            assert not tier.available
            with pytest.raises(TierUnavailable):
                await tier.present([name(0)], 1)
            for node in cluster.nodes:
                node.start()
            await available(tier)


async def test_the_master_that_sentinel_makes_is_found() -> None:
    with serve_watched() as watched:
        async with opened(watched.url) as tier:
            assert tier.available, tier.status()
            assert await tier.store(sends(range(8)), 5) == [None] * 8
            await caught_up(watched.master)
            watched.fail_over()
            assert await tier.fetch(fetches(range(8)), 5) != [None] * 8
            await available(tier)
            jobs = fetches(range(8))
            reasons = await tier.fetch(jobs, 5)
            assert reasons == [None] * 8
            check(jobs, reasons, range(8))
            assert await tier.store(sends(range(8, 10)), 5) == [None] * 2
            assert tier.status()["role"] == "master"


def refused(tier: RedisTier) -> str:
    """What `status` says after the first probe, which had no success."""
    assert not tier.available
    return str(tier.status())


@pytest.mark.parametrize("tls", [False, True])
async def test_sentinels_that_want_a_login_and_tls_have_their_own(tmp_path: Path, tls: bool) -> None:
    """The passwords differ, and neither is shown to the other's servers."""
    certified = Certificates(*certificates(tmp_path)) if tls else None
    for name_, text in (("redis", "of-redis\n"), ("sentinel", "of-the-sentinel\n"), ("wrong", "of-nobody\n")):
        (tmp_path / name_).write_text(text)
        (tmp_path / name_).chmod(0o600)
    with serve_watched("of-redis", "of-the-sentinel", certified) as watched:
        more = {"password_file": str(tmp_path / "redis"), **(certified.settings if certified else {})}
        more["connect_timeout"] = "5s"  # each connection asks a Sentinel first, both by TLS
        right = {**more, "sentinel_password_file": str(tmp_path / "sentinel")}
        async with opened(watched.url, **right) as tier:
            assert tier.available, tier.status()
            assert await tier.store(sends(range(8)), 5) == [None] * 8
            await caught_up(watched.master)
            watched.fail_over()
            await tier.fetch(fetches(range(8)), 5)
            await available(tier)
            jobs = fetches(range(8))
            reasons = await tier.fetch(jobs, 5)
            assert reasons == [None] * 8
            check(jobs, reasons, range(8))
        for wrong in (more, {**right, "sentinel_password_file": str(tmp_path / "wrong")}):
            async with opened(watched.url, **wrong) as tier:
                told = refused(tier)
                assert "Authentication required" in told or "invalid username-password" in told
                assert not any(word in told for word in ("of-redis", "of-the-sentinel", "of-nobody"))


async def test_sentinels_without_tls_before_a_redis_with_it(tmp_path: Path) -> None:
    certified = Certificates(*certificates(tmp_path))
    with serve_watched(tls=certified, plain_sentinel=True) as watched:
        async with opened(watched.url, **certified.settings, sentinel_tls="off") as tier:
            assert tier.available, tier.status()
        async with opened(watched.url, **certified.settings) as tier:
            assert "sentinel" in refused(tier)


async def test_over_tls_with_certificates_of_both_sides(tmp_path: Path) -> None:
    ca, cert, key = certificates(tmp_path)
    port = free_port()
    options = ("--tls-port", str(port), "--tls-cert-file", str(cert), "--tls-key-file", str(key))
    with serve(*options, "--tls-ca-cert-file", str(ca)) as server:
        url = f"rediss://127.0.0.1:{port}"
        async with opened(url, tls_ca=str(ca), tls_cert=str(cert), tls_key=str(key)) as tier:
            assert tier.available, tier.status()
            for size in (SIZE, 2 << 20):
                assert await tier.store(sends(range(6), size), 5) == [None] * 6
                jobs = fetches(range(6), size)
                reasons = await tier.fetch(jobs, 5)
                assert reasons == [None] * 6
                check(jobs, reasons, range(6))
        async with opened(url, tls_ca=str(ca)) as tier:
            assert not tier.available
        async with opened(url) as tier:
            assert not tier.available and "certificate" in str(tier.status()["reason"]).lower()
        async with opened(f"rediss://127.0.0.1:{server.port}", tls_ca=str(ca)) as tier:
            assert not tier.available
    with pytest.raises(ConfigError, match=r"redis\.tls_ca: it cannot be used"):
        RedisTier(settings(url, tls_ca=str(key)), SECRET)
    both = tmp_path / "both.pem"
    both.write_bytes(cert.read_bytes() + key.read_bytes())
    for field, file, files in (
        ("tls_key", key, {"tls_cert": cert, "tls_key": key}),
        ("tls_cert", both, {"tls_cert": both}),
    ):
        options = settings(url, **{name_: str(path) for name_, path in files.items()})
        file.chmod(0o640)
        with pytest.raises(ConfigError, match=rf"redis\.{field}: .* is open to others \(mode 0640\)"):
            RedisTier(options, SECRET)
        file.chmod(0o600)
        RedisTier(options, SECRET)
