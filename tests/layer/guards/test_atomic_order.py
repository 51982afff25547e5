"""Under use_deterministic_algorithms(True) each way of adding at repeated indices is right, and always the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from inline_snapshot import snapshot

from hf_mps.core import notices
from hf_mps.layer import guards
from hf_mps.layer.guards import kernel_overrides
from hf_mps.layer.guards.numerics import atomic_order
from hf_mps.layer.guards.numerics.atomic_order import AtomicOrder
from hf_mps.layer.guards.numerics.ordered_sums import add_rows
from hf_mps.metal.simulator import strictness
from tests.layer.guards.experiments.order import always, deterministic

COUNT = 60


@pytest.fixture(autouse=True)
def _any_order() -> Iterator[None]:
    with strictness.on("atomic-order"):
        yield


def drawn(device: str) -> SimpleNamespace:
    """Rows, numbers of rows that repeat, and values for them, the same on each device."""
    draw = torch.Generator().manual_seed(0)
    whole = torch.randn(5, 6, 7, generator=draw)
    numbers = [torch.randint(-size, size, (COUNT,), generator=draw) for size in whole.shape]
    values = torch.randn(6, 9, COUNT, generator=draw)
    places = torch.randint(0, 5, values.shape, generator=draw)
    made = {"whole": whole, "first": numbers[0], "second": numbers[1], "third": numbers[2], "values": values}
    return SimpleNamespace(**{name: each.to(device) for name, each in (made | {"places": places}).items()})


def put(given: Any, indices: list[Any], values: Any) -> Any:
    return torch.ops.aten.index_put_(given, indices, values, True)


def backward(padding: int = -1, by_frequency: bool = False, dtype: torch.dtype = torch.float32) -> Callable[[Any], Any]:
    return lambda d: torch.ops.aten.embedding_dense_backward(
        d.values.to(dtype), d.places[:, :, 0], 5, padding, by_frequency
    )


FORMS: dict[str, Callable[[Any], Any]] = {
    "embedding": backward(),
    "embedding with padding": backward(padding=2),
    "embedding by frequency": backward(by_frequency=True),
    "embedding in bfloat16": backward(dtype=torch.bfloat16),
    "rows": lambda d: put(d.whole.clone(), [d.first], d.values[:, :7].permute(2, 0, 1)),
    "one row": lambda d: put(d.whole.clone(), [d.first[0]], d.values[:, :7, 0]),
    "columns in the midst": lambda d: put(d.whole.clone(), [None, d.second], d.values[:5, 0, :, None]),
    "two dimensions side by side": lambda d: put(d.whole.clone(), [None, d.second, d.third], d.values[:5, 0]),
    "two dimensions apart": lambda d: put(d.whole.clone(), [d.first, None, d.third], d.values[:, 0].t()),
    "a mask": lambda d: put(d.whole.clone(), [d.whole > 0], torch.tensor(0.3, device=d.whole.device)),
    "a mask beside numbers": lambda d: put(d.whole.clone(), [d.whole[:, 0, 0] != 0, d.second[:5]], d.values[0, 0, 0]),
    "into a transposed tensor": lambda d: put(d.whole.clone().mT, [d.first], d.values[0, 0, :, None, None]).clone(),
    "index_add": lambda d: d.whole.index_add(0, d.first % 5, d.values[:, :7].permute(2, 0, 1), alpha=2),
    "index_add_ along the last": lambda d: d.whole.clone().index_add_(-1, d.third % 7, d.values[:5, :6]),
    "scatter_add": lambda d: torch.ones(6, 9, 5, device=d.whole.device).scatter_add(2, d.places, d.values),
    "scatter_add of a part": lambda d: torch.ones(7, 9, 70, device=d.whole.device).scatter_add(0, d.places, d.values),
    "scatter_reduce": lambda d: torch.ones(6, 9, 5, device=d.whole.device).scatter_reduce(
        2, d.places, d.values, "sum", include_self=False
    ),
    "out": lambda d: torch.scatter_add(
        torch.ones(6, 9, 5, device=d.whole.device), 2, d.places, d.values, out=torch.empty(0, device=d.whole.device)
    ),
    "nothing at all": lambda d: d.whole.index_add(0, d.first[:0], d.whole[:0]),
    "whole numbers": lambda d: (d.places[0, 0] * 0).index_add(0, d.places[0, 0], d.places[0, 0]),
}


@pytest.mark.parametrize("form", FORMS)
def test_each_form_has_the_cpus_result_and_always_the_same(form: str) -> None:
    run, there, here = FORMS[form], drawn("mps"), drawn("cpu")
    before = torch.mps.get_rng_state()
    with deterministic():
        found = run(there)
        assert always(lambda: run(there))
    half = found.dtype == torch.bfloat16
    torch.testing.assert_close(found.cpu(), run(here), **({"rtol": 2e-2, "atol": 0.1} if half else {}))
    assert torch.equal(torch.mps.get_rng_state(), before)
    assert guards.get("atomic-order").failure is None


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=70), st.sampled_from([torch.float32, torch.float16]))
def test_rows_are_added_to_those_of_their_keys(keys: list[int], dtype: torch.dtype) -> None:
    terms = torch.randn(len(keys), 3, generator=torch.Generator().manual_seed(len(keys)))
    terms[0, 0] = torch.inf
    target = torch.full((10, 3), 0.5, dtype=dtype, device="mps")
    add_rows(target, torch.tensor(keys), terms.to("mps", dtype))
    wanted = torch.full((10, 3), 0.5, dtype=torch.float64).index_add(0, torch.tensor(keys), terms.to(dtype).double())
    torch.testing.assert_close(target.cpu().double(), wanted, rtol=1e-3, atol=2e-3)


def test_a_trial_meets_the_devices_own_kernel() -> None:
    guard = guards.get("atomic-order")
    with deterministic():
        found = guard.applies()
    assert found.value
    with strictness.off("atomic-order"):
        assert guard.applies().reason == snapshot(
            "tried on the device: 8 equal backward passes of an embedding agree to the bit"
        )
    assert not guard.times


def test_without_the_flag_nothing_is_put_before_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    put_there: list[str] = []
    monkeypatch.setattr(kernel_overrides, "before", lambda guard, name, wrapper, when: put_there.append(name))
    module = SimpleNamespace(
        __name__="torch",
        use_deterministic_algorithms=lambda mode: None,
        set_deterministic_debug_mode=lambda mode: torch.use_deterministic_algorithms(bool(mode)),
    )
    assert not torch.are_deterministic_algorithms_enabled()
    AtomicOrder().install(module)  # type: ignore[arg-type]
    module.use_deterministic_algorithms(False)
    assert put_there == []
    with deterministic():
        torch.use_deterministic_algorithms(False)
        module.set_deterministic_debug_mode(1)
    assert "embedding_dense_backward" in put_there


def test_once_the_flag_is_off_again_the_device_is_stock() -> None:
    there = drawn("mps")
    with deterministic():
        assert always(lambda: FORMS["embedding"](there))
    done = guards.get("atomic-order").times
    assert not always(lambda: FORMS["embedding"](there))
    assert guards.get("atomic-order").times == done


def test_without_the_guard_torch_refuses_or_keeps_silent() -> None:
    """As on a Mac: an error, or a warning, for scatter_add; nothing for embedding's backward."""
    there = drawn("mps")
    with guards.suspended("atomic-order"):
        with deterministic():
            with pytest.raises(RuntimeError, match="scatter_reduce_mps does not have a deterministic implementation"):
                FORMS["scatter_add"](there)
            with pytest.raises(RuntimeError, match="index_put_with_accumulate_mps does not have"):
                FORMS["index_add"](there)
            assert not always(lambda: FORMS["embedding"](there))
        with deterministic(warn_only=True), pytest.warns(UserWarning, match="scatter_reduce_mps does not have"):
            FORMS["scatter_add"](there)


def larger(volume: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.interpolate(volume, scale_factor=3.0, mode="nearest-exact")


def bags(table: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.embedding_bag(torch.arange(80).view(8, 10).to("mps") % 4, table.view(4, -1), mode="sum")


@pytest.mark.parametrize(
    ("compute", "name"), [(larger, "_upsample_nearest_exact3d_backward"), (bags, "_embedding_bag_dense_backward")]
)
def test_what_keeps_no_order_says_so_once(compute: Callable[[torch.Tensor], torch.Tensor], name: str) -> None:
    given = torch.randn(1, 2, 4, 4, 4, device="mps", requires_grad=True)

    def gradient() -> torch.Tensor:
        (found,) = torch.autograd.grad((compute(given) ** 2).sum(), given)
        return found

    with deterministic(), pytest.warns(notices.GuardNotice) as told:
        assert not always(gradient)
    assert len(told) == 1
    assert f"{name} adds in any order on Metal" in str(told[0].message)
    assert name in atomic_order.UNORDERED


@pytest.mark.parametrize(
    "wrong",
    [
        lambda d: put(d.whole.clone(), [d.first], d.values),
        lambda d: put(d.whole.clone(), [d.first, d.second[:7]], d.values[0, 0]),
        lambda d: put(d.whole.clone(), [d.first % 5], d.values[:, :7].permute(2, 0, 1).half()),
        lambda d: d.whole.index_add(0, d.first % 5, d.values),
        lambda d: d.whole.scatter_add(0, d.places, d.values),
    ],
)
@pytest.mark.filterwarnings("ignore:.*does not have a deterministic implementation")
def test_what_the_cpu_refuses_is_refused_in_the_same_words(wrong: Callable[[Any], Any]) -> None:
    with pytest.raises((RuntimeError, IndexError)) as here:
        wrong(drawn("cpu"))
    with deterministic(warn_only=True), pytest.raises(here.type) as there:
        wrong(drawn("mps"))
    assert str(there.value).splitlines()[0] == str(here.value).splitlines()[0]
    assert guards.get("atomic-order").failure is None


@pytest.mark.filterwarnings("ignore:.*does not have a deterministic implementation")
def test_an_index_out_of_range_is_the_devices_business() -> None:
    with strictness.on("silent-indices"), strictness.off("late-indices"), deterministic(warn_only=True):
        ones, index = torch.ones(2, device="mps"), torch.tensor([0, 7], device="mps")
        assert torch.zeros(3, device="mps").index_add(0, index, ones).tolist() == [1, 0, 0]
