"""The other child of a MultiConnector: blocks in a dictionary of this process, loaded and saved within the step."""

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, SupportsHMA

SHELF: dict[bytes, list[Any]] = {}


class Meta(KVConnectorMetadata):  # type: ignore[misc]
    def __init__(self) -> None:
        self.loads: list[tuple[bytes, int]] = []
        self.saves: list[tuple[bytes, int]] = []


class ShelfConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._size = vllm_config.cache_config.block_size
        self._requests: dict[str, Any] = {}
        self._computed: dict[str, int] = {}
        self._loads: list[tuple[bytes, int]] = []

    @property
    def requires_kv_delivery(self) -> bool:
        return False

    def on_new_request(self, request: Any) -> None:
        self._requests[request.request_id] = request

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        hit, usable = 0, (request.num_tokens - 1) // self._size
        while hit < usable and request.block_hashes[hit] in SHELF:
            hit += 1
        self._computed[request.request_id] = num_computed_tokens
        return max(0, hit * self._size - num_computed_tokens), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        first = self._computed.get(request.request_id, 0) // self._size
        for index in range(first, first + num_external_tokens // self._size):
            self._loads.append((request.block_hashes[index], blocks.get_block_ids()[0][index]))

    def build_connector_meta(self, scheduler_output: Any) -> Meta:
        meta = Meta()
        meta.loads, self._loads = self._loads, []
        for name, count in scheduler_output.num_scheduled_tokens.items():
            request = self._requests[name]
            (table,) = scheduler_output.kv_connector_block_state.get_block_ids(name)
            full = min((request.num_computed_tokens + count) // self._size, len(request.block_hashes))
            meta.saves += [(request.block_hashes[index], table[index]) for index in range(full)]
        return meta

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        return False, None

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        return False, None

    def register_kv_caches(self, kv_caches: Any) -> None:
        self._kv = list(kv_caches.values())

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        for name, block in self._get_connector_metadata().loads:
            for tensor, data in zip(self._kv, SHELF[name], strict=True):
                tensor[block].copy_(data)

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None: ...

    def wait_for_save(self) -> None:
        for name, block in self._get_connector_metadata().saves:
            SHELF.setdefault(name, [tensor[block].clone() for tensor in self._kv])
