"""Names that older script bodies use: each works with one notice, and is left alone where the library has it."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import datasets
import pytest
import sklearn  # noqa: F401  sets two environment variables when it is first imported, here and not in a test
import torch
import transformers
import transformers.processing_utils
from inline_snapshot import snapshot
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainingArguments,
)
from transformers.optimization import AdamW
from transformers.trainer_utils import is_main_process
from transformers.utils import check_min_version, get_full_repo_name, send_example_telemetry
from transformers.utils.versions import require_version

from hf_mps.layer.compat import auth_token, metrics, names
from tests.layer.compat.arming import arm


def model() -> Any:
    size = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 16}
    return BertForSequenceClassification(BertConfig(vocab_size=20, **size))


def rows(count: int = 8) -> list[dict[str, Any]]:
    return [{"input_ids": [1, 2, 3], "labels": number % 2} for number in range(count)]


class Tokenizer:
    """As much of a tokenizer as Trainer needs to know of one."""

    model_input_names = ("input_ids",)

    def save_pretrained(self, folder: str) -> None:
        Path(folder, "tokenizer.txt").write_text("saved")

    def pad(self, features: list[dict[str, Any]], **_: Any) -> dict[str, torch.Tensor]:
        return {name: torch.tensor([row[name] for row in features]) for name in features[0]}


def test_telemetry_does_nothing_and_says_so_once(said) -> None:
    assert send_example_telemetry("run_glue", object(), framework="pytorch") is None
    send_example_telemetry("run_glue")
    assert said() == snapshot(["transformers.utils.send_example_telemetry: does nothing, examples report no use"])


def test_names_that_are_still_there_need_no_shim() -> None:
    check_min_version("4.21.0.dev0")
    require_version("datasets>=1.8.0", "a hint")
    assert is_main_process(-1)
    assert {"log_metrics", "save_metrics", "save_state", "is_world_process_zero"} <= set(dir(Trainer))
    assert {"should_log", "should_save", "n_gpu", "get_process_log_level"} <= set(dir(TrainingArguments))


def test_names_that_moved_are_found(said) -> None:
    assert get_full_repo_name("m", organization="us", token="x") == "us/m"
    assert said() == snapshot(
        ["transformers.utils.get_full_repo_name: huggingface_hub.get_full_repo_name takes its place"]
    )
    from huggingface_hub import Repository

    with pytest.raises(NotImplementedError, match="upload_folder"):
        Repository("x")


def test_adamw_is_pytorch_s_with_the_old_defaults(said) -> None:
    adam = transformers.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=0.1, no_deprecation_warning=True)
    assert isinstance(adam, torch.optim.AdamW)
    assert {name: adam.defaults[name] for name in ("lr", "eps", "weight_decay")} == {
        "lr": 0.1,
        "eps": 1e-6,
        "weight_decay": 0.0,
    }
    AdamW([torch.nn.Parameter(torch.zeros(1))], correct_bias=False)
    assert said() == snapshot(
        [
            "transformers.AdamW: torch.optim.AdamW takes its place",
            "transformers.AdamW: torch.optim.AdamW takes its place; correct_bias=False is dropped, it always corrects",
        ]
    )


def test_a_tokenizer_given_to_trainer_is_its_processing_class(said, tmp_path: Path) -> None:
    tokenizer = Tokenizer()
    trainer = Trainer(model(), TrainingArguments(str(tmp_path), report_to="none"), tokenizer=tokenizer)
    assert trainer.processing_class is tokenizer
    assert trainer.tokenizer is tokenizer
    notices = [line for line in said() if "okenizer" in line]
    assert notices == snapshot(
        [
            "Trainer(tokenizer=…): processing_class takes its place",
            "trainer.tokenizer is gone from transformers 5; in its place: trainer.processing_class",
        ]
    )


def test_a_subclass_s_own_tokenizer_is_its_own(said, tmp_path: Path) -> None:
    class Mine(Trainer):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.tokenizer = "mine"

    trainer = Mine(model(), TrainingArguments(str(tmp_path), report_to="none"))
    assert (trainer.tokenizer, trainer.processing_class) == ("mine", None)
    assert not [line for line in said() if "okenizer" in line]


def test_methods_overridden_in_their_old_form_are_called(said, tmp_path: Path) -> None:
    logged: list[dict[str, float]] = []

    class Old(Trainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False) -> Any:
            outputs = model(**inputs)
            return (outputs.loss, outputs) if return_outputs else outputs.loss

        def log(self, logs: dict[str, float]) -> None:
            logged.append(logs)

    args = TrainingArguments(
        str(tmp_path), max_steps=2, logging_steps=1, report_to="none", save_strategy="no", disable_tqdm=True
    )
    trainer = Old(model(), args, train_dataset=rows(), eval_dataset=rows())
    trainer.train()
    assert "eval_loss" in trainer.evaluate()
    assert any("loss" in row for row in logged)
    assert trainer.model_accepts_loss_kwargs is False
    assert [line for line in said() if line.startswith("Old.")] == snapshot(
        [
            "Old.compute_loss is called without num_items_in_batch, which transformers 5 passes",
            "Old.log is called without start_time, which transformers 5 passes",
        ]
    )


def test_use_auth_token_is_the_token_everywhere(said, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", "1")  # its threads outlive the load
    config = BertConfig(vocab_size=20, hidden_size=16, num_hidden_layers=1, num_attention_heads=1, intermediate_size=16)
    BertForSequenceClassification(config).save_pretrained(tmp_path)
    for reader in (AutoConfig, BertConfig, AutoModelForSequenceClassification, BertForSequenceClassification):
        got = reader.from_pretrained(tmp_path, use_auth_token=None)
        assert not hasattr(getattr(got, "config", got), "use_auth_token")
    assert said() == snapshot(["use_auth_token=…: token= takes its place"])
    with pytest.raises(ValueError, match="use_auth_token= and token= are both given"):
        AutoConfig.from_pretrained(tmp_path, use_auth_token="a", token="b")


def test_load_dataset_takes_use_auth_token(said, tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("a,b\n1,2\n")
    files = str(tmp_path / "rows.csv")
    got = datasets.load_dataset("csv", data_files=files, use_auth_token=None, cache_dir=str(tmp_path / "cache"))
    assert got["train"][0] == {"a": 1, "b": 2}
    assert said() == snapshot(["use_auth_token=…: token= takes its place"])


def test_a_library_that_has_the_name_keeps_its_own() -> None:
    mine = object()
    for shim, module, name in (
        (metrics, "datasets", "load_metric"),
        (names, "transformers.optimization", "AdamW"),
        (names, "transformers.utils", "send_example_telemetry"),
        (names, "huggingface_hub", "Repository"),
    ):
        library = ModuleType(module)
        setattr(library, name, mine)
        arm(shim, library)
        assert getattr(library, name) is mine

    class AutoConfig:
        @classmethod
        def from_pretrained(cls, name: str, use_auth_token: str | None = None) -> str | None:
            return use_auth_token

    library = ModuleType("transformers.models.auto.configuration_auto")
    library.AutoConfig = AutoConfig  # type: ignore[attr-defined]
    arm(auth_token, library)
    assert AutoConfig.from_pretrained("x", use_auth_token="kept") == "kept"
