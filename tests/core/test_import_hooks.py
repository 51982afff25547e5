"""The post-import hook: each library is switched once, whenever it is imported, and nothing of the hook stays in it."""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.util
import inspect
import sys
import warnings
from collections.abc import Iterator
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from inline_snapshot import snapshot

from hf_mps.core import import_hooks


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A folder for the module `some_library`, which `switch` switches by setting `switched`, as `some_room`."""
    monkeypatch.setitem(sys.modules, "watching", SimpleNamespace(start=start))
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("some_library", None)
    import_hooks.applied.pop(("some_library", "some_room"), None)


def switch(module: ModuleType, who: str) -> None:
    module.switched = module.__dict__.get("switched", 0) + 1  # type: ignore[attr-defined]


def start(arm: import_hooks.Arm = switch) -> None:
    import_hooks.start({"some_library": ("some_room",)}, arm)


def test_a_library_is_switched_when_it_is_imported(library: Path) -> None:
    (library / "some_library.py").write_text("value = 1\n")
    start()
    module = importlib.import_module("some_library")
    assert module.switched == 1
    assert import_hooks.applied["some_library", "some_room"] == "on"


@pytest.mark.parametrize("collecting", [True, False])
@pytest.mark.parametrize("ends", ["value = 1", "raise ImportError"])
def test_a_library_is_imported_without_collections_and_the_collector_is_then_as_before(
    library: Path, collecting: bool, ends: str
) -> None:
    (library / "some_library.py").write_text(f"import gc, watching\nwatching.seen = gc.isenabled()\n{ends}\n")
    start()
    (gc.enable if collecting else gc.disable)()
    try:
        with contextlib.suppress(ImportError):
            importlib.import_module("some_library")
        assert gc.isenabled() is collecting
    finally:
        gc.enable()
    assert sys.modules["watching"].seen is False


def test_a_library_that_was_imported_before_is_switched_at_once(library: Path) -> None:
    module = ModuleType("some_library")
    module.__spec__ = ModuleSpec("some_library", None)
    sys.modules["some_library"] = module
    start()
    start()
    assert module.switched == 1


def test_a_library_that_is_being_imported_is_switched_when_it_is_complete(
    library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "import watching\nwatching.start()\nearly = globals().get('switched')\nlate = 1\n"
    (library / "some_library.py").write_text(code)
    others = [finder for finder in sys.meta_path if not isinstance(finder, import_hooks._Finder)]
    monkeypatch.setattr(sys, "meta_path", others)
    module = importlib.import_module("some_library")
    assert module.early is None
    assert module.switched == 1
    assert type(module.__spec__) is ModuleSpec


def test_the_module_keeps_its_own_loader_source_and_spec(library: Path) -> None:
    (library / "some_library.py").write_text("def f():\n    return 1\n")
    start()
    found = importlib.util.find_spec("some_library")
    assert found.loader.get_source("some_library").startswith("def f")
    module = importlib.import_module("some_library")
    assert type(module.__loader__) is type(module.__spec__.loader) is SourceFileLoader
    assert inspect.getsource(module.f) == "def f():\n    return 1\n"


def test_a_library_that_fails_to_import_fails_as_before(library: Path) -> None:
    (library / "some_library.py").write_text("raise ValueError('its own fault')\n")
    start()
    with pytest.raises(ValueError, match="its own fault"):
        importlib.import_module("some_library")
    assert ("some_library", "some_room") not in import_hooks.applied


def test_a_library_that_is_not_installed_is_still_not_found(library: Path) -> None:
    start()
    assert importlib.util.find_spec("some_library") is None


def test_an_unknown_version_of_a_library_is_one_warning(library: Path) -> None:
    def missing(module: ModuleType, who: str) -> None:
        raise AttributeError("module 'some_library' has no attribute 'Trainer'")

    (library / "some_library.py").write_text("value = 1\n")
    start(missing)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert importlib.import_module("some_library").value == 1
    assert [str(warning.message) for warning in caught] == snapshot(
        [
            "hf_mps does not know this version of some_library (AttributeError: module 'some_library' has no attribute "
            "'Trainer'): some_room is off for it"
        ]
    )


def test_other_finders_are_asked_in_their_order(library: Path) -> None:
    class Wrapping:
        """Another post-import hook, as profilers and tracers have one."""

        def __init__(self) -> None:
            self.asked = 0
            self.inside = False

        def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
            if name != "some_library" or self.inside:
                return None
            self.asked += 1
            self.inside = True
            try:
                return importlib.util.find_spec(name)
            finally:
                self.inside = False

    (library / "some_library.py").write_text("value = 1\n")
    start()
    other = Wrapping()
    sys.meta_path.insert(0, other)
    try:
        module = importlib.import_module("some_library")
    finally:
        sys.meta_path.remove(other)
    assert other.asked == 1
    assert module.switched == 1
