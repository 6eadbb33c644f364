"""What ops keep and need on the CPU, where that is not what CUDA's kernels do.

Counted with torch's profiler (torch 2.13, oneDNN 3, float32): every row is an allocation pattern, not a fit, but for
oneDNN's LSTM, whose workspace has no published size.
"""

from __future__ import annotations

from collections.abc import Mapping

from parplan.cost_models.kept import Rule, Saved, names
from parplan.cost_models.op_calls import OpCall, Operand

__all__ = ["CPU_RULES"]

# oneDNN reads images of so few channels as they are.
_FEW_CHANNELS = 4
# Its copies have channels in blocks: of 8 with AVX2, of 16 with AVX-512 (more only where channels are few and odd).
_CHANNEL_BLOCK = 8


def _noise(call: OpCall) -> Saved:
    """Dropout multiplies with noise of the values' own type."""
    return Saved(inner_bytes=call.outputs[0].nbytes)


def _cpu_convolution(call: OpCall) -> Saved:
    """oneDNN works in layouts of its own: copies of what it reads and writes, in turn for each of its products."""
    if len(call.inputs) < 2 or len(call.outputs[0].shape) < 2:
        return Saved(names(*call.inputs))
    image, weight, out = call.inputs[0], call.inputs[1], call.outputs[0]
    taken_bytes = 0 if image.shape[1] <= _FEW_CHANNELS else _blocked_bytes(image)
    given_bytes = _blocked_bytes(out)
    kept = [a for a, b in ((image, weight), (weight, image)) if b.requires_grad]
    return Saved(
        names(*kept),
        forward_bytes=max(taken_bytes + weight.nbytes + given_bytes - out.nbytes, given_bytes),
        backward_bytes=max(taken_bytes + given_bytes, weight.nbytes),
    )


def _blocked_bytes(image: Operand) -> int:
    return image.nbytes // max(1, image.shape[1]) * -(-image.shape[1] // _CHANNEL_BLOCK) * _CHANNEL_BLOCK


def _cpu_attention(call: OpCall) -> Saved:
    """Fused without dropout; with it made of products, a softmax and noise, each the size of all pairs."""
    query, key, value = call.inputs[:3]
    if not call.argument(4, 0.0):
        rows = call.outputs[0].elements // max(1, call.outputs[0].shape[-1])
        return Saved(names(*call.inputs, *call.outputs), 4 * rows)
    pairs_bytes = query.nbytes // max(1, query.shape[-1]) * key.shape[-2]
    return Saved(names(value), 3 * pairs_bytes + query.nbytes + key.nbytes, backward_bytes=pairs_bytes)


def _layers(call: OpCall) -> int:
    layers = call.argument(4, 1)
    return layers if isinstance(layers, int) else 1


def _lstm(call: OpCall) -> Saved:
    """oneDNN's layer keeps a copy of its input and a workspace of gates and states, padded to the larger width."""
    series, out = call.inputs[0], call.outputs[0]
    directions = 2 if call.argument(7) is True else 1
    hidden = out.shape[-1] // directions
    steps = max(1, series.shape[1 if call.argument(8) is True else 0])
    inner_bytes = 0
    for layer in range(_layers(call)):
        width = max(hidden, series.shape[-1] if layer == 0 else out.shape[-1]) + 16
        floats = 4 * hidden + 16 + (6 * width + 4 * hidden) * (steps + 1) // steps
        inner_bytes += directions * floats * (out.nbytes // max(1, out.shape[-1]))
        inner_bytes += series.nbytes if layer == 0 else out.nbytes
    weights_bytes = sum(operand.nbytes for operand in call.inputs if operand.state)
    return Saved(names(out), inner_bytes, backward_bytes=21 * out.nbytes // 4 + series.nbytes + weights_bytes)


def _loop(kept: int, needed: int) -> Rule:
    """Recurrent layers that torch steps through: tensors of the size of the results, kept per layer."""

    def rule(call: OpCall) -> Saved:
        layers, nbytes = _layers(call), call.outputs[0].nbytes
        return Saved(names(*call.inputs), (kept * layers + layers - 1) * nbytes, backward_bytes=needed * nbytes)

    return rule


CPU_RULES: Mapping[str, Rule] = {
    **dict.fromkeys(("dropout", "native_dropout", "feature_dropout", "alpha_dropout"), _noise),
    **dict.fromkeys(("conv1d", "conv2d", "conv3d", "convolution"), _cpu_convolution),
    "scaled_dot_product_attention": _cpu_attention,
    "lstm": _lstm,
    "gru": _loop(7, 3),
    "rnn_tanh": _loop(1, 1),
    "rnn_relu": _loop(1, 1),
}
