"""hf_mps' own Metal kernels on an NVIDIA GPU: the same source as PTX, where a simdgroup is a warp.

    HF_MPS_SIMULATE=1 python scripts/conformance/ptx.py write FOLDER
    python FOLDER/ptx.py run FOLDER
    compute-sanitizer --tool racecheck python FOLDER/ptx.py run FOLDER

The first compiles here, and records what launches read and write. The others run on a machine with an NVIDIA GPU; the
last one finds races, which a CPU that runs threads in turn does not have.

`write` needs clang and llvmlite, as the simulated device does, and calls each kernel's functions for 20 shapes in three
dtypes. `run` needs PyTorch with CUDA and nothing of hf_mps. It prints, for each kernel, the largest difference from the
simulated device's result, in epsilons of the largest value; exit code 1 where one is above 16.
"""

from __future__ import annotations

import ctypes
import math
import os
import random
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from shutil import copyfile
from typing import Any

import torch

SHAPES, MOST = 20, 16
# What Metal's standard library has and PTX says otherwise, as LLVM assembly; exp and log are libdevice's.
INTRINSICS = """
declare void @llvm.nvvm.barrier0()
declare float @llvm.nvvm.shfl.sync.bfly.f32(i32, float, i32, i32)
declare float @llvm.sqrt.f32(float)
declare float @llvm.maxnum.f32(float, float)
declare float @llvm.fma.f32(float, float, float)
declare float @llvm.fabs.f32(float)
declare float @__nv_expf(float)
declare float @__nv_logf(float)
declare i32 @llvm.nvvm.read.ptx.sreg.tid.x()
declare i32 @llvm.nvvm.read.ptx.sreg.ntid.x()
declare i32 @llvm.nvvm.read.ptx.sreg.ctaid.x()
define internal void @air.wg.barrier(i32 %0, i32 %1) { call void @llvm.nvvm.barrier0() ret void }
define internal float @air.simd_shuffle_xor.f32(float %x, i16 %by) {
  %lane = zext i16 %by to i32
  %found = call float @llvm.nvvm.shfl.sync.bfly.f32(i32 -1, float %x, i32 %lane, i32 31)
  ret float %found
}
define internal i32 @air.mul_hi.u.i32(i32 %x, i32 %y) {
  %a = zext i32 %x to i64
  %b = zext i32 %y to i64
  %whole = mul i64 %a, %b
  %upper = lshr i64 %whole, 32
  %found = trunc i64 %upper to i32
  ret i32 %found
}
"""
for _name, _joined in (
    ("sum", "fadd float %x{0}, %y{0}"),
    ("max", "call float @llvm.maxnum.f32(float %x{0}, float %y{0})"),
):
    INTRINSICS += f"define internal float @air.simd_{_name}.f32(float %x0) {{\n"
    for _k in range(5):
        INTRINSICS += f"  %y{_k} = call float @air.simd_shuffle_xor.f32(float %x{_k}, i16 {16 >> _k})\n"
        INTRINSICS += f"  %x{_k + 1} = {_joined.format(_k)}\n"
    INTRINSICS += "  ret float %x5\n}\n"
for _name, _of, _given in (
    ("sqrt", "llvm.sqrt.f32", "float %x"),
    ("fabs", "llvm.fabs.f32", "float %x"),
    ("exp", "__nv_expf", "float %x"),
    ("log", "__nv_logf", "float %x"),
    ("fmax", "llvm.maxnum.f32", "float %x, float %y"),
    ("fma", "llvm.fma.f32", "float %x, float %y, float %z"),
):
    INTRINSICS += (
        f"define internal float @air.{_name}.f32({_given}) {{ %r = call float @{_of}({_given}) ret float %r }}\n"
    )
PLACES = {
    "thread_position_in_threadgroup": "%tid",
    "threads_per_threadgroup": "%width",
    "threadgroup_position_in_grid": "%group",
    "thread_position_in_grid": "%place",
}


def main() -> int:
    """Write, or run."""
    if len(sys.argv) != 3 or sys.argv[1] not in ("write", "run"):
        print("ptx.py: allowed: write FOLDER, run FOLDER")
        return 2
    folder = Path(sys.argv[2])
    return write(folder) if sys.argv[1] == "write" else run(folder)


def write(folder: Path) -> int:
    """Compile what the launches of all kernels need, and keep what they read and wrote."""
    from hf_mps.metal.source import library

    folder.mkdir(parents=True, exist_ok=True)
    launches: list[dict[str, Any]] = []
    ptx: dict[str, str] = {}
    plain = library.MetalKernel.__call__

    def recorded(kernel: Any, *given: Any, threads: Any, group_size: Any = None, **how: Any) -> None:
        tensors = [isinstance(each, torch.Tensor) for each in given]
        # A tensor that is bound several times is kept once.
        first = [next(k for k, other in enumerate(given) if other is each) for each in given]
        once = [at == place for place, at in enumerate(first)]
        before = [
            copied(each, "cpu") if of_tensor else kernel._value(binding, given, how.get("arg_casts"))
            for each, binding, of_tensor, one in zip(given, kernel._bindings, tensors, once, strict=True)
            if one
        ]
        plain(kernel, *given, threads=threads, group_size=group_size, **how)
        after = [
            each.cpu().clone() if binding.writes and of_tensor and one else None
            for each, binding, of_tensor, one in zip(given, kernel._bindings, tensors, once, strict=True)
        ]
        group = group_size or min(1024, threads)
        launches.append(
            {
                "kernel": kernel._name,
                "before": before,
                "after": after,
                "first": first,
                "threads": threads,
                "group": group,
            }
        )

    library.MetalKernel.__call__ = recorded  # type: ignore[method-assign]
    for call in calls():
        call()
    for source in sources():
        module = library._module(source)
        wanted = {each["kernel"] for each in launches} & set(module.described)
        ptx |= {name: compiled(module.only(name), module.signature(name)) for name in wanted}
    torch.save({"launches": launches, "ptx": ptx}, folder / "launches.pt")
    copyfile(__file__, folder / "ptx.py")
    print(f"{len(launches)} launches of {len(ptx)} kernels, {(folder / 'launches.pt').stat().st_size / 1e6:.1f} MB")
    return 0


def sources() -> list[str]:
    """Return the Metal source of each of hf_mps' kernels."""
    from hf_mps.metal.training_kernels import trial

    return list({trial.family(name).SOURCE.text: None for name in trial.FAMILIES})


def calls() -> list[Callable[[], Any]]:
    """Return calls of every kernel's function, each for SHAPES shapes in each dtype."""
    from hf_mps.metal.training_kernels import activations, adam_8bit, attention, clip, cross_entropy, norms, rotary

    draw, found = random.Random(0), []
    torch.manual_seed(0)

    def values(*shape: int, dtype: torch.dtype) -> Any:
        return torch.randn(*shape).to(dtype).to("mps")

    def clipped(tensors: list[Any]) -> None:
        clip.scale(tensors, 1.0, clip.total_norm(tensors))

    def both_ways(norm: Callable[..., Any], *given: Any) -> None:
        found, total = norm(*(each.detach().clone().requires_grad_() for each in given))
        result = found + total
        result.backward(torch.ones_like(result) + result.detach())

    def summed_root(given: Any, residual: Any, weight: Any) -> Any:
        return norms.normed("rms_norm", 1e-5, given, weight, None, residual)

    def attended(call: Any, *given: Any) -> None:
        result = attention.attention(*(each.detach().clone().requires_grad_() for each in given), call=call)
        result.backward(torch.ones_like(result) + result.detach())

    def activated(kind: str, given: Any, bias: Any) -> None:
        leaves = [each.detach().clone().requires_grad_() for each in (given, bias, given + 1)]
        for result in (
            activations.activated(leaves[0], leaves[1], kind),
            activations.activated(leaves[0], None, kind),
            activations.gated(leaves[0], leaves[2], kind),
        ):
            result.backward(torch.ones_like(result) + result.detach())

    kinds = tuple(activations.WRITTEN_OUT)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for number in range(SHAPES):
            rows, columns = draw.randint(1, 30), draw.choice((1, 7, 32, 100, 384, 1000, 1024, 2050))
            sizes = [draw.choice((1, 5, 300, 3_000)) for _ in range(draw.randint(2, 60))]
            given = values(rows, columns, dtype=dtype)
            weights = [values(columns, dtype=dtype) for _ in range(2)]
            many = values(300, 7, dtype=dtype), values(7, dtype=dtype)  # rows of which groups leave their sums
            logits = values(rows, columns * 3, dtype=dtype)
            labels = torch.randint(columns * 3, (rows,))
            labels[0] = -100
            found += [
                partial(clipped, [values(size, dtype=dtype) for size in sizes]),
                partial(both_ways, partial(norms.normed, "layer_norm", 1e-5), given, *weights),
                partial(both_ways, partial(norms.normed, "rms_norm", 1e-5), given, weights[0]),
                partial(both_ways, partial(norms.normed, "layer_norm", 1e-5, dropout=0.1), given, *weights, given + 1),
                partial(both_ways, partial(norms.normed, "rms_norm", 1e-5), *many),
                partial(both_ways, summed_root, given, given + 1, weights[0]),
                partial(activated, kinds[number % len(kinds)], given, weights[0]),
                partial(adam_8bit._two_steps, adam_8bit.adam, given, given + 1),
                partial(cross_entropy.losses_in_place, logits, labels.to("mps"), -100, 2.0),
            ]
            heads, places, others, width = (draw.randint(1, most) for most in (3, 50, 80, 128))
            sizes = [(heads, places, width), (1, others, width), (1, others, width)]
            seen = (torch.rand(2, 1, places, others) > 0.3).to("mps")
            call = attention.Call(width**-0.5, seen, False, 0.25, (draw.getrandbits(62), draw.getrandbits(40)))
            call = attention.Call(width**-0.5, causal=True) if draw.random() < 0.3 else call
            halved, angles = width // 2 * 2 + 2, [values(1, places, width // 2 * 2 + 2, dtype=dtype) for _ in range(2)]
            turned = [values(2, each, places, halved, dtype=dtype) for each in (heads, 1, heads, 1)]
            found.append(partial(rotary._side(rotary.rotated), *turned[:2], *angles, *turned[2:]))
            found.append(partial(attended, call, *(values(2, *size, dtype=dtype) for size in sizes)))
    return found


def compiled(text: str, signature: Any) -> str:
    """Return a kernel's assembly as PTX, with an entry that gives it a thread's place."""
    import llvmlite.binding as llvm

    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    text = re.sub(r"^declare [^\n]*@air\.[^\n]*$", "", text, flags=re.M)
    text = re.sub(r"^declare float @llvm\.(sqrt|maxnum|fma|fabs)[^\n]*$|^target [^\n]*$", "", text, flags=re.M)
    name = signature.name
    places = {each.parameter: PLACES[each.name] for each in signature.attributes}
    count = len(signature.bindings) + len(places)
    given = ", ".join(f"i32 {places[n]}" if n in places else f"ptr addrspace(1) %p{n}" for n in range(count))
    parameters = ", ".join(f"ptr addrspace(1) %p{n}" for n in range(count) if n not in places)
    entry = f"""
define ptx_kernel void @entry({parameters}, i32 %all) {{
  %tid = call i32 @llvm.nvvm.read.ptx.sreg.tid.x()
  %width = call i32 @llvm.nvvm.read.ptx.sreg.ntid.x()
  %group = call i32 @llvm.nvvm.read.ptx.sreg.ctaid.x()
  %first = mul i32 %group, %width
  %place = add i32 %first, %tid
  %inside = icmp ult i32 %place, %all
  br i1 %inside, label %run, label %end
run:
  call void @"{name}"({given})
  br label %end
end:
  ret void
}}"""
    module = llvm.parse_assembly(text + INTRINSICS + entry)
    device = Path(cuda_home()) / "nvvm/libdevice/libdevice.10.bc"
    module.link_in(llvm.parse_bitcode(device.read_bytes()))
    machine = llvm.Target.from_triple("nvptx64-nvidia-cuda").create_target_machine(
        cpu="sm_80", features="+ptx71", opt=3
    )
    module.triple, module.data_layout = "nvptx64-nvidia-cuda", str(machine.target_data)
    tuning = llvm.create_pipeline_tuning_options(speed_level=3)
    llvm.create_pass_builder(machine, tuning).getModulePassManager().run(
        module, llvm.create_pass_builder(machine, tuning)
    )
    return str(machine.emit_assembly(module))


def cuda_home() -> str:
    """Return the folder of CUDA's toolkit, which has libdevice."""
    return os.environ.get("CUDA_HOME", "/usr/local/cuda-13.0")


def run(folder: Path) -> int:
    """Launch everything on the GPU, and print how far each kernel is from what was written."""
    kept = torch.load(folder / "launches.pt")
    driver = ctypes.CDLL("libcuda.so.1")
    torch.zeros(1, device="cuda")  # makes the context
    functions = {name: loaded(driver, text) for name, text in kept["ptx"].items()}
    worst: dict[str, tuple[float, int]] = {}
    for each in kept["launches"]:
        tensors = [on_gpu(of) for of in each["before"]]
        places = {first: k for k, first in enumerate(dict.fromkeys(each["first"]))}
        tensors = [tensors[places[first]] for first in each["first"]]
        pointers = [ctypes.c_void_p(of.data_ptr()) for of in tensors] + [ctypes.c_int(each["threads"])]
        given = (ctypes.c_void_p * len(pointers))(
            *(ctypes.cast(ctypes.pointer(of), ctypes.c_void_p) for of in pointers)
        )
        groups = -(-each["threads"] // each["group"])
        sizes = (groups, 1, 1, each["group"], 1, 1, 0)
        check(driver.cuLaunchKernel(functions[each["kernel"]], *sizes, None, given, None), each["kernel"])
        torch.cuda.synchronize()
        off = [apart(of.cpu(), wanted) for of, wanted in zip(tensors, each["after"], strict=True) if wanted is not None]
        most, count = worst.get(each["kernel"], (0.0, 0))
        worst[each["kernel"]] = max(most, *off), count + 1
    print(f"{torch.cuda.get_device_name()}: kernel, launches, largest difference in epsilons of the largest value")
    for name, (most, count) in sorted(worst.items()):
        print(f"  {name:28} {count:4} {most:8.2f}{'' if most <= MOST else '  too far'}")
    return int(any(not most <= MOST for most, _ in worst.values()))


def on_gpu(given: Any) -> Any:
    """Return a tensor, or the bytes of a number, on the GPU."""
    if isinstance(given, torch.Tensor):
        return copied(given, "cuda")
    return torch.frombuffer(bytearray(given), dtype=torch.uint8).cuda()


def copied(tensor: Any, device: str) -> Any:
    """Return a copy with the same strides, and so the same gaps: a kernel is told where elements are.

    The gradients of queries, keys and values of one shape are parts of one tensor.
    """
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    return made.copy_(tensor)


def loaded(driver: Any, text: str) -> Any:
    """Return the entry of a PTX text."""
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    check(driver.cuModuleLoadData(ctypes.byref(module), text.encode() + b"\0"), "cuModuleLoadData")
    check(driver.cuModuleGetFunction(ctypes.byref(function), module, b"entry"), "cuModuleGetFunction")
    return function


def check(code: int, what: str) -> None:
    """Raise RuntimeError for an error of the driver's."""
    if code:
        raise RuntimeError(f"{what}: CUDA's driver answers {code}")


def apart(found: Any, wanted: Any) -> float:
    """Return the largest difference in epsilons of the largest value, or in bytes; infinity where one is no number."""
    if not wanted.dtype.is_floating_point:
        return float((found.int() - wanted.int()).abs().max())
    epsilon = torch.finfo(wanted.dtype).eps
    found, wanted = found.double(), wanted.double()
    same = (found == wanted) | (found.isnan() & wanted.isnan())  # what a launch leaves alone may be anything
    off = float((found - wanted).abs().masked_fill(same, 0).max())
    most = float(wanted.abs().masked_fill(~wanted.isfinite(), 0).max())
    return off / (max(most, 1e-30) * epsilon) if math.isfinite(off) else math.inf


if __name__ == "__main__":
    sys.exit(main())
