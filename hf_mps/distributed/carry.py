"""Files that one rank has and another's host has not: sent over Gloo in pieces, so that no file is ever in memory."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from hf_mps.core.errors import RunError
from hf_mps.distributed.ranks import Ranks

PIECE = 4 * 2**20
"""Bytes sent at once; two of them are in memory, one on its way and one that is read or written."""
PATIENCE = timedelta(minutes=5)
"""How long a rank may take over a piece."""
DIGEST = 32


class File(NamedTuple):
    """A file below a folder: its path there, with slashes, and its bytes."""

    name: str
    size: int


def listing(folder: Path) -> list[File]:
    """Return the files below `folder`, sorted; none where it is not there."""
    found = (path for path in folder.rglob("*") if path.is_file())
    return sorted(File(path.relative_to(folder).as_posix(), path.stat().st_size) for path in found)


def seen(ranks: Ranks, folder: Path) -> list[bool]:
    """Whether each rank sees what the main one writes into `folder`; called by all. Raises its OSError on every rank.

    A folder of the same name is no proof: each host may have its own.
    """

    def leave_mark() -> str:
        name = f".seen-{uuid.uuid4().hex}"
        (folder / name).touch()
        return name

    mark = folder / ranks.from_main(leave_mark)
    found = ranks.gather(mark.is_file())
    if ranks.world.main:
        mark.unlink(missing_ok=True)
    return found


def carry(
    ranks: Ranks, key: str, files: Sequence[File], folder: Path, *, sender: int, receivers: Sequence[int]
) -> None:
    """Bring `files` from the sender's `folder` into that of each of `receivers`; called by these ranks, no other.

    `folder` is each rank's own, there already; `key` is one by which these ranks never met before. Raises OSError for
    what cannot be read or written here, RunError where what came is not what was read; both once all pieces have gone
    through, so that nobody waits for this rank.
    """
    from torch.distributed.distributed_c10d import PrefixStore

    from hf_mps.distributed.metal import backend

    together = [sender, *receivers]
    store = PrefixStore(f"carry/{key}", ranks.store)
    group = backend.create(store, together.index(ranks.world.rank), len(together), PATIENCE)
    if ranks.world.rank == sender:
        _send(group, files, folder)
    else:
        _receive(group, files, folder)


class _Local:
    """A rank's own side of the files, of which the first error is kept: what follows has to go through all the same."""

    def __init__(self, folder: Path, *, writes: bool) -> None:
        self.error: OSError | None = None
        self._folder, self._writes = folder, writes
        self._open: BinaryIO | None = None
        self._digest = hashlib.sha256()

    def begin(self, name: str) -> None:
        """Go on with another file."""
        self._digest = hashlib.sha256()
        try:
            path = self._folder / name
            if self._writes:
                path.parent.mkdir(parents=True, exist_ok=True)
            self._open = path.open("xb" if self._writes else "rb")
        except OSError as error:
            self._keep(error)

    def piece(self, view: memoryview) -> None:
        """Fill `view` from the file, or write it there."""
        if self._open is not None:
            try:
                if self._writes:
                    self._open.write(view)
                elif self._open.readinto(view) != len(view):  # type: ignore[attr-defined]
                    raise OSError(f"{self._open.name} became shorter as it was sent")
            except OSError as error:
                self._keep(error)
        self._digest.update(view)

    def end(self) -> bytes:
        """Close the file; the digest of its bytes, zeros where they could not be read."""
        try:
            if self._open is not None:
                self._open.close()
        except OSError as error:
            self._keep(error)
        self._open = None
        return self._digest.digest() if self.error is None else bytes(DIGEST)

    def _keep(self, error: OSError) -> None:
        self.error = self.error or error
        self._open = None


def _send(group: Any, files: Sequence[File], folder: Path) -> None:
    """Read each piece while the one before is on its way; the digests of the files come last."""
    local, buffers, sent = _Local(folder, writes=False), _buffers(), None
    digests = b""
    for number, (name, size, first, last) in enumerate(_pieces(files)):
        tensor = buffers[number % 2][:size]
        if first:
            local.begin(name)
        local.piece(memoryview(tensor.numpy()))
        if last:
            digests += local.end()
        if sent is not None:
            sent.wait()
        sent = _broadcast(group, tensor) if size else None
    if sent is not None:
        sent.wait()
    _broadcast(group, _tensor(digests)).wait()
    if local.error is not None:
        raise local.error


def _receive(group: Any, files: Sequence[File], folder: Path) -> None:
    """Write each piece while the next one comes."""
    local, buffers, pieces = _Local(folder, writes=True), _buffers(), list(_pieces(files))
    digests = []
    coming = _broadcast(group, buffers[0][: pieces[0].size]) if pieces[0].size else None
    for number, (name, size, first, last) in enumerate(pieces):
        if coming is not None:
            coming.wait()
        if number + 1 < len(pieces):
            following = buffers[(number + 1) % 2][: pieces[number + 1].size]
            coming = _broadcast(group, following) if len(following) else None
        if first:
            local.begin(name)
        local.piece(memoryview(buffers[number % 2][:size].numpy()))
        if last:
            digests.append(local.end())
    theirs = _tensor(bytes(DIGEST * len(files)))
    _broadcast(group, theirs).wait()
    if local.error is not None:
        raise local.error
    for place, (file, digest) in enumerate(zip(files, digests, strict=True)):
        read = bytes(theirs[DIGEST * place : DIGEST * (place + 1)].tolist())
        if read not in (digest, bytes(DIGEST)):  # zeros: the sender could not read it, and says so
            raise RunError(f"{file.name} came otherwise than it was read on its way to {folder}; next: the run again")


class _Piece(NamedTuple):
    name: str
    size: int
    first: bool
    last: bool


def _pieces(files: Sequence[File]) -> Iterator[_Piece]:
    """The pieces of all files in their order, of an empty one a piece of no bytes."""
    for name, size in files:
        for begins in range(0, max(size, 1), PIECE):
            yield _Piece(name, min(PIECE, size - begins), begins == 0, begins + PIECE >= size)


def _buffers() -> list[Any]:
    import torch

    return [torch.empty(PIECE, dtype=torch.uint8) for _ in range(2)]


def _tensor(content: bytes) -> Any:
    import torch

    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def _broadcast(group: Any, tensor: Any) -> Any:
    from torch.distributed import BroadcastOptions

    options = BroadcastOptions()
    options.rootRank = 0
    return group.broadcast([tensor], options)
