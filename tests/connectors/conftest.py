"""Processes with vLLM for the tests of its connector; made and installed once a session."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from engines.vllm_engine import Vllm, environment, packed, processes


@pytest.fixture(scope="session")
def vllm_python() -> Path:
    return environment()


@pytest.fixture(scope="session")
def vllm_path(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """kvcascade as users install it, for the engines' PYTHONPATH."""
    return [packed(tmp_path_factory.mktemp("installed"))]


@pytest.fixture(scope="module")
def start_vllm(
    vllm_python: Path, vllm_path: list[Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., Vllm]]:
    """Starts processes with vLLM, ended after the module."""
    with processes(vllm_python, vllm_path, tmp_path_factory.mktemp("vllm")) as start:
        yield start


@pytest.fixture(scope="session")
def tiny_model(vllm_python: Path, vllm_path: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model of two layers with random weights, always the same."""
    folder = tmp_path_factory.mktemp("tiny")
    with processes(vllm_python, vllm_path, folder) as start:
        start().call("tiny", str(folder / "model"))
    return folder / "model"
