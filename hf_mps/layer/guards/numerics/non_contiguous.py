"""non-contiguous: parameters lie contiguously before they are trained, where kernels lose updates of others."""

from __future__ import annotations

from typing import Any

from hf_mps.core.choice import Choice
from hf_mps.layer.guards import training_hooks
from hf_mps.layer.guards.base import Guard


class NonContiguous(Guard):
    """Makes parameters contiguous when their optimizer is made; what optimizers keep beside them then is so too."""

    name = "non-contiguous"
    what = (
        "some kernels give wrong results on tensors that are not contiguous: such weights never move, or move wrongly"
    )
    # Frozen ones too, as convolutions misread them.
    patches = training_hooks.parameters("_look", frozen=True)

    def trial(self) -> Choice[bool]:
        """Whether one of the operators named by those issues differs from the CPU on transposed tensors."""
        wrong = [name for name, run in _trials().items() if not _agrees(run)]
        if wrong:
            return Choice(True, f"tried on the device: {', '.join(wrong)} differ from the CPU on transposed tensors")
        return Choice(False, "tried on the device: the operators of those issues are right on transposed tensors")

    def _look(self, parameters: list[Any]) -> None:
        loose = [parameter for parameter in parameters if not parameter.is_contiguous()]
        if not loose or not self.needed:
            return
        owners: dict[int, int] = {}
        for parameter in parameters:
            place = parameter.untyped_storage().data_ptr()
            owners[place] = owners.get(place, 0) + 1
        shared = [parameter for parameter in loose if owners[parameter.untyped_storage().data_ptr()] > 1]
        for parameter in loose:
            if not any(parameter is other for other in shared):
                # In the user's model: the kernel of each update reads and writes the parameter itself.
                parameter.data = parameter.data.contiguous()
        if len(loose) > len(shared):
            line = f"{len(loose) - len(shared)} parameters were made contiguous: {self.verdict().reason}"
            self.acted(line, aloud=False)
        if shared:
            self.acted(
                f"{len(shared)} parameters are views of others and stay as they are, so they may not be trained rightly"
            )


def _trials() -> dict[str, Any]:
    """Operators by name, each a function of three matrices that returns what is to be compared."""
    import torch

    return {
        "addcmul_": lambda x, y, z: x.addcmul_(y, z),
        "addcdiv_": lambda x, y, z: x.addcdiv_(y, z),
        "conv2d": lambda x, y, z: torch.nn.functional.conv2d(x[None, None], y[None, None, :2, :2]),
    }


def _agrees(run: Any) -> bool:
    import torch

    def result(device: str) -> torch.Tensor:
        made = (torch.linspace(1, 2, 12).view(3, 4) * factor for factor in (1.0, 0.5, -0.3))
        # The transpose of a tensor of the device: a moved one could come as contiguous.
        found: torch.Tensor = run(*(matrix.to(device).t() for matrix in made))
        return found.detach().cpu()

    return torch.allclose(result("cpu"), result("mps"), rtol=1e-4, atol=1e-5)


GUARD = NonContiguous()
