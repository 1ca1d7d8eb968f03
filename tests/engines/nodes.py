"""Nodes of a fleet under test: real daemons that share by a Redis or as peers, and what their engines fetch."""

import atexit
import tempfile
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from engines.redis_server import RedisServer
from engines.scripted import Engine, EngineError, eventually

from kvcascade.daemon.protocol import Tier

Start = Callable[..., Any]
BLOCKS = 40


SECRET = b"what all nodes of a fleet under test know"


@cache
def secret_file() -> str:
    """A file with `SECRET`, for this process: hand-offs between nodes without a Redis need one."""
    with tempfile.NamedTemporaryFile(prefix="kvc-secret-", delete=False) as file:
        file.write(SECRET)
    atexit.register(Path(file.name).unlink)
    return file.name


def node(start_daemon: Start, redis: RedisServer | None, name: str, **flags: str) -> Any:
    known = {"cluster_secret_file": secret_file()}
    where = known if redis is None else {"redis_url": redis.url, "redis_deadline": "1s"}
    usual = {"daemon_seed": "0", "cluster_fetch": "always", "peers_listen": "127.0.0.1:0"}
    return start_daemon(cluster_node=name, **{**usual, **where, **flags})


def fetch(engine: Engine, tokens: list[int], request: str = "r", **options: Any) -> dict[str, Any]:
    """What an engine does that waits for other nodes: look up, load, copy, prove."""
    found: dict[str, Any] = engine.lookup(tokens, request, wait_ms=3000, **options)
    assert not found["asking"]
    loaded = foreign = 0
    if found["lease"]:
        loaded = engine.load(found["lease"], found["matched"], 4000)
        judged = engine.read(tokens)
        loaded, foreign = len(judged["intact"]), len(judged["foreign"])
        engine.release(found["lease"])
    assert foreign == 0
    return {"matched": found["matched"], "loaded": loaded, "tiers": [Tier(tier).name for tier in found["tiers"]]}


def stored(daemon: Any, engine: Engine, tokens: list[int], *, where: str) -> None:
    """Stores a prompt, and returns when other nodes can know."""
    before = daemon.status()["cluster"]
    engine.store(tokens)

    def known() -> bool:
        now = daemon.status()["cluster"]
        shared = now["sharing"]["counters"].get("shared_blocks", 0) - before["sharing"]["counters"].get(
            "shared_blocks", 0
        )
        named = now["fleet"]["counters"].get("entries_written", 0) if now["fleet"] else 0
        return shared >= len(tokens) // 16 if where == "redis" else named > 0

    eventually(known)


def absence_forgotten() -> None:
    """What was not there is remembered for a second, and not asked for again."""
    time.sleep(1.1)


def fetched(engine: Engine, tokens: list[int], request: str = "r") -> int:
    """Blocks that an engine gets; 0 while its daemon is not there."""
    try:
        return int(fetch(engine, tokens, request)["loaded"])
    except EngineError:
        return 0
