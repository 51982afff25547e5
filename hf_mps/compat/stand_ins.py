"""What takes the place of names that went without a successor under the same signature; see `name_table`."""

from __future__ import annotations

from typing import Any, NoReturn
from urllib.parse import unquote, urlparse


def nothing(*args: Any, **kwargs: Any) -> None:
    """Take anything and do nothing."""


def never(*args: Any, **kwargs: Any) -> bool:
    """Return False."""
    return False


def always(*args: Any, **kwargs: Any) -> bool:
    """Return True."""
    return True


def is_torch_tpu_available(check_device: bool = True) -> bool:
    """Return whether torch_xla is there; `check_device` (4.21 to 4.40) asked for a device besides."""
    from transformers.utils import is_torch_xla_available

    found: bool = is_torch_xla_available()
    return found


def set_caching_enabled(boolean: bool) -> None:
    """Switch the cache of data sets on or off, as datasets.set_caching_enabled did until 2.0."""
    import datasets

    (datasets.enable_caching if boolean else datasets.disable_caching)()


class Repository:
    """huggingface_hub.Repository, a git clone, can be imported and not made. Replaced by HfApi.upload_folder."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(
            "huggingface_hub.Repository is gone with huggingface_hub 1.0; in its place: "
            "HfApi().upload_folder(repo_id=…, folder_path=…), or leave --push_to_hub out"
        )


class HfFolder:
    """The stored token, as huggingface_hub had it until 1.0; get_token, login and logout do the work."""

    @staticmethod
    def get_token() -> str | None:
        """Return the stored token, None where there is none."""
        import huggingface_hub

        token: str | None = huggingface_hub.get_token()
        return token

    @staticmethod
    def save_token(token: str) -> None:
        """Store `token`; raises ValueError where the hub refuses it."""
        import huggingface_hub

        huggingface_hub.login(token=token)

    @staticmethod
    def delete_token() -> None:
        """Forget the stored token."""
        import huggingface_hub

        huggingface_hub.logout()


def cached_download(url: str, **kwargs: Any) -> str:
    """Return the path of a file of the hub in the cache, by its address; raises what hf_hub_download raises.

    Raises ValueError for an address that is not …/[datasets/ or spaces/]OWNER/NAME/resolve/REVISION/PATH.
    """
    import huggingface_hub

    parts = [unquote(part) for part in urlparse(url).path.strip("/").split("/")]
    kind = parts.pop(0)[:-1] if parts[0] in ("datasets", "spaces", "models") else "model"
    if "resolve" not in parts[:3]:
        raise ValueError(
            f"cached_download: {url} is no file of a repository; allowed: …/OWNER/NAME/resolve/REVISION/PATH"
        )
    at = parts.index("resolve")
    known = {
        name: kwargs[name] for name in ("cache_dir", "force_download", "token", "local_files_only") if name in kwargs
    }
    found: str = huggingface_hub.hf_hub_download(
        "/".join(parts[:at]), "/".join(parts[at + 2 :]), repo_type=kind, revision=parts[at + 1], **known
    )
    return found


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


class TransfoXLConfig(_TransfoXL):
    """Can be imported and not made."""


class TransfoXLModel(_TransfoXL):
    """Can be imported and not made."""


class TransfoXLLMHeadModel(_TransfoXL):
    """Can be imported and not made."""


class TransfoXLTokenizer(_TransfoXL):
    """Can be imported and not made."""
