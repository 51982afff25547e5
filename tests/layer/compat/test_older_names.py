"""Names that older scripts import: each is found under its old module, and stock's own names win where they exist."""

from __future__ import annotations

import importlib
import subprocess
import sys
from types import ModuleType

import pytest
import transformers
from inline_snapshot import snapshot
from transformers import BertConfig, GPT2Config, T5Config, is_torch_tpu_available

from hf_mps.layer.compat import SHIMS, names
from tests.layer.compat.arming import arm

SMALL = {"vocab_size": 20, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 16}


@pytest.mark.parametrize("old", names.NAMES, ids=lambda old: old.name)
def test_every_old_name_is_found_where_scripts_import_it(old: names.Old) -> None:
    for place in old.places:
        assert "names" in SHIMS.after[place]
        assert getattr(importlib.import_module(place), old.name) is not None


def test_a_tpu_is_asked_for_as_run_qa_of_4_24_does(said) -> None:
    assert is_torch_tpu_available(check_device=False) is False
    assert said() == snapshot(["transformers.is_torch_tpu_available: is_torch_xla_available takes its place"])


class Lazy(ModuleType):
    """As transformers' module: its class knows names that are not in it yet."""

    def __getattr__(self, name: str) -> str:
        if name != "TextDataset":
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return "stock's"


def test_stock_s_own_name_wins_and_an_unknown_one_is_an_import_error() -> None:
    library = ModuleType("transformers.utils")
    library.is_offline_mode = mine = object()  # type: ignore[attr-defined]
    lazy = Lazy("transformers")
    for module in (library, lazy):
        arm(names, module)
        arm(names, module)
        assert not hasattr(module, "nope")
    assert library.is_offline_mode is mine
    assert lazy.TextDataset == "stock's"
    assert hasattr(lazy, "LineByLineTextDataset")
    with pytest.raises(ImportError, match="cannot import name 'Nope'"):
        exec("from transformers import Nope")


def test_a_module_s_own_way_to_names_comes_first() -> None:
    def own(name: str) -> str:
        if name == "is_offline_mode":
            return "stock's"
        raise AttributeError(f"stock has no {name}")

    library = ModuleType("transformers.utils")
    library.__getattr__ = own  # type: ignore[method-assign]
    arm(names, library)
    assert library.is_offline_mode == "stock's"
    assert library.get_full_repo_name.__name__ == "get_full_repo_name"
    with pytest.raises(AttributeError, match="stock has no nope"):
        _ = library.nope


def test_a_library_that_asks_whether_a_name_is_there_hears_no_notice(said, monkeypatch: pytest.MonkeyPatch) -> None:
    code = compile("found = hasattr(transformers, 'AutoModelWithLMHead')", "/x/site-packages/foreign.py", "exec")
    space = {"transformers": transformers}
    exec(code, space)
    assert space["found"] is True
    assert said() == []


def test_a_language_model_of_any_kind_is_made_by_the_one_class(said, tmp_path) -> None:
    mapping, auto = transformers.MODEL_WITH_LM_HEAD_MAPPING, transformers.AutoModelWithLMHead
    kinds = {BertConfig: "BertForMaskedLM", T5Config: "T5ForConditionalGeneration", GPT2Config: "GPT2LMHeadModel"}
    assert {config: mapping[config].__name__ for config in kinds} == kinds
    assert set(kinds) <= set(mapping.keys())
    made = auto.from_config(BertConfig(**SMALL))
    made.save_pretrained(tmp_path)
    again = auto.from_pretrained(str(tmp_path), from_tf=False, config=BertConfig(**SMALL))
    assert type(made).__name__ == type(again).__name__ == "BertForMaskedLM"
    with pytest.raises(ValueError, match="ViTConfig has no language model"):
        auto.from_config(transformers.ViTConfig())
    assert len(said()) == 2


def test_what_nobody_can_make_any_more_says_which_release_has_it(said) -> None:
    with pytest.raises(NotImplementedError, match="TransfoXLLMHeadModel is gone with transformers 5"):
        transformers.TransfoXLLMHeadModel.from_pretrained("transfo-xl-wt103")


def test_a_tpu_is_a_kind_of_distribution_that_this_is_not() -> None:
    from accelerate import DistributedType

    assert DistributedType.TPU is DistributedType.XLA
    assert "TPU" not in DistributedType.__members__


@pytest.mark.nightly
@pytest.mark.slow
def test_without_the_layer_the_names_are_gone(tmp_path) -> None:
    """The fault that the shims cure; where stock has a name again, its shim is needless and can go."""
    asked = [f"{place}:{old.name}" for old in names.NAMES for place in old.places]
    (tmp_path / "ask.py").write_text(
        "import importlib, sys\n"
        "for each in sys.argv[1:]:\n"
        "    module, _, name = each.partition(':')\n"
        "    if hasattr(importlib.import_module(module), name): print(each)\n"
    )
    environment = {"HF_MPS": "0", "PATH": "/usr/bin", "HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, str(tmp_path / "ask.py"), *asked], capture_output=True, text=True, env=environment, check=True
    )
    assert done.stdout.split() == []
