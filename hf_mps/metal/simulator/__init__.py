"""The simulated Metal device: a device of type `mps` on a machine that has no Metal.

It runs the Metal paths of any program on Linux, and makes no claim about a Mac's speed or rounding. Everything above
this package sees a device like a Mac's and asks whether it is simulated (`hf_mps.metal.device.simulated`) for a label
alone, never to do something else.
"""

from __future__ import annotations

import atexit
import platform
import time
from typing import TYPE_CHECKING, Any

from hf_mps.core.errors import UserError
from hf_mps.core.text import first_line
from hf_mps.metal.kernels import enable, requested, say_coverage
from hf_mps.metal.simulator.counters import Counted, counted

if TYPE_CHECKING:
    from types import ModuleType

    from hf_mps.metal.device.profiles import Profile

__all__ = ["Counted", "counted", "load", "loaded", "peak_memory", "reset_peak_memory"]

_profile: Profile | None = None
_start_failed: UserError | None = None
"""What a first start ended with: the device has told PyTorch of itself by then, which ends a process at the second."""


def load(profile: str | None = None) -> Profile:
    """Give this process a simulated Metal device and return its profile; a second call changes nothing.

    `profile` is a name of `hf_mps.metal.device.profiles` ("1" or None is the default one). The device is compiled on
    first use, about a minute. Raises UserError, in one line, on a Mac with Metal, with a PyTorch that is built for
    another accelerator, for an unknown profile or fault, for kernels that cannot run (HF_MPS_KERNELS), for another
    profile than the loaded one, after something asked PyTorch for Metal, for a PYTORCH_ENABLE_MPS_FALLBACK that is no
    number, and where it cannot be compiled.
    """
    global _profile
    from hf_mps.metal.device import faults, profiles

    wanted = profiles.get(profile or "1")
    faults.left_out()  # a name that there is not is refused before anything is loaded
    import torch  # first: with HF_MPS_SIMULATE set, PyTorch's autoload comes through here and leaves the work done

    if _profile is not None:
        if wanted != _profile:
            raise UserError(
                f"the simulated device {_profile.name} is loaded already; start a new process for {wanted.name}"
            )
        return _profile
    if _start_failed is not None:
        raise _start_failed
    if torch.backends.mps.is_built() or platform.system() == "Darwin":
        raise UserError(
            "this PyTorch has real Metal support, so the simulated device is not loaded; unset HF_MPS_SIMULATE"
        )
    _refuse_other_accelerators(torch)
    kernels = requested()  # as little as a fault's name: a device that computes with others is not what was asked for
    from hf_mps.metal.device import machine
    from hf_mps.metal.simulator import build, strictness

    metal = build.extension()
    _start(metal, wanted)
    strictness.start(metal, wanted, torch.__version__)
    _offer(torch, metal)
    machine.override(wanted.machine())
    if kernels is not None:
        enable(kernels[0], metal, checked=kernels[1])
        atexit.register(say_coverage)
    atexit.register(_let_autograd_finish)
    build.start_as(metal)
    _profile = wanted
    return wanted


def loaded() -> Profile | None:
    """Return the profile of the device that this process simulates, or None."""
    return _profile


def peak_memory() -> int:
    """The largest number of bytes that tensors held on the device since the last `reset_peak_memory`; 0 unloaded."""
    return int(_metal().memory()["peak"]) if _profile is not None else 0


def reset_peak_memory() -> None:
    """Let `peak_memory` start again from what is held now."""
    if _profile is not None:
        _metal().reset_peak()


def _metal() -> ModuleType:
    from hf_mps.metal.simulator import build

    return build.running("no simulated device is loaded")


def _let_autograd_finish() -> None:
    """Give autograd's device thread the moment in which it drops the last backward pass.

    It needs Python's lock for that and may still wait for it when `backward` has returned. A program that ends right
    there would be aborted ("terminate called without an active exception"): Python ends a thread that asks for its
    lock too late, inside a C++ destructor.
    """
    time.sleep(0.02)


def _refuse_other_accelerators(torch: ModuleType) -> None:
    """PyTorch allows one accelerator, and counts the one it was built for, present or not: backward would fail.

    Source: aten/src/ATen/DeviceAccelerator.cpp, "Cannot have both MPS and cuda". Asking PyTorch itself which one it is
    would make it look for Metal, once and for all, before the device is there.
    """
    for name, title in (("cuda", "CUDA"), ("hip", "ROCm"), ("xpu", "XPU")):
        version = getattr(torch.version, name, None)
        if version:
            raise UserError(
                f"the simulated device needs a PyTorch built for the CPU alone, and this one is built for {title} "
                f"{version}: pip install torch --index-url https://download.pytorch.org/whl/cpu"
            )


def _start(metal: ModuleType, profile: Profile) -> None:
    global _start_failed
    import torch

    from hf_mps.metal.operators.table import ONLY_AN_ERROR, table

    try:
        metal.start(
            chip=profile.chip,
            cores=profile.cores,
            recommended_max=profile.recommended_max,
            macos_major=profile.macos[0],
            macos_minor=profile.macos[1],
            native=sorted(table().native),
            sparse={key: dict(kernels) for key, kernels in table().sparse.items() if kernels},
            always_on_cpu=sorted(table().cpu | ONLY_AN_ERROR),
            commit=str(torch.version.git_version),
        )
    except (RuntimeError, ValueError, IndexError) as error:
        told = f"PYTORCH_ENABLE_MPS_FALLBACK is no number, and PyTorch reads it as one ({error}); set it to 1 or 0"
        if isinstance(error, RuntimeError):  # the others are std::stoi's: no number, or one beyond 32 bits
            if "asked PyTorch for Metal before" not in str(error):
                raise
            # PyTorch looks a backend up once in a process and remembers that there was none.
            told = (
                f"the simulated device comes too late ({first_line(error)}): set HF_MPS_SIMULATE=1 before "
                "Python starts, or load it right after `import torch`"
            )
        _start_failed = UserError(told)
        raise _start_failed from error


def _offer(torch: ModuleType, metal: ModuleType) -> None:
    """Let torch's own Python find the device: what a wheel with Metal has in torch._C."""
    from hf_mps.metal.simulator import compiled

    functions = metal.torch_functions
    for name in dir(functions):
        if name.startswith("_mps_"):
            setattr(torch._C, name, getattr(functions, name))
    # torch.backends.mps.is_built returns it.
    torch._C._has_mps = True
    # torch.mps read this one when it was imported, and has kept a function that says no.
    torch.mps._is_in_bad_fork = functions._mps_is_in_bad_fork
    # Both remember their answer, and something may have asked before the device was there.
    for asked in (torch.backends.mps.is_available, torch.backends.mps.is_macos_or_newer):
        asked.cache_clear()
    compiled.install_compiler()
    compiled.install_shaders(metal)
    compiled.install_streams()
    _make_storages(torch)


def _make_storages(torch: ModuleType) -> None:
    """Let `torch.UntypedStorage(bytes, device="mps")` make storages, which a wheel without Metal refuses in C++. Once.

    torch.load, UntypedStorage.mps() and .to("mps") all make their storage that way.
    """
    storage: Any = torch.UntypedStorage
    original = storage.__new__
    if getattr(original, "_hf_mps_makes_mps", False):
        return

    def new(cls: Any, *args: Any, device: Any = None, **kwargs: Any) -> Any:
        if device is None or torch.device(device).type != "mps" or len(args) > 1:
            # The C++ constructor takes no `device=None`.
            return original(cls, *args, **kwargs) if device is None else original(cls, *args, device=device, **kwargs)
        content = args[0] if args else kwargs.get("size", 0)
        if isinstance(content, int):
            return torch.empty(content, dtype=torch.uint8, device="mps").untyped_storage()
        return torch.tensor(list(content), dtype=torch.uint8, device="mps").untyped_storage()

    new._hf_mps_makes_mps = True  # type: ignore[attr-defined]
    storage.__new__ = new
