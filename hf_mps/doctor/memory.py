"""Memory and swap as they are now, against what Metal recommends."""

from __future__ import annotations

from hf_mps.device import choice, machine
from hf_mps.device import memory as memories
from hf_mps.doctor.finding import Finding, note, ok
from hf_mps.finetune.report.screen.numbers import memory as words


def examine() -> list[Finding]:
    """Memory in all and free, the recommended maximum of the device, swap in use."""
    import psutil

    now, swap = psutil.virtual_memory(), psutil.swap_memory()
    here = machine.present()
    total = here.memory or now.total
    found = [_free(total, min(total, now.available), here.label)]
    if choice.metal().value:
        recommended = memories.recommended("mps")
        assert recommended is not None
        says = f"a process should hold at most {words(recommended)} on the GPU; PyTorch refuses at 1.7 times that"
        found.append(ok("recommended", f"{says}{here.label}; beside live memory {memories.DRIVER}"))
    if swap.used > 0.1 * total:
        found.append(
            note("swap", f"{words(swap.used)} are swapped out already: training slows down many times", "top -o mem")
        )
    else:
        found.append(ok("swap", f"{words(swap.used)} in use"))
    return found


def _free(total: int, available: int, label: str) -> Finding:
    says = f"{words(total)} in all{label}, {words(available)} free for programs"
    if available < 0.25 * total:
        return note("memory", f"{says}: a training will be pushed into swap early", "top -o mem")
    return ok("memory", says)
