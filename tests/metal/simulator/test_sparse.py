"""Sparse COO tensors on the simulated device: the operators that a Mac has for them, right, and no others."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hf_mps.metal.fallback import registration
from hf_mps.metal.operators.table import SPARSE, table
from tests.metal.simulator.conformance import sparse_calls
from tests.metal.simulator.conformance.compare import Outcome, outcome
from tests.metal.simulator.conformance.sparse_calls import KINDS, Tensors

pytestmark = [
    pytest.mark.usefixtures("mps"),
    pytest.mark.filterwarnings("ignore:Sparse invariant checks"),
    pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta"),
]

DTYPES = (torch.float32, torch.float16, torch.int64)
# Metal's sums and products are coalesced, which the CPU's need not be.
COALESCED = ("add", "sub", "mul")


@pytest.fixture
def device_alone() -> Iterator[None]:
    """Without the layer's kernels for what Metal lacks."""
    with registration.suspended():
        yield


@pytest.mark.parametrize("key", SPARSE)
def test_the_device_has_the_kernels_that_the_table_lists_and_no_others(key: str, device_alone: None) -> None:
    assert set(torch._C._dispatch_get_registrations_for_dispatch_key(key)) == set(table().sparse[key])


@pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="the counts of torch 2.13")
def test_the_counts_of_torch_2_13() -> None:
    counts = {key: (len(kernels), sum(kernels.values())) for key, kernels in table().sparse.items()}
    assert counts == {"SparseMPS": (160, 146), "SparseCsrMPS": (13, 13)}


@pytest.mark.parametrize("name", sorted(table().sparse["SparseMPS"]))
def test_an_operator_gives_what_the_cpu_gives(name: str) -> None:
    agreed = 0
    for dtype in DTYPES:
        for kind in KINDS:
            for given in sparse_calls.calls(name):
                found = compared(name, given, kind, dtype)
                assert found.agrees, (dtype, kind, found.detail)
                agreed += found.kind in ("same", "close")
    assert (agreed == 0) == (name in sparse_calls.REFUSE_ALL)


def compared(name: str, given: sparse_calls.Given, kind: str, dtype: torch.dtype) -> Outcome:
    """One call on the device against the CPU; in double precision, then rounded, where the CPU has no such kernel."""

    def on(device: str, computed_in: torch.dtype = dtype) -> Any:
        results = sparse_calls.call(name, given, Tensors(kind, computed_in, device, of=dtype))
        assert all(not isinstance(one, torch.Tensor) or one.device.type == device for one in results)
        if not name.startswith(tuple(f"aten::{start}" for start in COALESCED)):
            return results
        return [one.coalesce() if one.is_sparse else one for one in results]

    def rounded() -> Any:
        return [one.to(dtype) for one in on("cpu", torch.float64)[:1]]

    found = outcome(lambda: on("cpu"), lambda: on("mps"))
    if "only the CPU raises NotImplementedError" in found.detail and "not implemented for" in found.detail:
        return outcome(rounded, lambda: on("mps")[:1])
    return found


def test_sums_and_products_of_two_are_coalesced_as_metals_are() -> None:
    for dtype in DTYPES:
        left, right = (Tensors("repeated", dtype, "mps").sparse(scale) for scale in (1, 2))
        for result in (left + right, left - right, left * right, left.clone().add_(right)):
            assert (result.is_coalesced(), result._nnz()) == (True, 3)


def test_what_the_table_does_not_list_is_refused_in_the_dispatchers_words(device_alone: None) -> None:
    sparse = torch.eye(3, device="mps").to_sparse()
    for call, name in (
        (lambda: torch.hspmm(sparse, torch.ones(3, 2, device="mps")), "aten::hspmm"),
        (lambda: torch.ones(3, 3, device="mps").addmm_(sparse, torch.ones(3, 3, device="mps")), "aten::addmm_"),
        (lambda: torch.ones_like(sparse), "aten::fill_.Scalar"),
    ):
        with pytest.raises(NotImplementedError, match=f"Could not run '{name}' with arguments from the 'SparseMPS'"):
            call()


def test_compressed_layouts_are_refused_as_on_a_mac() -> None:
    eye = torch.eye(2, device="mps")
    with pytest.raises(NotImplementedError, match=r"aten::_to_sparse_csr' is not currently implemented for the MPS"):
        eye.to_sparse_csr()
    with pytest.raises(NotImplementedError, match="Could not run 'new_compressed_tensor' from the 'mps:0' device"):
        torch.sparse_csr_tensor(eye[0].long().cumsum(0), eye[0, :1].long(), eye[0, :1], size=(1, 2))


@pytest.mark.parametrize(
    ("left", "right", "words"),
    [
        ((3, 4), (1, 4), r"mul\(sparse, sparse\): sparse sizes must match exactly"),
        ((3, 4), (3, 4, 2), r"mul\(sparse, sparse\): must have same sparse_dim, got 2 vs 3"),
    ],
)
def test_a_product_is_broadcast_where_metal_does_and_nowhere_else(left: Any, right: Any, words: str) -> None:
    with pytest.raises(RuntimeError, match=words):
        torch.ones(left, device="mps").to_sparse() * torch.ones(right, device="mps").to_sparse()
    with pytest.raises(RuntimeError, match=r"mul\(dense, sparse\): sizes must match exactly \(no broadcasting\)"):
        torch.ones(3, 4, device="mps").to_sparse() * torch.ones(1, 4, device="mps")


def test_a_sparse_tensor_lives_on_the_device(tmp_path: Path) -> None:
    indices, values = torch.tensor([[0, 1, 1], [2, 0, 2]]), torch.tensor([3.0, 4.0, 5.0])
    sparse = torch.sparse_coo_tensor(indices.to("mps"), values.to("mps"), (2, 3)).coalesce()
    assert (sparse.device.type, sparse.is_sparse) == ("mps", True)
    assert sparse.indices().is_mps
    assert sparse.values().is_mps
    assert "device='mps:0'" in repr(sparse)
    torch.save(sparse, tmp_path / "sparse.pt")
    for twin in (sparse.clone(), copy.deepcopy(sparse), sparse.cpu().to("mps"), torch.load(tmp_path / "sparse.pt")):
        assert twin.is_mps
        assert torch.equal(twin.to_dense(), sparse.to_dense())


def test_whether_its_places_are_in_order_is_found_out_on_the_device() -> None:
    """torch.load asks since 2.15, of every sparse tensor that says so of itself."""
    places, values = torch.tensor([[0, 1], [2, 0]], device="mps"), torch.ones(2, device="mps")
    torch._validate_sparse_coo_tensor_args(places, values, (2, 3), True)
    with pytest.raises(RuntimeError, match="uncoalesced"):
        torch._validate_sparse_coo_tensor_args(places.flip(1), values, (2, 3), True)
    with pytest.raises(RuntimeError, match=r"size is inconsistent with indices"):
        torch._validate_sparse_coo_tensor_args(places, values, (2, 2), True)


def test_its_memory_is_the_devices() -> None:
    before = torch.mps.current_allocated_memory()
    sparse = torch.eye(512, device="mps").to_sparse()
    assert torch.mps.current_allocated_memory() - before >= 512 * (2 * 8 + 4)
    del sparse
    assert torch.mps.current_allocated_memory() == before


def test_float64_is_refused_as_in_dense_tensors() -> None:
    with pytest.raises(TypeError, match="MPS framework doesn't support float64"):
        torch.eye(2, dtype=torch.float64).to_sparse().to("mps")


# What training meets. Each trains on both devices with one seed.


def losses(device: str, loop: Any) -> list[float]:
    torch.manual_seed(3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "Sparse invariant checks")
        return list(loop(device))


def sparse_embedding(device: str, optimizers: Any) -> Iterator[float]:
    """nn.Embedding(sparse=True): its gradient is sparse, two of them are summed for each step."""
    model = nn.Sequential(nn.Embedding(40, 8, sparse=True), nn.Flatten(), nn.Linear(24, 3)).to(device)
    chosen = optimizers(list(model[0].parameters()), list(model[2].parameters()))
    for step in range(8):
        rows = torch.randint(0, 40, (16, 3))
        loss = nn.functional.cross_entropy(model(rows.to(device)), (rows.sum(1) % 3).to(device))
        loss.backward()
        assert model[0].weight.grad.is_sparse
        if step % 2:
            for optimizer in chosen:
                optimizer.step()
                optimizer.zero_grad()
        yield loss.item()


@pytest.mark.parametrize(
    "optimizers",
    [
        lambda table, rest: [torch.optim.SGD([*table, *rest], lr=0.3)],
        lambda table, rest: [torch.optim.SGD([*table, *rest], lr=0.3, momentum=0.9)],
        lambda table, rest: [torch.optim.Adagrad([*table, *rest], lr=0.1)],
        lambda table, rest: [torch.optim.SparseAdam(table, lr=0.05), torch.optim.AdamW(rest, lr=0.01)],
    ],
    ids=["sgd", "momentum", "adagrad", "sparse-adam"],
)
def test_an_embedding_with_sparse_gradients_trains_as_on_the_cpu(optimizers: Any) -> None:
    on_cpu, on_device = (losses(device, lambda d: sparse_embedding(d, optimizers)) for device in ("cpu", "mps"))
    assert on_device == pytest.approx(on_cpu, rel=1e-5)
    assert on_cpu[-1] != on_cpu[0]


def trained_values(device: str) -> Iterator[float]:
    """As PEFT's SHiRA: a vector is trained, which makes a sparse matrix that is added to a frozen weight."""
    weight = torch.randn(6, 5).to(device)
    indices = torch.randperm(30)[:7]
    indices = torch.stack((indices // 5, indices % 5)).to(device)
    vector = nn.Parameter(torch.zeros(7, device=device))
    x, y = torch.randn(20, 5).to(device), torch.randn(20, 6).to(device)
    optimizer = torch.optim.AdamW([vector], lr=0.1)
    for _ in range(6):
        delta = torch.sparse_coo_tensor(indices, vector * 2.0, weight.shape)
        loss = nn.functional.mse_loss(nn.functional.linear(x, weight + delta), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()
    weight += torch.sparse_coo_tensor(indices, vector.detach(), weight.shape)  # merged
    yield weight.sum().item()


def sparse_product(device: str) -> Iterator[float]:
    """As PEFT's FRoD: a product of a sparse matrix, whose values are trained, with activations."""
    indices = torch.tensor([[0, 0, 1, 3, 3], [0, 2, 1, 0, 3]]).to(device)
    values = nn.Parameter(torch.randn(5).to(device))
    x = torch.randn(12, 4).to(device).requires_grad_()
    for _ in range(3):
        matrix = torch.sparse_coo_tensor(indices, values, (4, 4)).coalesce()
        assert matrix._nnz() == 5
        loss = torch.sparse.mm(matrix, x.t()).t().square().mean() + matrix.to_dense().abs().sum() * 0.01
        of_values, of_x = torch.autograd.grad(loss, (values, x))
        with torch.no_grad():
            values -= 0.1 * of_values
            x -= of_x
        yield loss.item()


def sparse_scores(device: str) -> Iterator[float]:
    """As a sparse encoder (SPLADE): similarities of sparse embeddings, and their norms."""
    queries, documents = (torch.randn(5, 30).relu().to(device).to_sparse() for _ in range(2))
    yield torch.sparse.mm(queries, documents.t()).to_dense().sum().item()
    yield torch.sparse.sum(queries * queries, dim=1).to_dense().sqrt().sum().item()
    yield torch.sparse.softmax(queries, dim=1).to_dense().std().item()
    yield torch.cat([queries.index_select(0, torch.tensor([1, 3], device=device)), documents]).norm().item()


@pytest.mark.parametrize("loop", [trained_values, sparse_product, sparse_scores])
def test_what_libraries_do_with_sparse_tensors_gives_the_cpus_numbers(loop: Any) -> None:
    on_cpu, on_device = losses("cpu", loop), losses("mps", loop)
    assert on_device == pytest.approx(on_cpu, rel=1e-5)


def test_gradients_reach_the_values_in_half_precision_too() -> None:
    values = torch.tensor([1.0, 2.0, 4.0], dtype=torch.float16, device="mps", requires_grad=True)
    sparse = torch.sparse_coo_tensor(torch.tensor([[0, 2, 2], [1, 0, 0]], device="mps"), values, (3, 2))
    (sparse + sparse).coalesce().to_dense().square().sum().backward()
    assert values.grad.tolist() == [8.0, 48.0, 48.0]
