"""The identities of a convolution, forward and backward.

A convolution links a small side y (N, C, P...) and a big side x (N, I, Q...) by a weight w (C, I /
groups, K...), where q = stride p + dilation k - padding in every dimension; a transposed one goes
from the small side to the big one, as the gradient of x does. With signs r that are a product of
signs along each dimension, sums over positions become a product with the weight::

    sum_p r_p y[n, c, p] = sum_ik w[c, i, k] (sum_p r_p x[n, i, q(p, k)])
    sum_q r_q x[n, i, q] = sum_ck w[c, i, k] (sum_p r_q(p, k) y[n, c, p])

and with signs u over the channels of x and t over the kernel::

    sum_ik u_i t_k dw[c, i, k] = sum_np y[n, c, p] (sum_ik u_i t_k x[n, i, q(p, k)])

The inner sums along one dimension are products with a matrix of K columns, so that every tensor is
read about once.
"""

from __future__ import annotations

import copy
import itertools
from dataclasses import replace
from functools import partial
from math import prod
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from outlast.guard.product import Row, is_doubtful, rounding_of, second_look
from outlast.guard.residual import ResidualTest, accumulating, name_of, residual_test
from outlast.guard.threshold import product_bound, unit_roundoff

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outlast.guard.watch import Watch


class Convolution:
    """The geometry of a convolution; see the module.

    Args:
        weight: (small channels, big channels / groups, kernel...).
        stride: One for each dimension, as the next four.
        padding: See `stride`.
        dilation: See `stride`.
        transposed: Whether it goes from the small side to the big one.
        output_padding: See `stride`.
        groups: Of channels.
    """

    def __init__(  # noqa: PLR0917 - the arguments of the operation
        self,
        weight: Tensor,
        stride: Sequence[int],
        padding: Sequence[int],
        dilation: Sequence[int],
        transposed: bool,
        output_padding: Sequence[int],
        groups: int,
    ) -> None:
        self.kernel = tuple(weight.shape[2:])
        count = len(self.kernel)
        self.stride, self.padding, self.dilation = (
            tuple(given) * (count if len(given) == 1 else 1)
            for given in (stride, padding, dilation)
        )
        self.transposed, self.groups = transposed, groups
        self._sums: torch.dtype | None = None
        self._multiplied = prod(weight.shape[1:])

    def in_double(self) -> Convolution:
        """The same with sums in fp64 against the bounds of sums in fp32, for a second look."""
        other = copy.copy(self)
        other._sums = torch.float64
        return other

    def flops(self, small: Tensor) -> float:
        """FLOPs of one product of this convolution; small: (batch, channels, positions...)."""
        return 2.0 * small.numel() * self._multiplied

    def to_small(
        self, big: Tensor, weight: Tensor, bias: Tensor | None, found: Tensor, watch: Watch
    ) -> ResidualTest:
        """Check `found`, the small side, by rows (batch, channels)."""
        signs = self._signs(watch, found.shape[2:], found)
        windows = []
        for axis, own in enumerate(signs):
            places, inside = self._places(axis, len(own), big.shape[2 + axis], own.device)
            window = big.new_zeros((big.shape[2 + axis], self.kernel[axis]), dtype=own.dtype)
            taps = torch.arange(self.kernel[axis], device=own.device).expand(places.shape)
            # For one tap no two positions of the small side are at one place.
            window[places[inside], taps[inside]] = own[:, None].expand(places.shape)[inside]
            windows.append(window)
        wide = self._grouped(weight.double(), 0).flatten(2)
        summed = self._grouped(_summed_over(big, windows)).flatten(2)
        squares = self._grouped(weight.double().square().flatten(2).sum(2), 0)
        masses = self._grouped(_squares(big))
        expected = torch.einsum("ngt,gct->ngc", summed, wide).flatten(1)
        by_square = torch.einsum("ngi,gci->ngc", masses, squares).flatten(1)
        judged = self._judge(found, signs, expected, by_square, bias, wide.shape[-1])
        if self._sums is None or not is_doubtful(judged):
            return judged
        read = self._windows(big, found.shape[2:], with_ones=False)
        # (groups, samples, positions, terms)
        read = read.reshape(self.groups, len(found), prod(found.shape[2:]), -1)

        def row(number: int) -> Row:
            sample, channel = divmod(number, found.shape[1])
            right = read[channel * self.groups // found.shape[1], sample].t()
            added = None if bias is None else bias[channel].expand(right.shape[1])
            return Row(found[sample, channel].flatten(), weight[channel].flatten(), right, added)

        return second_look(judged, row, _outer(signs))

    def to_big(
        self, small: Tensor, weight: Tensor, bias: Tensor | None, found: Tensor, watch: Watch
    ) -> ResidualTest:
        """Check `found`, the big side, by rows (batch, channels)."""
        signs = self._signs(watch, found.shape[2:], found)
        windows = []
        for axis, own in enumerate(signs):
            places, inside = self._places(axis, small.shape[2 + axis], len(own), own.device)
            windows.append(torch.where(inside, own[places.clamp(0, len(own) - 1)], 0.0))
        # (groups, small channels, big channels, taps)
        wide = self._grouped(weight.double(), 0).flatten(3)
        summed = self._grouped(_summed_over(small, windows)).flatten(3)
        masses = self._grouped(_squares(small))
        expected = torch.einsum("ngck,gcik->ngi", summed, wide).flatten(1)
        by_square = torch.einsum("ngc,gci->ngi", masses, wide.square().sum(3)).flatten(1)
        terms = wide.shape[1] * wide.shape[3]
        judged = self._judge(found, signs, expected, by_square, bias, terms)
        if self._sums is None or not is_doubtful(judged):
            return judged
        # (samples, groups, small channels, small positions...)
        grouped = self._grouped(small)
        own_channels = weight.shape[1]

        def row(number: int) -> Row:
            sample, channel = divmod(number, found.shape[1])
            group, own = divmod(channel, own_channels)
            left = self._grouped(weight, 0)[group, :, own].flatten()
            right = self._reached(grouped[sample, group], found.shape[2:])
            added = None if bias is None else bias[channel].expand(right.shape[1])
            return Row(found[sample, channel].flatten(), left, right, added)

        return second_look(judged, row, _outer(signs))

    def _reached(self, small: Tensor, lengths: Sequence[int]) -> Tensor:
        """Operands of the product that gives each position: (channels taps, big positions).

        Args:
            small: (channels, positions...) of the small side.
            lengths: Of the big side.
        """
        count = len(lengths)
        for axis, length in enumerate(lengths):
            places, inside = self._places(axis, small.shape[1], length, small.device)
            # (small positions, taps, big positions)
            hits = places[..., None] == torch.arange(length, device=small.device)
            hits &= inside[..., None]
            small = torch.tensordot(small, hits.to(small.dtype), ([1], [0]))
        taps, places_of = range(1, 2 * count, 2), range(2, 2 * count + 1, 2)
        return small.permute(0, *taps, *places_of).flatten(count + 1).flatten(0, count)

    def to_weight(
        self, small: Tensor, big: Tensor, found: Tensor, bias: Tensor | None, watch: Watch
    ) -> ResidualTest:
        """Check `found`, the weight's gradient, with the bias's, by rows of small channels."""
        dtype = accumulating(found)
        channels = found.shape[1]
        lengths = (channels, *self.kernel)
        u, *taps = self._signs(watch, lengths, found, side="input")
        grouped = self._grouped(big.to(dtype))
        kernel = u.new_ones(())
        for along_one in taps:
            kernel = kernel[..., None] * along_one
        summed = torch.einsum("i,ngi...->ng...", u, grouped)
        squares = grouped.square().sum(2)
        convolve = partial(
            (functional.conv1d, functional.conv2d, functional.conv3d)[len(taps) - 1],
            stride=self.stride,
            padding=self.padding,
            dilation=self.dilation,
            groups=self.groups,
        )
        shape = (self.groups, 1, *self.kernel)
        # Output padding of a transposed convolution has places for more than the small side.
        along, mass = (
            _cropped(convolve(sums, taps_of.expand(shape)), small.shape[2:]).flatten(2)
            for sums, taps_of in ((summed, kernel), (squares, torch.ones_like(kernel)))
        )
        if bias is not None:
            along, mass = along + 1.0, mass + 1.0
        mass = mass + along.square()
        dy = self._grouped(small.to(dtype)).flatten(3)
        # Like terms are rounded alike where a product adds them one after the other.
        expected = (dy * along[:, :, None]).sum(-1).double().sum(0).flatten()
        by_square = (dy.square() @ mass[..., None])[..., 0].double().sum(0).flatten()
        rows = found.to(dtype).flatten(1)
        signs = (u[:, None] * kernel.flatten()).flatten()
        value = (rows @ signs).double()
        powers = rows.square().sum(1).double()
        if bias is not None:
            value, powers = value + bias.double(), powers + bias.double().square()
        bound = product_bound(
            rounding_of(found, dtype), small.numel() // small.shape[1], rows.shape[1], alike=True
        )
        sums = unit_roundoff(name_of(dtype)) ** 2 / 3.0 * (32 + channels + prod(self.kernel))
        # Terms of one sample may all have one sign, and its neighbour's the other.
        alike = replace(bound, by_square=bound.by_square * prod(small.shape[2:]))
        variance = alike.variance(powers, by_square, value) + sums * by_square
        judged = residual_test(value - expected, variance, powers)
        if not is_doubtful(judged):
            return judged
        if bias is not None:
            signs = torch.cat([signs, signs.new_ones(1)])
        windows = self._windows(big, small.shape[2:], with_ones=bias is not None)

        def row(channel: int) -> Row:
            stored = found[channel].flatten()
            if bias is not None:
                stored = torch.cat([stored, bias[channel : channel + 1]])
            group = channel * self.groups // small.shape[1]
            return Row(stored, small[:, channel].flatten(), windows[group])

        return second_look(judged, row, signs)

    def _windows(self, big: Tensor, positions: Sequence[int], *, with_ones: bool) -> Tensor:
        """Windows of the small side's positions: (groups, batch positions, channels taps)."""
        around = [width for width in reversed(self.padding) for _ in range(2)]
        windows = self._grouped(functional.pad(big, around))
        for axis, (taps, step, apart) in enumerate(
            zip(self.kernel, self.stride, self.dilation, strict=True)
        ):
            windows = windows.unfold(3 + axis, apart * (taps - 1) + 1, step)[..., ::apart]
            windows = windows.narrow(3 + axis, 0, positions[axis])
        count = len(positions)
        places, taken = range(3, 3 + count), range(3 + count, 3 + 2 * count)
        windows = windows.permute(1, 0, *places, 2, *taken)
        windows = windows.reshape(self.groups, big.shape[0] * prod(positions), -1)
        return functional.pad(windows, (0, 1), value=1.0) if with_ones else windows

    def _signs(
        self, watch: Watch, lengths: Sequence[int], like: Tensor, side: str = "output"
    ) -> list[Tensor]:
        """Independent signs for every dimension of these lengths, in the type of the sums."""
        drawn = watch.signs.take(side, sum(lengths), like.device).to(
            self._sums or accumulating(like)
        )
        ends = itertools.accumulate(lengths)
        return [drawn[end - length : end] for length, end in zip(lengths, ends, strict=True)]

    def _grouped(self, tensor: Tensor, axis: int = 1) -> Tensor:
        """`tensor` with the channels of `axis` as (groups, channels / groups)."""
        shape = tensor.shape
        return tensor.reshape(*shape[:axis], self.groups, -1, *shape[axis + 1 :])

    def _places(
        self, axis: int, small: int, big: int, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """Positions on the big side (small, taps), and which of them exist."""
        p = torch.arange(small, device=device)[:, None]
        k = torch.arange(self.kernel[axis], device=device)
        places = self.stride[axis] * p + self.dilation[axis] * k - self.padding[axis]
        return places, (places >= 0) & (places < big)

    def _judge(  # noqa: PLR0917
        self,
        found: Tensor,
        signs: Sequence[Tensor],
        expected: Tensor,
        by_square: Tensor,
        bias: Tensor | None,
        terms: int,
    ) -> ResidualTest:
        value = _summed_over(found, [own[:, None] for own in signs]).flatten(2)[..., 0]
        powers = _squares(found)
        positions = prod(found.shape[2:])
        if bias is not None:
            wide = bias.double()
            total = torch.stack([own.sum() for own in signs]).double().prod()
            expected = expected + wide * total
            by_square = by_square + positions * wide.square()
        dtype = accumulating(found)
        bound = product_bound(rounding_of(found, dtype), terms, positions)
        # Sums along one dimension add one number after the other.
        longest = max(len(own) for own in signs)
        sums = unit_roundoff(name_of(dtype)) ** 2 / 3.0 * (32 + longest)
        variance = bound.variance(powers, by_square) + sums * (by_square + powers)
        return residual_test((value - expected).flatten(), variance.flatten(), powers.flatten())


def _outer(signs: Sequence[Tensor]) -> Tensor:
    """The signs of all positions in a row, from those along each dimension."""
    product = signs[0]
    for along_one in signs[1:]:
        product = (product[..., None] * along_one).flatten()
    return product


def _cropped(tensor: Tensor, lengths: Sequence[int]) -> Tensor:
    """The first `lengths` positions of a tensor (batch, channels, positions...)."""
    for axis, length in enumerate(lengths):
        tensor = tensor.narrow(2 + axis, 0, length)
    return tensor


def _summed_over(tensor: Tensor, windows: Sequence[Tensor]) -> Tensor:
    """Products of a tensor (batch, channels, positions...) with a matrix along each dimension.

    Returns:
        (batch, channels, columns...) in float64.
    """
    summed = tensor.to(windows[-1].dtype) @ windows[-1]
    summed = summed.double()
    for axis, window in enumerate(windows[:-1]):
        moved = summed.movedim(2 + axis, -1) @ window.double()
        summed = moved.movedim(-1, 2 + axis)
    return summed


def _squares(tensor: Tensor) -> Tensor:
    """Squared norms (batch, channels) over all positions, in float64."""
    norms: Tensor = torch.linalg.vector_norm(tensor.flatten(2), dim=2, dtype=accumulating(tensor))
    return norms.double().square()
