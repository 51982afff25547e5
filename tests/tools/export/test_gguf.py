"""`hf-mps export gguf`: a converter writes, transformers' reader opens the file again.

llama.cpp's own converter is taken where it is on the PATH; else the one beside this file, which knows Llama alone.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoTokenizer, XGLMConfig, XGLMForCausalLM

from hf_mps.tools.export import runtimes
from tests.finetune.tiny import Ended
from tests.tools.export import llama_to_gguf
from tests.tools.export.conftest import record

pytest.importorskip("gguf")
Run = Callable[..., Ended]
OURS = Path(llama_to_gguf.__file__)


@pytest.fixture
def converter() -> Path:
    """The converter to run."""
    found = next(filter(None, map(shutil.which, runtimes.COMMANDS)), None)
    return Path(found) if found else OURS


@pytest.mark.slow
@pytest.mark.process
def test_an_adapter_leaves_merged_in_one_file(converter: Path, hf_mps: Run, adapted: Path, tmp_path: Path) -> None:
    """By the export's own comparison, and by gguf's own reader: names, shapes and types of what is in the file."""
    from gguf import GGUFReader

    ended = hf_mps("export", "gguf", adapted, tmp_path / "out", "--weights", "f16", "--converter", converter)
    assert ended.code == 0, ended.err
    found = record(tmp_path / "out")
    assert found["comparison"]["difference"]["relative"] < 2e-3
    assert found["choices"]["adapter"]["value"] == "merged into 35 layers"
    tensors = {one.name: one for one in GGUFReader(tmp_path / "out" / "teller-f16.gguf").tensors}
    assert len(tensors) == 47
    assert tensors["blk.4.ffn_down.weight"].tensor_type.name == "F16"
    assert [int(size) for size in tensors["token_embd.weight"].shape] == [64, 512]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["hf-mps-export.json", "teller-f16.gguf"]


@pytest.mark.slow
@pytest.mark.process
def test_a_file_with_other_logits_is_not_left_there(hf_mps: Run, stories: Path, tmp_path: Path) -> None:
    """A converter that does not turn the query weights, as one for another rotation would: only logits show it."""
    shutil.copytree(stories, tmp_path / "wrong")
    ended = hf_mps("export", "gguf", tmp_path / "wrong", tmp_path / "out", "--weights", "f32", "--converter", OURS)
    assert ended.code == 1
    assert "its logits, opened by transformers" in ended.err
    assert ended.err.endswith("; nothing was written\n")
    assert [path.name for path in tmp_path.iterdir()] == ["wrong"]


@pytest.mark.process
def test_an_architecture_that_llama_cpp_does_not_know_is_misuse(hf_mps: Run, stories: Path, tmp_path: Path) -> None:
    config = XGLMConfig(vocab_size=512, d_model=8, ffn_dim=8, num_layers=1, attention_heads=1)
    XGLMForCausalLM(config).save_pretrained(tmp_path / "other")
    AutoTokenizer.from_pretrained(stories).save_pretrained(tmp_path / "other")
    ended = hf_mps("export", "gguf", tmp_path / "other", tmp_path / "out", "--converter", OURS)
    assert ended.code == 2
    way_on = f"next: hf-mps export mlx {tmp_path / 'other'} OUT"
    assert f"llama.cpp's converter does not know XGLMForCausalLM; {way_on}\n" in ended.err
    assert [path.name for path in tmp_path.iterdir()] == ["other"]


@pytest.mark.process
def test_a_converter_that_fails_ends_in_its_own_last_word(hf_mps: Run, stories: Path, tmp_path: Path) -> None:
    (tmp_path / "convert_hf_to_gguf.py").write_text("raise MemoryError('no room for the model')", encoding="utf-8")
    ended = hf_mps("export", "gguf", stories, tmp_path / "out", "--converter", tmp_path)
    assert ended.code == 1
    assert ended.err == (
        "hf-mps: llama.cpp's converter failed: MemoryError: no room for the model; nothing was written\n"
    )
    assert not (tmp_path / "out").exists()


def test_without_a_converter_the_line_says_where_it_comes_from(
    hf_mps: Run, stories: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    ended = hf_mps("export", "gguf", stories, tmp_path / "out")
    assert ended.code == 2
    assert ended.err == (
        "hf-mps: export gguf needs llama.cpp's convert_hf_to_gguf.py, which is not on the PATH; next: git clone"
        " https://github.com/ggml-org/llama.cpp, then the same command with --converter llama.cpp\n"
    )
    said = hf_mps("export", "gguf", stories, tmp_path / "out", "--converter", tmp_path)
    assert said.code == 2
    assert said.err.endswith("there is no convert_hf_to_gguf.py; allowed: that file, or llama.cpp's folder\n")


def test_a_command_on_the_path_is_found_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    command = tmp_path / "llama-convert-hf-to-gguf"
    command.write_text("#!/bin/sh\n", encoding="utf-8")
    command.chmod(0o755)
    assert runtimes.converter(None).value == [str(command)]
    script = tmp_path / "convert_hf_to_gguf.py"
    script.write_text("", encoding="utf-8")
    script.chmod(0o755)
    assert runtimes.converter(None).value[1:] == [str(script)], "a script runs in this environment's Python"
