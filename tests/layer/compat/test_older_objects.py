"""What older scripts do with tokenizers, configurations, image models and datasets works, each with one notice."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import datasets
import pytest
import sklearn  # noqa: F401  sets an environment variable when it is first imported, here and not in a test
import torch
import transformers
from inline_snapshot import snapshot
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import BertConfig, PreTrainedTokenizerFast, T5Config, ViTConfig

from hf_mps.layer.compat import datasets as rows
from hf_mps.layer.compat import objects
from tests.layer.compat.arming import arm

SPECIAL = {
    "unk_token": "[UNK]",
    "pad_token": "[PAD]",
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
    "mask_token": "[MASK]",
}
WORDS = [*SPECIAL.values(), "the", "cat", "sat", "on", "mat"]


@pytest.fixture
def tokenizer() -> Any:
    """Ten words, and [CLS] … [SEP] around a text or two."""
    inner = Tokenizer(models.WordLevel({word: at for at, word in enumerate(WORDS)}, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=inner, **SPECIAL)


def test_targets_are_tokenized_as_targets(tokenizer: Any, said) -> None:
    modes: list[str] = []
    tokenizer._switch_to_target_mode = lambda: modes.append("target")
    tokenizer._switch_to_input_mode = lambda: modes.append("input")
    with tokenizer.as_target_tokenizer():
        inside = tokenizer(["the cat"])["input_ids"]
    assert inside == [[2, 5, 6, 3]]
    assert modes == ["target", "input"]
    assert said() == snapshot(["tokenizer.as_target_tokenizer(): tokenizer(text_target=…) takes its place"])
    with pytest.raises(KeyError), tokenizer.as_target_tokenizer():
        raise KeyError
    assert tokenizer._in_target_context_manager is False


def test_special_tokens_are_put_around_ids(tokenizer: Any) -> None:
    assert tokenizer.build_inputs_with_special_tokens([5, 6]) == [2, 5, 6, 3]
    assert tokenizer.build_inputs_with_special_tokens([5], [6, 7]) == [2, 5, 3, 6, 7, 3]


def test_predictions_that_trainer_padded_are_decoded(tokenizer: Any, said) -> None:
    rows = torch.tensor([[2, 5, 3, -100], [2, 5, 6, 3]])
    assert tokenizer.batch_decode(rows, skip_special_tokens=True) == ["the", "the cat"]
    assert tokenizer.decode([5, -100]) == "the [PAD]"
    assert said() == snapshot(
        ["tokenizer.decode: -100, with which Trainer pads predictions, is read as the padding token"]
    )
    with pytest.raises(OverflowError):
        tokenizer.decode([5, -3])


def test_a_speech_processor_is_its_tokenizer_for_a_while(said) -> None:
    class Words:
        def __call__(self, text: str) -> str:
            return f"tokens of {text}"

        def pad(self, labels: list[int], **_: Any) -> str:
            return f"padded {labels}"

    class Speech(transformers.ProcessorMixin):
        def __init__(self) -> None:
            self.tokenizer = Words()

        def __call__(self, sound: str) -> str:
            return f"features of {sound}"

    processor = Speech()
    with processor.as_target_processor():
        assert (processor("a"), processor.pad([1])) == ("tokens of a", "padded [1]")
        assert isinstance(processor, Speech)
    assert (processor("a"), type(processor)) == ("features of a", Speech)
    assert said() == snapshot(
        ["processor.as_target_processor(): processor(text=…) and processor.pad(labels=…) take its place"]
    )


def test_a_configuration_reads_as_in_transformers_4(said, tmp_path: Path) -> None:
    config = T5Config()
    assert (config.tokenizer_class, config.decoder_start_token_id) == (None, None)
    assert said() == [
        f"config.{name} is unset and gone from transformers 5: read as None"
        for name in ("tokenizer_class", "decoder_start_token_id")
    ]
    config.decoder_start_token_id = 7
    assert config.decoder_start_token_id == 7
    assert "tokenizer_class" not in config.to_dict()
    config.save_pretrained(tmp_path)
    assert transformers.AutoConfig.from_pretrained(tmp_path).decoder_start_token_id == 7
    with pytest.raises(AttributeError, match="has no attribute 'nope'"):
        _ = config.nope


def test_a_library_hears_of_a_configuration_what_stock_says(said) -> None:
    code = compile("found = hasattr(config, 'tokenizer_class')", "/x/site-packages/foreign.py", "exec")
    space = {"config": BertConfig()}
    exec(code, space)
    assert space["found"] is False
    assert "tokenizer_class" not in dict(inspect.getmembers(space["config"]))
    assert said() == []


def test_a_feature_extractor_of_images_has_a_size_of_either_time(said, tmp_path: Path) -> None:
    made = transformers.ViTFeatureExtractor(size=32)
    assert (made.size, int(made.size), made.size["height"], "shortest_edge" in made.size) == (32, 32, 32, False)
    assert dict(made.size) == {"height": 32, "width": 32}
    image = Image.new("RGB", (50, 40))
    assert made(image, return_tensors="pt")["pixel_values"].shape == (1, 3, 32, 32)
    made.save_pretrained(tmp_path)
    ViTConfig(image_size=32).save_pretrained(tmp_path)
    stock = transformers.AutoImageProcessor.from_pretrained(tmp_path)
    assert stock.to_dict() == made.to_dict()
    for reader in (transformers.AutoFeatureExtractor, transformers.ViTFeatureExtractor):
        again = reader.from_pretrained(str(tmp_path))
        assert again.size == 32
        assert isinstance(again, type(stock))
    written = json.loads((tmp_path / "preprocessor_config.json").read_text())
    written["feature_extractor_type"] = "ViTFeatureExtractor"  # as a checkpoint of 4.20 has it
    del written["image_processor_type"]
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(written))
    assert transformers.AutoFeatureExtractor.from_pretrained(str(tmp_path)).size == 32
    assert "AutoFeatureExtractor of an image model: AutoImageProcessor takes its place" in said()


def test_a_speech_model_freezes_its_encoder_by_the_older_name(said) -> None:
    config = transformers.Wav2Vec2Config(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, conv_dim=[8] * 7
    )
    model = transformers.Wav2Vec2ForCTC(config)
    model.freeze_feature_extractor()
    assert not any(each.requires_grad for each in model.wav2vec2.feature_extractor.parameters())
    assert any(each.requires_grad for each in model.wav2vec2.encoder.parameters())
    assert len(said()) == 1
    bert = transformers.BertModel(
        BertConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=1, intermediate_size=16)
    )
    assert not hasattr(bert, "freeze_feature_extractor")


def test_what_is_no_feature_extractor_is_stock_s_error(tmp_path: Path) -> None:
    BertConfig().save_pretrained(tmp_path)
    with pytest.raises((ValueError, OSError), match="feature extractor"):
        transformers.AutoFeatureExtractor.from_pretrained(str(tmp_path))


def test_load_dataset_gives_columns_the_names_of_a_task(said, tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("id,text,label\n1,a,0\n2,b,1\n")
    kwargs: dict[str, Any] = {"data_files": str(tmp_path / "rows.csv"), "cache_dir": str(tmp_path / "cache")}
    both = datasets.load_dataset("csv", task="text-classification", **kwargs)
    assert both["train"][1] == {"text": "b", "labels": 1}
    one = datasets.load_dataset("csv", task="text-classification", split="train", **kwargs)
    assert one.column_names == ["text", "labels"]
    assert said() == snapshot(
        ["load_dataset(task='text-classification'): its columns become text, labels, others are dropped"]
    )
    assert datasets.load_dataset("csv", task=None, split="train", **kwargs).column_names == ["id", "text", "label"]
    stream = datasets.load_dataset("csv", task="text-classification", streaming=True, **kwargs)["train"]
    assert list(stream)[1] == {"text": "b", "labels": 1}
    with pytest.raises(ValueError, match="needs the column image; there: id, text, label"):
        datasets.load_dataset("csv", task="image-classification", **kwargs)
    with pytest.raises(ValueError, match="allowed: audio-classification, "):
        datasets.load_dataset("csv", task="dancing", **kwargs)


def test_labels_of_text_become_numbers_as_a_script_maps_them(said, tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("text,label\na,yes\nb,no\n")
    rows = datasets.load_dataset("csv", data_files=str(tmp_path / "rows.csv"), cache_dir=str(tmp_path), split="train")
    large = rows.cast_column("label", datasets.Value("large_string"))
    datasets.disable_progress_bars()  # a notice would stand in the bar's line
    try:
        mapped = large.map(lambda row: {"label": int(row["label"] == "yes")})
    finally:
        datasets.enable_progress_bars()
    assert mapped["label"][:] == [1, 0]
    assert [line for line in said() if line.startswith("map: ")] == snapshot(
        ["map: numbers in place of a column's texts stay int64; datasets would keep them as texts"]
    )
    assert large.cast_column("text", datasets.Value("large_string"))["text"][:] == ["a", "b"]
    numbers = datasets.Dataset.from_dict({"n": [1, 2]}).cast_column("n", datasets.Value("large_string"))
    assert numbers["n"][:] == ["1", "2"]  # asked for by name, it is done


def test_a_text_file_is_rows_for_a_language_model(tokenizer: Any, tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text("the cat sat\n\non the mat the cat\n")
    blocks = transformers.TextDataset(tokenizer, str(file), block_size=5, overwrite_cache=True)
    assert [row.tolist() for row in blocks] == [[2, 5, 6, 7, 3], [2, 8, 5, 9, 3]]
    lines = transformers.LineByLineTextDataset(tokenizer=tokenizer, file_path=str(file), block_size=4)
    assert [row["input_ids"].tolist() for row in lines] == [[2, 5, 6, 3], [2, 8, 5, 3]]
    (tmp_path / "marks").write_text("[1]\n[2]\n")
    marked = transformers.LineByLineWithRefDataset(tokenizer, str(file), 4, str(tmp_path / "marks"))
    assert [row["chinese_ref"].tolist() for row in marked] == [[1], [2]]
    with pytest.raises(ValueError, match="not found"):
        transformers.TextDataset(tokenizer, "nowhere", 5)


def test_whole_words_are_masked(tokenizer: Any) -> None:
    collator = transformers.DataCollatorForWholeWordMask(tokenizer=tokenizer, mlm_probability=0.9)
    assert collator.whole_word_mask is True
    assert isinstance(collator, transformers.DataCollatorForLanguageModeling)


def test_a_library_that_has_the_methods_keeps_its_own() -> None:
    class Own:
        tokenizer_class = as_target_tokenizer = "mine"
        build_inputs_with_special_tokens = as_target_processor = "mine"

    library = ModuleType("library")
    library.PreTrainedTokenizerBase = library.ProcessorMixin = library.PreTrainedConfig = Own  # type: ignore[attr-defined]
    library.load_dataset = lambda path, task=None: task  # type: ignore[attr-defined]
    for shim in (objects, rows):
        for module in dict.fromkeys(target.partition(":")[0] for target in shim.patches):
            if not module.endswith(
                ("modeling_utils", "generation.utils", "integration_utils", "features.features", "table")
            ):
                arm(shim, library, module)
    assert set(vars(Own)) >= {*objects.METHODS, "as_target_processor", "tokenizer_class"}
    assert {getattr(Own, name) for name in (*objects.METHODS, "as_target_processor", "tokenizer_class")} == {"mine"}
    assert not hasattr(library, "load_dataset_builder")


def test_a_column_of_dictionaries_of_lists_has_its_feature(capsys: pytest.CaptureFixture[str]) -> None:
    """As run_object_detection of 4.46 reads the names of its classes; other columns are what datasets has."""
    boxes = {"bbox": datasets.List(datasets.Value("float32")), "category": datasets.ClassLabel(names=["cat", "dog"])}
    features = datasets.Features({"objects": datasets.Sequence(boxes), "text": {"en": datasets.Value("string")}})
    rows = [{"objects": {"bbox": [[0.0]], "category": [1]}, "text": {"en": "a"}}]
    found = datasets.Dataset.from_list(rows, features=features).features
    assert found["objects"].feature["category"].names == ["cat", "dog"]
    assert found == features
    assert found["objects"] == features["objects"]
    assert not hasattr(found["text"], "feature")
    assert "datasets 4; in its place" in capsys.readouterr().err


def test_use_auth_token_and_an_image_model_are_read_together(tmp_path: Path) -> None:
    transformers.ViTFeatureExtractor(size=16).save_pretrained(tmp_path)
    ViTConfig(image_size=16).save_pretrained(tmp_path)
    found = transformers.AutoFeatureExtractor.from_pretrained(str(tmp_path), use_auth_token=None, revision="main")
    assert found.size == 16
    assert torch.is_tensor(found(Image.new("RGB", (9, 9)), return_tensors="pt")["pixel_values"])


def test_a_count_of_none_is_the_default_of_generate(said) -> None:
    config = transformers.GPT2Config(vocab_size=20, n_embd=16, n_layer=1, n_head=1, bos_token_id=0, eos_token_id=0)
    model = transformers.GPT2LMHeadModel(config).eval()
    start = torch.tensor([[3, 4]])
    expected = model.generate(start, max_new_tokens=2, do_sample=False, pad_token_id=0)
    found = model.generate(
        start, max_new_tokens=2, do_sample=False, pad_token_id=0, num_beams=None, num_return_sequences=None
    )
    assert found.tolist() == expected.tolist()
    assert said() == [f"generate({name}=None): left out, the default stays" for name in objects.COUNTS]


CHECKOUT_OF_TRANSFORMERS = """
import tempfile
import transformers
folder = tempfile.mkdtemp()
transformers.BertConfig().save_pretrained(folder)
print(transformers.__file__, transformers.BertConfig.from_pretrained(folder).model_type)
"""


@pytest.mark.process
def test_a_library_that_runs_from_a_checkout_is_not_taken_for_a_script(tmp_path: Path, run_python: Any) -> None:
    (tmp_path / "transformers").symlink_to(Path(transformers.__file__).parent)
    done = run_python("-c", f"import torch{CHECKOUT_OF_TRANSFORMERS}", env={"PYTHONPATH": str(tmp_path)}, cwd=tmp_path)
    assert done.stdout == f"{tmp_path}/transformers/__init__.py bert\n", done.stderr
