"""`hf-mps kernels list` and `show`: what a person and a program read of a release's kernels."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from inline_snapshot import snapshot

from hf_mps.cli.main import main
from hf_mps.metal.kernels import describe, store
from hf_mps.metal.kernels.metallib import Library
from tests.metal.kernels.wheels import wheel
from tests.snapshots import masked

Printed = pytest.CaptureFixture[str]


@pytest.fixture
def small(tmp_path: Path, own_cache: Path, capsys: Printed) -> str:
    """A small release, fetched."""
    assert main(["kernels", "fetch", "--wheel", str(wheel(tmp_path / "wheels"))]) == 0
    capsys.readouterr()
    return "2.99.0"


def _shown(capsys: Printed, *arguments: str) -> str:
    assert main(["kernels", *arguments]) == 0
    return capsys.readouterr().out


def test_releases_and_families_are_listed(small: str, capsys: Printed) -> None:
    assert _shown(capsys, "list") == snapshot(
        "2.99.0  4 kernels  2 families  0 MiB  torch-2.99.0-cp312-cp312-macosx_14_0_arm64.whl\n"
        "families of 2.99.0:\n"
        "double  3  float half\n"
        "halve   1  int64_t\n"
    )
    assert json.loads(_shown(capsys, "list", "--json"))["families"] == [
        {"name": "double", "kernels": 3, "types": ["float", "half"]},
        {"name": "halve", "kernels": 1, "types": ["int64_t"]},
    ]


def test_the_kernels_of_a_family_are_listed_with_their_buffers(small: str, capsys: Printed) -> None:
    assert _shown(capsys, "list", "--family", "double") == snapshot(
        "double_dense_float_float  0 out* 2 sizes\n"
        "double_dense_half_half    0 out* 2 sizes\n"
        "double_strided_float      0 out* 2 sizes\n"
    )
    assert json.loads(_shown(capsys, "list", "--family", "halve", "--json")) == {
        "release": "2.99.0",
        "family": "halve",
        "kernels": ["halve_int64_t_32"],
    }


def test_a_kernel_is_shown_with_all_that_it_says_of_itself(small: str, capsys: Printed) -> None:
    size = len(store.open_library(small)["double_dense_float_float"])
    assert masked(_shown(capsys, "show", "double_dense_float_float"), size=f"{size:,}") == snapshot(
        "double_dense_float_float  torch 2.99.0, family double, <size> bytes\n"
        "location  name        address space  access      type    bytes\n"
        "       0  out         device         read_write  float  4 each\n"
        "       2  sizes       constant       read        Sizes       8\n"
        "            +0 rows                              uint        4\n"
        "            +4 scale                             float       4\n"
        "thread  thread_position_in_grid (uint)\n"
        "threadgroup memory  cache: 32 bytes, [8 x float]\n"
        "largest threadgroup  1024 threads\n"
        "intrinsics  air.fma.f32\n"
        "compiled with  denorms_disable\n"
    )
    shown = json.loads(_shown(capsys, "show", "double_dense_float_float", "--json"))
    assert shown["bindings"][1]["members"][1] == {
        "name": "scale",
        "offset": 4,
        "type": "float",
        "count": 0,
        "bytes": 4,
        "location": None,
    }
    assert shown["threadgroup_memory"] == [{"name": "cache", "type": "[8 x float]", "size": 32}]


def test_a_module_is_printed_as_llvm_reads_it(small: str, capsys: Printed) -> None:
    text = _shown(capsys, "show", "double_strided_float", "--ir")
    assert 'target triple = "air64_v26-apple-macosx14.0.0"' in text
    assert "define void @double_strided_float(ptr addrspace(1)" in text


@pytest.mark.parametrize(
    "arguments",
    [
        ["show", "double_dense_float_flaot"],
        ["show", "nothing_of_the_kind"],
        ["show", "double_strided_float", "--ir", "--json"],
        ["show", "double_strided_float", "--release", "2.98"],
        ["list", "--family", "doubel"],
        ["list", "--release", "newest"],
        ["list", "--release", "mlx-newest"],
    ],
)
def test_a_wrong_word_ends_in_one_line(arguments: list[str], small: str, capsys: Printed) -> None:
    assert main(["kernels", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert {" ".join(arguments): err.removeprefix("hf-mps: ").rstrip("\n")}.items() <= WRONG.items()


WRONG = {
    "show double_dense_float_flaot": (
        "there is no kernel double_dense_float_flaot; did you mean 'double_dense_float_float'?"
    ),
    "show nothing_of_the_kind": "there is no kernel nothing_of_the_kind; next: hf-mps kernels list",
    "show double_strided_float --ir --json": "--ir cannot be combined with --json; give one of them",
    "show double_strided_float --release 2.98": (
        "the Metal kernels of torch 2.98.0 are not fetched (2.99.0 here); next: hf-mps kernels fetch 2.98.0"
    ),
    "list --family doubel": "there is no family doubel; did you mean 'double'?",
    "list --release mlx-newest": "'mlx-newest' is no release of MLX; allowed: a version, for example mlx-0.32.4",
    "list --release newest": "'newest' is no release of PyTorch; allowed: a version, for example 2.13.0",
}


def test_without_a_fetched_release_the_next_command_is_named(own_cache: Path, capsys: Printed) -> None:
    own = store.installed()
    for arguments in (["list"], ["show", "rms_norm_float"]):
        assert main(["kernels", *arguments]) == 2
        assert capsys.readouterr().err == (
            f"hf-mps: the Metal kernels of torch {own} are not fetched; next: hf-mps kernels fetch {own}\n"
        )


def test_without_llvmlite_the_next_command_is_named(
    small: str, capsys: Printed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llvmlite", None)
    monkeypatch.setitem(sys.modules, "llvmlite.binding", None)
    assert main(["kernels", "list"]) == 0
    capsys.readouterr()
    for arguments in (["show", "double_strided_float"], ["list", "--family", "double"]):
        assert main(["kernels", *arguments]) == 2
        assert capsys.readouterr().err == snapshot(
            "hf-mps: llvmlite, which reads Metal kernels, is not installed; next: pip install 'llvmlite<0.51,>=0.50'\n"
        )
    assert main(["kernels", "remove", small]) == 0


def test_the_verb_imports_no_torch(own_cache: Path, small: str, run_python: Callable[..., object]) -> None:
    code = """
import sys
from hf_mps.cli.main import main
assert main(["kernels", "list"]) == 0
assert "llvmlite" not in sys.modules
assert main(["kernels", "show", "double_strided_float"]) == 0
assert main(["kernels", "remove", "--all"]) == 0
print([name for name in ("torch", "numpy") if name in sys.modules])
"""
    ended = run_python("-c", code)
    assert ended.stdout.endswith("[]\n"), ended.stderr  # type: ignore[attr-defined]


def test_the_real_kernels_of_a_release_have_their_families(library: Library) -> None:
    assert len(library) == 12_998
    found = {each.name: each for each in describe.table(library)}
    assert found["rms_norm"].kernels == 3
    assert found["rms_norm"].types == ("bfloat", "float", "half")
    assert sum(each.kernels for each in found.values()) == len(library)
    for kernel, family in {
        "gelu_backward_dense_float_float": "gelu_backward",
        "chebyshev_polynomial_t_strided_cast_half_half": "chebyshev_polynomial_t",
        "mb_merge_final_topk_int_tptg1024": "mb_merge_final_topk",
        "sdpa_vector_float_96_96_masknone": "sdpa_vector",
        "cat_int32_t_char_float": "cat",
        "index_put_accumulate_float": "index_put_accumulate",
        "bessel_y0_forward_dense_scalar_float_short": "bessel_y0_forward",
    }.items():
        assert describe.family(kernel) == family


def test_a_real_kernel_is_shown(release: str, capsys: Printed) -> None:
    shown = json.loads(_shown(capsys, "show", "fused_adamw_float_float", "--release", release, "--json"))
    arguments, lists = shown["bindings"][:2]
    assert [each["name"] for each in arguments["members"]] == [
        "params",
        "grads",
        "exp_avgs",
        "exp_avg_sqs",
        "state_steps",
    ]
    assert (arguments["bytes"], arguments["indirect"], lists["bytes"]) == (1280, True, 768)
    assert [each["name"] for each in shown["attributes"]] == [
        "thread_position_in_threadgroup",
        "threadgroup_position_in_grid",
        "threads_per_threadgroup",
    ]
    assert shown["intrinsics"] == ["air.pow.f32", "air.sqrt.f32"]


@pytest.mark.parametrize(
    ("line", "place", "offered"),
    [
        ("hf-mps kernels show double_d", 3, {"double_dense_float_float", "double_dense_half_half"}),
        ("hf-mps kernels remove 2", 3, {"2.99.0"}),
    ],
)
def test_the_shell_completes_releases_and_kernels(
    line: str, place: int, offered: set[str], small: str, capsys: Printed, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setenv("_HF_MPS_COMPLETE", "complete_bash")
        patch.setenv("COMP_WORDS", line)
        patch.setenv("COMP_CWORD", str(place))
        with pytest.raises(SystemExit) as ended:
            main([])
    assert ended.value.code == 0
    assert set(capsys.readouterr().out.split()) == offered
