"""Sample calls for every op of the axis table, as data: what the proofs in test_axis_table.py run.

`T("b t i")` is a tensor operand, one word per dimension: a letter gets a random size that the number of parts
divides (the same one throughout a call), a number stands for itself, `*` multiplies. `S("b*t")` is such a size as an
argument. Kinds of values: see `_KINDS`.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

__all__ = ["SAMPLES", "Call", "S", "Sizes", "T"]


@dataclass(frozen=True)
class T:
    """A tensor operand: words for its dimensions, and what its values are; a trailing "." says no gradient is asked."""

    words: str
    kind: str = "normal"

    @property
    def wants_gradient(self) -> bool:
        return not self.kind.endswith(".")


@dataclass(frozen=True)
class S:
    """A size argument: the product of a word."""

    word: str


@dataclass(frozen=True)
class Call:
    """Arguments of one call of an op."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def call(*args: Any, **kwargs: Any) -> Call:
    return Call(args, kwargs)


class Sizes:
    """Random sizes by letter, all of them multiples of `parts`; and the operands made of them."""

    def __init__(self, parts: int, seed: int) -> None:
        self._random = random.Random(seed)
        self._generator = torch.Generator().manual_seed(seed)
        self._parts = parts
        self._sizes: dict[str, int] = {}

    def size(self, word: str) -> int:
        """Size of one dimension."""
        return prod(int(factor) if factor.isdigit() else self._letter(factor) for factor in word.split("*"))

    def _letter(self, letter: str) -> int:
        return self._sizes.setdefault(letter, self._parts * self._random.randint(1, 3))

    def value(self, argument: Any) -> Any:
        """The value of an argument of a sample."""
        if isinstance(argument, T):
            kind, _, more = argument.kind.rstrip(".").partition(":")
            shape = [self.size(word) for word in argument.words.split()]
            value = _KINDS[kind](shape, self._generator, self.size(more) if more else 0)
            return value.requires_grad_((value.is_floating_point() or value.is_complex()) and argument.wants_gradient)
        if isinstance(argument, S):
            return self.size(argument.word)
        if isinstance(argument, (list, tuple)):
            return [self.value(item) for item in argument]
        return argument


Make = Callable[[list[int], torch.Generator, int], Tensor]


def _uniform(low: float, high: float) -> Make:
    return lambda shape, g, n: low + (high - low) * torch.rand(shape, generator=g, dtype=torch.float64)


def _definite(values: Tensor) -> Tensor:
    """Symmetric matrices whose eigenvalues are positive and apart."""
    return values @ values.mT + torch.diag(torch.arange(1.0, values.shape[-1] + 1, dtype=torch.float64))


_KINDS: dict[str, Make] = {
    "normal": lambda shape, g, n: torch.randn(shape, generator=g, dtype=torch.float64),
    "positive": _uniform(0.5, 2.0),
    "unit": _uniform(0.1, 0.9),
    "bool": lambda shape, g, n: torch.randint(0, 2, shape, generator=g).bool(),
    "sign": lambda shape, g, n: 2.0 * torch.randint(0, 2, shape, generator=g).double() - 1,
    "index": lambda shape, g, n: torch.randint(0, n, shape, generator=g),
    "integer": lambda shape, g, n: torch.randint(0, 100, shape, generator=g),
    "ordered": lambda shape, g, n: torch.randn(shape, generator=g, dtype=torch.float64).sort(-1)[0],
    "matrix": lambda shape, g, n: _definite(torch.randn(shape, generator=g, dtype=torch.float64)),
    "complex": lambda shape, g, n: torch.randn(shape, generator=g, dtype=torch.complex128),
}

X = T("a b c")
POSITIVE = T("a b c", "positive")
UNIT = T("a b c", "unit")
BOOL = T("a b c", "bool")
PAIRS = [call(X, T("a b c")), call(X, T("b 1")), call(T("c"), X), call(T("a 1 c"), T("b 1"))]
POSITIVES = [call(POSITIVE, POSITIVE), call(POSITIVE, T("c", "positive"))]
BOOLS = [call(BOOL, BOOL), call(BOOL, T("b 1", "bool"))]
SCALAR = [call(X, 0.5)]
FLOAT = torch.float64

_UNARY = """abs alias atan celu clone contiguous cos cosh detach elu erf exp exp2 expm1 gelu hardsigmoid
    hardswish hardtanh isfinite isinf isnan leaky_relu lift_fresh lift_fresh_copy log_sigmoid mish nan_to_num neg
    ones_like relu relu6 selu sigmoid sign silu sin sinh softplus softshrink square tan tanh zeros_like ceil floor round
    trunc _to_copy logical_not detach_ empty_like"""
_POSITIVE = "log log10 log1p log2 reciprocal rsqrt sqrt"
_BINARY = """max.other min.other
    add.Tensor atan2 div.Tensor eq.Tensor ge.Tensor gt.Tensor le.Tensor lt.Tensor maximum minimum mul.Tensor
    ne.Tensor rsub.Tensor sub.Tensor"""
_SCALAR = """add.Scalar clamp_max clamp_min div.Scalar eq.Scalar ge.Scalar gt.Scalar le.Scalar lt.Scalar mul.Scalar
    ne.Scalar remainder.Scalar rsub.Scalar sub.Scalar"""
_BINARY += """ divide.Tensor greater.Tensor greater_equal.Tensor less.Tensor less_equal.Tensor multiply.Tensor
    not_equal.Tensor subtract.Tensor true_divide.Tensor"""
_SCALAR += """ divide.Scalar greater.Scalar greater_equal.Scalar less.Scalar less_equal.Scalar multiply.Scalar
    not_equal.Scalar subtract.Scalar true_divide.Scalar"""
_BOOLEAN = "__and__.Tensor __or__.Tensor logical_and logical_or logical_xor bitwise_and.Tensor bitwise_or.Tensor"

IMAGE = {1: "n c 8", 2: "n c 8 6", 3: "n c 4 6 4"}
KERNEL = {1: "3", 2: "3 2", 3: "2 3 2"}


def _convolutions(rank: int, words: dict[str, str]) -> list[Call]:
    """Stride, padding, dilation and groups: none, some with a multiplier, one per channel, fixed ones."""
    spatial, kernel = words["spatial"], words["kernel"]
    plain = T(f"n i {spatial}"), T(f"o i {kernel}")
    grouped = T(f"n g*2 {spatial}"), T(f"g*3 2 {kernel}"), T("g*3")
    depthwise = T(f"n g {spatial}"), T(f"g*2 1 {kernel}"), T("g*2")
    fixed = T(f"n i*6 {spatial}"), T(f"o*6 i {kernel}"), None
    twos, ones, none = [2] * rank, [1] * rank, [0] * rank
    return [
        call(*plain, T("o"), ones, none, ones, 1),
        call(*plain, None, twos, ones, twos, 1),
        call(*grouped, twos, none, ones, S("g")),
        call(*depthwise, ones, ones, ones, S("g")),
        call(*fixed, ones, none, ones, 6),
    ]


def _transposed(rank: int, words: dict[str, str]) -> list[Call]:
    spatial, kernel = words["spatial"], words["kernel"]
    twos, ones, none = [2] * rank, [1] * rank, [0] * rank
    return [
        call(T(f"n i {spatial}"), T(f"i o {kernel}"), T("o"), twos, ones, ones, 1, ones),
        call(T(f"n i {spatial}"), T(f"i o {kernel}"), None, ones, none, none, 1, ones),
        call(T(f"n g*2 {spatial}"), T(f"g*2 3 {kernel}"), T("g*3"), twos, none, none, S("g"), ones),
    ]


SPATIAL = {
    rank: {"spatial": IMAGE[rank].split(" ", 2)[2], "kernel": KERNEL[rank], "image": IMAGE[rank]} for rank in (1, 2, 3)
}


def _padded(rank: int, words: dict[str, str]) -> list[Call]:
    image, ones = T(f"n i {words['spatial']}"), [1] * rank
    return [
        call(image, T(f"o i {words['kernel']}"), T("o"), ones, "valid", ones, 1),
        call(T(f"n g {words['spatial']}"), T(f"g*2 1 {words['kernel']}"), T("g*2"), ones, "same", ones, S("g")),
    ]


def _pools(rank: int, words: dict[str, str]) -> dict[str, list[Call]]:
    image = T(words["image"])
    unbatched = T(words["image"].split(" ", 1)[1])
    two, one, none = [2] * rank, [1] * rank, [0] * rank
    windows = [call(image, two, two, none), call(unbatched, two, one, one)]
    found = {f"max_pool{rank}d": windows, f"avg_pool{rank}d": windows}
    adaptive = [call(image, two), call(unbatched, one)]
    found |= {f"adaptive_avg_pool{rank}d": adaptive, f"adaptive_max_pool{rank}d": adaptive}
    if rank > 1:
        found[f"max_pool{rank}d_with_indices"] = windows
    resized = [call(image, None, [2.0] * rank)]
    found[f"upsample_nearest{rank}d.vec"] = resized
    return found


ELEMENT_LOSS = [call(X, X, 0), call(X, X, 1)]
BROADCAST_LOSS = [call(X, T("b c", "normal."), 0), call(T("a a"), T("a", "normal."), 0)]  # warns, and computes
CLASSES = T("n k")
TARGETS = T("n", "index:k")
CLASS_LOSS = [
    call(CLASSES, TARGETS, None, 0),
    call(CLASSES, TARGETS, T("k", "positive."), 0),
    call(T("n n"), T("n", "index:n"), T("n", "positive."), 0),
    call(CLASSES, TARGETS, None, 1),
]
UNBATCHED_CLASS = [call(T("k"), T("", "index:k"), None, 0)]
DENSE_CLASS = [call(T("n k a b"), T("n a b", "index:k"), None, 0)]


def step(gates: int, states: int = 1) -> Call:
    """One step of a recurrent net: input, states, weights, biases."""
    hidden = [T("n h") for _ in range(states)]
    weights = T(f"h*{gates} i"), T(f"h*{gates} h"), T(f"h*{gates}"), T(f"h*{gates}")
    return call(T("n i"), hidden if states > 1 else hidden[0], *weights)


def recurrent(gates: int, states: int, batch_first: bool) -> Call:
    """One layer of a recurrent net: input, states, weights, has_biases, layers, dropout, train, both ways, order."""
    hx = [T("1 b h")] * states
    weights = [T(f"{gates}*h i"), T(f"{gates}*h h"), T(f"{gates}*h"), T(f"{gates}*h")]
    x = T("b t i") if batch_first else T("t b i")
    return call(x, hx if states > 1 else hx[0], weights, True, 1, 0.0, True, False, batch_first)


# fmt: off
SAMPLES: dict[str, list[Call]] = {
    **{op: [call(X), call(T("a"))] for op in _UNARY.split()},
    **{op: [call(POSITIVE)] for op in _POSITIVE.split()},
    **dict.fromkeys(_BINARY.split(), PAIRS),
    **dict.fromkeys(_SCALAR.split(), SCALAR),
    **dict.fromkeys(_BOOLEAN.split(), BOOLS),
    "acos": [call(UNIT)],
    "asin": [call(UNIT)],
    "logit": [call(UNIT)],
    "bernoulli.p": [call(T("a b c", "normal."), 1.0)],
    "bitwise_not": [call(BOOL)],
    "clamp": [call(X, -0.5, 0.5)],
    "dropout": [call(X, 0.0, True), call(X, 0.5, False)],
    "feature_dropout": [call(X, 0.0, True)],
    "full_like": [call(X, 2.0)],
    "masked_fill.Scalar": [call(X, BOOL, 0.0), call(X, T("1 b c", "bool"), 0.0)],
    "pow.Scalar": [call(2.0, X)],
    "pow.Tensor_Scalar": [call(X, 2)],
    "threshold": [call(X, 0.1, 0.2)],
    "to.dtype": [call(X, FLOAT), call(T("a b", "integer"), FLOAT)],
    "type_as": [call(X, X)],

    "addcdiv": [call(X, T("b c"), POSITIVE)],
    "addcmul": [call(X, T("b c"), T("a 1 c"))],
    "clamp.Tensor": [call(X, T("c", "unit"), T("b c", "positive"))],
    "floor_divide": [call(T("a b c", "normal."), T("c", "positive."))],
    "remainder.Tensor": [call(X, T("c", "positive."))],
    "div.Tensor_mode": [call(X, POSITIVE, rounding_mode="floor")],
    "lerp.Scalar": [call(X, T("b c"), 0.3)],
    "lerp.Tensor": [call(X, T("b c"), T("c"))],
    "masked_fill.Tensor": [call(X, T("b 1", "bool"), T(""))],
    "pow.Tensor_Tensor": POSITIVES,
    "where.Scalar": [call(BOOL, 1.0, 0.0)],
    "where.ScalarOther": [call(T("b c", "bool"), X, 0.0)],
    "where.ScalarSelf": [call(T("b c", "bool"), 0.0, X)],
    "where.self": [call(T("b 1", "bool"), X, T("c"))],

    "sum": [call(X), call(T("a"))],
    "sum.dim_IntList": [call(X, [1]), call(X, [0, 2], True), call(X, [-1]), call(T("a b", "integer"), [0])],
    "mean.dim": [call(X, [1]), call(X, [-1, 0], True)],
    "amax": [call(X, [1]), call(X, [0], True)],
    "amin": [call(X, [1])],
    "max.dim": [call(X, 1), call(X, 0, True)],
    "min.dim": [call(X, -1)],
    "argmax": [call(X, 1), call(X)],
    "argmin": [call(X, 0, True)],
    "var.correction": [call(X, [1], correction=1), call(X, None, correction=0)],
    "std.correction": [call(X, [0, 1], correction=1, keepdim=True)],
    "var_mean.correction": [call(X, [2], correction=1)],
    "logsumexp": [call(X, [1])],
    "any.dim": [call(BOOL, 1)],
    "all.dim": [call(BOOL, 0, True)],
    "prod.dim_int": [call(X, 1)],
    "linalg_vector_norm": [call(X, 2, [1]), call(X)],
    "norm.ScalarOpt_dim": [call(X, 2, [1])],

    "softmax.int": [call(X, -1), call(X, 1)],
    "log_softmax.int": [call(X, -1)],
    "_softmax": [call(X, 1, False)],
    "_log_softmax": [call(X, 2, False)],
    "cumsum": [call(X, 1)],
    "diff": [call(X), call(X, 1, 1, T("a b c"), T("a 1 c"))],
    "flip": [call(X, [0]), call(X, [1, -1])],
    "roll": [call(X, [1], [0]), call(X, [1, -2], [1, -1]), call(X, [1])],
    "cumprod": [call(X, 1)],
    "tril": [call(T("a b b")), call(X, 1)],
    "triu": [call(T("a b b")), call(X, -1)],
    "fill.Scalar": [call(X, 2.0)],
    "fill.Tensor": [call(X, T(""))],
    "glu": [call(T("a b*2 c"), 1), call(T("a b 4"))],
    "repeat_interleave.self_int": [call(T("a 1 c"), 4, 1, output_size=4), call(X, 2, 1), call(X, 3, 0), call(X, 2)],
    "prelu": [call(T("n c 4"), T("c")), call(X, T("1")), call(T("n c"), T("c")), call(T("n c 1"), T("c"))],
    **{op: [step(gates)] for op, gates in (("gru_cell", 3), ("rnn_relu_cell", 1), ("rnn_tanh_cell", 1))},
    "lstm_cell": [step(4, states=2)],
    "pixel_shuffle": [call(T("n 12 2 3"), 2)],
    "pixel_unshuffle": [call(T("n 3 4 6"), 2)],
    "sort": [call(X), call(X, 0)],
    "sort.stable": [call(X, stable=True, dim=1)],
    "argsort": [call(T("a b c", "normal."), 1)],
    "argsort.stable": [call(T("a b c", "normal."), stable=True, dim=0)],
    "searchsorted.Tensor": [call(T("7", "ordered."), T("a b", "normal.")),
                            call(T("a b 7", "ordered."), T("a b c", "normal."))],
    "bucketize.Tensor": [call(T("a b", "normal."), T("7", "ordered."))],
    "histc": [call(T("a b", "normal."), 5, -1, 1), call(T("a b", "normal."), 5)],
    **{f"fft_{op}": [call(X), call(X, None, 1)] for op in ("fft", "ifft", "rfft", "hfft", "ihfft")},
    "fft_irfft": [call(T("a b c", "complex"), S("c"), 1)],
    **{f"fft_{op}": [call(X), call(X, None, [0, 1])] for op in ("fft2", "ifft2", "rfft2")},
    **{f"fft_{op}": [call(X, None, [1])] for op in ("fftn", "ifftn", "rfftn")},
    **{f"fft_{op}": [call(T("a b c", "complex"), None, [1, 2])] for op in ("irfft2", "irfftn")},
    **{f"fft_{op}": [call(X, [1])] for op in ("fftshift", "ifftshift")},
    "_fft_c2c": [call(T("a b c", "complex"), [1], 0, True)],
    "_fft_r2c": [call(X, [2], 0, True)],
    "_fft_c2r": [call(T("a b 4", "complex"), [2], 0, 6)],
    "view_as_real": [call(T("a b", "complex"))],
    "view_as_complex": [call(T("a b 2"))],
    "real": [call(T("a b", "complex"))],
    **{op: [call(T("a b", "normal."))] for op in ("rand_like", "randn_like", "exponential", "uniform")},
    "randint_like": [call(T("a b", "normal."), 5)],
    "randint_like.low_dtype": [call(T("a b", "normal."), 2, 5)],
    **{op: [call(T("a b 3 3", "matrix"))]
       for op in ("inverse", "linalg_cholesky", "linalg_cholesky_ex", "linalg_det", "linalg_eigh", "linalg_inv",
                  "linalg_inv_ex", "linalg_matrix_exp", "linalg_qr")},
    "linalg_solve": [call(T("a b 3 3", "matrix"), T("a b 3 k")), call(T("3 3", "matrix"), T("a 3 k"))],
    "linalg_cross": [call(T("a b 3"), T("a b 3")), call(T("a 3 b"), T("1 3 b"), dim=1)],
    "unfold": [call(T("a 6 b"), 1, 3, 2), call(T("a 6"), 1, 2, 2)],
    "topk": [call(X, 2), call(X, 1, 1)],
    "split.Tensor": [call(X, 2, 1), call(T("a 5 b"), 2, 1)],
    "split_with_sizes": [call(T("a 5 b"), [1, 4], 1)],
    "chunk": [call(X, 2, 2)],

    "linear": [call(T("b t i"), T("o i"), T("o")), call(T("b i"), T("o i")), call(T("i"), T("o i"), T("o"))],
    "addmm": [call(T("o"), T("b i"), T("i o")), call(T("o"), T("b i"), T("i o"), beta=0.5, alpha=2.0),
              call(T("b o"), T("b i"), T("i o"))],
    "mm": [call(T("m k"), T("k n"))],
    "bmm": [call(T("b m k"), T("b k n"))],
    "baddbmm": [call(T("b m n"), T("b m k"), T("b k n")), call(T("n"), T("b m k"), T("b k n"), beta=0.5, alpha=2.0),
                call(T("b 1 n"), T("b m k"), T("b k n")), call(T("1 m 1"), T("b m k"), T("b k n"), beta=0)],
    "matmul": [call(T("m k"), T("k n")), call(T("a b m k"), T("k n")), call(T("a b m k"), T("a b k n")),
               call(T("a b m k"), T("b k n")), call(T("k"), T("k n")), call(T("m k"), T("b k n")),
               call(T("a 1 m k"), T("b k n")), call(T("a m k"), T("k")), call(T("k"), T("k"))],
    "mv": [call(T("m k"), T("k"))],
    "einsum": [call("bchw,dc->bdhw", [T("b c 3 2"), T("d c")]), call("...ij,jk->...ik", [T("a b i j"), T("j k")]),
               call("ij,jk", [T("i j"), T("j k")]), call("bij,bij->b", [T("b i j"), T("b i j")]),
               call("bi,ijk,bk->bj", [T("b i"), T("i j k"), T("b k")]), call("...ij->...ji", [T("a i j")]),
               call("b i, b j -> b i j", [T("b i"), T("b j")]), call("bi,bi->bi", [T("1 i"), T("b i")]),
               call("ii->i", [T("i i")])],
    **{op: [recurrent(gates, states, True), recurrent(gates, states, False)]
       for op, gates, states in (("lstm.input", 4, 2), ("gru.input", 3, 1), ("rnn_relu.input", 1, 1),
                                 ("rnn_tanh.input", 1, 1))},
    "embedding": [call(T("v f"), T("b t", "index:v")), call(T("v f"), T("b", "index:v"), 1),
                  call(T("v f"), T("b", "index:v"), -1, True)],
    "scaled_dot_product_attention": [
        call(T("b h t e"), T("b h s e"), T("b h s d")),
        call(T("b h t e"), T("b h t e"), T("b h t e"), None, 0.0, True),
        call(T("b h t e"), T("b h s e"), T("b h s e"), T("t s"), 0.0),
        call(T("b h t e"), T("b h s e"), T("b h s e"), T("b 1 t s"), 0.0),
        call(T("b h t e"), T("b h s e"), T("b h s e"), T("1 h t s"), 0.0),
        call(T("b t e"), T("b s e"), T("b s e")),
        call(T("b h*2 t e"), T("b h s e"), T("b h s e"), None, 0.0, False, enable_gqa=True),
        call(T("b h t e"), T("b 1 s e"), T("b 1 s e"), T("b 1 t s"), 0.0),
        call(T("b 1 t e"), T("1 h s e"), T("b h s e"), None, 0.0, True),
    ],
    **{f"conv{r}d": _convolutions(r, words) for r, words in SPATIAL.items()},
    **{f"conv{r}d.padding": _padded(r, words) for r, words in SPATIAL.items()},
    **{f"conv_transpose{r}d" + (".input" if r > 1 else ""): _transposed(r, words) for r, words in SPATIAL.items()},
    "batch_norm": [
        call(T("n c 4 3"), T("c"), T("c"), T("c", "normal."), T("c", "positive."), False, 0.1, 1e-5, False),
        call(T("n c"), None, None, T("c", "normal."), T("c", "positive."), False, 0.1, 1e-5, False),
        call(T("n c 4"), T("c"), T("c"), T("c", "normal."), T("c", "positive."), True, 0.1, 1e-5, False),
        call(T("n c 4"), T("c"), T("c"), None, None, True, 0.1, 1e-5, False),
    ],
    "instance_norm": [
        call(T("n c 4 3"), T("c"), T("c"), None, None, True, 0.1, 1e-5, False),
        call(T("n c 4"), None, None, None, None, True, 0.1, 1e-5, False),
        call(T("n c 4"), T("c"), T("c"), T("c", "normal."), T("c", "positive."), False, 0.1, 1e-5, False),
    ],
    "group_norm": [call(T("n g*4 3 2"), S("g"), T("g*4"), T("g*4")), call(T("n c*2 3"), 2)],
    "layer_norm": [call(T("a b c"), [S("c")], T("c"), T("c")), call(T("a b c"), [S("b"), S("c")])],
    "rms_norm": [call(T("a b c"), [S("c")], T("c"))],
    **{op: calls for r, words in SPATIAL.items() for op, calls in _pools(r, words).items()},
    "_adaptive_avg_pool2d": [call(T("n c 8 6"), [2, 2])],
    "upsample_linear1d.vec": [call(T("n c 5"), [7], False, None)],
    "upsample_bilinear2d.vec": [call(T("n c 5 4"), None, True, [2.0, 2.0])],
    **{f"_upsample_{kind}2d_aa.vec": [call(T("n c 5 4"), [7, 8], False, None)] for kind in ("bicubic", "bilinear")},
    "polar": [call(POSITIVE, X), call(POSITIVE, T("c"))],
    "upsample_bicubic2d.vec": [call(T("n c 5 4"), [7, 8], False, None)],

    **dict.fromkeys(("mse_loss", "l1_loss"), ELEMENT_LOSS + BROADCAST_LOSS),
    **dict.fromkeys(("smooth_l1_loss", "huber_loss"), ELEMENT_LOSS),
    "kl_div": [call(X, POSITIVE, 0), call(X, POSITIVE, 0, log_target=True), call(X, POSITIVE, 2)],
    "binary_cross_entropy": [call(UNIT, UNIT, None, 0), call(UNIT, UNIT, T("c", "unit."), 0),
                             call(UNIT, UNIT, None, 1)],
    "binary_cross_entropy_with_logits": [call(X, UNIT, None, T("c", "unit."), 0),
                                         call(X, UNIT, T("b c", "unit."), None, 0)],
    "hinge_embedding_loss": [call(X, T("a b c", "sign"), 1.0, 0)],
    "soft_margin_loss": [call(X, T("a b c", "sign."), 0)],
    "poisson_nll_loss": [call(X, POSITIVE, True, False, 1e-8, 0)],
    "margin_ranking_loss": [call(T("a"), T("a"), T("a", "sign"), 0.1, 0)],
    "cross_entropy_loss": CLASS_LOSS + UNBATCHED_CLASS + DENSE_CLASS + [call(CLASSES, T("n k", "unit"), None, 0)],
    "nll_loss_nd": CLASS_LOSS + DENSE_CLASS,
    "nll_loss": CLASS_LOSS,
    "nll_loss2d": DENSE_CLASS,
    "multi_margin_loss": [call(CLASSES, TARGETS, 1, 1.0, None, 0), call(CLASSES, TARGETS, 1, 1.0, T("k", "unit."), 0)],
    "multilabel_margin_loss": [call(CLASSES, T("n k", "index:k"), 0)],
    "cosine_embedding_loss": [call(T("n f"), T("n f"), T("n", "sign"), 0.1, 0)],
    "cosine_similarity": [call(X, X), call(X, T("1 b c"), -1), call(X, T("b c"), 2), call(T("a b"), T("a b"), 1, 1e-6)],
    "triplet_margin_loss": [call(T("n f"), T("n f"), T("n f"), 1.0, 2.0, 1e-6, False, 0)],

    "view": [call(X, [S("a*b"), S("c")]), call(T("a*b c"), [S("a"), S("b"), S("c")]), call(X, [S("a"), -1]),
             call(T("a b 1"), [1, S("a"), S("b")]), call(T("6 a"), [2, 3, S("a")]), call(T("2 3 a"), [3, 2, S("a")])],
    "reshape": [call(X, [S("a"), S("b*c")]), call(X, [S("a*b*c")])],
    "_reshape_copy": [call(X, [S("a"), S("b*c")])],
    "_unsafe_view": [call(X, [S("a*b"), S("c")])],
    "unsqueeze": [call(X, 0), call(X, -1)],
    "squeeze.dim": [call(T("a 1 b"), 1), call(T("a b"), 0)],
    "squeeze.dims": [call(T("a 1 b 1"), [1, 3]), call(T("a 1 b"), [0, 1])],
    "flatten.using_ints": [call(X, 1), call(X, 0, 1), call(X)],
    "unflatten.int": [call(T("a b*c d"), 1, [S("b"), S("c")]), call(T("a b*c"), -1, [S("b"), -1])],
    "permute": [call(X, [2, 0, 1]), call(X, [0, -1, 1])],
    "transpose.int": [call(X, 0, -1), call(X, 1, 2)],
    "numpy_T": [call(T("a b"))],
    "t": [call(T("a b")), call(T("a"))],
    "cat": [
        *(call([X, T("a d c")], 1), call([X, X], -1)),
        *(call([X, T("a 0 c"), X, T("a d c")], 1), call([X, T("a 0 c")], 1)),
    ],
    "stack": [call([X, X], 1), call([X, T("a b c")], -1)],
    "unbind.int": [call(T("a 3 b"), 1), call(T("2 a b"))],
    "index.Tensor": [
        call(X, [None, T("5", "index:b"), T("5", "index:c")]),
        call(T("v f"), [T("b t", "index:v")]),
        call(X, [T("b 1", "index:a"), T("c", "index:b")]),
        call(X, [None, None, T("b t", "index:c")]),
        call(X, [T("t", "index:a"), None, T("t", "index:c")]),
        call(X, [T("a", "bool")]),
        call(T("a", "index:a"), [T("a", "index:a")]),
    ],
    "index_put": [
        call(X, [T("a b", "bool")], T("")),
        call(X, [None, T("b", "bool")], T("1")),
        call(X, [T("a", "bool")], T("b c")),
        call(X, [T("1", "index:a")], T("b c")),
        call(X, [None, T("5", "index:b")], T("a 5 c"), True),
        call(X, [None, T("3", "index:b"), T("3", "index:c")], T("3"), True),
        call(X, [T("2 1", "index:a"), T("3", "index:b")], T("2 3 1"), True),
        call(X, [T("3", "index:a"), None, T("3", "index:c")], T("3 b"), True),
    ],
    "scatter.src": [call(T("a 7 c"), 1, T("a 1 c", "index:b"), T("a 1 c"))],
    "scatter.value": [call(X, 2, T("a b t", "index:c"), 0.5), call(X, 0, T("t 1 c", "index:a"), 0.5)],
    "scatter.reduce": [call(T("a b c", "normal."), 1, T("a t c", "index:b"), T("a t c", "normal."), reduce="add")],
    "scatter.value_reduce": [call(T("a b c", "normal."), 1, T("a t c", "index:b"), 2.0, reduce="multiply")],
    "scatter_add": [call(X, 1, T("a t c", "index:b"), T("a t c")),
                    call(X, 1, T("a t c", "index:b"), T("a t c*2", "normal."))],
    "scatter_reduce.two": [call(X, 1, T("a t c", "index:b"), T("a t c"), "amax")],
    "index_add": [call(X, 1, T("t", "index:b"), T("a t c")), call(X, 0, T("t", "index:a"), T("t b c"), alpha=2.0)],
    "index_copy": [call(X, 1, T("1", "index:b"), T("a 1 c"))],
    "index_fill.int_Scalar": [call(X, 1, T("t", "index:b"), 0.5)],
    "im2col": [call(T("n c 8 6"), [3, 2], [1, 1], [1, 0], [2, 1]), call(T("c 8 6"), [3, 2], [1, 1], [0, 0], [1, 1])],
    "col2im": [call(T("n c*6 20"), [6, 6], [3, 2], [1, 1], [0, 0], [1, 1])],
    "index_select": [call(X, 1, T("t", "index:b")), call(X, -1, T("", "index:c"))],
    "gather": [call(X, 1, T("a t c", "index:b")), call(X, 2, T("a 1 t", "index:c"))],
    "slice_scatter": [
        call(X, T("a 1 c"), 1, 1, 2),
        call(X, X, 0, 0, 2**63 - 1),
        call(X, X, 0),
        call(X, X, 0, 0, S("a")),
    ],
    "select_scatter": [call(X, T("a c"), 1, 0), call(X, T("b c"), 0, -1)],
    "repeat": [call(X, [1, 2, 1]), call(T("a b"), [2, 1, 1]), call(T("a b"), [S("d"), S("e"), 1])],
    "select.int": [call(X, 1, 0), call(X, 0, -1)],
    "slice.Tensor": [call(X, 1, 1), call(X, 0, 0, 2**63 - 1), call(X, 2, 0, 1), call(X, 0, 0, 2**63 - 1, 2)],
    "narrow": [call(X, 1, 0, 1), call(X, 0, 0, S("a"))],
    "expand": [call(T("a 1 c"), [S("a"), S("b"), S("c")]), call(T("b 1"), [S("a"), -1, S("c")])],
    "constant_pad_nd": [call(X, [1, 2], 0.5), call(X, [0, 0, 1, 0]), call(X, [0, 0, 0, 0, 2, 0])],
    "pad": [call(T("n c 6"), [2, 1], "reflect"), call(X, [1, 2])],
    "full": [call([S("a"), S("b")], 2.0, dtype=FLOAT)],
    **{op: [call([S("a"), S("b")], dtype=FLOAT)] for op in ("zeros", "rand", "randn")},
    "randint": [call(5, [S("a"), S("b")])],
    "randint.low": [call(2, 5, [S("a"), S("b")])],
    "ones": [call([S("a"), S("b")], dtype=FLOAT)],
    "empty.memory_format": [call([S("a"), S("b")], dtype=FLOAT)],
    "new_full": [call(X, [S("a"), S("d")], 2.0)],
    "new_zeros": [call(X, [S("a"), S("d")])],
    "new_ones": [call(X, [S("a"), S("d")])],
    "new_empty": [call(X, [S("a"), S("d")])],
}
# fmt: on
