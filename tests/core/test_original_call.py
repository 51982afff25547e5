"""What is put around a library's function never costs the caller: a fault of ours ends in the stock behaviour."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from hf_mps.core.errors import Notice, RunError, UserError
from hf_mps.core.patching import OriginalCall
from hf_mps.layer.guards.base import Safeguard


class Thing(Safeguard):
    """A guard of nothing, which notes what it says."""

    kind, name, what = "guard", "example", "nothing"

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def say(self, line: str) -> None:
        self.said.append(line)


class Library:
    """A function that counts its calls, under `__name__` as a class or module has it."""

    __name__ = "library"

    def __init__(self, function: Callable[..., Any]) -> None:
        self.calls: list[Any] = []

        def work(*args: Any, **kwargs: Any) -> Any:
            self.calls.append((args, kwargs))
            return function(*args, **kwargs)

        self.work = work


def put(wrapper: Callable[..., Any], function: Callable[..., Any] = lambda x: 2 * x) -> tuple[Thing, Library]:
    thing, library = Thing(), Library(function)
    thing.around(library, "work", wrapper)
    return thing, library


def before(stock: OriginalCall, x: int) -> Any:
    raise ZeroDivisionError("of ours")


def after(stock: OriginalCall, x: int) -> Any:
    stock(x)
    raise ZeroDivisionError("of ours")


def changed(stock: OriginalCall, x: int) -> Any:
    x = x + 100
    raise ZeroDivisionError("of ours")


@pytest.mark.parametrize(("wrapper", "calls"), [(before, 1), (after, 1), (changed, 1)])
def test_the_caller_gets_what_stock_returns_and_stock_runs_once(wrapper: Any, calls: int) -> None:
    thing, library = put(wrapper)
    assert [library.work(3), library.work(4)] == [6, 8]
    assert library.calls == [((3,), {}), ((4,), {})]
    (line,) = thing.said
    assert line.startswith("the guard example failed: ZeroDivisionError: of ours")
    assert line.endswith("; it is disabled for this process; training continues")
    assert not thing.on
    assert thing.failure is not None


def test_a_call_made_for_a_part_of_the_work_is_not_the_callers() -> None:
    def halves(stock: OriginalCall, x: int) -> Any:
        return stock.partial(x - 1) + undefined(x)

    def undefined(x: int) -> int:
        raise KeyError(x)

    thing, library = put(halves)
    assert library.work(3) == 6
    assert library.calls == [((2,), {}), ((3,), {})]
    assert len(thing.said) == 1


@pytest.mark.parametrize("error", [ValueError("theirs"), KeyboardInterrupt(), SystemExit(3), StopIteration()])
def test_what_stock_raises_goes_through_as_it_is(error: BaseException) -> None:
    def fails(x: int) -> int:
        raise error

    def careful(stock: OriginalCall, x: int) -> Any:
        try:
            return stock(x)
        finally:
            pass

    thing, library = put(careful, fails)
    with pytest.raises(type(error)) as raised:
        library.work(3)
    assert raised.value is error
    assert (len(library.calls), thing.said, thing.on) == (1, [], True)


def test_what_stock_raises_wins_over_what_goes_wrong_after_it() -> None:
    error = ValueError("theirs")

    def fails(x: int) -> int:
        raise error

    def clumsy(stock: OriginalCall, x: int) -> Any:
        try:
            return stock(x)
        finally:
            raise KeyError("ours")

    thing, library = put(clumsy, fails)
    with pytest.raises(ValueError, match="theirs") as raised:
        library.work(3)
    assert raised.value is error
    assert raised.value.__context__ is None
    assert (len(library.calls), len(thing.said)) == (1, 1)


def test_what_other_code_of_the_users_raises_goes_through_as_well() -> None:
    def later(stock: OriginalCall, x: int) -> Any:
        return stock.foreign(lambda: {}["of the user"])

    thing, library = put(later)
    with pytest.raises(KeyError, match="of the user"):
        library.work(3)
    assert (library.calls, thing.said) == ([], [])


@pytest.mark.parametrize("refusal", [UserError("no"), RunError("no"), Notice("no")])
def test_a_refusal_is_no_fault(refusal: Exception) -> None:
    def refuses(stock: OriginalCall, x: int) -> Any:
        try:
            return stock(x)
        except ValueError:
            raise refusal from None

    def fails(x: int) -> int:
        raise ValueError(x)

    thing, library = put(refuses, fails)
    with pytest.raises(type(refusal), match="no"):
        library.work(3)
    assert (thing.said, thing.on) == ([], True)


def test_an_error_that_went_through_keeps_nothing_alive() -> None:
    class Tensor:
        pass

    seen: list[weakref.ref[Tensor]] = []

    def fails(x: int) -> int:
        big = Tensor()
        seen.append(weakref.ref(big))
        raise MemoryError(x)

    _, library = put(lambda stock, x: stock(x), fails)
    gc.disable()
    try:
        _caught(library)
        assert seen[0]() is None
    finally:
        gc.enable()


def _caught(library: Library) -> None:
    try:
        library.work(3)
    except MemoryError:
        return


def test_something_of_its_own_that_is_called_later_is_as_safe() -> None:
    thing = Thing()

    def batches() -> Iterator[int]:
        yield from (1, 2)
        thing.safely(lambda: 1 // 0)

    assert list(batches()) == [1, 2]
    assert len(thing.said) == 1
    assert thing.safely(lambda: 5) is None
    thing.forget()
    assert thing.safely(lambda: 5) == 5


def test_where_warnings_are_errors_a_fault_of_ours_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    class Strict(Thing):
        def say(self, line: str) -> None:
            raise Notice(line)

    thing, library = Strict(), Library(lambda x: 2 * x)
    thing.around(library, "work", before)
    assert library.work(3) == 6
    assert capsys.readouterr().err.startswith("hf_mps: the guard example failed: ZeroDivisionError: of ours")
