"""Weights in 4 and 8 bits: the bits, what computes with them on each device, and what is refused in one line."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from inline_snapshot import snapshot

from hf_mps.core.errors import UserError
from hf_mps.finetune.models import checkpoint, quantization
from hf_mps.metal.device import precision
from tests.finetune import builders
from tests.refusals import refusal

pytest.importorskip("bitsandbytes")

# The 16 values of NF4, from table E of arXiv 2305.14314 (QLoRA, appendix E).
NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334),
    *(-0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return builders.model(tmp_path_factory.mktemp("models"), "llama")


def loaded(place: Path, kind: Any) -> Any:

    settings: dict[str, Any] = {}
    if kind is not None:
        settings = {"quantization_config": quantization.config(kind, "float32"), "device_map": {"": "cpu"}}
    model, _ = checkpoint.resolve(str(place)).model("AutoModelForCausalLM", **settings)
    if kind is not None:
        quantization.settle(model, "float32")
    return model


@pytest.fixture(scope="module")
def whole(place: Path) -> Any:
    return loaded(place, None)


@pytest.fixture(scope="module", params=get_args(quantization.Kind))
def rounded(place: Path, request: pytest.FixtureRequest) -> tuple[Any, Any]:
    return request.param, loaded(place, request.param)


def test_every_linear_layer_but_the_output_layer_is_quantized_and_the_choices_say_so(
    rounded: tuple[Any, Any], whole: Any
) -> None:
    kind, model = rounded
    linear = {name: part for name, part in whole.named_modules() if isinstance(part, torch.nn.Linear)}
    linear.pop("lm_head")
    found = quantization.layers(model)
    assert found.keys() == linear.keys()
    assert {layer.weight.dtype for layer in found.values()} == {torch.int8 if kind == "int8" else torch.uint8}
    assert quantization.parameters(model) == sum(each.numel() for each in whole.parameters())
    count = sum(each.weight.numel() for each in linear.values())
    told = quantization.choices(model, kind, quantization.compute_dtype({}, "float32", "mps"), "mps")
    assert told["quantization"].value == kind
    assert f"{len(linear)} linear layers, {count / 1e6:,.1f} M weights in {'8' if kind == 'int8' else '4'} bits" in (
        told["quantization"].reason
    )
    assert "whole, in float32: embed_tokens, " in told["quantization"].reason
    assert "lm_head" in told["quantization"].reason


def test_the_weights_are_the_nearest_of_the_format_s_values(rounded: tuple[Any, Any], whole: Any) -> None:
    """Another way than bitsandbytes': each weight over its block's largest, the nearest of the 16 (or 255) values."""
    kind, model = rounded
    name = "model.layers.0.mlp.up_proj"
    found = quantization.dequantized(model.get_submodule(name))
    exact = whole.get_submodule(name).weight.detach()
    assert found.dtype == torch.float32
    assert found.shape == exact.shape
    if kind == "int8":
        scale = exact.half().abs().amax(dim=1, keepdim=True).float() / 127
        assert ((found - exact).abs() <= 0.6 * scale).all(), "half a step, and the rounding of float16"
        assert torch.equal((found / scale).round(), (found / scale).round().clamp(-127, 127))
        return
    blocks = exact.reshape(-1, 64)
    scale = blocks.abs().amax(dim=1, keepdim=True)
    if kind == "nf4":
        values = torch.tensor(NF4)
        nearest = values[(blocks / scale).unsqueeze(-1).sub(values).abs().argmin(-1)] * scale
        # Double quantization: the scales themselves are rounded to 8 bits.
        torch.testing.assert_close(found.reshape(-1, 64), nearest, rtol=0.05, atol=1e-7)
    assert float((found - exact).norm() / exact.norm()) < {"nf4": 0.12, "fp4": 0.17}[kind]


@pytest.mark.rotated
def test_a_device_holds_the_same_bits_and_multiplies_by_them_as_the_cpu_does(rounded: tuple[Any, Any]) -> None:
    _, model = rounded
    ids = torch.arange(5, 25)[None]
    there = copy.deepcopy(model)
    there.to("mps")
    layers, moved = quantization.layers(model), quantization.layers(there)
    for name in list(layers)[:7]:
        assert moved[name].weight.device.type == "mps"
        assert torch.equal(quantization.dequantized(moved[name]).cpu(), quantization.dequantized(layers[name]))
    for training in (True, False):
        ours, theirs = there.train(training)(ids.to("mps")).logits.cpu(), model.train(training)(ids).logits
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("device", ["cpu", "mps"])
def test_products_and_gradients_are_those_of_whole_weights_also_after_an_evaluation(
    rounded: tuple[Any, Any], device: str
) -> None:
    """bitsandbytes repacks 4-bit weights at an evaluation on some CPUs, and no gradient passes them afterwards."""
    layer = copy.deepcopy(quantization.layers(rounded[1])["model.layers.0.mlp.down_proj"]).to(device)
    weight = quantization.dequantized(layer)
    layer.eval()
    with torch.no_grad():
        layer(torch.ones(2, 3, layer.in_features, device=device))
    layer.train()
    x, y = (torch.linspace(-1, 1, 6 * layer.in_features, device=device).view(2, 3, -1).requires_grad_() for _ in "xy")
    ours, theirs = layer(x), torch.nn.functional.linear(y, weight)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    (ours**2).sum().backward()
    (theirs**2).sum().backward()
    torch.testing.assert_close(x.grad, y.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("emulates", "training", "weights", "device", "dtype", "reason"),
    [
        (False, {}, "bfloat16", "mps", "bfloat16", "this chip computes it"),
        (True, {}, "bfloat16", "mps", "float32", "this chip emulates bfloat16"),
        (False, {}, "float32", "mps", "float32", "the run's precision, fp32"),
        (False, {"bf16": True}, "float32", "mps", "bfloat16", "the run's precision, bf16"),
        (True, {"fp16": True}, "float32", "mps", "float16", "the run's precision, fp16"),
        (False, {}, "bfloat16", "cpu", "float32", "the CPU's own"),
    ],
)
def test_the_dtype_of_products_follows_the_run_and_the_chip(
    monkeypatch: pytest.MonkeyPatch,
    emulates: bool,
    training: dict[str, Any],
    weights: str,
    device: str,
    dtype: str,
    reason: str,
) -> None:
    monkeypatch.setattr(precision, "emulates_bfloat16", lambda: emulates)
    found = quantization.compute_dtype(training, weights, device)
    assert found.value == dtype
    assert reason in found.reason


@pytest.mark.parametrize(
    ("macos", "has_kernels", "value"),
    [
        ("15.5", True, "bitsandbytes' own"),
        ("26.1", False, "bitsandbytes' own"),
        ("26.1", True, "kernels-community/bitsandbytes-mps"),
    ],
)
def test_the_header_says_what_makes_whole_weights_on_metal(
    monkeypatch: pytest.MonkeyPatch, macos: str, has_kernels: bool, value: str
) -> None:
    monkeypatch.setattr(quantization.platform, "mac_ver", lambda: (macos, ("", "", ""), "arm64"))
    monkeypatch.setattr(quantization, "find_spec", lambda name: has_kernels or None)
    assert quantization._kernels("nf4", "mps").value == value


@pytest.mark.parametrize(
    ("stored", "line"),
    [
        (
            {"quantization_config": {"quant_method": "awq", "bits": 4}},
            snapshot(
                "model M: its weights are quantized by AWQ, above which nothing trains here; next: the model that it"
                " was made from, with quantization=nf4"
            ),
        ),
        (
            {"quantization": {"group_size": 64, "bits": 4}, "quantization_config": {"group_size": 64, "bits": 4}},
            snapshot(
                "model M: its weights are in MLX's own format, which PyTorch does not read; next: the model that it"
                " was made from, with quantization=nf4, or mlx_lm.lora"
            ),
        ),
    ],
)
def test_a_checkpoint_that_is_quantized_already_is_refused(stored: dict[str, Any], line: str) -> None:
    assert refusal(quantization.refuse_stored, "M", stored, None) == line


def test_one_that_is_quantized_as_the_recipe_says_is_read_as_it_is(place: Path, tmp_path: Path) -> None:
    model = loaded(place, "nf4")
    model.save_pretrained(tmp_path)
    again = loaded(tmp_path, "nf4")
    for name, layer in quantization.layers(model).items():
        assert torch.equal(quantization.dequantized(layer), quantization.dequantized(again.get_submodule(name)))
    with pytest.raises(UserError, match=r"its weights are nf4 of bitsandbytes; next: quantization=nf4 with lora$"):
        loaded(tmp_path, None)


def test_without_bitsandbytes_the_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantization, "find_spec", lambda name: None)
    with pytest.raises(
        UserError, match=r"^quantization: bitsandbytes is not installed; next: pip install .*, or quant"
    ):
        quantization.config("nf4", "float32")


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({}, "has quantization: nf4 without lora, and rounded weights cannot be trained"),
        ({"lora": {}, "training": {"fsdp": True}}, "has quantization and training.fsdp"),
    ],
)
def test_what_rounded_weights_cannot_do_is_refused_with_the_recipe(given: dict[str, Any], line: str) -> None:
    values: dict[str, Any] = {
        "task": "sft",
        "model": "M",
        "data": {"hub": "h", "hold_out": 0.1, "splits": {"train": "train"}},
        "quantization": "nf4",
        **given,
    }
    with pytest.raises(UserError, match=line):
        builders.recipe(**values)


def test_a_configuration_that_names_no_quantization_is_one_of_whole_weights(place: Path, tmp_path: Path) -> None:
    own = tmp_path / "own"
    shutil.copytree(place, own)
    said = json.loads((own / "config.json").read_text(encoding="utf-8"))
    (own / "config.json").write_text(json.dumps({**said, "quantization_config": None}), encoding="utf-8")
    assert not quantization.is_quantized(loaded(own, None))
    assert quantization.is_quantized(loaded(own, "nf4"))
