"""Image of the virtual machine: a Debian kernel with soft-RoCE, an initramfs, and packages.

    python -m tests.rdma_vm.image    makes it, where it is not made yet

Everything is downloaded with apt, without root, and only unpacked, in .cache/rdma_vm; nothing is
installed. The guest's root is the host's own (read-only) with these packages above it.
"""

import dataclasses
import hashlib
import lzma
import os
import pathlib
import platform
import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterable, Mapping

ROOT = pathlib.Path(__file__).parents[2]
_CACHE = ROOT / ".cache" / "rdma_vm"
_INIT = pathlib.Path(__file__).with_name("init.sh")
_PACKAGES = (
    "qemu-system-x86",
    "busybox-static",
    "iproute2",  # rdma link add
    "ibverbs-providers",
    "perftest",
    "python3-pyverbs",
)
# Debian's cloud kernel has neither soft-RoCE nor 9p.
_KERNEL = "linux-image-amd64"
_MODULES = (
    "virtio_pci",
    "virtio_net",
    "virtio_console",
    "9pnet_virtio",
    "9p",
    "overlay",
    "dummy",
    "crc32_generic",  # by name in the kernel's crypto table: no module depends on it
    "ib_uverbs",
    "rdma_ucm",
    "rdma_rxe",
)


class UnavailableError(Exception):
    """No virtual machine can run here; the text says why."""


@dataclasses.dataclass(frozen=True)
class Image:
    """The files of a guest."""

    folder: pathlib.Path

    @property
    def kernel(self) -> pathlib.Path:
        """An ELF or a bzImage."""
        return self.folder / "kernel"

    @property
    def initramfs(self) -> pathlib.Path:
        """Holds init.sh, which mounts everything else."""
        return self.folder / "initramfs"

    @property
    def packages(self) -> pathlib.Path:
        """The unpacked packages, as a root directory."""
        return self.folder / "packages"

    @property
    def stamp(self) -> pathlib.Path:
        """Says what the image was made of, when it is complete."""
        return self.folder / "stamp"

    def host_environment(self) -> Mapping[str, str]:
        """Environment in which a program of `packages` runs on the host."""
        libraries = self.packages / "usr/lib/x86_64-linux-gnu"
        return {
            **os.environ,
            "PATH": f"{self.packages}/usr/bin:{os.environ['PATH']}",
            "LD_LIBRARY_PATH": f"{libraries}:{libraries}/pulseaudio",
            "QEMU_MODULE_DIR": str(libraries / "qemu"),
        }

    def firmware(self) -> list[str]:
        """QEMU's arguments that say where its firmware is."""
        folders = [self.packages / "usr/share" / name for name in ("qemu", "seabios")]
        return [argument for folder in folders for argument in ("-L", str(folder))]


def load() -> Image:
    """The image, which must have been made.

    Raises:
      UnavailableError: it was not, or can't be.
    """
    image = Image(_CACHE)
    if not image.stamp.exists() or image.stamp.read_text() != _inputs():
        raise UnavailableError(
            "there is no image of the virtual machine; `python -m tests.rdma_vm.image` makes it or"
            " says why it can't"
        )
    return image


def make() -> Image:
    """The image, made now if it is not there.

    Raises:
      UnavailableError: this machine or its network lacks something necessary.
    """
    try:
        return load()
    except UnavailableError:
        pass
    if platform.machine() != "x86_64" or not shutil.which("apt-get"):
        raise UnavailableError("the virtual machine is made of Debian's packages for x86-64")
    print(
        "a virtual machine with soft-RoCE, in .cache/rdma_vm (for tests; 200 MB)", file=sys.stderr
    )
    shutil.rmtree(_CACHE, ignore_errors=True)
    image = Image(_CACHE)
    apt = _Apt(image.folder / "apt")
    try:
        _get_packages(image, apt)
    except UnavailableError:
        apt.update()
        _get_packages(image, apt)
    _get_kernel(image, apt)
    shutil.rmtree(apt.folder)
    image.stamp.write_text(_inputs())
    return image


def _inputs() -> str:
    sources = (pathlib.Path(__file__), _INIT)
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()


def _run(*command: str | pathlib.Path, cwd: pathlib.Path | None = None) -> str:
    try:
        done = subprocess.run(command, cwd=cwd, check=True, capture_output=True, text=True)
    except subprocess.CalledProcessError as error:
        raise UnavailableError(f"{error}: {error.stderr.strip()[-500:]}") from None
    return done.stdout


class _Apt:
    """apt without root: with a folder of its own, and with the system's lists unless updated."""

    def __init__(self, folder: pathlib.Path):
        self.folder = folder
        self._options = ["-o", "Debug::NoLocking=1", "-o", f"Dir::Cache={folder}"]

    def update(self) -> None:
        """Fetches lists: the system's are old, or not there."""
        self._options += ["-o", f"Dir::State::lists={self.folder / 'lists'}"]
        (self.folder / "lists" / "partial").mkdir(parents=True)
        self.run("apt-get", "update", "-qq")

    def run(self, tool: str, *arguments: str, cwd: pathlib.Path | None = None) -> str:
        return _run(tool, *self._options, *arguments, cwd=cwd)


def _get_packages(image: Image, apt: _Apt) -> None:
    """Packages that the host has are not downloaded; the guest sees them all the same."""
    archives = apt.folder / "archives"
    (archives / "partial").mkdir(parents=True, exist_ok=True)
    apt.run("apt-get", "install", "-qq", "--download-only", "--no-install-recommends", *_PACKAGES)
    # Links as on a merged-/usr system: a directory /lib would hide the host's link of that name.
    for name in ("bin", "sbin", "lib", "lib64"):
        (image.packages / "usr" / name).mkdir(parents=True)
        (image.packages / name).symlink_to(f"usr/{name}")
    for archive in archives.glob("*.deb"):
        _unpack(archive, image.packages)


def _unpack(archive: pathlib.Path, folder: pathlib.Path) -> None:
    tar = ("tar", "-x", "--keep-directory-symlink", "--no-same-owner", "-C", str(folder))
    with subprocess.Popen(("dpkg-deb", "--fsys-tarfile", archive), stdout=subprocess.PIPE) as deb:
        subprocess.run(tar, stdin=deb.stdout, check=True)
    if deb.returncode:
        raise UnavailableError(f"{archive.name} can't be unpacked")


def _get_kernel(image: Image, apt: _Apt) -> None:
    found = re.search(r"Depends: (linux-image-\S+)", apt.run("apt-cache", "depends", _KERNEL))
    if not found:
        raise UnavailableError(f"apt does not know the package {_KERNEL}")
    folder = image.folder / "linux"
    folder.mkdir()
    apt.run("apt-get", "download", "-qq", found[1], cwd=folder)
    _unpack(next(folder.glob("*.deb")), folder)
    version = found[1].removeprefix("linux-image-")
    image.kernel.write_bytes(_decompressed((folder / "boot" / f"vmlinuz-{version}").read_bytes()))
    busybox = shutil.which("busybox", path=image.host_environment()["PATH"])
    assert busybox
    _run(busybox, "depmod", "-b", folder, version)
    _make_initramfs(image, pathlib.Path(busybox), folder / "lib" / "modules" / version)
    shutil.rmtree(folder)


def _decompressed(kernel: bytes) -> bytes:
    """The ELF inside a bzImage that is compressed with xz; else the bzImage itself.

    Under emulation the kernel takes seconds to unpack itself. Offsets: Documentation/x86/boot.rst.
    """
    sectors = kernel[0x1F1] or 4
    offset, length = struct.unpack_from("<II", kernel, 0x248)
    start = (sectors + 1) * 512 + offset
    payload = kernel[start : start + length]
    if not payload.startswith(b"\xfd7zXZ"):
        return kernel
    return lzma.LZMADecompressor().decompress(payload)


def _in_load_order(modules: pathlib.Path, names: Iterable[str]) -> list[pathlib.Path]:
    """The files of `names` and of all that they depend on, those first."""
    lines = (modules / "modules.dep").read_text().splitlines()
    needs = {path: rest.split() for path, rest in (line.split(":") for line in lines)}
    path_of = {pathlib.Path(path).stem: path for path in needs}
    order: dict[str, None] = {}

    def add(path: str) -> None:
        for needed in needs[path]:
            add(needed)
        order.setdefault(path)

    for name in names:
        add(path_of[name])
    return [modules / path for path in order]


def _make_initramfs(image: Image, busybox: pathlib.Path, modules: pathlib.Path) -> None:
    tree = image.folder / "tree"
    for name in ("bin", "modules", "proc", "sys", "dev", "host", "packages", "overlay", "newroot"):
        (tree / name).mkdir(parents=True)
    shutil.copy(busybox, tree / "bin" / "busybox")
    shutil.copy(_INIT, tree / "init")
    (tree / "init").chmod(0o755)
    for number, module in enumerate(_in_load_order(modules, _MODULES)):
        shutil.copy(module, tree / "modules" / f"{number:02}_{module.name}")
    names = "\n".join(str(path.relative_to(tree)) for path in sorted(tree.rglob("*")))
    with image.initramfs.open("wb") as archive:
        cpio = (busybox, "cpio", "-o", "-H", "newc")
        subprocess.run(
            cpio, cwd=tree, input=names.encode(), stdout=archive, stderr=subprocess.PIPE, check=True
        )
    shutil.rmtree(tree)


if __name__ == "__main__":
    try:
        make()
    except UnavailableError as error:
        sys.exit(f"no virtual machine: {error}")
