"""A disk tier on a directory, and file systems of every kind to put it on."""

import subprocess
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from engines.disk import MIB, Tiers, mounted, open_descriptors


@pytest.fixture
async def tiers(tmp_path: Path) -> AsyncIterator[Tiers]:
    before = open_descriptors()
    opened = Tiers(tmp_path / "disk")
    yield opened
    await opened.close()
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("kvcascade-disk")]
    assert open_descriptors() <= before


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    yield from mounted("tmpfs", tmp_path / "small", "-t", "tmpfs", "-o", "size=8m", "none")


@pytest.fixture
def plain_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system that knows neither direct IO nor fallocate."""
    yield from mounted("ramfs", tmp_path / "plain", "-t", "ramfs", "none")


@pytest.fixture
def image_disk(tmp_path: Path) -> Iterator[Path]:
    image = tmp_path / "image"
    with image.open("wb") as file:
        file.truncate(64 * MIB)
    subprocess.run(["mkfs.ext4", "-q", image], check=True)
    yield from mounted("a loop device", tmp_path / "loop", "-o", "loop", str(image))
