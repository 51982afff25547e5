"""Tensors of the simulated device on their way elsewhere: files, pickles, other processes, views, numpy."""

from __future__ import annotations

import copy
import io
import multiprocessing
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils.data import DataLoader, TensorDataset

pytestmark = pytest.mark.usefixtures("mps")


def test_torch_save_and_load_keep_the_device(tmp_path: Path) -> None:
    x = torch.arange(6.0, device="mps").view(2, 3)
    torch.save({"x": x, "row": x[1]}, tmp_path / "x.pt")
    back = torch.load(tmp_path / "x.pt")
    assert back["x"].device == torch.device("mps:0")
    assert torch.equal(back["x"], x)
    back["row"][0] = -1
    assert back["x"][1, 0].item() == -1, "tensors that shared memory share it again"


@pytest.mark.parametrize("there", ["cpu", "mps"])
@pytest.mark.parametrize("here", ["cpu", "mps"])
def test_map_location_moves_them(there: str, here: str, tmp_path: Path) -> None:
    module = torch.nn.Linear(3, 2).to(there)
    torch.save(module.state_dict(), tmp_path / "m.pt")
    back = torch.load(tmp_path / "m.pt", map_location=here, weights_only=True)
    assert {tensor.device.type for tensor in back.values()} == {here}
    assert torch.equal(back["weight"].cpu(), module.weight.detach().cpu())


def test_safetensors(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(3, 4, device="mps"), "b": torch.arange(5, device="mps").to(torch.bfloat16)}
    save_file(tensors, tmp_path / "x.safetensors")
    for device in ("cpu", "mps"):
        back = load_file(tmp_path / "x.safetensors", device=device)
        assert {tensor.device.type for tensor in back.values()} == {device}
        assert all(torch.equal(back[name].cpu(), tensors[name].cpu()) for name in tensors)


def test_deepcopy_and_pickle() -> None:
    x = torch.randn(2, 2, device="mps", requires_grad=True)
    for twin in (copy.deepcopy(x), pickle.loads(pickle.dumps(x))):
        assert twin.device == x.device
        assert twin.requires_grad
        assert torch.equal(twin, x)
        assert twin.data_ptr() != x.data_ptr()
    buffer = io.BytesIO()
    torch.save(torch.nn.Parameter(x.detach()), buffer)
    buffer.seek(0)
    assert isinstance(torch.load(buffer, weights_only=False), torch.nn.Parameter)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.bool, torch.uint8])
def test_there_and_back_keeps_every_bit(dtype: torch.dtype) -> None:
    x = torch.arange(-4, 8).to(dtype).view(3, 4)
    for form in (x, x.t(), x[:, ::2], x[1:], x[0, 0], x[:0]):
        moved = form.to("mps")
        assert moved.dtype == dtype
        assert torch.equal(moved.cpu(), form)
        assert moved.stride() == form.to("cpu", copy=True).stride()


def test_a_copy_writes_through_views_in_both_directions() -> None:
    x = torch.zeros(4, 4, device="mps")
    x[1:3, ::2] = torch.ones(2, 2)
    x.t()[0].copy_(torch.full((4,), 5.0, device="mps"))
    host = torch.zeros(4)
    host[::2].copy_(x[1, :2])
    assert host.tolist() == [5.0, 0.0, 0.0, 0.0]
    assert x.sum().item() == 5 * 4 + 2


def test_views_share_memory_and_version() -> None:
    x = torch.zeros(6, device="mps")
    view, version = x.view(2, 3).transpose(0, 1), x._version
    view[0, 1] = 3
    assert x.tolist() == [0, 0, 0, 3, 0, 0]
    assert x._version > version
    assert view.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()


def test_numpy_needs_the_cpu_first_as_on_a_mac() -> None:
    x = torch.ones(2, device="mps")
    with pytest.raises(TypeError, match=r"can't convert mps:0 device type tensor to numpy"):
        x.numpy()
    assert x.cpu().numpy().tolist() == [1.0, 1.0]
    assert torch.from_numpy(np.arange(3)).to("mps").tolist() == [0, 1, 2]


def test_resizing_an_output_reaches_every_alias() -> None:
    out = torch.empty(0, device="mps")
    alias = out.detach()
    torch.add(torch.ones(5, device="mps"), torch.ones(5, device="mps"), out=out)
    assert out.tolist() == [2.0] * 5
    assert alias.untyped_storage().nbytes() == out.untyped_storage().nbytes()
    x = torch.ones(2, device="mps")
    x.resize_(4)
    assert x.shape == (4,)
    assert x[:2].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_with_workers_feeds_the_device(workers: int) -> None:
    data = TensorDataset(torch.arange(12.0).view(6, 2))
    loader = DataLoader(data, batch_size=2, num_workers=workers, pin_memory=False)
    batches = [batch.to("mps") for (batch,) in loader]
    assert torch.cat(batches).tolist() == data.tensors[0].tolist()


def test_a_forked_process_is_told_that_it_cannot_use_the_device() -> None:
    def child(answers) -> None:
        answers.send(torch.mps._is_in_bad_fork())

    torch.ones(1, device="mps")
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=child, args=(theirs,))
    process.start()
    assert ours.poll(60)
    assert ours.recv() is True
    process.join(60)
    assert torch.mps._is_in_bad_fork() is False
