"""Run PyTorch's own hand-written Metal tests (test_mps.py of 2.6) on the simulated device, or on a Mac.

    python scripts/tools/pytorch_suite.py                            # takes the file from Debian's source of pytorch
    python scripts/tools/pytorch_suite.py PATH/test_mps.py
    python scripts/tools/pytorch_suite.py PATH/test_mps.py --kernels --profile m1-8gb

prints how many tests passed, failed as scripts/tools/known_failures_of_pytorch/*.txt lists them, by reason, failed
otherwise, or were left out; ends with 1 where anything differs from the lists
(hf_mps.metal.pytest_plugin.known_failures). --kernels computes with PyTorch's own Metal kernels (hf-mps kernels fetch).
The file is not part of this project: without a path it comes by apt-get from Debian trixie's source package, 27 MB,
into a temporary folder; that needs apt-get and Debian's keyring (the package debian-archive-keyring).
"""

from __future__ import annotations

import argparse
import platform
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

LISTS = Path(__file__).with_name("known_failures_of_pytorch")
KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"
SOURCE = f"deb-src [signed-by={KEYRING}] http://deb.debian.org/debian trixie main\n"
LEFT_OUT = {
    "TestConsistency": "samples of operators, not written by hand (tests/metal/simulator/conformance runs them)",
    "TestCommon": "the same against NumPy",
    "TestErrorInputs": "samples of operators' refusals",
    "int4": "aten::_convert_weight_to_int4pack, which the simulated device does not compute",
    "large": "tensors of gigabytes",
    "64bit": "tensors of gigabytes",
    "huge": "tensors of gigabytes",
}
"""Words of tests' ids, with the reason why these tests are left out."""


class Mac:
    """What the file asks of a Mac outside torch, answered for the profile; and the counts of the run."""

    def __init__(self, profile: str) -> None:
        self.profile = profile
        self.counts: Counter[str] = Counter()
        self.places: list[str] = []

    def pytest_configure(self) -> None:
        """Answer platform.mac_ver() and sysctl hw.memsize, and give compile_shader the name that it had in 2.6."""
        import torch

        torch.mps._compile_shader = torch.mps.compile_shader  # type: ignore[attr-defined]
        if platform.system() == "Darwin":
            return
        from hf_mps.metal.device import profiles

        mac = profiles.get(self.profile)
        platform.mac_ver = lambda *_: (".".join(map(str, mac.macos)), ("", "", ""), "arm64")  # type: ignore[assignment,misc]
        stock = subprocess.check_output

        def check_output(command: Any, *arguments: Any, **options: Any) -> Any:
            if command == ["sysctl", "-n", "hw.memsize"]:
                return str(mac.memory).encode()
            return stock(command, *arguments, **options)

        subprocess.check_output = check_output  # type: ignore[assignment]

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Take the counts, and the lines of the lists that were met."""
        listed = [each for each in terminalreporter.stats.get("xfailed", []) if str(LISTS) in each.wasxfail]
        self.places = [each.wasxfail for each in listed]
        kinds = ("passed", "failed", "error", "skipped", "xfailed", "deselected")
        self.counts = Counter({kind: len(terminalreporter.stats.get(kind, ())) for kind in kinds})
        self.counts["xfailed"] -= len(listed)


def main() -> int:
    """Run the suite and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", nargs="?", type=Path, help="PyTorch 2.6's test/test_mps.py")
    parser.add_argument("--profile", default="1", help="the Mac that is simulated (hf_mps.metal.device.profiles)")
    parser.add_argument("--kernels", action="store_true", help="compute with PyTorch's own Metal kernels")
    parser.add_argument("--output", action="store_true", help="show pytest's own output too")
    given = parser.parse_args()
    if given.path is not None and not given.path.is_file():
        parser.error(f"no such file: {given.path}; next: python scripts/tools/pytorch_suite.py")
    with tempfile.TemporaryDirectory() as folder:
        try:
            path = (given.path or fetched(Path(folder))).resolve()
        except (OSError, subprocess.CalledProcessError) as error:
            reason = getattr(error, "stderr", None) or str(error)
            parser.error(f"Debian's source package cannot be fetched: {reason.strip()}; pass the path of test_mps.py")
        mac = Mac(given.profile)
        code = pytest.main(options(path, given), plugins=[mac])
    report(mac, given.kernels)
    return int(code)


def options(path: Path, given: argparse.Namespace) -> list[str]:
    """What pytest is called with; no configuration of ours, and none that lies around the file."""
    lists = ["common", "mac"] if platform.system() == "Darwin" else ["common", "simulated"]
    words = [str(path), f"--rootdir={path.parent}", "-c/dev/null", "-pno:cacheprovider", "-q", "--tb=short", "-rfE"]
    if platform.system() != "Darwin":
        words += [f"--simulated-metal={given.profile}", *(["--metal-kernels"] if given.kernels else [])]
        lists.append("kernels" if given.kernels else "drawn")
    words += [f"--known-failures={LISTS / name}.txt" for name in lists]
    return [*words, f"-knot ({' or '.join(LEFT_OUT)})", *([] if given.output else ["-p", "no:warnings"])]


def report(mac: Mac, kernels: bool) -> None:
    """Print the table."""
    import torch

    counts = mac.counts
    way = ", PyTorch's kernels" if kernels else ""
    print(f"\ntest_mps.py of PyTorch 2.6, torch {torch.__version__}, profile {mac.profile}{way}")
    print(f"{counts['passed']:6}  passed")
    print(f"{counts['xfailed']:6}  failed as the file itself expects")
    print(f"{len(mac.places):6}  failed as listed")
    for reason, count in Counter(map(reason_of, mac.places)).items():
        print(f"        {count:4}  {reason}")
    print(f"{counts['failed'] + counts['error']:6}  failed or passed otherwise")
    print(f"{counts['skipped']:6}  skipped by the file itself")
    print(f"{counts['deselected']:6}  left out")
    for word, reason in LEFT_OUT.items():
        print(f"              {word}: {reason}")


def reason_of(place: str) -> str:
    """The comment above a line of a list ("FILE:LINE: TYPE")."""
    file, line, _ = place.rsplit(":", 2)
    before = Path(file).read_text(encoding="utf-8").splitlines()[: int(line) - 1]
    while not before[-1].startswith("#"):
        before.pop()
    comment: list[str] = []
    while before and before[-1].startswith("#"):
        comment.insert(0, before.pop().removeprefix("#").strip())
    return " ".join(comment)


def fetched(folder: Path) -> Path:
    """test_mps.py out of Debian's source package, by an apt configuration of its own, in `folder`.

    Raises:
        OSError: there is no apt-get.
        subprocess.CalledProcessError: apt-get fails; `stderr` has its words.
    """
    (folder / "lists" / "partial").mkdir(parents=True)
    (folder / "cache" / "archives" / "partial").mkdir(parents=True)
    (folder / "sources.list").write_text(SOURCE, encoding="utf-8")
    settings = {
        "Dir::Etc::sourcelist": folder / "sources.list",
        "Dir::Etc::sourceparts": "-",
        "Dir::State::lists": folder / "lists",
        "Dir::Cache": folder / "cache",
        "APT::Sandbox::User": "",
    }
    apt = ["apt-get", "-qq", *(f"-o{name}={value}" for name, value in settings.items())]
    for words in (["update"], ["source", "--download-only", "pytorch"]):
        subprocess.run([*apt, *words], cwd=folder, check=True, capture_output=True, text=True)
    (archive,) = folder.glob("pytorch_*.orig.tar.*")
    with tarfile.open(archive) as opened:
        member = next(each for each in opened if each.name.endswith("/test/test_mps.py"))
        taken = opened.extractfile(member)
        assert taken is not None
        (folder / "test_mps.py").write_bytes(taken.read())
    return folder / "test_mps.py"


if __name__ == "__main__":
    sys.exit(main())
