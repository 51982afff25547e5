"""lstm-dropout: an LSTM of several layers with dropout runs a layer at a time, so that its gradients are right."""

from __future__ import annotations

from typing import Any

from hf_mps.core.choice import Choice
from hf_mps.layer.guards.base import Guard


class LstmDropout(Guard):
    """Runs such a stack as single layers with dropout between them: the same function, with other masks."""

    name = "lstm-dropout"
    what = "the gradients of an LSTM of two or more layers with dropout are computed as if there had been no dropout"
    # The function that nn.LSTM calls; nothing else in torch is touched.
    patches = {"torch._VF:lstm": "_lstm"}

    def trial(self) -> Choice[bool]:
        """Whether a gradient passes between two layers that dropout=1 cuts apart; leaves the generator as it was."""
        import torch

        before = torch.mps.get_rng_state()
        try:
            weights: list[torch.Tensor] = [*torch.nn.LSTM(3, 3, num_layers=2, device="mps").parameters()]
            x = torch.ones(4, 1, 3, device="mps", requires_grad=True)
            zeros = torch.zeros(2, 1, 3, device="mps")
            out = torch._C._VariableFunctions.lstm(x, (zeros, zeros), weights, True, 2, 1.0, True, False, False)
            (gradient,) = torch.autograd.grad(out[0].sum(), x)
        finally:
            torch.mps.set_rng_state(before)
        if bool((gradient == 0).all()):
            return Choice(False, "tried on the device: no gradient passes a dropout of 1 between two layers")
        return Choice(True, "tried on the device: a gradient passes a dropout of 1 between two layers")

    def _lstm(self, stock: Any, input: Any, *rest: Any) -> Any:
        # Packed sequences give batch sizes second and take no kernel of Metal's own.
        if len(rest) != 8 or not isinstance(rest[0], list | tuple) or input.device.type != "mps":
            return stock(input, *rest)
        states, weights, has_bias, layers, dropout, training, bidirectional, batch_first = rest
        if layers < 2 or not dropout or not training or not self.needed:
            return stock(input, *rest)
        line = f"an LSTM of {layers} layers with dropout runs a layer at a time, for the right gradients"
        self.acted(line, aloud=False)
        return _layer_by_layer(
            stock.partial, input, states, weights, has_bias, layers, dropout, bidirectional, batch_first
        )


def _layer_by_layer(
    stock: Any, x: Any, states: Any, weights: Any, has_bias: Any, layers: int, p: float, both: bool, first: bool
) -> Any:
    """As torch's composite form (aten/src/ATen/native/RNN.cpp, apply_layer_stack): dropout after all but the last."""
    import torch

    each, ways = len(weights) // layers, 2 if both else 1
    hidden, cells = [], []
    for layer in range(layers):
        here = tuple(state[layer * ways : (layer + 1) * ways] for state in states)
        own = weights[layer * each : (layer + 1) * each]
        x, h, c = stock(x, here, own, has_bias, 1, 0.0, True, both, first)
        hidden.append(h)
        cells.append(c)
        if layer < layers - 1:
            x = torch.nn.functional.dropout(x, p, training=True)
    return x, torch.cat(hidden), torch.cat(cells)


GUARD = LstmDropout()
