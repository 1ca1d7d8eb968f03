"""Memory that processes share: sealed memfds, generations, and device memory behind one seam.

This is the only file that touches memfd, mlock, madvise and CUDA; everything else sees numpy views, file descriptors
and `copy`. The rule that holds throughout: what cannot be had is said before a page is touched (`require_memory`), and
what only makes things faster (huge pages, mlock, registration with CUDA) degrades with a reason and never fails.

The daemon owns a `SharedMemory` or device memory and hands its descriptor out; an engine opens it with `Mapping` or
`import_device_memory`. Nothing has a name in a file system, so nothing is left when both sides are killed (fault C13).
"""

import ctypes
import errno
import fcntl
import mmap
import os
import re
import resource
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final, Protocol, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvcascade.config.errors import ConfigError, ProtocolError, TierUnavailable

from .pool import PAGE

if TYPE_CHECKING:
    from torch import Tensor

# Left to the daemon's index and to everybody else when a pool is sized; a sixteenth where memory is small.
HEADROOM: Final = 256 << 20
# Larger registrations block other CUDA calls of the process for seconds.
REGISTER_CHUNK: Final = 1 << 30

# Not in Python 3.11's fcntl and mmap modules; from linux/fcntl.h and asm-generic/mman-common.h.
_F_SEAL_FUTURE_WRITE: Final = 0x10
_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_MADV_POPULATE_WRITE: Final = 23
_UNLIMITED: Final = 1 << 60

_libc: Final = ctypes.CDLL(None, use_errno=True)
for _call in (_libc.mlock, _libc.madvise):
    _call.restype = ctypes.c_int
_libc.mlock.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

HostBytes = NDArray[np.uint8]


def human_size(size: int) -> str:
    """A size for a message: `1536 MiB` is "1.5 GiB"."""
    value, unit = float(size), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{value:.1f}".removesuffix(".0") + f" {unit}"


# --- what there is ---------------------------------------------------------------------------------------------------


def available_memory(proc: Path = Path("/proc")) -> tuple[int, str]:
    """Bytes that this process may still take without being killed for it, and which limit says so.

    The least of the machine's MemAvailable and of every memory cgroup from ours to the top, v1 and v2: its limit less
    what is charged to it, where inactive file cache does not count since the kernel gives it back first.
    """
    best, which = _meminfo(proc)["MemAvailable"], "MemAvailable"
    for directory, version in _memory_cgroups(proc):
        for limit in ("memory.max", "memory.high") if version == 2 else ("memory.limit_in_bytes",):
            most = _read_number(directory / limit)
            if most is None or most >= _UNLIMITED:
                continue
            used = _read_number(directory / ("memory.current" if version == 2 else "memory.usage_in_bytes")) or 0
            cache = _read_stat(directory / "memory.stat", "inactive_file" if version == 2 else "total_inactive_file")
            left = max(0, most - max(0, used - cache))
            if left < best:
                best, which = left, f"{limit} of cgroup {directory}"
    return best, which


def require_memory(size: int, setting: str, proc: Path = Path("/proc")) -> None:
    """Refuse a size that cannot be had; nothing is allocated or touched.

    Raises ConfigError that names the setting, the size, what is available and which limit binds. Sizes of several pools
    are to be asked for together: none of them is charged before it is faulted in.
    """
    available, which = available_memory(proc)
    most = available - min(HEADROOM, available // 16)
    if size > most:
        raise ConfigError(
            f"{setting} = {human_size(size)} does not fit: {human_size(available)} available ({which}), "
            f"of which {human_size(available - most)} are kept free; set it to at most {human_size(most)}"
        )


def _meminfo(proc: Path) -> dict[str, int]:
    found = re.findall(r"^(\w+):\s+(\d+) kB$", (proc / "meminfo").read_text(), re.MULTILINE)
    return {name: int(kib) << 10 for name, kib in found}


def _memory_cgroups(proc: Path) -> Iterator[tuple[Path, int]]:
    """(directory, cgroup version) of our memory cgroup and its ancestors, as far as they are mounted."""
    ours: dict[int, str] = {}
    for line in _read_lines(proc / "self/cgroup"):
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            ours[2] = path
        elif "memory" in controllers.split(","):
            ours[1] = path
    for line in _read_lines(proc / "self/mountinfo"):
        before, _, after = line.partition(" - ")
        root, point = (re.sub(r"\\([0-7]{3})", lambda m: chr(int(m[1], 8)), s) for s in before.split(" ")[3:5])
        kind, _, options = after.split(" ", 2)
        version = {"cgroup": 1, "cgroup2": 2}.get(kind)
        if version not in ours or (version == 1 and "memory" not in re.split("[ ,]", options)):
            continue
        # A container may see a path of the host, mounted from there: what lies above the mount is out of sight.
        path = ours[version]
        inside = path[len(root) :] if path == root or path.startswith(f"{root}/") else path
        top = Path(point)
        directory = top / inside.strip("/")
        if ".." in directory.parts or not directory.is_dir():
            directory = top
        yield directory, version
        while directory != top:
            directory = directory.parent
            yield directory, version


def _read_lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _read_number(path: Path) -> int | None:
    """The number in a one-line file; None when there is no such file or it says "max"."""
    lines = _read_lines(path)
    return int(lines[0]) if lines and lines[0].isdigit() else None


def _read_stat(path: Path, name: str) -> int:
    return next((int(line.split()[1]) for line in _read_lines(path) if line.startswith(f"{name} ")), 0)


# --- shared memory ---------------------------------------------------------------------------------------------------


class Memory(Protocol):
    """Bytes of a pool as one process sees them, on the host or on a device."""

    device: str
    size: int

    def view(self, offset: int, length: int) -> "Place":
        """The bytes [offset, offset + length) for `copy`; valid until `close`. IndexError outside the memory."""
        ...

    def tensor(self, offset: int, length: int) -> "Tensor":
        """The same as a torch.uint8 tensor on `device`, sharing memory; not to be used after `close`. Needs torch."""
        ...

    def close(self) -> None:
        """Give the memory up in this process. Idempotent."""
        ...


class DeviceMemory(Memory, Protocol):
    """Memory that the daemon owns and exports."""

    def export(self) -> int:
        """A new descriptor for another process, which imports it by `import_device_memory`; the caller closes it."""
        ...


class _HostMemory:
    """A mapping of a memfd as an array; what the owner's and the engine's side have in common."""

    device = "cpu"

    def __init__(self, mapping: mmap.mmap, size: int) -> None:
        self.size = size
        self._mapping: mmap.mmap | None = mapping
        self._array: HostBytes | None = np.frombuffer(mapping, np.uint8)

    def array(self) -> HostBytes:
        """All bytes, shape (size,); TierUnavailable after `close`."""
        if self._array is None:
            raise TierUnavailable("the shared memory is closed")
        return self._array

    def view(self, offset: int, length: int) -> HostBytes:
        if not 0 <= offset <= offset + length <= self.size:
            raise IndexError(f"bytes [{offset}, {offset + length}) of {self.size}")
        return self.array()[offset : offset + length]

    def tensor(self, offset: int, length: int) -> "Tensor":
        import torch

        return torch.from_numpy(self.view(offset, length))  # type: ignore[no-any-return, unused-ignore]

    def close(self) -> None:
        """Drop the mapping. Views that are still held keep their memory, which goes with the last of them."""
        self._array = None
        mapping, self._mapping = self._mapping, None
        if mapping is not None:
            with suppress(BufferError):
                mapping.close()


class SharedMemory(_HostMemory):
    """A memfd of this process, mapped read-write and sealed, so that nobody it is given to can shrink or grow it.

    Unsealed, one truncate by an engine would kill everybody by SIGBUS. `size` is rounded up to whole pages; no page is
    touched before `populate` or the first write. With `huge_pages`, pages come from the kernel's reserve where it
    suffices; else ordinary ones are taken and `huge_reason` says why. With `sole_writer` no mapping made later can be
    writable, however a process reopens the descriptor. TierUnavailable when the kernel gives no memfd at all.
    """

    def __init__(self, name: str, size: int, *, huge_pages: bool = False, sole_writer: bool = False) -> None:
        if size <= 0:
            raise ValueError(f"shared memory of {size} bytes")
        self.huge = False
        self.huge_reason: str | None = None
        self._adopted = False
        mapping: mmap.mmap | None = None
        if huge_pages:
            huge_page = _meminfo(Path("/proc")).get("Hugepagesize", 2 << 20)
            huge_size = -(-size // huge_page) * huge_page
            try:
                self.fd, mapping = _map_memfd(name, huge_size, os.MFD_HUGETLB)
                self.huge, size = True, huge_size
            except OSError as error:
                free = _meminfo(Path("/proc")).get("HugePages_Free", 0) * huge_page >> 10
                self.huge_reason = (
                    f"{error.strerror}; {human_size(free)} of {human_size(size)} are reserved and free "
                    "(vm.nr_hugepages)"
                )
        if mapping is None:
            size = -(-size // PAGE) * PAGE
            try:
                self.fd, mapping = _map_memfd(name, size, 0)
            except OSError as error:
                raise TierUnavailable(f"no shared memory of {human_size(size)}: {error.strerror}") from error
        super().__init__(mapping, size)
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS | (_F_SEAL_FUTURE_WRITE if sole_writer else 0))

    @classmethod
    def adopt(cls, fd: int, size: int) -> "SharedMemory":
        """The memory behind a descriptor of an earlier owner, contents kept; takes the descriptor over.

        ProtocolError, with the descriptor left to the caller, when it is no memfd of exactly `size` bytes, sealed as
        ours are, that can be mapped for writing.
        """
        try:
            seals, there = fcntl.fcntl(fd, fcntl.F_GET_SEALS), os.fstat(fd)
            if seals & _SEALS != _SEALS or there.st_size != size:
                raise ProtocolError(f"a memfd of {there.st_size} bytes, seals {seals:#x}, is no pool of {size} bytes")
            mapping = mmap.mmap(fd, size)
        except OSError as error:
            raise ProtocolError(f"the descriptor of a pool cannot be mapped: {error.strerror}") from error
        memory = cls.__new__(cls)
        memory.fd = fd
        memory.huge, memory.huge_reason = there.st_blksize > PAGE, None
        memory._adopted = True
        _HostMemory.__init__(memory, mapping, size)
        return memory

    def populate(self, offset: int, length: int) -> None:
        """Fault pages in for writing, contents kept; blocks about 1 s a GiB and releases the GIL.

        TierUnavailable when there is no memory for them: said here, where a first write would kill the process.
        """
        view = self.view(offset, length)
        while _libc.madvise(view.ctypes.data, length, _MADV_POPULATE_WRITE):
            failure = ctypes.get_errno()
            if failure == errno.EINVAL:  # before Linux 5.14
                if self._adopted:
                    view[::PAGE].max()  # others may be writing there
                else:
                    view[::PAGE] |= 0
                return
            if failure not in (errno.EINTR, errno.EAGAIN):
                raise TierUnavailable(f"{human_size(length)} could not be faulted in: {os.strerror(failure)}")

    def lock(self, offset: int, length: int) -> str | None:
        """Keep pages from being swapped out, as long as the memory is mapped; the reason when that is refused."""
        view = self.view(offset, length)
        if not _libc.mlock(view.ctypes.data, length):
            return None
        failure = os.strerror(ctypes.get_errno())
        most = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
        limit = "no limit" if most == resource.RLIM_INFINITY else human_size(most)
        return f"mlock of {human_size(length)}: {failure} (RLIMIT_MEMLOCK is {limit}; systemd: LimitMEMLOCK)"

    def dup_readonly(self) -> int:
        """A new descriptor that is open for reading alone; the caller closes it. See `sole_writer` for a promise."""
        return os.open(f"/proc/self/fd/{self._open_fd()}", os.O_RDONLY | os.O_CLOEXEC)

    def export(self) -> int:
        """A new descriptor, for reading and writing; the caller closes it."""
        return os.dup(self._open_fd())

    def disown(self) -> None:
        """Unmap, and leave the descriptor to the caller."""
        super().close()

    def _open_fd(self) -> int:
        self.array()  # A number that is closed may be another file's by now.
        return self.fd

    def close(self) -> None:
        if self._mapping is not None:
            os.close(self.fd)
        super().close()


def _map_memfd(name: str, size: int, flags: int) -> tuple[int, mmap.mmap]:
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | flags)
    try:
        os.ftruncate(fd, size)
        return fd, mmap.mmap(fd, size)
    except BaseException:
        os.close(fd)
        raise


class Mapping(_HostMemory):
    """An engine's view of a memfd that the daemon sent; the descriptor may be closed afterwards.

    Raises ProtocolError when it is not a memfd sealed against shrinking (a truncate would kill this process by SIGBUS),
    is smaller than `size`, or may not be mapped for writing although `writable` asks for it.
    """

    def __init__(self, fd: int, size: int, writable: bool) -> None:
        try:
            seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
            there = os.fstat(fd).st_size
        except OSError as error:
            raise ProtocolError(f"the daemon sent a descriptor that is no memfd: {error.strerror}") from error
        if not seals & fcntl.F_SEAL_SHRINK:
            raise ProtocolError("the daemon sent a memfd that is not sealed against shrinking")
        if not 0 < size <= there:
            raise ProtocolError(f"the daemon sent a memfd of {there} bytes for a pool of {size}")
        try:
            mapping = mmap.mmap(fd, size, prot=mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0))
        except OSError as error:
            raise ProtocolError(f"the daemon's memfd cannot be mapped: {error.strerror}") from error
        super().__init__(mapping, size)


class Generations:
    """The generation of every page of a pool: a u32 that is bumped when the slot that begins there is handed on.

    The daemon alone writes; engines map a descriptor of which no writable mapping can be made. A reader notes a slot's
    generation with its lease and compares it after its copy has completed: changed means that the bytes are not those
    asked for. `bump` belongs to the loop's thread.
    """

    def __init__(self, pages: int) -> None:
        self._memory = SharedMemory("kvcascade-generations", pages * 4, sole_writer=True)
        self.values: NDArray[np.uint32] = self._memory.array().view(np.uint32)[:pages]

    @property
    def size(self) -> int:
        """Bytes to map."""
        return self._memory.size

    def of(self, pages: ArrayLike) -> NDArray[np.uint32]:
        """The generations of these pages now (a copy)."""
        now: NDArray[np.uint32] = self.values[np.asarray(pages, np.int64)]
        return now

    def bump(self, pages: ArrayLike) -> None:
        """Void every lease on the slots that begin at these pages; each once, also when named twice. Wraps at 2^32."""
        self.values[np.asarray(pages, np.int64)] += np.uint32(1)

    def void(self) -> None:
        """Void every lease on every slot: the pool has another owner from now on, whose generations are not these."""
        self.values += np.uint32(1)

    def populate(self, first: int, pages: int) -> None:
        """Fault in what belongs to pages [first, first + pages), so that no later bump can fail for lack of memory."""
        start = first * 4 // PAGE * PAGE
        end = min(-(-(first + pages) * 4 // PAGE) * PAGE, self._memory.size)
        self._memory.populate(start, end - start)

    def export(self) -> int:
        """A new descriptor for reading alone; the caller closes it."""
        return self._memory.dup_readonly()

    def close(self) -> None:
        self.values = np.empty(0, np.uint32)
        self._memory.close()


# --- the device seam -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DeviceBytes:
    """A range of device memory, for `copy`; valid until its memory is closed."""

    memory: "CudaMemory"
    address: int
    nbytes: int


Place = HostBytes | DeviceBytes


def open_device_memory(device: str, size: int, setting: str = "hbm.size") -> DeviceMemory:
    """Memory of a pool on "cpu" (shared memory) or "cuda:N" (CUDA virtual memory, exported by file descriptor).

    ConfigError when the device has not so much or a name of neither form; TierUnavailable when CUDA cannot be used.
    """
    if device == "cpu":
        require_memory(size, setting)
        return SharedMemory("kvcascade-hbm", size)
    return CudaMemory(device, size, setting=setting)


def import_device_memory(device: str, fd: int, size: int) -> Memory:
    """An engine's view of exported device memory; the descriptor may be closed afterwards.

    Memory of a GPU survives its exporter's death until the last importer closes it. ProtocolError for a descriptor that
    is not what it should be, TierUnavailable when this process cannot use CUDA.
    """
    return Mapping(fd, size, writable=True) if device == "cpu" else CudaMemory(device, size, fd=fd)


def copy(dst: Place, src: Place) -> None:
    """Copy the bytes of one place to another of the same length, host or device; see `copy_all`."""
    copy_all([(dst, src)])


def copy_all(pairs: Iterable[tuple[Place, Place]]) -> None:
    """Copy each (destination, source), and return when every byte has arrived. Blocks; releases the GIL.

    Host arrays are uint8 and contiguous where the other side is a device. Copies of a device run on a stream of their
    own: whoever filled the source or last used the destination on another stream has waited for it before. ValueError
    for unequal lengths, TierUnavailable when the device fails; also then no byte moves after the return.
    """
    waiting: dict[int, CudaMemory] = {}
    try:
        for dst, src in pairs:
            if dst.nbytes != src.nbytes:
                raise ValueError(f"{src.nbytes} bytes do not go into {dst.nbytes}")
            if isinstance(dst, DeviceBytes) or isinstance(src, DeviceBytes):
                memory = dst.memory if isinstance(dst, DeviceBytes) else cast(DeviceBytes, src).memory
                waiting[id(memory)] = memory
                memory.enqueue(dst, src)
            else:
                np.copyto(dst, src)
    finally:
        for memory in waiting.values():
            memory.synchronize()


def register_host(array: HostBytes, device: str = "cuda:0", *, chunk: int = REGISTER_CHUNK) -> str | None:
    """Pin host memory for every CUDA context of this process; None, or the reason why it stays unpinned.

    Goes chunk by chunk, and all or nothing. A copy must not cross two chunks: `chunk` is a multiple of the slab size
    and the array starts with a slab. `unregister_host` ends it, before the memory is unmapped.
    """
    try:
        cuda = _Cuda(device)
    except (TierUnavailable, ConfigError) as error:
        return str(error)
    done = 0
    try:
        with cuda.current():
            for start in range(0, array.nbytes, chunk):
                part = array[start : start + chunk]
                flags = cuda.driver.CU_MEMHOSTREGISTER_PORTABLE
                cuda.call("cuMemHostRegister", part.ctypes.data, part.nbytes, flags)
                done += part.nbytes
    except TierUnavailable as error:
        _unregister(cuda, array[:done], chunk)
        return f"{error}, after {human_size(done)} of {human_size(array.nbytes)}"
    return None  # The context stays retained, since the registrations live in it.


def unregister_host(array: HostBytes, device: str = "cuda:0", *, chunk: int = REGISTER_CHUNK) -> None:
    """End a registration that succeeded, with the same arguments."""
    cuda = _Cuda(device)
    _unregister(cuda, array, chunk)
    cuda.release()  # what `register_host` retained


def _unregister(cuda: "_Cuda", array: HostBytes, chunk: int) -> None:
    with cuda.current():
        for start in range(0, array.nbytes, chunk):
            cuda.call("cuMemHostUnregister", array[start:].ctypes.data)
    cuda.release()


class _Cuda:
    """The CUDA driver on one device. Calls raise TierUnavailable and run in the primary context, which torch shares."""

    def __init__(self, device: str) -> None:
        match = re.fullmatch(r"cuda:(\d{1,3})", device)
        if match is None:
            raise ConfigError(f'device "{device}" is neither "cpu" nor "cuda:N"')
        try:
            from cuda.bindings import driver
        except ImportError as error:
            raise TierUnavailable(f"hbm.device: {device} needs cuda-bindings: install kvcascade[cuda]") from error
        self.driver: ModuleType = driver
        try:
            self.call("cuInit", 0)
        except RuntimeError as error:  # cuda-bindings: no driver library on this machine
            raise TierUnavailable(f"{device} cannot be used: no CUDA driver ({error})") from error
        self.ordinal = int(match[1])
        self._device = self.call("cuDeviceGet", self.ordinal)
        self._context = self.call("cuDevicePrimaryCtxRetain", self._device)

    def call(self, name: str, *arguments: object) -> Any:
        """One driver call; its result (None, one, or a tuple). A failure names the call and CUDA's own words."""
        status, *results = getattr(self.driver, name)(*arguments)
        if status != self.driver.CUresult.CUDA_SUCCESS:
            _, text = self.driver.cuGetErrorString(status)
            raise TierUnavailable(f"{name}: {text.decode() if text else status}")
        return results[0] if len(results) == 1 else tuple(results) or None

    @contextmanager
    def current(self) -> Iterator[None]:
        """Make the context current for the calling thread, and leave the thread (a torch one perhaps) as it was."""
        self.call("cuCtxPushCurrent", self._context)
        try:
            yield
        finally:
            self.call("cuCtxPopCurrent")

    def release(self) -> None:
        self.call("cuDevicePrimaryCtxRelease", self._device)


class CudaMemory:
    """Device memory by CUDA's virtual memory calls: created by the daemon, or imported from its descriptor."""

    def __init__(self, device: str, size: int, *, fd: int | None = None, setting: str = "hbm.size") -> None:
        self.device = device
        self.size = size
        self._cuda = cuda = _Cuda(device)
        driver = cuda.driver
        self._handle_type = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        wanted = driver.CUmemAllocationProp()
        wanted.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        wanted.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        wanted.location.id = cuda.ordinal
        wanted.requestedHandleTypes = self._handle_type
        access = driver.CUmemAccessDesc()
        access.location = wanted.location
        access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        # Undone in reverse by `close`, also when a later step fails.
        self._undo: list[tuple[object, ...]] = []
        try:
            with cuda.current():
                least = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
                granularity = cuda.call("cuMemGetAllocationGranularity", wanted, least)
                mapped = -(-size // granularity) * granularity
                if fd is None:
                    free, _ = cuda.call("cuMemGetInfo")
                    if mapped > free:
                        raise ConfigError(
                            f"{setting} = {human_size(size)} does not fit: {human_size(free)} are free on {device}"
                        )
                    self._handle = cuda.call("cuMemCreate", mapped, wanted, 0)
                else:
                    self._handle = cuda.call("cuMemImportFromShareableHandle", fd, self._handle_type)
                self._undo.append(("cuMemRelease", self._handle))
                pointer = cuda.call("cuMemAddressReserve", mapped, 0, 0, 0)
                self._undo.append(("cuMemAddressFree", pointer, mapped))
                cuda.call("cuMemMap", pointer, mapped, 0, self._handle, 0)
                self._undo.append(("cuMemUnmap", pointer, mapped))
                cuda.call("cuMemSetAccess", pointer, mapped, [access], 1)
                self._stream = cuda.call("cuStreamCreate", driver.CUstream_flags.CU_STREAM_NON_BLOCKING)
                self._undo.append(("cuStreamDestroy", self._stream))
            self._address = int(pointer)
        except BaseException:
            self._undo_all()
            raise

    def view(self, offset: int, length: int) -> DeviceBytes:
        if not 0 <= offset <= offset + length <= self.size:
            raise IndexError(f"bytes [{offset}, {offset + length}) of {self.size}")
        return DeviceBytes(self, self._address + offset, length)

    def tensor(self, offset: int, length: int) -> "Tensor":
        import torch

        return torch.as_tensor(_CudaArray(self.view(offset, length)), device=self.device)

    def export(self) -> int:
        with self._cuda.current():
            return int(self._cuda.call("cuMemExportToShareableHandle", self._handle, self._handle_type, 0))

    def enqueue(self, dst: Place, src: Place) -> None:
        """Start one copy on this memory's stream; `synchronize` waits for it, and both sides stay alive until then."""
        with self._cuda.current():
            if isinstance(dst, DeviceBytes) and isinstance(src, DeviceBytes):
                name, to, source = "cuMemcpyDtoDAsync", dst.address, src.address
            elif isinstance(dst, DeviceBytes):
                name, to, source = "cuMemcpyHtoDAsync", dst.address, _host_address(src)
            else:
                name, to, source = "cuMemcpyDtoHAsync", _host_address(dst), cast(DeviceBytes, src).address
            self._cuda.call(name, to, source, dst.nbytes, self._stream)

    def synchronize(self) -> None:
        """Wait until every copy that was enqueued has arrived."""
        with self._cuda.current():
            self._cuda.call("cuStreamSynchronize", self._stream)

    def close(self) -> None:
        """Wait for copies, unmap and release. The memory itself goes when no process holds it any more."""
        if self._undo:
            try:
                self.synchronize()
            finally:
                self._undo_all()

    def _undo_all(self) -> None:
        with self._cuda.current():
            while self._undo:
                name, *arguments = self._undo.pop()
                self._cuda.call(str(name), *arguments)
        self._cuda.release()


class _CudaArray:
    """Device bytes in the form that torch reads without a copy."""

    def __init__(self, view: DeviceBytes) -> None:
        self.memory = view.memory
        self.__cuda_array_interface__ = {
            "shape": (view.nbytes,),
            "typestr": "|u1",
            "data": (view.address, False),
            "version": 3,
        }


def _host_address(place: Place) -> int:
    array = cast(HostBytes, place)
    if not array.flags.c_contiguous:
        raise ValueError("a host array that a device copies must be contiguous")
    return int(array.ctypes.data)
