"""half-precision: bf16 or fp16 that accelerate does not have on mps is refused in a sentence that names the version."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib.metadata import version
from types import CodeType, ModuleType
from typing import Any

from hf_mps.core.choice import Choice
from hf_mps.core.errors import UserError
from hf_mps.core.patching import in_lightning
from hf_mps.layer.guards.base import Guard

HALVES = ("bf16", "fp16")


class HalfPrecision(Guard):
    """Looks at what TrainingArguments, Accelerate and Lightning were asked for, before they say less or nothing."""

    name = "half-precision"
    what = "bf16 and fp16 that this accelerate cannot do end in an error that does not say what is missing"
    issue = "https://github.com/huggingface/accelerate/issues/3064"
    until = "the oldest supported accelerate does both, and Lightning 2.6 is the oldest supported"
    patches = {
        "transformers.training_args:TrainingArguments.__post_init__": "_arguments_made",
        "accelerate.accelerator:AcceleratorState.__init__": "_state_made",
        **in_lightning(
            {"trainer.connectors.accelerator_connector:_AcceleratorConnector._check_and_init_precision": "_plugin"}
        ),
    }

    def __init__(self) -> None:
        super().__init__()
        # Whether accelerate has each on mps (1.10 has neither); empty before accelerate is there.
        self._in_accelerate: dict[str, Callable[[], bool]] = {}

    def applies(self) -> Choice[bool]:
        """Whether one of the two cannot be used here."""
        lacking = [reason for reason in map(self._refusal, HALVES) if reason]
        return Choice(bool(lacking), "; ".join(lacking) or "bf16 and fp16 can both be used here")

    def concerns(self, module: ModuleType) -> bool:
        """Always; what accelerate can do is known once it is there."""
        if module.__name__ == "accelerate.accelerator":
            has_fp16 = _names_mps_beside_cuda(inspect.unwrap(module.Accelerator.__init__).__code__)
            self._in_accelerate = {"fp16": lambda: has_fp16, "bf16": lambda: bool(module.is_bf16_available(True))}
            self._verdict = None
        return True

    def _refusal(self, name: str) -> str:
        """Why `name` cannot be used on the device, or an empty string."""
        if name in self._in_accelerate and not self._in_accelerate[name]():
            return f"{name} cannot be used on mps: it needs accelerate 1.11 or newer; this is {version('accelerate')}"
        return ""

    def _refuse(self, names: list[str], said: str) -> None:
        """Raise UserError for the first of `names` that cannot be used."""
        for name in names:
            reason = self._refusal(name)
            if reason:
                self.acted(f"{said} was refused", aloud=False)
                other = next((each for each in HALVES if each != name and not self._refusal(each)), "")
                choices = f"{other}, or fp32 without either" if other else "fp32, with neither bf16 nor fp16"
                raise UserError(f"{said}: {reason}; next: {choices}")

    def _arguments_made(self, stock: Callable[..., None], arguments: Any, *args: Any, **kwargs: Any) -> None:
        from hf_mps.metal.device.choice import metal

        asked = [name for name in HALVES if getattr(arguments, name) or getattr(arguments, f"{name}_full_eval")]
        try:
            stock(arguments, *args, **kwargs)  # may move it to the CPU, and may refuse
        except ValueError:
            if asked and not arguments.use_cpu and metal().value:
                self._refuse(asked, f"{asked[0]}=True")
            raise
        if asked and not arguments.use_cpu and metal().value:
            self._refuse(asked, f"{asked[0]}=True")

    def _state_made(self, stock: Callable[..., None], state: Any, *args: Any, **kwargs: Any) -> None:
        known = bool(state._shared_state)
        stock(state, *args, **kwargs)
        if not known and state.device.type == "mps" and state.mixed_precision in HALVES:
            name = state.mixed_precision
            try:
                self._refuse([name], f"mixed_precision={name}")
            except UserError:
                type(state)._reset_state()  # or the next Accelerator of a notebook would find this one
                raise

    def _plugin(self, stock: Callable[..., Any], connector: Any) -> Any:
        import torch

        flag, on_metal = str(connector._precision_flag), connector._accelerator_flag == "mps"
        plugin = stock(connector)
        made_here = plugin is not getattr(connector, "_precision_plugin_flag", None)  # else the user's own object
        if on_metal and made_here and getattr(plugin, "device", None) == "cuda":
            # Lightning before 2.6 (Lightning#20497): autocast for CUDA, which does nothing here.
            plugin.device = "mps"
            if plugin.scaler is not None:
                plugin.scaler = torch.amp.GradScaler("mps")
            line = f"precision={flag} is autocast on mps; this Lightning would ask CUDA for it, and train in fp32"
            self.acted(line, aloud=False)
        return plugin


def _names_mps_beside_cuda(code: CodeType) -> bool:
    """Whether the devices that a function takes, listed in a constant of its code, have mps among them."""
    lists = [each for each in code.co_consts if isinstance(each, tuple | frozenset) and {"cuda", "xpu"} <= set(each)]
    return not lists or any("mps" in each for each in lists)


GUARD = HalfPrecision()
