"""Small wheels of PyTorch for macOS, as whole or as broken as a test wants them, and package indexes that hold them."""

from __future__ import annotations

import base64
import contextlib
import functools
import hashlib
import http.server
import struct
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path

import llvmlite.binding as llvm

DYLIB = "torch/lib/libtorch_cpu.dylib"
COMMIT = "0123456789abcdef0123456789abcdef01234567"

# Doubles each value, with threadgroup memory that it declares and does not need, and a struct of two members.
DOUBLED = """
target datalayout = "e-p:64:64:64-i64:64:64-n8:16:32"
target triple = "air64_v26-apple-macosx14.0.0"
@_ZZ6doubleIfEvPU9MTLdevicefE5cache = internal addrspace(3) global [8 x float] undef, align 4
define void @NAME(ptr addrspace(1) %0, ptr addrspace(2) %1, i32 %2) {
  %at = getelementptr float, ptr addrspace(1) %0, i32 %2
  %value = load float, ptr addrspace(1) %at
  %twice = call float @air.fma.f32(float %value, float 1.0, float %value)
  store float %twice, ptr addrspace(1) %at
  ret void
}
declare float @air.fma.f32(float, float, float)
!air.compile_options = !{!7}
!air.kernel = !{!0}
!0 = !{ptr @NAME, !1, !2}
!1 = !{}
!2 = !{!3, !4, !6}
!3 = !{i32 0, !"air.buffer", !"air.location_index", i32 0, i32 1, !"air.read_write", !"air.address_space", i32 1, \
!"air.arg_type_size", i32 4, !"air.arg_type_align_size", i32 4, !"air.arg_type_name", !"float", !"air.arg_name", !"out"}
!4 = !{i32 1, !"air.buffer", !"air.buffer_size", i32 8, !"air.location_index", i32 2, i32 1, !"air.read", \
!"air.address_space", i32 2, !"air.struct_type_info", !5, !"air.arg_type_size", i32 8, !"air.arg_type_align_size", \
i32 4, !"air.arg_type_name", !"Sizes", !"air.arg_name", !"sizes"}
!5 = !{i32 0, i32 4, i32 0, !"uint", !"rows", i32 4, i32 4, i32 0, !"float", !"scale"}
!6 = !{i32 2, !"air.thread_position_in_grid", !"air.arg_type_name", !"uint", !"air.arg_name", !"tid"}
!7 = !{!"air.compile.denorms_disable"}
"""
KERNELS = ("double_dense_float_float", "double_dense_half_half", "double_strided_float", "halve_int64_t_32")


def metallib(*names: str, macos: int = 14) -> bytes:
    """A metallib with kernels of these names, for a release of macOS."""
    records, modules = b"", b""
    for name in names:
        bitcode = llvm.parse_assembly(DOUBLED.replace("NAME", name)).as_bitcode()
        wrapped = struct.pack("<5I", 0x0B17C0DE, 0, 20, len(bitcode), 0) + bitcode
        place = struct.pack("<3Q", 0, 0, len(modules))
        tags = (
            _tag(b"NAME", name.encode() + b"\0") + _tag(b"MDSZ", struct.pack("<Q", len(wrapped))) + _tag(b"OFFT", place)
        )
        records += struct.pack("<I", len(tags) + 8) + tags + b"ENDT"
        modules += wrapped
    functions = struct.pack("<I", len(names)) + records
    size = 88 + len(functions) + len(modules)
    sections = struct.pack("<8Q", 88, len(functions), 88, 0, 88, 0, 88 + len(functions), len(modules))
    return (
        b"MTLB"
        + struct.pack("<BBHHHI", 1, 0x80, 2, 7, 0x8100, macos)
        + struct.pack("<Q", size)
        + sections
        + functions
        + modules
    )


def library(*metallibs: bytes) -> bytes:
    """A dylib that holds the metallibs, among other bytes."""
    return b"\xcf\xfa\xed\xfe" + b"MTLB, by chance".ljust(200) + bytes(100).join(metallibs) + bytes(50)


def wheel(
    folder: Path,
    release: str = "2.99.0",
    *,
    dylib: bytes | None = None,
    project: str = "torch",
    platform: str = "macosx_14_0_arm64",
) -> Path:
    """A wheel in `folder`."""
    content = library(metallib(*KERNELS)) if dylib is None else dylib
    files = {DYLIB: content, "torch/version.py": f"__version__ = '{release}'\ngit_version = '{COMMIT}'\n".encode()}
    return _packed(folder, project, release, f"cp312-cp312-{platform}", files)


def mlx_wheel(folder: Path, version: str = "0.99.0") -> Path:
    """A wheel of MLX's Metal kernels in `folder`."""
    files = {"mlx/lib/mlx.metallib": metallib(*KERNELS)}
    return _packed(folder, "mlx-metal", version, "py3-none-macosx_14_0_arm64", files)


def _packed(folder: Path, project: str, version: str, tag: str, files: dict[str, bytes]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    name = project.replace("-", "_")
    path, info = folder / f"{name}-{version}-{tag}.whl", f"{name}-{version}.dist-info"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for file, content in files.items():
            archive.writestr(file, content)
        archive.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {project}\nVersion: {version}\n\nNumbers.\n"
        )
        archive.writestr(f"{info}/WHEEL", f"Wheel-Version: 1.0\nTag: {tag}\n")
        file, content = next(iter(files.items()))
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        archive.writestr(f"{info}/RECORD", f"{file},sha256={digest},{len(content)}\n")
    return path


def index(folder: Path, *wheels: Path, stated: str = "") -> str:
    """A package index of files with one project's wheels, and its URL; it states each sha256, or `stated` for all."""
    links = []
    for each in wheels:
        digest = stated or hashlib.sha256(each.read_bytes()).hexdigest()
        links.append(f'<a href="{each.as_uri()}#sha256={digest}">{each.name}</a>')
    project = wheels[0].name.partition("-")[0].replace("_", "-")
    (folder / project).mkdir(parents=True)
    (folder / project / "index.html").write_text(_page(links))
    return folder.as_uri()


@contextlib.contextmanager
def served(folder: Path, made: Path, stated: str | None = None) -> Iterator[str]:
    """An index on this machine that sends metadata beside the wheel `made` (PEP 658), as PyPI does, and its URL.

    It states the sha256 `stated`, or the wheel's own, or none where that is empty.
    """
    digest = hashlib.sha256(made.read_bytes()).hexdigest() if stated is None else stated
    (folder / "torch").mkdir(parents=True)
    (folder / made.name).write_bytes(made.read_bytes())
    with zipfile.ZipFile(made) as archive:
        metadata = next(name for name in archive.namelist() if name.endswith("METADATA"))
        (folder / f"{made.name}.metadata").write_bytes(archive.read(metadata))
    place = f"/{made.name}{'#sha256=' * bool(digest)}{digest}"
    link = f'<a href="{place}" data-core-metadata="true" data-dist-info-metadata="true">{made.name}</a>'
    (folder / "torch" / "index.html").write_text(_page([link]))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Quiet, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


def _page(links: list[str]) -> str:
    return "<!DOCTYPE html><html><body>" + "<br>\n".join(links) + "</body></html>"


def _tag(name: bytes, value: bytes) -> bytes:
    return name + struct.pack("<H", len(value)) + value
