"""The tensors of run() beside the cache: checked once for each form, then known again by object, form and address."""

from __future__ import annotations

import itertools
import weakref
from typing import Any, NamedTuple

import torch

from podgraph.dispatch.tensors import ALIGN_BYTES, DTYPES, MAX_OFFSET, check_tensor
from podgraph.errors import BatchError
from podgraph.shapes import AttentionSpec


class Call:
    """The other tensors of one call, which it does not keep alive.

    Attributes:
        key: addresses of q, out and lse (0: none), strides of q in elements.
        rows: rows that all of them have.
    """

    __slots__ = ("_form", "_lse", "_lse_form", "_out", "_q", "key", "rows")

    def __init__(
        self,
        q: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor | None,
        form: Form,
        key: tuple[int, ...],
        rows: int,
    ) -> None:
        self._q, self._out = weakref.ref(q), weakref.ref(out)
        self._lse = None if lse is None else weakref.ref(lse)
        self._form, self._lse_form = form, None if lse is None else _form_of(lse)
        self.key, self.rows = key, rows

    def same(self, q: torch.Tensor, out: torch.Tensor | None, lse: torch.Tensor | None, rows: int) -> bool:
        """Whether the same tensors come again, unchanged, with room for so many rows.

        The same objects are not enough: a tensor can be given other memory, another shape or another dtype in place.
        """
        if self._q() is not q or self._out() is not out or q is None or out is None or self.rows < rows:
            return False
        if lse is None or self._lse is None:
            if lse is not None or self._lse is not None:
                return False
        elif self._lse() is not lse or self.key[2] != lse.data_ptr() or self._lse_form != _form_of(lse):
            return False
        form, key = self._form, self.key
        return (
            key[0] == q.data_ptr()
            and key[1] == out.data_ptr()
            and form.q_shape == q.shape
            and form.q_strides == q.stride()
            and form.out_shape == out.shape
            and out.is_contiguous()
            and q.dtype is form.dtype is out.dtype
        )


class Form(NamedTuple):
    """What the checks of q and out look at beside their addresses, and what follows from it.

    Attributes:
        q_bytes, out_bytes: from the first element to the end of the last one.
    """

    q_shape: torch.Size
    q_strides: tuple[int, ...]
    out_shape: torch.Size
    dtype: torch.dtype
    q_bytes: int
    out_bytes: int


def _form_of(lse: torch.Tensor) -> tuple[Any, ...]:
    return lse.shape, lse.stride(), lse.dtype


def output_of(q: torch.Tensor) -> torch.Tensor:
    """An output for q, contiguous; q may be a slice of a wider tensor, or none that fits, which `CallChecker` finds.

    Raises:
        BatchError: q is no tensor at all, or a sparse one.
    """
    try:
        return torch.empty_like(q, memory_format=torch.contiguous_format)
    except (TypeError, RuntimeError) as e:
        raise BatchError(f"q: got {getattr(q, 'layout', type(q).__name__)}, allowed: a dense tensor") from e


class CallChecker:
    """Checks the tensors of run() for one specification on one device.

    Most calls come with tensors of the form that the last one had, elsewhere in memory: then only the addresses are
    looked at.
    """

    def __init__(self, spec: AttentionSpec, device: torch.device) -> None:
        self._device, self._dtype = device, DTYPES[spec.dtype]
        self._heads = spec.num_qo_heads, spec.head_dim
        self._last: Form | None = None

    def check(self, rows: int, q: torch.Tensor, out: torch.Tensor, lse: torch.Tensor | None) -> Call:
        """The call, where everything is as it must be.

        Args:
            rows: query rows of the planned batch.

        Raises:
            BatchError: naming the tensor, what was got and what is allowed.
        """
        form = self._last
        try:
            if (
                form is None
                or q.shape != form.q_shape
                or q.stride() != form.q_strides
                or out.shape != form.out_shape
                or not out.is_contiguous()
                or not q.dtype is form.dtype is out.dtype
                or not q.device == self._device == out.device
            ):
                form = self._form(q, out)
        except (AttributeError, RuntimeError):  # no tensors, or none with strides
            form = self._form(q, out)
        room = min(form.q_shape[0], form.out_shape[0])
        at, out_at = q.data_ptr(), out.data_ptr()
        if (
            room < rows
            or (at | out_at) % ALIGN_BYTES
            or lse is not None
            or (at < out_at + form.out_bytes and out_at < at + form.q_bytes)
        ):
            room = min(room, self._check_addresses(rows, q, out, lse, form))
        self._last = form
        lse_at = 0 if lse is None else lse.data_ptr()
        return Call(q, out, lse, form, (at, out_at, lse_at, form.q_strides[0], form.q_strides[1]), room)

    def _form(self, q: torch.Tensor, out: torch.Tensor) -> Form:
        """Checks everything of q and out but their addresses and whether they have enough rows."""
        shape = (None, *self._heads)
        for name, tensor in (("q", q), ("out", out)):
            check_tensor(name, tensor, self._device, self._dtype, shape)
        if q.shape[0] * q.stride(0) >= MAX_OFFSET:
            raise BatchError(
                f"q: got {q.shape[0]} rows {q.stride(0)} elements apart, allowed: below 2^31 elements in all"
            )
        if out.numel() >= MAX_OFFSET:
            raise BatchError(f"out: got {out.numel()} elements, allowed: below 2^31")
        if not out.is_contiguous():
            raise BatchError(f"out: got {tuple(out.shape)} strides {out.stride()}, allowed: contiguous")
        q_bytes, out_bytes = (_extent(tensor) for tensor in (q, out))
        return Form(q.shape, q.stride(), out.shape, self._dtype, q_bytes, out_bytes)

    def _check_addresses(
        self, rows: int, q: torch.Tensor, out: torch.Tensor, lse: torch.Tensor | None, form: Form
    ) -> int:
        """The rest, one by one, with words for what is wrong; returns the rows of lse."""
        for name, tensor in (("q", q), ("out", out)):
            if tensor.shape[0] < rows:
                raise BatchError(f"{name}: got {tensor.shape[0]} rows, allowed: at least the planned batch's {rows}")
            if tensor.data_ptr() % ALIGN_BYTES:
                raise BatchError(f"{name}: got address {tensor.data_ptr():#x}, allowed: on {ALIGN_BYTES} bytes")
        places = [("q", q.data_ptr(), form.q_bytes), ("out", out.data_ptr(), form.out_bytes)]
        if lse is not None:
            _check_lse(rows, lse, self._device, self._heads[0])
            places.append(("lse", lse.data_ptr(), _extent(lse)))
        for (name, at, size), (other, other_at, other_size) in itertools.combinations(places, 2):
            if at < other_at + other_size and other_at < at + size:
                raise BatchError(
                    f"{other}: got memory that {name} lies in too, allowed: memory of its own (what is written there "
                    "would be read before)"
                )
        return form.q_shape[0] if lse is None else lse.shape[0]


def _check_lse(rows: int, lse: torch.Tensor, device: torch.device, heads: int) -> None:
    if not isinstance(lse, torch.Tensor):
        raise BatchError(f"lse: got {type(lse).__name__}, allowed: a tensor or None")
    if lse.device != device or lse.dtype != torch.float32 or lse.dim() != 2 or not _is_contiguous(lse):
        raise BatchError(
            f"lse: got {lse.dtype} {tuple(lse.shape)} on {lse.device}, allowed: contiguous float32 on {device}"
        )
    if lse.shape[0] < rows or lse.shape[1] != heads:
        raise BatchError(f"lse: got shape {tuple(lse.shape)}, allowed: at least ({rows}, {heads})")
    if lse.data_ptr() % lse.element_size():
        raise BatchError(f"lse: got address {lse.data_ptr():#x}, allowed: on {lse.element_size()} bytes")


def _is_contiguous(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.is_contiguous()


def _extent(tensor: torch.Tensor) -> int:
    """Bytes from the first element to the end of the last one."""
    if tensor.numel() == 0:
        return 0
    steps = ((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (sum(steps) + 1) * tensor.element_size()
