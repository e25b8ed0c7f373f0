"""The residual stream, and three lazy values by which layers stay plain while their kernels are fused.

A layer's sublayer ends in a sum over the tensor group and the next one begins with a norm. Neither is computed where
the layer names it: `Partial` is a row-parallel linear that is not multiplied yet, `Normed` a norm that is not
read yet, `PostNormed` a sublayer's own norm that is not added yet. Whoever reads them knows most and so chooses the
kernel: one for all-reduce, add and norm; one for GEMM and all-reduce; one for a sublayer's norm, the addition and the
next norm; a norm that makes e4m3.
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from ....comm.base import Comm, FusedComm, Work, all_reduce_add_norm
from ....kernels.norm.norm import norm_add_norm, sum_add_rms_norm
from ....kernels.quantized import e4m3_rows, packed_gemm
from ....kernels.quantized.e4m3_rows import E4m3Rows


class Norm(Protocol):
    """A norm of rows [T, H], as norm.py has them."""

    eps: float

    @property
    def rms_weight(self) -> Tensor | None:
        """[H] of an RMS norm: what kernels take that fuse it with its neighbours. None: it is another norm."""

    def norm(self, x: Tensor) -> Tensor:
        """A new tensor."""

    def add_norm(self, x: Tensor, residual: Tensor, other: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The norm of residual + x, or of residual + (x + other), and that sum. x and residual may be overwritten."""


class Summand(Protocol):
    """The producer of this rank's part of a sum over the tensor group: a row-parallel linear, or experts."""

    group: Comm

    @property
    def matrix(self) -> Tensor | None: ...

    @property
    def added_bias(self) -> Tensor | None: ...

    def multiply(self, x: Any) -> Tensor: ...

    def terms_of(self, x: Any) -> Tensor | None:
        """[T, n, H], whose sum over n, plus `added_bias`, `multiply` makes, where kernels have such terms; None: they
        have not."""


class Partial:
    """The output of row-parallel linears or experts: this rank's part of a sum over the tensor group,
    [T, H]. An input has T rows, its len()."""

    def __init__(self, *terms: tuple[Summand, Any], scale: float = 1.0):
        self.terms = terms
        self.scale = scale
        self._local: Tensor | None = None

    @property
    def group(self) -> Comm:
        return self.terms[0][0].group

    def __len__(self) -> int:
        return len(self.terms[0][1])

    def __add__(self, other: Partial) -> Partial:
        """Both, in one sum."""
        assert self._local is None and other._local is None and self.scale == other.scale
        return Partial(*self.terms, *other.terms, scale=self.scale)

    def __mul__(self, scale: float) -> Partial:
        if scale == 1.0:
            return self
        assert self._local is None
        return Partial(*self.terms, scale=self.scale * scale)

    def local(self) -> Tensor:
        """This rank's part. It may be overwritten by the consumer, of which there is one."""
        if self._local is None:
            # Routed experts come first, and may wait for the host: a GPU computes shared ones meanwhile.
            (linear, x), *others = reversed(self.terms)
            self._local = linear.multiply(x)
            for linear, x in others:
                self._local += linear.multiply(x)
            if self.scale != 1.0:
                self._local *= self.scale
        return self._local

    def sum(self) -> Tensor:
        """[T, H], equal on all ranks."""
        return self.group.all_reduce(self.local())

    def begin(self, residual: Tensor, norm: Norm) -> Work | None:
        """Begin what `add_norm` makes, overlapped with what the caller computes next; None: it has not begun."""
        x = self.local()
        return self.group.all_reduce_async(x, lambda rest: norm.add_norm(x, residual, rest))

    def add_norm(self, residual: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
        """The norm of the sum and residual [T, H], and the new residual. The old one may be overwritten."""
        weight, eps = norm.rms_weight, norm.eps
        if weight is None:
            return norm.add_norm(self.sum(), residual)
        if self.group.size == 1 and (found := self._terms_apart()) is not None:
            terms, other = found
            return sum_add_rms_norm(terms, residual, weight, eps, other)
        alone = self._local is None and len(self.terms) == 1 and self.scale == 1.0
        if alone and isinstance(self.group, FusedComm):
            ((linear, x),) = self.terms
            if (matrix := linear.matrix) is not None:
                bias = linear.added_bias
                done = self.group.gemm_all_reduce_add_norm(x, matrix, residual, weight, eps, bias)
                if done is not None:
                    return done
        return all_reduce_add_norm(self.group, self.local(), residual, weight, eps)

    def add_norm_e4m3(self, residual: Tensor, weight: Tensor, eps: float) -> tuple[E4m3Rows, Tensor]:
        """`add_norm` with tp_size 1, on Hopper: an RMS norm, in e4m3."""
        terms, other = self._terms_apart() or (self.local().contiguous().unsqueeze(1), None)
        return e4m3_rows.sum_add_rms_norm(terms, residual, weight, eps, other)

    def _terms_apart(self) -> tuple[Tensor, Tensor | None] | None:
        """Terms that the norm of tp_size 1 adds up itself: a token's experts [T, n, H], and the sum of all else,
        [T, H], or [H] where that is a bias."""
        (first, x), *others = self.terms
        if self._local is not None or self.scale != 1.0 or (terms := first.terms_of(x)) is None:
            return None
        bias, other = first.added_bias, Partial(*others).local() if others else None
        if other is None or bias is None:
            return terms, bias if other is None else other
        return terms, other.add_(bias)


class PostNormed:
    """The norm of a sublayer's output [T, H], before it is computed: PostNorm(x). x is equal on all ranks and may be
    overwritten."""

    def __init__(self, norm: Norm, x: Tensor):
        self.norm = norm
        self.x = x

    def tensor(self) -> Tensor:
        return self.norm.norm(self.x)

    def add_norm(self, residual: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
        """The norm of residual [T, H] + this, and the new residual. The old one may be overwritten."""
        first, second = self.norm.rms_weight, norm.rms_weight
        if first is None or second is None:
            return norm.add_norm(self.tensor(), residual)
        return norm_add_norm(self.x, first, self.norm.eps, residual, second, norm.eps)


class ResidualStream:
    """One microbatch's residual stream on its way through a stage's layers."""

    def __init__(self, value: Tensor):
        """value: [T, H], equal on all ranks; it is overwritten."""
        self.value = value
        self.pending: Partial | PostNormed | Tensor | None = None  # what has been added, but not yet to `value`
        self._work: Work | None = None

    def __len__(self) -> int:
        return self.value.shape[0]

    def add(self, x: Partial | PostNormed | Tensor) -> None:
        """Add a sublayer's output [T, H]. A tensor is equal on all ranks and may be overwritten."""
        self.read()
        self.pending = x

    def scale(self, factor: Tensor) -> None:
        """Multiply all that was added by a number, [1]."""
        self.read().mul_(factor)

    def begin(self) -> None:
        """Begin the all-reduce of what was added last, overlapped with what is computed next: another microbatch."""
        if isinstance(self.pending, Partial) and len(self):
            x = self.pending.local()
            self._work = self.pending.group.all_reduce_async(x)

    def read(self) -> Tensor:
        """All that was added, [T, H], equal on all ranks."""
        x, self.pending = self.pending, None
        work, self._work = self._work, None
        if x is not None and len(self):
            if work:
                x = work.wait()
            elif isinstance(x, Partial):
                x = x.sum()
            elif isinstance(x, PostNormed):
                x = x.tensor()
            self.value = self._added(x)
        return self.value

    def _added(self, x: Tensor) -> Tensor:
        """The new value with a sublayer's output [T, H]."""
        return self.value.add_(x)


class Normed:
    """The norm of a residual stream, before it is computed: AddRMSNorm(stream) or AddLayerNorm(stream).

    norm: computes it where no kernel fuses it.
    """

    def __init__(self, norm: Norm, stream: ResidualStream):
        self.norm = norm
        self.stream = stream
        self._work: Work | None = None
        self._value: Tensor | None = None
        self._rows: E4m3Rows | None = None

    def begin(self) -> None:
        """Begin the all-reduce and the norm overlapped with what is computed next: another microbatch."""
        stream = self.stream
        if isinstance(stream.pending, Partial) and len(stream):
            self._work = stream.pending.begin(stream.value, self.norm)

    def tensor(self) -> Tensor:
        """[T, H], equal on all ranks."""
        if self._value is None:
            self._value = self._compute()
        return self._value

    def keep(self, rows: Tensor) -> None:
        """From here on the stream has only these rows [S] int64, and so has this norm for who reads it again."""
        if self._value is not None:
            self._value = self._value[rows]
        self._rows = None
        self.stream.value = self.stream.read()[rows]

    def packed_linear(self, packed: Any, gate: str = "", bias: Tensor | None = None) -> Tensor | None:
        """The linear of a quantised weight by two kernels, where the one for FP8 takes what that of the norm makes."""
        if packed_gemm.takes_e4m3(self.stream.value, packed, bias) and (rows := self._e4m3()) is not None:
            return packed_gemm.linear(rows, packed, gate, bias)
        return None

    def _e4m3(self) -> E4m3Rows | None:
        """The norm in e4m3 alone, where, with tp_size 1, it adds up what is pending, or has already made it."""
        stream, x, by = self.stream, self.stream.pending, self.norm.rms_weight
        if self._rows is not None or self._value is not None or self._work is not None or by is None:
            return self._rows
        if isinstance(x, Partial) and x.group.size == 1:
            stream.pending = None
            self._rows, stream.value = x.add_norm_e4m3(stream.value, by, self.norm.eps)
        return self._rows

    def _compute(self) -> Tensor:
        stream = self.stream
        x, stream.pending = stream.pending, None
        if x is None:
            return self.norm.norm(stream.value)
        if self._work is not None:
            normed, stream.value = self._work.wait()
        elif isinstance(x, (Partial, PostNormed)):
            normed, stream.value = x.add_norm(stream.value, self.norm)
        else:
            normed, stream.value = self.norm.add_norm(x, stream.value)
        return normed


class Unnormed(Normed):
    """The residual stream itself, where sublayers read it without a norm: models whose norms come after sublayers."""

    def __init__(self, stream: ResidualStream):
        self.stream = stream

    def begin(self) -> None:
        """Nothing is pending but a tensor."""

    def tensor(self) -> Tensor:
        """[T, H], equal on all ranks. Valid until the stream is added to."""
        return self.stream.read()

    def keep(self, rows: Tensor) -> None:
        self.stream.value = self.stream.read()[rows]

    def packed_linear(self, packed: Any, gate: str = "", bias: Tensor | None = None) -> Tensor | None:
        return None
