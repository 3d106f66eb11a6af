"""The networks of the forms: letters and sizes of their cores. No torch.

Every builder checks what a user can get wrong: ranks, and numbers of modes.
"""

from __future__ import annotations

import string
from collections.abc import Sequence
from itertools import pairwise

from outlast.errors import TensorizeError
from outlast.tensorize.network import Network
from outlast.tensorize.shapes import balanced_modes, bond_ranks

_MODES = "abcdefghijkl"
_OUT_MODES = "ABCDEFGHIJKL"
_BONDS = "pqrstuvwxyzPQRSTUVWXYZmno"
_RANKS = "mnopqrstuvwxyzMNOPQRSTUVWXYZ"

MOST_MODES = len(_MODES)
"""On each side: 4096 features are 12 modes of 2."""

Ranks = int | tuple[int, ...]


def one_rank(rank: object, form: str) -> int:
    """A rank that is one number.

    Raises:
        TensorizeError: It is none, or below 1.
    """
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
        raise TensorizeError(f"rank = {rank!r} of a {form} layer must be an integer of at least 1")
    return rank


def some_ranks(rank: object, form: str) -> Ranks:
    """A rank for all bonds, or one for each.

    Raises:
        TensorizeError: It is neither, or one is below 1.
    """
    if isinstance(rank, tuple | list):
        return tuple(one_rank(item, form) for item in rank)
    return one_rank(rank, form)


def chosen_modes(
    given: Sequence[int] | None, features: int, count: object, *, name: str
) -> tuple[int, ...]:
    """The factors of a number of features.

    Args:
        given: What the user gave; None: as even as possible.
        features: What they multiply to, or a little more.
        count: How many, where none are given.
        name: What the user calls `count`.

    Raises:
        TensorizeError: There are too many or none, or one is below 1.
    """
    if given is None:
        if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= MOST_MODES:
            raise TensorizeError(f"{name} = {count!r} must be an integer from 1 to {MOST_MODES}")
        return balanced_modes(features, count)
    modes = tuple(given)
    sound = all(isinstance(mode, int) and mode >= 1 for mode in modes)
    if not sound or not 1 <= len(modes) <= MOST_MODES:
        raise TensorizeError(
            f"modes = {modes} of {features} features must be 1 to {MOST_MODES} integers of at "
            "least 1"
        )
    return modes


def _check_letters(modes: int, bonds: int, form: str) -> None:
    """Refuse more indices than there are letters for, with those of a copy of the bonds.

    (`outlast.tensorize.rules.product` multiplies a network with itself.)

    Raises:
        TensorizeError: There are more.
    """
    if modes + 2 * bonds > len(string.ascii_letters):
        raise TensorizeError(
            f"a {form} layer of {modes} modes has too many indices: ask for fewer cores or modes"
        )


def train_network(
    in_features: int,
    out_features: int,
    rank: Ranks,
    *,
    in_modes: tuple[int, ...],
    out_modes: tuple[int, ...],
) -> Network:
    """One core per mode, those of the inputs before those of the outputs (Yang et al. 2024).

    Raises:
        TensorizeError: A rank below 1, or the wrong number of ranks.
    """
    rank = some_ranks(rank, "tt")
    inputs, outputs = _MODES[: len(in_modes)], _OUT_MODES[: len(out_modes)]
    modes = inputs + outputs
    _check_letters(len(modes), len(modes) - 1, "tt")
    bonds = _BONDS[: len(modes) - 1]
    ends = ["", *bonds, ""]
    cores = tuple(
        left + mode + right for mode, (left, right) in zip(modes, pairwise(ends), strict=True)
    )
    sizes = (
        *zip(modes, (*in_modes, *out_modes), strict=True),
        *zip(bonds, bond_ranks(rank, (*in_modes, *out_modes)), strict=True),
    )
    return Network(inputs, outputs, cores, sizes, in_features, out_features)


def train_matrix_network(
    in_features: int,
    out_features: int,
    rank: Ranks,
    *,
    in_modes: tuple[int, ...],
    out_modes: tuple[int, ...],
) -> Network:
    """One core per pair of modes, (r, out, in, r') (Novikov et al. 2015, arXiv 1509.06569).

    Raises:
        TensorizeError: There are not as many modes on one side as on the other, or a rank is none.
    """
    rank = some_ranks(rank, "ttm")
    if len(in_modes) != len(out_modes):
        raise TensorizeError(
            f"in_modes = {in_modes} and out_modes = {out_modes} of a ttm layer must be as many"
        )
    pairs = [into * out for into, out in zip(in_modes, out_modes, strict=True)]
    inputs, outputs = _MODES[: len(in_modes)], _OUT_MODES[: len(in_modes)]
    bonds = _BONDS[: len(in_modes) - 1]
    ends = ["", *bonds, ""]
    cores = tuple(
        left + out + into + right
        for out, into, (left, right) in zip(outputs, inputs, pairwise(ends), strict=True)
    )
    sizes = (
        *zip(inputs + outputs, (*in_modes, *out_modes), strict=True),
        *zip(bonds, bond_ranks(rank, pairs), strict=True),
    )
    return Network(inputs, outputs, cores, sizes, in_features, out_features)


def block_network(
    in_features: int,
    out_features: int,
    rank: int,
    *,
    in_modes: tuple[int, int],
    out_modes: tuple[int, int],
) -> Network:
    """h[m, n, r] = sum_i R[m, n, r, i] x[m, i]; y[n, o] = sum_{m, r} L[n, o, m, r] h[m, n, r].

    (Qiu et al., 2024, arXiv 2406.06248.)

    Raises:
        TensorizeError: A rank below 1, or not two modes on each side.
    """
    rank = one_rank(rank, "btt")
    if len(in_modes) != 2 or len(out_modes) != 2:
        raise TensorizeError(
            f"in_modes = {in_modes} and out_modes = {out_modes} of a btt layer must be two on each "
            "side"
        )
    sizes = (
        ("m", in_modes[0]),
        ("i", in_modes[1]),
        ("n", out_modes[0]),
        ("o", out_modes[1]),
        ("r", rank),
    )
    return Network("mi", "no", ("mnri", "nomr"), sizes, in_features, out_features)


def tucker_network(
    in_features: int,
    out_features: int,
    rank: int | tuple[int, ...],
    *,
    in_modes: tuple[int, ...],
    out_modes: tuple[int, ...],
) -> Network:
    """W[AB, ab] = sum U[a, p] V[b, q] C[p, q, r, s] Y[r, A] Z[s, B] (Tucker 1966).

    A rank above its mode adds nothing and is cut to it.

    Raises:
        TensorizeError: A rank below 1, or not one number and not one per mode.
    """
    modes = (*in_modes, *out_modes)
    rank = some_ranks(rank, "tucker")
    _check_letters(len(modes), len(modes), "tucker")
    asked = (rank,) * len(modes) if isinstance(rank, int) else rank
    if len(asked) != len(modes):
        raise TensorizeError(
            f"rank = {rank} of a tucker layer must be one number of at least 1, or one for each "
            f"of the {len(modes)} modes"
        )
    inputs, outputs = _MODES[: len(in_modes)], _OUT_MODES[: len(out_modes)]
    ranks = _RANKS[: len(modes)]
    into, out = ranks[: len(in_modes)], ranks[len(in_modes) :]
    cores = (
        *(mode + bond for mode, bond in zip(inputs, into, strict=True)),
        ranks,
        *(bond + mode for mode, bond in zip(outputs, out, strict=True)),
    )
    cut = (min(one, mode) for one, mode in zip(asked, modes, strict=True))
    sizes = (*zip(inputs + outputs, modes, strict=True), *zip(ranks, cut, strict=True))
    return Network(inputs, outputs, cores, sizes, in_features, out_features)


def cp_network(
    in_features: int,
    out_features: int,
    rank: int,
    *,
    in_modes: tuple[int, ...],
    out_modes: tuple[int, ...],
) -> Network:
    """W[AB, ab] = sum_r U[a, r] V[b, r] Y[r, A] Z[r, B] (Lebedev et al. 2015, arXiv 1412.6553).

    Raises:
        TensorizeError: A rank below 1.
    """
    rank = one_rank(rank, "cp")
    inputs, outputs = _MODES[: len(in_modes)], _OUT_MODES[: len(out_modes)]
    cores = (*(mode + "r" for mode in inputs), *("r" + mode for mode in outputs))
    sizes = (*zip(inputs + outputs, (*in_modes, *out_modes), strict=True), ("r", rank))
    return Network(inputs, outputs, cores, sizes, in_features, out_features)
