"""The table of Metal's operators: read right, cached, and the same as what the dispatcher says of every operator."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hf_mps.core import cache
from hf_mps.core.errors import UserError
from hf_mps.core.releases import torch_release
from hf_mps.metal.operators import table as tables

COMPOSITE_KEYS = ("CompositeImplicitAutograd", "CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional")
# Operators of the JIT that are registered by hand in C++ and stand in no native_functions.yaml.
BY_HAND = ("aten::get_gradients", "aten::quantized_lstm.", "aten::quantized_gru.", "aten::shallow_copy_data_")


def registered() -> set[str]:
    names = torch._C._dispatch_get_all_op_names()
    return {name for name in names if name.startswith("aten::") and not name.startswith(BY_HAND)}


def has_kernel(name: str, key: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(name, key)


# The layer's own kernels for missing operators are off: this is about the device alone.
DISPATCHER = """
import torch
for name in torch._C._dispatch_get_all_op_names():
    if name.startswith("aten::") and torch._C._dispatch_has_kernel_for_dispatch_key(name, "MPS"):
        line = next(line for line in torch._C._dispatch_dump(name).splitlines() if line.startswith("MPS: "))
        print(name, "python" if "/torch/_" in line else "device")
"""


def test_table_and_dispatcher_agree_for_every_operator_on_mps(mps: None, run_python) -> None:
    done = run_python("-c", DISPATCHER, env={"HF_MPS_SIMULATE": "1", "HF_MPS_FALLBACK": "error"})
    there = dict(line.split() for line in done.stdout.splitlines())
    assert len(there) > 500, done.stderr
    table = tables.table()
    said = table.native | table.cpu | tables.ONLY_AN_ERROR | table.python
    assert sorted(there.keys() - said) == [], "kernels that a Mac does not have"
    assert sorted((said & registered()) - there.keys()) == [], "kernels that a Mac has"
    assert {name for name, place in there.items() if place == "python"} == table.python


def test_table_and_dispatcher_agree_on_what_is_composite() -> None:
    table = tables.table()
    there = {name for name in registered() if any(has_kernel(name, key) for key in COMPOSITE_KEYS)}
    # A native kernel goes before a composite one; torchgen names variants that it then does not make.
    assert {name for name in registered() if table.kind(name) == "composite"} == {
        name for name in there if table.kind(name) in ("composite", "missing")
    }
    assert not table.missing & there


def test_every_operator_is_of_one_kind() -> None:
    table = tables.table()
    assert not table.native & table.composite
    assert not table.native & table.missing
    assert not table.composite & table.missing
    for name in registered():
        assert table.kind(name) in ("native", "composite", "missing", "cpu", "python")
    with pytest.raises(KeyError):
        table.kind("aten::no_such_operator")


@pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="the counts of torch 2.13")
def test_the_counts_of_torch_2_13() -> None:
    assert len(tables.table().native) == 890
    assert len(tables.table().missing) == 335


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("aten::add.Tensor", "native"),  # structured_delegate to add.out
        ("aten::add_.Tensor", "native"),
        ("aten::add.out", "native"),
        ("aten::linear", "native"),
        ("aten::_fused_adamw_", "native"),
        ("aten::transpose.int", "composite"),
        ("aten::adaptive_max_pool3d", "composite"),  # made of its out= form …
        ("aten::adaptive_max_pool3d.out", "missing"),  # … which is what a Mac reports as missing
        ("aten::_new_zeros_with_same_feature_meta.out", "composite"),  # autogen
        ("aten::mode", "missing"),
        ("aten::_nested_get_values", "missing"),  # an empty `dispatch: {}`
        ("aten::_coalesce", "missing"),  # SparseMPS is not MPS
        ("aten::upsample_nearest3d.vec", "cpu"),
    ],
)
def test_operators_whose_kind_is_known(name: str, kind: str) -> None:
    assert tables.table().kind(name) == kind


@pytest.mark.parametrize(
    ("name", "same_as_cpu"),
    [("aten::abs", True), ("aten::to_dense", None), ("aten::_coalesce", False), ("aten::addmm_", None)],
)
def test_kernels_for_sparse_tensors_are_told_from_the_cpus(name: str, same_as_cpu: bool | None) -> None:
    assert tables.table().sparse["SparseMPS"].get(name) is same_as_cpu


@pytest.mark.parametrize(
    ("name", "before", "since"),
    [
        ("aten::_linalg_eigh", "composite", "native"),
        ("aten::_linalg_eigh.eigenvalues", "missing", "native"),
        ("aten::_ctc_loss", "missing", "native"),
        ("aten::poisson", "missing", "native"),
        ("aten::linalg_svd", "cpu", "composite"),
        ("aten::linalg_lu_solve.out", "python", "native"),
    ],
)
def test_operators_that_got_a_kernel_with_torch_2_14(name: str, before: str, since: str) -> None:
    assert tables.table().kind(name) == (since if torch_release() >= (2, 14) else before)


@pytest.fixture
def stored(own_folders: Path) -> Iterator[Path]:
    """The folder that the table is stored in, empty, and nothing read in this process yet."""
    tables.table.cache_clear()
    yield own_folders
    tables.table.cache_clear()


def test_reading_it_costs_less_than_5_ms_once_it_is_stored(stored: Path) -> None:
    parsed = tables.table()
    times = []
    for _ in range(5):
        tables.table.cache_clear()
        start = time.perf_counter()
        assert tables.table() == parsed
        times.append(time.perf_counter() - start)
    assert min(times) < 0.005
    assert [path.suffix for path in stored.iterdir()] == [".json"]


def test_a_damaged_store_is_made_anew(stored: Path) -> None:
    parsed = tables.table()
    (file,) = stored.iterdir()
    for damage in (b"", b"{}", b"[1]", b'{"native": 1}', b"\xff\xfe"):
        file.write_bytes(damage)
        tables.table.cache_clear()
        assert tables.table() == parsed
    assert file.stat().st_size > 10_000


def test_a_table_in_the_spare_folder_is_found_there(
    stored: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as unwritable:
        (tmp_path / "file").write_text("")
        unwritable.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
        parsed = tables.table()
    spare = cache.spare()
    assert tmp_path in spare.parents, "the temporary folder of the test, not of the machine"
    assert [path.suffix for path in spare.iterdir()] == [".json"]
    tables.table.cache_clear()
    assert tables.table() == parsed
    assert not stored.exists(), "found in the spare folder, it is not stored once more"


def test_a_cache_that_cannot_be_written_is_no_error(
    stored: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "file"))
    assert tables.table().native


def test_a_torch_without_the_file_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="reinstall torch"):
        tables.functions_file()


def test_it_does_not_import_torch(run_python) -> None:
    code = "import sys; from hf_mps.metal.operators import table; table.table().native; print('torch' in sys.modules)"
    done = run_python("-c", code, env={"HF_MPS": "0", "HF_MPS_SIMULATE": None})
    assert (done.stdout.strip(), done.stderr) == ("False", "")
