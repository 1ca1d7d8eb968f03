"""The other child of a MultiConnector: blocks in a dictionary of this process, loaded and saved within the step.

Options: `behind`, loads are in the background; `fails`, what is loaded is wrong, and said to be; `later`, each first
question has no answer yet; `parameters`, what requests that end give their clients.
"""

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, SupportsHMA

SHELF: dict[bytes, list[Any]] = {}


class Meta(KVConnectorMetadata):  # type: ignore[misc]
    def __init__(self) -> None:
        self.loads: list[tuple[bytes, int]] = []
        self.loading: set[str] = set()
        self.saves: list[tuple[bytes, int]] = []


class ShelfConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._options = dict(vllm_config.kv_transfer_config.kv_connector_extra_config)
        self._size = vllm_config.cache_config.block_size
        self._requests: dict[str, Any] = {}
        self._computed: dict[str, int] = {}
        self._loads: list[tuple[bytes, int]] = []
        self._loading: set[str] = set()
        self._asked: set[str] = set()
        self._failed: set[int] = set()

    @property
    def requires_kv_delivery(self) -> bool:
        return False

    def on_new_request(self, request: Any) -> None:
        self._requests[request.request_id] = request

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        if self._options.get("later") and request.request_id not in self._asked:
            self._asked.add(request.request_id)
            return None, False
        hit, usable = 0, (request.num_tokens - 1) // self._size
        while hit < usable and request.block_hashes[hit] in SHELF:
            hit += 1
        self._computed[request.request_id] = num_computed_tokens
        new = max(0, hit * self._size - num_computed_tokens)
        return new, bool(new) and bool(self._options.get("behind"))

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        first = self._computed.get(request.request_id, 0) // self._size
        for index in range(first, first + num_external_tokens // self._size):
            self._loads.append((request.block_hashes[index], blocks.get_block_ids()[0][index]))
        if num_external_tokens and self._options.get("behind"):
            self._loading.add(request.request_id)

    def build_connector_meta(self, scheduler_output: Any) -> Meta:
        meta = Meta()
        meta.loads, self._loads = self._loads, []
        meta.loading, self._loading = self._loading, set()
        for name, count in scheduler_output.num_scheduled_tokens.items():
            request = self._requests[name]
            (table,) = scheduler_output.kv_connector_block_state.get_block_ids(name)
            full = min((request.num_computed_tokens + count) // self._size, len(request.block_hashes))
            meta.saves += [(request.block_hashes[index], table[index]) for index in range(full)]
        return meta

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, Any]:
        return False, self._options.get("parameters")

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, Any]:
        return self.request_finished(request, block_ids)

    def register_kv_caches(self, kv_caches: Any) -> None:
        self._kv = list(kv_caches.values())

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        for name, block in self._get_connector_metadata().loads:
            for tensor, data in zip(self._kv, SHELF[name], strict=True):
                tensor[block].copy_(data + (1 if self._options.get("fails") else 0))
            if self._options.get("fails"):
                self._failed.add(block)
        self._loading |= self._get_connector_metadata().loading

    def get_finished(self, finished_req_ids: set[str]) -> tuple[None, set[str] | None]:
        loaded, self._loading = self._loading, set()
        return None, loaded or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self._failed = self._failed, set()
        return failed

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None: ...

    def wait_for_save(self) -> None:
        for name, block in self._get_connector_metadata().saves:
            SHELF.setdefault(name, [tensor[block].clone() for tensor in self._kv])
