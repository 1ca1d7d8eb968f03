"""The connector with a clock on its hooks: the seconds that the engine's threads spend in it, for a bench.

Every side writes its sums into a file of its own in the folder BENCH_TIMES: seconds and steps, two doubles.
"""

import os
import time
from pathlib import Path
from typing import Any

import numpy as np

from kvcascade.connectors.vllm import CascadeConnector

SCHEDULER = (
    "on_new_request", "get_num_new_matched_tokens", "update_state_after_alloc", "build_connector_meta",
    "update_connector_output", "request_finished_all_groups", "take_events",
    "get_kv_connector_stats",
)  # fmt: skip
WORKER = (
    "handle_preemptions", "start_load_kv", "wait_for_layer_load", "save_kv_layer", "wait_for_save",
    "get_transfer_results", "get_block_ids_with_load_errors", "build_connector_worker_meta",
    "get_kv_connector_stats",
)  # fmt: skip
A_STEP = ("build_connector_meta", "wait_for_save")


class TimedConnector(CascadeConnector):
    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        side = role.name.lower()
        file = Path(os.environ["BENCH_TIMES"]) / f"{side}-{os.getpid()}"
        file.write_bytes(bytes(16))
        self._sums = np.memmap(file, np.float64, "r+", shape=(2,))
        for name in SCHEDULER if side == "scheduler" else WORKER:
            setattr(self, name, self._timed(getattr(self, name), name in A_STEP))

    def _timed(self, hook: Any, a_step: bool) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            began = time.perf_counter()
            try:
                return hook(*arguments, **named)
            finally:
                self._sums[0] += time.perf_counter() - began
                self._sums[1] += a_step

        return call
