"""Capture the pattern pack_padded_sequence -> recurrent layer -> pad_packed_sequence.

A packed sequence has no batch dimension and a size that depends on values, so torch.export cannot trace it. Within a
forward, though, packing only says how long each sample is. While a model is captured, a packed sequence is the padded
tensor with its lengths, and a recurrent layer that is given one is a single op on both, in which samples stay apart.
That op packs, computes and unpacks where it runs, on the samples a device has.

As with `nn.DataParallel`, every replica has to return results of one length: `total_length` is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.utils import rnn

from parplan.errors import CaptureError
from parplan.graph.axes.row_syntax import OpAxis
from parplan.graph.axes.table import OWN_ROWS, Call, own_op

__all__ = ["RNN_PACKED", "Packed", "longest", "packed_sequences", "run_packed"]

_PLAIN_PACK, _PLAIN_PAD = rnn.pack_padded_sequence.__code__, rnn.pad_packed_sequence.__code__


@dataclass(frozen=True)
class Packed:
    """Stands for a packed sequence while a model is captured: the padded tensor with its lengths.

    Args:
        padded: [samples, time, features], or [time, samples, features].
        lengths: [samples].
        batch_first: which of the two.
        sorted: the user promised that lengths fall.
    """

    padded: Tensor
    lengths: Tensor
    batch_first: bool
    sorted: bool = field(repr=False)

    def __getattr__(self, name: str) -> Any:
        raise CaptureError(
            f"the forward reads {name!r} of a packed sequence, whose size depends on the values of its lengths; only "
            "LSTM, GRU, RNN and pad_packed_sequence may take one in a captured model"
        )


@dataclass(frozen=True)
class _Options:
    """Constructor arguments and call mode of a recurrent layer."""

    batch_first: bool
    sorted: bool
    biases: bool
    bidirectional: bool
    training: bool
    layers: int
    hidden: int
    projected: int

    @property
    def directions(self) -> int:
        return 2 if self.bidirectional else 1

    def state_shapes(self, mode: str, samples: int) -> list[tuple[int, int, int]]:
        """Of the hidden state, and of the cells where there are such."""
        rows = self.layers * self.directions
        cells = [(rows, samples, self.hidden)] if mode == "LSTM" else []
        return [(rows, samples, self.projected or self.hidden), *cells]


def run_packed(
    values: Sequence[Tensor],
    state: Sequence[Tensor],
    weights: Sequence[Tensor],
    mode: str,
    flags: Sequence[bool],
    sizes: Sequence[int],
    dropout: float,
) -> list[Tensor]:
    """Pack, run the layer, unpack: the ops that the model's own code would run.

    Args:
        values: padded samples, and their lengths.
        state: hidden state at the start (and cells); empty for zeros.
        weights: the layer's flat weights.
        mode: "LSTM", "GRU", "RNN_TANH" or "RNN_RELU".
        flags, sizes: of `_Options`, in its order.

    Returns:
        The padded results, the last hidden state (and cells), samples in the order they came.
    """
    (padded, lengths), options = values, _Options(*flags, *sizes)
    packed = rnn.pack_padded_sequence(padded, lengths.cpu(), options.batch_first, options.sorted)
    start = list(state) or [padded.new_zeros(s) for s in options.state_shapes(mode, len(lengths))]
    if state and packed.sorted_indices is not None:
        start = [tensor.index_select(1, packed.sorted_indices) for tensor in start]
    given = start if mode == "LSTM" else start[0]
    run: Callable[..., tuple[Tensor, ...]] = getattr(torch._VF, mode.lower())
    more = (options.biases, options.layers, dropout, options.training, options.bidirectional)
    data, *last = run(packed.data, packed.batch_sizes, given, list(weights), *more)
    result = rnn.PackedSequence(data, packed.batch_sizes, packed.sorted_indices, packed.unsorted_indices)
    total = padded.shape[1 if options.batch_first else 0]
    out, _ = rnn.pad_packed_sequence(result, options.batch_first, total_length=total)
    back = packed.unsorted_indices
    return [out, *(tensor if back is None else tensor.index_select(1, back) for tensor in last)]


def _without_values(values: Sequence[Tensor], *more: Any) -> list[Tensor]:
    """Empty results of `run_packed`, of the shapes that it gives."""
    _, _, mode, flags, sizes, _ = more
    padded, options = values[0], _Options(*flags, *sizes)
    out = padded.new_empty((*padded.shape[:2], options.directions * (options.projected or options.hidden)))
    shapes = options.state_shapes(mode, padded.shape[0 if options.batch_first else 1])
    return [out, *(padded.new_empty(shape) for shape in shapes)]


RNN_PACKED = own_op("rnn_packed", run_packed, _without_values)


def longest(nodes: Iterable[fx.Node], name: str) -> int | None:
    """The greatest length that value `name` may hold, if some node takes it as lengths: all of the time there is."""
    for call in (Call(node) for node in nodes if node.target is RNN_PACKED):
        padded, lengths = call["values"]
        if lengths.name == name:
            return int(padded.meta["val"].shape[1 if call["flags"][0] else 0])
    return None


def _axes(call: Call) -> tuple[OpAxis, ...]:
    """Samples stay apart; time, features and state are whole."""
    (padded, lengths), state = call["values"], call["state"]
    samples = 0 if call["flags"][0] else 1
    dims = {padded.name: samples, lengths.name: 0} | {tensor.name: 1 for tensor in state}
    dims |= {name: 1 if index else samples for index, name in call.results.items()}
    return (OpAxis(dims),)


OWN_ROWS[RNN_PACKED] = _axes


@contextmanager
def packed_sequences() -> Iterator[None]:
    """While it lasts, packing gives padded tensors with their lengths, which recurrent layers and unpacking take."""
    kinds: tuple[Any, ...] = (nn.LSTM, nn.GRU, nn.RNN)
    plain = [kind.forward for kind in kinds]
    # The code and not the names: users import these functions into modules of their own.
    rnn.pack_padded_sequence.__code__, rnn.pad_packed_sequence.__code__ = _pack.__code__, _pad.__code__
    for kind, forward in zip(kinds, plain, strict=True):
        kind.forward = _forward_for(forward)
    try:
        yield
    finally:
        rnn.pack_padded_sequence.__code__, rnn.pad_packed_sequence.__code__ = _PLAIN_PACK, _PLAIN_PAD
        for kind, forward in zip(kinds, plain, strict=True):
            kind.forward = forward


def _pack(input: Tensor, lengths: Any, batch_first: bool = False, enforce_sorted: bool = True) -> Any:
    from parplan.graph import packed_sequences as packed

    return packed.pack(input, lengths, batch_first, enforce_sorted)


def _pad(sequence: Any, batch_first: bool = False, padding_value: float = 0.0, total_length: int | None = None) -> Any:
    from parplan.graph import packed_sequences as packed

    return packed.pad(sequence, batch_first, padding_value, total_length)


def pack(padded: Tensor, lengths: Any, batch_first: bool, is_sorted: bool) -> Packed:
    """pack_padded_sequence while a model is captured."""
    return Packed(padded, torch.as_tensor(lengths, dtype=torch.int64), batch_first, is_sorted)


def pad(packed: Any, batch_first: bool, padding_value: float, total_length: int | None) -> tuple[Tensor, Tensor]:
    """pad_packed_sequence while a model is captured.

    Raises:
        CaptureError: the length of the result depends on values, or is less than that of what was packed.
    """
    if not isinstance(packed, Packed):
        raise CaptureError("pad_packed_sequence: the sequence was packed outside of the forward; pack it inside")
    time = packed.padded.shape[1 if packed.batch_first else 0]
    if total_length is None or total_length < time:
        raise CaptureError(
            f"pad_packed_sequence(total_length={total_length}): replicas would return results of different lengths; "
            f"give total_length=x.size({int(packed.batch_first)}), the length before packing ({time} here)"
        )
    samples_first = packed.padded if packed.batch_first else packed.padded.transpose(0, 1)
    result = nn.functional.pad(samples_first, (0, 0, 0, total_length - time)) if total_length > time else samples_first
    if padding_value != 0:
        beyond = torch.arange(total_length, device=result.device) >= packed.lengths.to(result.device).unsqueeze(1)
        result = result.masked_fill(beyond.unsqueeze(2), padding_value)
    return result if batch_first else result.transpose(0, 1), packed.lengths


def _forward_for(plain: Callable[..., Any]) -> Callable[..., Any]:
    def forward(self: Any, input: Any, hx: Any = None) -> Any:
        return _run_layer(self, input, hx) if isinstance(input, Packed) else plain(self, input, hx)

    return forward


def _run_layer(layer: nn.RNNBase, packed: Packed, state: Any) -> tuple[Packed, Any]:
    """The forward of a recurrent layer on a packed sequence."""
    start = [] if state is None else [state] if isinstance(state, Tensor) else list(state)
    flags = [packed.batch_first, packed.sorted, layer.bias, layer.bidirectional, layer.training]
    sizes = [layer.num_layers, layer.hidden_size, layer.proj_size]
    values, weights = [packed.padded, packed.lengths], [getattr(layer, name) for name in layer._flat_weights_names]
    out, *last = RNN_PACKED(values, start, weights, layer.mode, flags, sizes, float(layer.dropout))
    return Packed(out, packed.lengths, packed.batch_first, packed.sorted), tuple(last) if len(last) > 1 else last[0]
