"""Sealed shared memory, generations, refusal by limits, and the device seam on the host."""

import errno
import fcntl
import mmap
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvcascade.config.errors import ConfigError, ProtocolError, TierUnavailable
from kvcascade.tiers.memory import (
    Generations,
    Mapping,
    SharedMemory,
    available_memory,
    copy,
    copy_all,
    human_size,
    import_device_memory,
    open_device_memory,
    register_host,
    require_memory,
)
from kvcascade.tiers.pool import PAGE

MIB = 1 << 20


def open_descriptors() -> set[str]:
    return {entry.name for entry in Path("/proc/self/fd").iterdir()}


@pytest.fixture
def memory() -> Iterator[SharedMemory]:
    shared = SharedMemory("test", MIB)
    yield shared
    shared.close()


# --- sealed memory ---------------------------------------------------------------------------------------------------


def test_an_engine_sees_what_the_daemon_writes_and_the_other_way_round(memory: SharedMemory) -> None:
    fd = memory.export()
    mapping = Mapping(fd, memory.size, writable=True)
    os.close(fd)
    memory.array()[5] = 7
    mapping.array()[6] = 8
    assert (mapping.array()[5], memory.array()[6]) == (7, 8)
    mapping.close()


@pytest.mark.parametrize("size", [0, MIB // 2, 2 * MIB])
def test_a_truncate_of_the_memfd_by_an_engine_fails(memory: SharedMemory, size: int) -> None:
    with pytest.raises(PermissionError):
        os.ftruncate(memory.fd, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(memory.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    memory.array()[:] = 1  # no SIGBUS


def test_a_memfd_that_could_be_truncated_is_not_mapped() -> None:
    fd = os.memfd_create("unsealed", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, MIB)
    with pytest.raises(ProtocolError, match="not sealed"):
        Mapping(fd, MIB, writable=True)
    os.close(fd)


def test_what_is_not_a_memfd_or_too_small_is_not_mapped(memory: SharedMemory, tmp_path: Path) -> None:
    with (tmp_path / "file").open("wb+") as file:
        file.truncate(MIB)
        with pytest.raises(ProtocolError, match="no memfd"):
            Mapping(file.fileno(), MIB, writable=True)
    for size in (MIB + 1, 0):
        with pytest.raises(ProtocolError, match=f"for a pool of {size}"):
            Mapping(memory.fd, size, writable=True)
    fd = memory.dup_readonly()
    with pytest.raises(ProtocolError, match="cannot be mapped"):
        Mapping(fd, MIB, writable=True)
    os.close(fd)


def test_sizes_are_whole_pages() -> None:
    shared = SharedMemory("test", 1)
    assert shared.size == PAGE
    shared.close()
    with pytest.raises(ValueError, match="0 bytes"):
        SharedMemory("test", 0)


def test_no_page_is_touched_before_it_is_populated(memory: SharedMemory) -> None:
    assert os.fstat(memory.fd).st_blocks == 0
    memory.populate(PAGE, 2 * PAGE)
    assert os.fstat(memory.fd).st_blocks * 512 == 2 * PAGE
    memory.array()[PAGE] = 9
    memory.populate(0, MIB)
    assert memory.array()[PAGE] == 9
    with pytest.raises(IndexError):
        memory.populate(0, MIB + 1)


def test_locking_works_or_says_why_not(memory: SharedMemory) -> None:
    reason = memory.lock(0, MIB)
    assert reason is None or "RLIMIT_MEMLOCK" in reason


def test_a_lock_beyond_the_limit_degrades_with_a_reason() -> None:
    # Another user in a process of its own: root is not bound by the limit.
    program = (
        "import os, resource\n"
        "from kvcascade.tiers.memory import SharedMemory\n"
        "resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))\n"
        "os.getuid() or os.setuid(65534)\n"
        "print(SharedMemory('test', 1 << 20).lock(0, 1 << 20))\n"
    )
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, check=True)
    assert "RLIMIT_MEMLOCK is 64 KiB" in done.stdout


def test_huge_pages_are_used_when_there_are_some_and_otherwise_it_is_said_why_not() -> None:
    shared = SharedMemory("test", MIB, huge_pages=True)
    assert shared.huge == (shared.huge_reason is None)
    assert shared.huge or "vm.nr_hugepages" in str(shared.huge_reason)
    shared.populate(0, shared.size)
    shared.array()[-1] = 1
    shared.close()


def test_closing_tolerates_views_that_are_still_held(memory: SharedMemory) -> None:
    mapping = Mapping(memory.fd, memory.size, writable=True)
    view = mapping.view(0, PAGE)
    for side in (mapping, memory):
        side.close()
        side.close()
    view[:] = 3
    assert view.sum() == 3 * PAGE
    with pytest.raises(TierUnavailable, match="closed"):
        mapping.array()
    with pytest.raises(TierUnavailable, match="closed"):
        memory.export()


def test_memory_and_descriptors_are_given_back() -> None:
    before = open_descriptors()
    for _ in range(3):
        shared = SharedMemory("test", MIB)
        Mapping(shared.fd, MIB, writable=True).close()
        shared.close()
        generations = Generations(10)
        os.close(generations.export())
        generations.close()
    assert open_descriptors() == before
    assert "memfd:test" not in Path("/proc/self/maps").read_text()


def test_a_killed_daemon_leaves_no_shared_memory_file() -> None:
    # C13: nothing has a name, so nothing is left for a later start to clean up.
    program = (
        "import time\n"
        "from kvcascade.tiers.memory import Generations, SharedMemory\n"
        "memory = SharedMemory('kvcascade-dram', 8 << 20)\n"
        "memory.populate(0, memory.size)\n"
        "generations = Generations(2048)\n"
        "print('up', flush=True)\n"
        "time.sleep(60)\n"
    )
    before = set(Path("/dev/shm").iterdir())
    for _ in range(3):
        with subprocess.Popen([sys.executable, "-P", "-c", program], stdout=subprocess.PIPE, text=True) as daemon:
            assert daemon.stdout is not None
            assert daemon.stdout.readline() == "up\n"
            daemon.kill()
            assert daemon.wait() == -signal.SIGKILL
    # Other programs of this machine may come and go there.
    assert [left for left in set(Path("/dev/shm").iterdir()) - before if "kvcascade" in left.name] == []


def test_memory_outlives_the_process_that_made_it_as_long_as_an_engine_maps_it(memory: SharedMemory) -> None:
    mapping = Mapping(memory.fd, memory.size, writable=True)
    memory.array()[:] = 4
    memory.close()
    assert mapping.array().sum() == 4 * MIB
    mapping.close()


# --- generations -----------------------------------------------------------------------------------------------------


def test_bumping_a_slot_is_seen_by_a_reader_that_maps_the_page() -> None:
    generations = Generations(3000)
    fd = generations.export()
    reader = Mapping(fd, generations.size, writable=False)
    seen = reader.array().view(np.uint32)
    generations.bump(np.array([0, 2999, 2999], np.uint32))
    assert (seen[0], seen[1], seen[2999]) == (1, 0, 1)
    assert generations.of([0, 1]).tolist() == [1, 0]
    generations.values[1] = 0xFFFFFFFF
    generations.bump([1])
    assert generations.of([1]).tolist() == [0]
    os.close(fd)
    reader.close()
    generations.close()


def test_an_engine_cannot_write_the_generations_by_any_way() -> None:
    generations = Generations(1024)
    fd = generations.export()
    with pytest.raises(ProtocolError, match="cannot be mapped"):
        Mapping(fd, generations.size, writable=True)
    reader = Mapping(fd, generations.size, writable=False)
    with pytest.raises(ValueError, match="read-only"):
        reader.array()[0] = 1
    # Reopening /proc/self/fd gives the same user a writable descriptor; the seal still holds.
    again = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
    for attempt in (
        lambda: mmap.mmap(again, generations.size),
        lambda: os.pwrite(again, b"x", 0),
        lambda: os.ftruncate(again, 0),
    ):
        with pytest.raises(OSError) as refused:
            attempt()
        assert refused.value.errno == errno.EPERM
    generations.bump([0])  # the daemon's own mapping goes on
    assert generations.of([0]).tolist() == [1]
    for descriptor in (fd, again):
        os.close(descriptor)
    reader.close()
    generations.close()


def test_the_pages_behind_generations_are_faulted_in_for_a_slab() -> None:
    generations = Generations(5000)
    generations.populate(1000, 1000)
    generations.populate(4000, 1000)
    generations.close()


# --- what there is ---------------------------------------------------------------------------------------------------


def fake_proc(root: Path, available: int, cgroup: str, mounts: str) -> Path:
    proc = root / "proc"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text(f"MemTotal: 999999999 kB\nMemAvailable: {available >> 10} kB\nHugePages_Free: 0\n")
    (proc / "self/cgroup").write_text(cgroup)
    (proc / "self/mountinfo").write_text(mounts)
    return proc


def write_files(directory: Path, **files: object) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (directory / name.replace("__", ".")).write_text(f"{text}\n")


def mount(root: str, point: Path, kind: str, options: str) -> str:
    escaped = str(point).replace(" ", "\\040")
    return f"30 23 0:28 {root} {escaped} rw,relatime shared:1 - {kind} {kind} {options}\n"


def test_memory_that_is_available_on_this_machine_is_known() -> None:
    available, which = available_memory()
    assert 0 < available <= os.sysconf("SC_PHYS_PAGES") * PAGE
    assert which


def test_the_least_limit_of_nested_v2_cgroups_binds(tmp_path: Path) -> None:
    top = tmp_path / "sys fs"
    write_files(top, memory__stat="inactive_file 0")
    write_files(top / "pod", memory__max=900 * MIB, memory__high="max", memory__current=500 * MIB, memory__stat="a 1")
    write_files(top / "pod/c", memory__max="max", memory__high="max", memory__current=1, memory__stat="a 1")
    proc = fake_proc(tmp_path, 9000 * MIB, "0::/pod/c\n", mount("/", top, "cgroup2", "rw,nsdelegate"))
    assert available_memory(proc) == (400 * MIB, f"memory.max of cgroup {top}/pod")
    # File cache is given back before anybody is killed.
    write_files(top / "pod", memory__stat=f"anon 5\ninactive_file {300 * MIB}")
    assert available_memory(proc)[0] == 700 * MIB
    write_files(top / "pod/c", memory__high=100 * MIB)
    assert available_memory(proc) == (100 * MIB - 1, f"memory.high of cgroup {top}/pod/c")


def test_v1_cgroups_bind_also_inside_a_container_that_mounts_only_its_own(tmp_path: Path) -> None:
    top = tmp_path / "memory"
    write_files(
        top,
        memory__limit_in_bytes=600 * MIB,
        memory__usage_in_bytes=200 * MIB,
        memory__stat=f"total_inactive_file {100 * MIB}",
    )
    mounts = mount("/", tmp_path, "tmpfs", "rw") + mount("/docker/abc", top, "cgroup", "rw,memory")
    proc = fake_proc(tmp_path, 9000 * MIB, "5:cpu,memory:/docker/abc\n1:name=systemd:/\n", mounts)
    assert available_memory(proc) == (500 * MIB, f"memory.limit_in_bytes of cgroup {top}")
    write_files(top, memory__limit_in_bytes=9223372036854771712)
    assert available_memory(proc) == (9000 * MIB, "MemAvailable")


def test_without_cgroups_the_machine_binds(tmp_path: Path) -> None:
    proc = fake_proc(tmp_path, 64 * MIB, "", "")
    (proc / "self/mountinfo").unlink()
    assert available_memory(proc) == (64 * MIB, "MemAvailable")


def test_a_size_that_cannot_be_had_is_refused_with_what_to_change(tmp_path: Path) -> None:
    proc = fake_proc(tmp_path, 64 * MIB, "", "")
    require_memory(60 * MIB, "dram.size", proc)
    with pytest.raises(ConfigError, match=r"dram.size = 1 GiB does not fit: 64 MiB available \(MemAvailable\).*60 MiB"):
        require_memory(1 << 30, "dram.size", proc)


def test_refusal_happens_before_any_page_is_touched() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ConfigError, match=r"hbm\.size = 1024 TiB does not fit"):
        open_device_memory("cpu", 1 << 50)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536 * MIB, "1.5 GiB"), (1 << 50, "1024 TiB")],
)
def test_sizes_are_written_for_people(size: int, text: str) -> None:
    assert human_size(size) == text


# --- the device seam -------------------------------------------------------------------------------------------------


def test_copies_go_between_pools_on_the_host() -> None:
    pool = open_device_memory("cpu", MIB)
    fd = pool.export()
    engine = import_device_memory("cpu", fd, MIB)
    os.close(fd)
    host = np.arange(PAGE, dtype=np.uint64).view(np.uint8)
    copy(pool.view(0, host.nbytes), host)
    back = np.empty_like(host)
    copy_all([(back, engine.view(0, back.nbytes)), (engine.view(64 * PAGE, PAGE), host[:PAGE])])
    assert (back == host).all()
    other = np.empty(PAGE, np.uint8)
    copy(other, pool.view(64 * PAGE, PAGE))
    assert (other == host[:PAGE]).all()
    for side in (pool, engine):
        side.close()


def test_places_of_unequal_length_are_not_copied() -> None:
    with pytest.raises(ValueError, match="2 bytes do not go into 1"):
        copy(np.zeros(1, np.uint8), np.zeros(2, np.uint8))


def test_a_view_outside_the_memory_is_refused(memory: SharedMemory) -> None:
    for offset, length in ((0, MIB + 1), (-1, 1), (MIB, 1), (8, -4)):
        with pytest.raises(IndexError):
            memory.view(offset, length)


def test_a_tensor_shares_the_memory_of_its_pool(memory: SharedMemory) -> None:
    torch = pytest.importorskip("torch")
    tensor = memory.tensor(PAGE, 16)
    tensor.fill_(3)
    assert tensor.dtype == torch.uint8
    assert memory.array()[PAGE : PAGE + 16].tolist() == [3] * 16


def test_an_unknown_device_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match='"tpu:0" is neither'):
        open_device_memory("tpu:0", MIB)


def test_without_cuda_it_is_said_why_and_host_memory_stays_unpinned(memory: SharedMemory) -> None:
    if Path("/dev/nvidiactl").exists():
        pytest.skip("there is a GPU")
    with pytest.raises(TierUnavailable, match="cuda:0"):
        open_device_memory("cuda:0", MIB)
    assert "cuda:0" in str(register_host(memory.array()))


def test_an_earlier_owners_memory_is_adopted_as_it_is():
    first = SharedMemory("kvcascade-test", 2 * PAGE)
    first.array()[:] = 7
    second = SharedMemory.adopt(first.export(), first.size)
    assert (second.array() == 7).all()
    second.populate(0, 2 * PAGE)
    second.array()[0] = 8
    assert (first.array()[0], first.array()[1]) == (8, 7)
    first.close()
    assert second.array()[0] == 8
    second.close()


def test_what_is_no_pool_is_not_adopted_and_stays_the_callers():
    memory = SharedMemory("kvcascade-test", PAGE)
    alone = SharedMemory("kvcascade-test", PAGE, sole_writer=True)
    for fd, size in (
        (memory.export(), 2 * PAGE),  # another size
        (os.memfd_create("unsealed"), 0),
        (os.open("/dev/null", os.O_RDWR), 0),
        (alone.export(), PAGE),  # no second process may write there
    ):
        with pytest.raises(ProtocolError):
            SharedMemory.adopt(fd, size)
        os.close(fd)
    memory.close()
    alone.close()
