"""What a command does before it imports torch, which takes seconds: it says what is going on, or is done already."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

# `import torch` ends a command here, and what was on the screen by then is printed. A terminal shows what it shows.
BEFORE_TORCH = """
import io, json, sys
class Torch(BaseException): pass
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            raise Torch
sys.meta_path.insert(0, Finder())
class Screen(io.StringIO):
    encoding = "utf-8"
    def isatty(self): return TERMINAL
from hf_mps.cli.main import main
found = {}
for words in json.loads(sys.argv[1]):
    out, err = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = io.StringIO(), Screen()
    try:
        main(words)
        reached = False
    except Torch:
        reached = True
    finally:
        shown = sys.stdout.getvalue() + sys.stderr.getvalue()
        sys.stdout, sys.stderr = out, err
    found[" ".join(words)] = [reached, shown]
print(json.dumps(found))
"""
# What only some verbs need, and takes a tenth of a second and more at each start.
LATER = ("psutil", "hf_mps.distributed.ranks", "hf_mps.tools.dryrun", "yaml", "importlib.metadata")
LONG = [
    ["finetune", "quickstart"],
    ["finetune", "quickstart", "--plan"],
    ["finetune", "quickstart", "--smoke"],
    ["audit", "quickstart"],
    ["plan", "quickstart"],
    ["parity", "quickstart"],
    ["doctor"],
    ["bench", "--quick"],
    ["bench", "--launches"],
]
IN_A_LOG = [["finetune", "quickstart"], ["bench", "--quick"]]
SHORT = [
    ["--help"],
    ["finetune", "--help"],
    ["bench", "--help"],
    ["predict", "--help"],
    ["chat", "--help"],
    ["evaluate", "--help"],
    ["recipes", "list"],
    ["recipes", "keys", "quickstart"],
]

Shown = Callable[..., dict[str, tuple[bool, str]]]


@pytest.fixture
def shown(run_python: Callable[..., object], tmp_path: object) -> Shown:
    def shown(commands: list[list[str]], *, terminal: bool) -> dict[str, tuple[bool, str]]:
        code = BEFORE_TORCH.replace("TERMINAL", str(terminal))
        variables = {"TERM": "xterm-256color", "HF_MPS_SIMULATE": "1"}
        ended = run_python("-c", code, json.dumps(commands), cwd=tmp_path, env=variables)
        assert ended.returncode == 0, ended.stderr  # type: ignore[attr-defined]
        return json.loads(ended.stdout)

    return shown


def test_every_long_command_says_on_a_terminal_what_it_does_before_it_imports_torch(shown: Shown) -> None:
    found = shown(LONG, terminal=True)
    assert len(found) == len(LONG)
    for command, (reached, words) in found.items():
        assert reached, f"{command} is to import torch"
        assert "…" in words, f"{command} had said nothing before it imported torch"


def test_a_run_and_a_benchmark_say_so_in_a_log_too(shown: Shown) -> None:
    found = shown(IN_A_LOG, terminal=False)
    assert found["finetune quickstart"] == [True, "quickstart: loading PyTorch, the rows and the model …\n"]
    assert found["bench --quick"] == [True, "loading PyTorch …\n"]


def test_help_and_lists_are_done_without_torch(shown: Shown) -> None:
    for command, (reached, words) in shown(SHORT, terminal=False).items():
        assert not reached, f"{command} imports torch"
        assert words.count("\n") > 5, command


def test_help_starts_without_what_only_some_verbs_need(run_python: Callable[..., object], tmp_path: object) -> None:
    code = (
        "import json, sys\nfrom hf_mps.cli.main import main\nmain(['--help'])\n"
        f"print(json.dumps([name for name in {LATER} if name in sys.modules]))"
    )
    ended = run_python("-c", code, cwd=tmp_path)
    assert ended.stdout.splitlines()[-1] == "[]", ended.stdout  # type: ignore[attr-defined]


# What many have installed and a plan of the quickstart has no use for; transformers' Trainer itself imports SciPy, and
# pandas where datasets is installed.
NEEDLESS = ("sklearn", "matplotlib", "evaluate", "trl", "lightning", "torchmetrics", "torch._inductor.compile_fx")


def test_a_plan_imports_only_what_it_needs(run_python: Callable[..., object], tmp_path: object) -> None:
    code = (
        "import json, sys\nfrom hf_mps.cli.main import main\n"
        "assert main(['finetune', 'quickstart', '--plan']) == 0\n"
        f"print(json.dumps([name for name in {NEEDLESS} if name in sys.modules]))"
    )
    ended = run_python("-c", code, cwd=tmp_path, env={"HF_MPS_SIMULATE": "1"})
    assert ended.stdout.splitlines()[-1] == "[]", ended.stdout  # type: ignore[attr-defined]
