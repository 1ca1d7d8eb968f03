"""A wall clock that jumps under real processes: a library that is loaded before theirs, and reads an offset."""

import mmap
import shutil
import struct
import subprocess
from pathlib import Path

import pytest

_SOURCE = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile long *offset;

__attribute__((constructor)) static void begin(void) {
    const char *path = getenv("TEST_WALL_CLOCK");
    int fd = path == NULL ? -1 : open(path, O_RDONLY);
    if (fd < 0) return;
    void *page = mmap(NULL, sizeof(long), PROT_READ, MAP_SHARED, fd, 0);
    close(fd);
    if (page != MAP_FAILED) offset = page;
}

int clock_gettime(clockid_t id, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (real == NULL) real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    int result = real(id, now);
    if (offset != NULL && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE)) now->tv_sec += *offset;
    return result;
}

int gettimeofday(struct timeval *now, void *zone) {
    struct timespec at;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &at);
    now->tv_sec = at.tv_sec;
    now->tv_usec = at.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *now) {
    struct timespec at;
    clock_gettime(CLOCK_REALTIME, &at);
    if (now != NULL) *now = at.tv_sec;
    return at.tv_sec;
}
"""


class WallClock:
    """`environment` goes to processes, whose CLOCK_REALTIME `jump` moves from then on. Monotonic clocks stay."""

    def __init__(self, folder: Path) -> None:
        """Skips the test where there is no C compiler."""
        compiler = shutil.which("cc")
        if compiler is None:
            pytest.skip("there is no C compiler to make a clock that jumps")
        source, library, offset = folder / "wall_clock.c", folder / "wall_clock.so", folder / "offset"
        source.write_text(_SOURCE)
        subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
        offset.write_bytes(struct.pack("=q", 0))
        self._file = offset.open("r+b")
        self._page = mmap.mmap(self._file.fileno(), 8)
        self.environment = {"LD_PRELOAD": str(library), "TEST_WALL_CLOCK": str(offset)}

    @property
    def offset(self) -> int:
        return int(struct.unpack("=q", self._page[:])[0])

    def jump(self, seconds: int) -> None:
        self._page[:] = struct.pack("=q", self.offset + seconds)

    def close(self) -> None:
        self._page.close()
        self._file.close()
