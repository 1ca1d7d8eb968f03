"""What the connector for vLLM counted, in vLLM's own /metrics.

Rule: metrics that cannot be shown are logged, and cost the engine nothing.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

log = logging.getLogger(__name__)


@dataclass
class CascadeStats(KVConnectorStats):  # type: ignore[misc]
    """Sums of one interval; of several ranks, or of the scheduler and the ranks: added up."""

    data: dict[str, Any] = field(default_factory=dict)

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> "CascadeStats":
        names = self.data.keys() | other.data.keys()
        return CascadeStats(data={name: self.data.get(name, 0) + other.data.get(name, 0) for name in names})

    def reduce(self) -> dict[str, int | float]:
        return dict(sorted(self.data.items()))

    def is_empty(self) -> bool:
        return not self.data


class CascadeMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """The sums in vLLM's own /metrics: `vllm:kvcascade_<what>_total`, a few with a label that tells which."""

    # From a counter of ours to (metric, help, label, value).
    KNOWN: Mapping[str, tuple[str, str, str, str]] = {
        **{
            f"hit_tokens_{source}": ("hit_tokens", "Prompt tokens loaded, by where they were found", "source", source)
            for source in ("hbm", "dram", "disk", "redis", "peer", "other")
        },
        **{
            f"miss_{reason}": ("misses", "Requests of which nothing was loaded, by reason", "reason", reason)
            for reason in ("missing", "engine_has_it", "unanswered", "unavailable")
        },
        **{
            name: (name, text, "", "")
            for name, text in (
                ("lookups", "Lookups asked of the daemon"),
                ("loaded_bytes", "Bytes copied from the daemon's memory"),
                ("stored_bytes", "Bytes copied to the daemon's memory"),
                ("loaded_blocks", "Blocks loaded, by all ranks"),
                ("stored_blocks", "Blocks stored, by all ranks"),
                ("failed_blocks", "Blocks whose load failed a check or a deadline"),
                ("load_failures", "Blocks that were promised and computed after all, for each rank that said so"),
                ("blocks_late", "Blocks that did not come up in time"),
                ("blocks_refused", "Blocks that the daemon had no room for"),
                ("save_failures", "Blocks whose save failed"),
                ("saves_late", "Blocks copied aside for which no slots came"),
                ("saves_skipped", "Blocks not saved because too many saves were under way"),
                ("saves_doubted", "Blocks not saved because they may rest on a failed load"),
                ("handoffs_given", "Prompts handed off to another engine"),
                ("handoffs_taken", "Requests of which a hand-off from another engine spared some of the prompt"),
                ("handoffs_missed", "Requests whose hand-off brought nothing"),
                ("handoffs_refused", "Requests with parameters that were not understood"),
            )
        },
    }

    def __init__(self, config: Any, metric_types: Any, labelnames: list[str], engines: dict[int, list[object]]) -> None:
        super().__init__(config, metric_types, labelnames, engines)
        self._children: dict[tuple[str, int], Any] = {}
        made: dict[str, Any] = {}
        try:
            for counter, (name, text, label, value) in self.KNOWN.items():
                if name not in made:
                    labels = [*labelnames, label] if label else labelnames
                    made[name] = self._counter_cls(name=f"vllm:kvcascade_{name}", documentation=text, labelnames=labels)
                for engine, values in engines.items():
                    self._children[counter, engine] = made[name].labels(*values, *([value] if label else []))
        except Exception:
            log.exception("metrics are not shown")

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        try:
            for name, number in transfer_stats_data.items():
                child = self._children.get((name, engine_idx))
                if child is not None and number > 0:
                    child.inc(number)
        except Exception:
            log.exception("metrics are lost")
