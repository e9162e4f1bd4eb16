"""File systems for one test: small, and gone afterwards whatever happens. Mounting needs root."""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

_IOC_SHUTDOWN = 0x8004587D  # EXT4_IOC_SHUTDOWN
_NO_LOG_FLUSH = 2  # EXT4_GOING_FLAGS_NOLOGFLUSH: what is not on the device now never gets there
_BALLAST = "ballast"
_CHUNK_BYTES = 1024 * 1024


def _can_mount() -> bool:
    """Whether this process may mount; root in a container often may not."""
    if os.geteuid() != 0:
        return False
    probe = subprocess.run(
        ["unshare", "--mount", "mount", "-t", "tmpfs", "tmpfs", "/mnt"], capture_output=True, check=False
    )
    return probe.returncode == 0


needs_root = pytest.mark.skipif(not _can_mount(), reason="needs root and the right to mount")


@dataclass(frozen=True, slots=True)
class Mount:
    """A mounted file system."""

    path: Path

    def free_bytes(self) -> int:
        info = os.statvfs(self.path)
        return info.f_bavail * info.f_frsize

    def fill(self, but_bytes: int = 0) -> None:
        """Take all space that is left, or nearly."""
        with (self.path / _BALLAST).open("wb", buffering=0) as ballast, contextlib.suppress(OSError):
            if but_bytes:
                ballast.write(bytes(max(0, self.free_bytes() - but_bytes)))
                return
            size = _CHUNK_BYTES
            while size:
                try:
                    while ballast.write(b"x" * size) == size:
                        pass
                except OSError:
                    pass
                size //= 2

    def empty(self) -> None:
        """Give back what :meth:`fill` took."""
        (self.path / _BALLAST).unlink()

    def cut_power(self) -> None:
        """Nothing that is not on the device now gets there, not even on unmounting (ext4)."""
        fd = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.ioctl(fd, _IOC_SHUTDOWN, struct.pack("I", _NO_LOG_FLUSH))
        finally:
            os.close(fd)


def _run(*command: str | Path) -> None:
    subprocess.run(list(map(str, command)), check=True, capture_output=True, timeout=60)


@contextlib.contextmanager
def mounted_tmpfs(path: Path, size_bytes: int) -> Iterator[Mount]:
    """A file system in memory with a bound on its size."""
    path.mkdir(exist_ok=True)
    _run("mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", path)
    try:
        yield Mount(path)
    finally:
        _run("umount", "--lazy", path)


class Disk:
    """An ext4 file system in a file, whose power can be cut.

    Args:
        directory: for the image and the mount point.
    """

    def __init__(self, directory: Path, size_bytes: int) -> None:
        self.image = directory / "disk.img"
        self.mount = Mount(directory / "disk")
        self._copies = 0
        self._is_mounted = False
        self.mount.path.mkdir()
        with self.image.open("wb") as image:
            image.truncate(size_bytes)
        _run("mkfs.ext4", "-q", "-F", "-E", "lazy_itable_init=0,nodiscard", self.image)

    def attach(self) -> None:
        """Mount it; the journal is replayed as after a power loss."""
        _run("mount", "-o", "loop", self.image, self.mount.path)
        self._is_mounted = True

    def detach(self) -> None:
        """Unmount it; nothing may use it."""
        if self._is_mounted:
            _run("umount", self.mount.path)
            self._is_mounted = False
            if self._is_held():
                # a mount namespace of a test that runs beside this one has a copy of the mount: what would be mounted
                # again is the file system in memory, which is cut off for ever
                self._copies += 1
                image = self.image.with_name(f"disk-{self._copies}.img")
                _run("cp", "--sparse=always", self.image, image)
                self.image = image

    def _is_held(self) -> bool:
        """Whether a loop device has the image still."""
        done = subprocess.run(["losetup", "--associated", self.image], check=True, capture_output=True, timeout=60)
        return bool(done.stdout)

    def discard(self) -> None:
        """Unmount it even if something still uses it."""
        if self._is_mounted:
            _run("umount", "--lazy", self.mount.path)
            self._is_mounted = False


@contextlib.contextmanager
def ext4_disk(directory: Path, size_bytes: int) -> Iterator[Disk]:
    """A mounted :class:`Disk`, unmounted in the end."""
    disk = Disk(directory, size_bytes)
    try:
        disk.attach()
        yield disk
    finally:
        disk.discard()
