"""What takes the place of names that went without a successor under the same signature; see `name_table`."""

from __future__ import annotations

from typing import Any, NoReturn


def nothing(*args: Any, **kwargs: Any) -> None:
    """Take anything and do nothing."""


def is_torch_tpu_available(check_device: bool = True) -> bool:
    """Return whether torch_xla is there; `check_device` (4.21 to 4.40) asked for a device besides."""
    from transformers.utils import is_torch_xla_available

    found: bool = is_torch_xla_available()
    return found


class Repository:
    """huggingface_hub.Repository, a git clone, can be imported and not made. Replaced by HfApi.upload_folder."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(
            "huggingface_hub.Repository is gone with huggingface_hub 1.0; in its place: "
            "HfApi().upload_folder(repo_id=…, folder_path=…), or leave --push_to_hub out"
        )


class _TransfoXL:
    """A class of Transformer-XL, which transformers removed: a table of models can name it, nobody can make one."""

    @classmethod
    def _refuse(cls) -> NoReturn:
        raise NotImplementedError(
            f"transformers.{cls.__name__} is gone with transformers 5; in its place: transformers 4.56 or another model"
        )

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._refuse()

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise NotImplementedError, which names the release that has the model."""
        cls._refuse()


class TransfoXLLMHeadModel(_TransfoXL):
    """Can be imported and not made."""


class TransfoXLTokenizer(_TransfoXL):
    """Can be imported and not made."""
