"""What the processes of one run tell each other outside the training: small objects, errors, and that all are there.

They go through the key-value store that the launcher's processes meet in (torch.distributed's TCPStore), so that the
ranks can speak before there is a process group, whatever its device will be, and however long one of them takes: a
process group's own collectives would end after its timeout while the main process still reads the rows. Alone every
method is a plain call, and torch is not imported.

Whoever can reach that store can write there, so nothing of it is unpickled: a message can only become plain values, and
objects of this package's own dataclasses, named tuples and recipes, which are filled without being called.
"""

from __future__ import annotations

import base64
import json
import platform
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from datetime import timedelta
from functools import cache, wraps
from importlib import import_module
from pathlib import Path, PurePath
from typing import Any, TypeVar

from pydantic import BaseModel

from hf_mps.core.errors import RunError, UserError
from hf_mps.core.files import bare
from hf_mps.core.text import first_line, summary
from hf_mps.distributed.world import World

T = TypeVar("T")
PREFIX = "hf_mps"
PAUSES = (0.001, 0.2)
"""Seconds between two looks for what another rank is still at: the first, and the longest."""
LEAVING = 10
"""Seconds that the main process waits for the others when all is done."""
OPENING = timedelta(minutes=5)
"""How long the processes of one run may take to start, the slowest after the fastest."""


@dataclass(frozen=True)
class Failure:
    """Why a rank could not do its part: a person's error with its kind, or any other exception in a line."""

    rank: int
    host: str
    users: bool
    """Whether it is a UserError."""
    text: str

    def error(self, *, named: bool) -> UserError | RunError:
        """Return the same error for another rank; `named` says whose it is."""
        words = f"rank {self.rank} on {self.host}: {self.text}" if named else self.text
        made = (UserError if self.users else RunError)(words)
        made.named = named
        return made


class Ranks:
    """The processes of `world`; every method but `here` is called by all of them, in the same order."""

    def __init__(self, world: World, store: Any = None) -> None:
        self.world, self._store, self._calls = world, store, 0

    @classmethod
    def here(cls) -> Ranks:
        """The processes that this one was started with; one object, however often it is asked for."""
        return _made(World.here())

    @property
    def store(self) -> Any:
        """Return the store that all ranks reach, with keys of this package alone (torch.distributed.Store).

        Raises UserError where the launcher's variables name none, RunError where it cannot be reached.
        """
        if self._store is None:
            self._store = open_store(self.world)
        return self._store

    def from_main(self, make: Callable[[], T]) -> T:
        """Return what `make` returns on the main process, which alone calls it; its error on every rank.

        The value is sent as `messages` has it. Other ranks' UserError and RunError are `quiet`: the main process says
        it.
        """
        if self.world.alone:
            return make()
        key = self._key()
        if not self.world.main:
            stored = self._get(key)
            self._was_read(key, [key], self.world.size - 1)
            value, failure = self._read(stored)
            if failure is not None:
                raise quiet(failure.error(named=False))
            return value  # type: ignore[no-any-return]
        try:
            value = make()
            self.store.set(key, packed((value, None)))
        except BaseException as error:
            # Sent before it is raised: the others wait for this key, however long it takes.
            self.store.set(key, packed((None, self._failure(error))))
            raise
        return value

    def run_on_all(self, make: Callable[[], T]) -> T:
        """Return what `make` returns here, once it has on every rank; where it raised on one of them, all raise.

        Where all failed alike, or the main process did, its error is the one that is printed; else the main process
        raises that of the lowest rank, which it names with its host.
        """
        if self.world.alone:
            return make()
        raised: BaseException | None = None
        try:
            value = make()
        except BaseException as error:
            raised = error
        failed = [one for one in self.gather(None if raised is None else self._failure(raised)) if one is not None]
        if not failed:
            return value
        first = failed[0]
        if self.world.main and first.rank != 0:
            raise first.error(named=True)
        if raised is not None and (self.world.main or not isinstance(raised, UserError | RunError)):
            raise raised
        raise quiet(first.error(named=first.rank != 0)) from raised

    def main_first(self, make: Callable[[], T]) -> T:
        """What `make` returns here; the first process of each host calls it before the others, which find its files."""
        if self.world.alone:
            return make()
        # Two rounds, each a barrier: the second begins when every host's first process is done.
        early = self.run_on_all(lambda: make() if self.world.local_main else None)
        value = self.run_on_all(lambda: None if self.world.local_main else make())
        return early if self.world.local_main else value  # type: ignore[return-value]

    def gather(self, value: T) -> list[T]:
        """Return the `value` of each rank, in their order, on every rank; sent as `messages` has it."""
        if self.world.alone:
            return [value]
        key = self._key()
        self.store.set(f"{key}/{self.world.rank}", packed(value))
        keys = [f"{key}/{rank}" for rank in range(self.world.size)]
        values = [self._read(self._get(one)) for one in keys]
        self._was_read(key, keys, self.world.size)
        return values

    def exchange(self, value: T) -> list[T]:
        """As `gather`, for what is large: through the process group that the training has opened."""
        if self.world.alone:
            return [value]
        from torch.distributed import all_gather_object

        values: list[Any] = [None] * self.world.size
        all_gather_object(values, value)
        return values

    def leave(self) -> None:
        """Say that this process asks for nothing more; the main one, which may hold the store, waits for the others."""
        if self.world.alone or self._store is None:
            return
        key = f"left/{self._key()}"
        if not self.world.main:
            self.store.add(key, 1)
            return
        deadline = time.monotonic() + LEAVING
        while self.store.add(key, 0) < self.world.size - 1 and time.monotonic() < deadline:
            time.sleep(PAUSES[0])

    def sees(self, folder: Path) -> list[bool]:
        """Return whether each rank sees what the main one writes into `folder`. Raises its OSError on every rank.

        A folder of the same name is no proof: each host may have its own.
        """

        def leave_mark() -> str:
            name = f".seen-{uuid.uuid4().hex}"
            (folder / name).touch()
            return name

        mark = folder / self.from_main(leave_mark)
        found = self.gather(mark.is_file())
        if self.world.main:
            mark.unlink(missing_ok=True)
        return found

    def _key(self) -> str:
        self._calls += 1
        return str(self._calls)

    def _get(self, key: str) -> bytes:
        """Return the value of a key once some rank has set it, however long that takes."""
        from torch.distributed import DistError

        pause = PAUSES[0]
        try:
            # Not `wait`, which would tell of each second without the key on stderr.
            while not self.store.check([key]):
                time.sleep(pause)
                pause = min(2 * pause, PAUSES[1])
            return bytes(self.store.get(key))
        except DistError as error:
            raise RunError(f"{self.world}: the main process went away ({first_line(error)})") from error

    def _was_read(self, key: str, keys: list[str], readers: int) -> None:
        """Let the last of the `readers` of `keys` remove them from the store."""
        if self.store.add(f"{key}/read", 1) == readers:
            for one in (*keys, f"{key}/read"):
                self.store.delete_key(one)

    def _read(self, message: bytes) -> Any:
        try:
            return unpacked(message)
        except BrokenMessage as error:
            raise RunError(f"{self.world}: somebody else writes to the store of this run: {error}") from error

    def _failure(self, error: BaseException) -> Failure:
        words = str(error) if isinstance(error, UserError | RunError) else summary(error)
        return Failure(self.world.rank, platform.node(), isinstance(error, UserError), words)


def quiet(error: UserError | RunError) -> UserError | RunError:
    """Return the error, which ends this process with its exit code and prints nothing: another rank says it."""
    error.quiet = True
    return error


@cache
def _made(world: World) -> Ranks:
    return Ranks(world)


def separate_restarts(restarts: int) -> None:
    """Let the process group of ranks that torchrun has started again meet under new names.

    torchrun's agent keeps one store over all starts (torch 2.13, dynamic_rendezvous.py, `_shared_tcp_store_server`),
    and torch.distributed's `env://` writes there without a prefix, as if it were new (rendezvous.py): Gloo would wait
    for the addresses of the processes that died, half an hour.
    """
    if not restarts:
        return
    module: Any = import_module("torch.distributed.rendezvous")
    stock = module._create_c10d_store

    def create(*args: Any, **kwargs: Any) -> Any:
        from torch.distributed.distributed_c10d import PrefixStore

        return PrefixStore(f"start_{restarts}", stock(*args, **kwargs))

    # Once in a process: what is there already has this mark of `wraps`.
    if not hasattr(stock, "__wrapped__"):
        module._create_c10d_store = wraps(stock)(create)


def open_store(world: World) -> Any:
    """Return the store of torch.distributed's `env://` rendezvous, under this package's prefix."""
    from torch.distributed import DistError
    from torch.distributed.distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    try:
        url = f"env://?rank={world.rank}&world_size={world.size}"
        store, *_ = next(rendezvous(url, timeout=OPENING))
    except ValueError as error:  # MASTER_ADDR and MASTER_PORT
        way_on = "torchrun or accelerate launch, which say where the processes meet"
        raise UserError(f"{world}: {first_line(error)}; next: {way_on}") from error
    except DistError as error:
        raise RunError(f"{world}: the processes' meeting point cannot be reached: {first_line(error)}") from error
    return PrefixStore(f"{PREFIX}/{world.restarts}", store)


PACKAGE = "hf_mps"
KIND, VALUE = "kind", "value"


class BrokenMessage(ValueError):
    """A text that no rank of hf_mps has written."""


def packed(value: Any) -> bytes:
    """Return the message that holds `value`. Raises TypeError for an object that is no plain value and none of ours."""
    return json.dumps(_plain(value)).encode()


def unpacked(message: bytes) -> Any:
    """Return the value of a message. Raises BrokenMessage for any other bytes."""
    try:
        return _whole(json.loads(message))
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, ImportError) as error:
        raise BrokenMessage(f"no message of this package: {type(error).__name__}: {error}") from error


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool) or type(value) in (int, float, str):
        return value
    if isinstance(value, PurePath):
        return {KIND: "path", VALUE: str(value)}
    if isinstance(value, bytes):
        return {KIND: "bytes", VALUE: base64.b64encode(value).decode()}
    if type(value) is list:
        return [_plain(each) for each in value]
    if type(value) in (tuple, set, frozenset):
        return {KIND: type(value).__name__, VALUE: [_plain(each) for each in value]}
    if isinstance(value, Mapping):
        return {KIND: "dict", VALUE: [[_plain(key), _plain(each)] for key, each in value.items()]}
    kind = type(value)
    if kind.__module__.partition(".")[0] == PACKAGE and (names := _fields(kind)) is not None:
        own = {name: _plain(getattr(value, name)) for name in names}
        return {KIND: f"{kind.__module__}:{kind.__qualname__}", VALUE: own}
    if isinstance(value, int | float | str):
        return bare(value)
    raise TypeError(f"a {kind.__module__}.{kind.__qualname__} is no message between ranks")


def _whole(given: Any) -> Any:
    if isinstance(given, list):
        return [_whole(each) for each in given]
    if not isinstance(given, dict):
        return given
    kind, value = given[KIND], given[VALUE]
    if kind in SIMPLE:
        return SIMPLE[kind](value)
    module, _, name = kind.partition(":")
    if module.partition(".")[0] != PACKAGE:
        raise BrokenMessage(f"{kind} is not of {PACKAGE}")
    found: Any = import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    names = _fields(found)
    if names is None or found.__module__ != module or set(value) != set(names):
        raise BrokenMessage(f"{kind} does not have these fields")
    filled = {key: _whole(each) for key, each in value.items()}
    if issubclass(found, tuple):
        return tuple.__new__(found, [filled[key] for key in names])
    if issubclass(found, BaseModel):
        recipe = found.model_construct(**{key: filled[key] for key in found.model_fields})
        for key in found.__private_attributes__:
            setattr(recipe, key, filled[key])
        return recipe
    made = object.__new__(found)
    for key, each in filled.items():
        object.__setattr__(made, key, each)
    return made


def _fields(kind: Any) -> tuple[str, ...] | None:
    """The names of the values that a class holds; None for a class that is no dataclass, named tuple or recipe."""
    if not isinstance(kind, type):
        return None
    if is_dataclass(kind):
        return tuple(field.name for field in fields(kind))
    if issubclass(kind, BaseModel):
        return (*kind.model_fields, *kind.__private_attributes__)
    named: tuple[str, ...] | None = getattr(kind, "_fields", None) if issubclass(kind, tuple) else None
    return named


SIMPLE: dict[str, Callable[[Any], Any]] = {
    "path": Path,
    "bytes": base64.b64decode,
    "tuple": lambda value: tuple(map(_whole, value)),
    "set": lambda value: set(map(_whole, value)),
    "frozenset": lambda value: frozenset(map(_whole, value)),
    "dict": lambda value: {_whole(key): _whole(each) for key, each in value},
}
