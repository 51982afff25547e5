"""Which device a run takes: Metal, then CUDA, then the CPU, with the reason in words."""

from __future__ import annotations

from hf_mps.core import settings
from hf_mps.core.choice import Choice
from hf_mps.core.errors import UserError
from hf_mps.metal.device import machine, probe


def choose(*, owned: bool = True) -> Choice[str]:
    """Return the device type, 'mps', 'cuda' or 'cpu', and why. Imports torch and tries Metal on the first call.

    Our own programs and whoever asks hf_mps itself call this; a library's question is `switch`. Raises UserError where
    HF_MPS_DEVICE asks for a device that is not there or is set beside HF_MPS=0, with which no library follows it, and
    where it, HF_MPS_PROBE or HF_MPS_SIMULATE has a value that nobody knows. `owned` as in `metal`.
    """
    requested = _requested()
    if requested is not None and not settings.enabled():
        raise UserError(
            f"HF_MPS=0 and HF_MPS_DEVICE={requested} contradict each other: with hf_mps off no library follows the "
            f"device; unset one of them"
        )
    if requested == "cpu":
        return Choice("cpu", "HF_MPS_DEVICE=cpu asks for it")
    if requested is not None:
        there = metal(owned=owned) if requested == "mps" else cuda()
        if not there.value:
            raise UserError(f"HF_MPS_DEVICE={requested}: {there.reason}")
        return Choice(requested, f"HF_MPS_DEVICE={requested} asks for it; {there.reason}")
    on_metal = metal(owned=owned)
    if on_metal.value:
        return Choice("mps", on_metal.reason)
    on_cuda = cuda()
    if on_cuda.value:
        return Choice("cuda", f"{on_cuda.reason}; no Metal: {on_metal.reason}")
    # The advice behind the semicolon is for somebody who asked for CUDA.
    return Choice("cpu", f"no CUDA: {on_cuda.reason.partition(';')[0]}; no Metal: {on_metal.reason}")


def switch() -> str | None:
    """Return the device type that HF_MPS_DEVICE asks for, known to be there, or None where it is unset.

    Raises UserError as `choose` does.
    """
    return None if settings.device() is None else choose(owned=False).value


def simulated(device: str = "mps") -> bool:
    """Return whether `device` is simulated: its numbers then come from this machine's CPU, and its speed is no Mac's.

    It is for labels alone: a program does the same on the simulated device as on a Mac. Imports torch.
    """
    if device != "mps":
        return False
    import torch  # noqa: F401  first: the simulated device is loaded with it

    return machine.present().simulated


def metal(*, owned: bool = False) -> Choice[bool]:
    """Return whether Metal is taken, with the reason: not switched off, and there; with HF_MPS=0 what PyTorch says.

    `owned` as in `hf_mps.metal.device.probe.metal`, which says where it is tried too. Raises UserError only for a value
    of HF_MPS, HF_MPS_DEVICE, HF_MPS_PROBE or HF_MPS_SIMULATE that nobody knows.
    """
    if not settings.enabled():
        return probe.untried()
    requested = _requested()
    if requested not in (None, "mps"):
        return Choice(False, f"HF_MPS_DEVICE={requested} switches Metal off; to switch it on: unset HF_MPS_DEVICE")
    return probe.metal(owned=owned)


def refused() -> bool:
    """Whether Metal is known not to be taken, by the switch or by a probe that ran before; asks nothing of the device.

    Raises as `metal`.
    """
    known = probe.known()
    return settings.enabled() and (_requested() not in (None, "mps") or (known is not None and not known.value))


def _requested() -> str | None:
    """The device type that HF_MPS_DEVICE asks for; a misspelt HF_MPS_SIMULATE is no reason to train on the CPU."""
    if settings.simulate():
        from hf_mps.metal.device import profiles  # here, as `import torch` asks with no such variable set

        profiles.requested()
    return settings.device()


def cuda() -> Choice[bool]:
    """Return whether CUDA (or ROCm, which PyTorch calls by the same name) is there, with the reason. Imports torch."""
    import torch

    if torch.cuda.is_available():
        return Choice(True, f"CUDA answers as {torch.cuda.get_device_name()}")
    if torch.version.cuda or torch.version.hip:
        return Choice(
            False, f"PyTorch {torch.__version__} is built for CUDA but finds no GPU it can use; see: nvidia-smi"
        )
    if machine.present().mac:
        return Choice(False, f"there is no CUDA on a Mac; {probe.ON_THE_CPU}")
    return Choice(
        False,
        f"PyTorch {torch.__version__} is built without CUDA; "
        f"for a build that has it: https://pytorch.org/get-started/locally",
    )
