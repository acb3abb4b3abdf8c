"""Hadamard matrices, the fast transform that multiplies with them, and seeded orthogonal matrices."""

from __future__ import annotations

from functools import lru_cache
from itertools import product
from math import isqrt
from typing import Any

import numpy as np
import torch

_RADIX_BITS = 4  # a power of two is multiplied with matrices of up to 16 x 16, for which matmuls are fast


def hadamard_matrix(order: int) -> np.ndarray:
    """A matrix H of 1 and -1 with H H^T = order * I, its first row all 1. Shape [order, order], int8.

    >>> hadamard_matrix(2)
    array([[ 1,  1],
           [ 1, -1]], dtype=int8)

    A Kronecker product of Sylvester's matrix and of matrices of Paley's two constructions over finite fields
    (R. E. A. C. Paley, On orthogonal matrices, 1933), the one whose transform is the cheapest.
    Raises ValueError for an order that they do not reach, see `has_hadamard`.
    """
    matrix = np.ones((1, 1), np.int8)
    for factor in _matrices(order):
        matrix = np.kron(matrix, factor)
    return matrix


def has_hadamard(order: int) -> bool:
    """Is there a Hadamard matrix of this order among Sylvester times Paley?

    >>> [n for n in range(80, 104, 4) if not has_hadamard(n)]
    [92]
    """
    return type(order) is int and order > 0 and _factors(order) is not None


def hadamard_transform(x: Any, axis: int = -1, *, size: int | None = None) -> Any:
    """x H / sqrt(size) along an axis: an orthogonal map that spreads outliers over all channels.

    >>> hadamard_transform(np.array([4.0, 0, 0, 0]))
    array([2., 2., 2., 2.])

    x: floating numpy or torch array, its axis cut into blocks of ``size`` (None: one block, the whole axis) that are
    transformed each for itself. Same kind, dtype and shape out; 16-bit numbers are added up in float32. Takes
    O(n log n) operations for powers of two, and n times the order of Paley's part besides for others.
    Its inverse is a multiplication with H^T, which for Sylvester's matrix (size a power of two) is H again.

    Raises ValueError for what is no floating array, a size that does not divide the axis or has no Hadamard matrix.
    """
    array = torch.from_numpy(np.ascontiguousarray(x)) if isinstance(x, np.ndarray) else x
    if not isinstance(array, torch.Tensor) or not array.is_floating_point() or array.ndim == 0:
        raise ValueError(f"hadamard_transform takes a floating numpy or torch array with an axis, not {_kind(x)}")
    if not -array.ndim <= axis < array.ndim:
        raise ValueError(f"axis={axis} of an array of shape {list(array.shape)}: give one from 0 to {array.ndim - 1}")
    width = array.shape[axis]
    size = width if size is None else size
    if type(size) is not int or size < 1 or width % size:
        raise ValueError(f"blocks of size {size} do not divide an axis of {width}")
    work = array.float() if array.dtype.itemsize < 4 else array
    moved = work.movedim(axis, -1)
    done = multiplied(moved.reshape(-1, size), size).reshape(moved.shape).movedim(-1, axis)
    result = (done / size**0.5).to(array.dtype)
    return result.numpy() if isinstance(x, np.ndarray) else result


def rotate_inputs(weight: Any, size: int | None = None) -> Any:
    """The weight W H / sqrt(size) of a linear layer whose input goes through `hadamard_transform` at run time.

    >>> w, x = np.float64([[1, 2], [3, 5]]), np.float64([7, 11])
    >>> np.allclose(rotate_inputs(w) @ hadamard_transform(x), w @ x)
    True

    weight: [..., outputs, inputs], numpy or torch; computed in float64, returned in its own dtype. size: blocks along
    the inputs, None for one block. Source: the online rotations of QuaRot (arXiv 2404.00456, section 4) and R4 of
    SpinQuant (2405.16406); blocks of the format's own size, MR-GPTQ (2509.23202).
    Raises ValueError as `hadamard_transform` does.
    """
    if isinstance(weight, torch.Tensor) and weight.is_floating_point():
        rotated: torch.Tensor = hadamard_transform(weight.double(), size=size)
        return rotated.to(weight.dtype)
    if isinstance(weight, np.ndarray) and weight.dtype.kind == "f":
        return hadamard_transform(weight.astype(np.float64), size=size).astype(weight.dtype)
    return hadamard_transform(weight, size=size)


def random_signs(count: int, seed: tuple[int, ...]) -> torch.Tensor:
    """`count` numbers 1.0 or -1.0, float64, the same for a seed on every machine and version."""
    words = np.random.PCG64(np.random.SeedSequence(seed)).random_raw(-(-count // 64))
    bits = np.unpackbits(np.asarray(words, dtype="<u8").view(np.uint8))[:count]
    return torch.from_numpy(1.0 - 2.0 * bits)


def random_orthogonal(order: int, seed: tuple[int, ...]) -> torch.Tensor:
    """An orthogonal matrix of Haar measure: Q of a Gaussian matrix, with R's diagonal made positive. float64.

    Source: F. Mezzadri, How to generate random matrices from the classical compact groups, 2007. The last bits
    depend on the machine's linear algebra.
    """
    generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed)))
    q, r = np.linalg.qr(generator.standard_normal((order, order)))
    return torch.from_numpy(q * np.where(np.diagonal(r) < 0, -1.0, 1.0))


def _kind(x: Any) -> str:
    return f"{type(x).__name__} of {x.dtype}" if hasattr(x, "dtype") else type(x).__name__


def multiplied(x: torch.Tensor, order: int, *, transposed: bool = False) -> torch.Tensor:
    """Rows of x, [n, order], times H or H^T, one Kronecker factor after the other."""
    after = order
    for factor in _matrices(order):
        n = len(factor)
        after //= n
        matrix = torch.from_numpy(factor.T if transposed else factor).to(x.dtype)
        if after == 1:
            x = (x.reshape(-1, n) @ matrix).reshape(-1, order)
        else:
            x = (matrix.T @ x.reshape(-1, n, after)).reshape(-1, order)
    return x


@lru_cache(maxsize=256)
def _matrices(order: int) -> tuple[np.ndarray, ...]:
    factors = _factors(order) if type(order) is int and order > 0 else None
    if factors is None:
        raise ValueError(
            f"there is no Hadamard matrix of order {order!r} here: 1, 2 and multiples of 4 that are products of "
            "Sylvester's and Paley's orders have one"
        )
    matrices = [_paley(factor) for factor in factors if factor > 2]
    exponent = factors.count(2)
    passes = -(-exponent // _RADIX_BITS)
    for i in range(passes):  # as equal as they come, since a small matmul wastes a pass
        matrices.append(_sylvester((exponent + i) // passes))
    return tuple(matrices)


@lru_cache(maxsize=4096)
def _factors(order: int) -> tuple[int, ...] | None:
    """Orders of 2 and of Paley's whose product is the order and whose sum, the cost of a transform, is the least."""
    if order == 1:
        return ()
    best: tuple[int, ...] | None = None
    for first in _divisors(order):
        if first == 2 or _paley_field(first):
            rest = _factors(order // first)
            if rest is not None and (best is None or first + sum(rest) < sum(best)):
                best = tuple(sorted((first, *rest), reverse=True))
    return best


def _divisors(n: int) -> list[int]:
    small = [d for d in range(1, isqrt(n) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)} - {1})


def _paley_field(order: int) -> tuple[int, int] | None:
    """The field of p**k elements from which a construction makes this order: q + 1, or 2 (q + 1)."""
    if order >= 4 and order % 4 == 0:
        for q, remainder in ((order - 1, 3), (order // 2 - 1, 1)):
            field = _prime_power(q)
            if field and q % 4 == remainder:
                return field
    return None


def _prime_power(q: int) -> tuple[int, int] | None:
    if q < 2:
        return None
    p = next((d for d in range(2, isqrt(q) + 1) if q % d == 0), q)
    k = 0
    while q % p == 0:
        q, k = q // p, k + 1
    return (p, k) if q == 1 else None


def _sylvester(exponent: int) -> np.ndarray:
    matrix = np.ones((1, 1), np.int8)
    for _ in range(exponent):
        matrix = np.kron(matrix, np.array([[1, 1], [1, -1]], np.int8))
    return matrix


def _paley(order: int) -> np.ndarray:
    field = _paley_field(order)
    assert field is not None
    q = field[0] ** field[1]
    core = np.zeros((q + 1, q + 1), np.int8)
    core[0, 1:], core[1:, 0], core[1:, 1:] = 1, 1, _jacobsthal(*field)
    if q % 4 == 3:
        core[1:, 0] = -1
        return core + np.eye(q + 1, dtype=np.int8)
    identity = np.eye(q + 1, dtype=np.int8)
    two, other = np.array([[1, 1], [1, -1]], np.int8), np.array([[1, -1], [-1, -1]], np.int8)
    matrix = np.kron(core, two) + np.kron(identity, other)
    return matrix * matrix[0]


def _jacobsthal(p: int, k: int) -> np.ndarray:
    """1 where a - b is a square of the field of p**k elements, -1 where it is none, 0 where a = b."""
    powers = _powers_of_a_generator(p, k)
    places = p ** np.arange(k)
    character = np.zeros(p**k, np.int8)
    character[powers @ places] = np.where(np.arange(len(powers)) % 2, -1, 1)
    digits = np.arange(p**k)[:, None] // places % p
    return character[(digits[:, None] - digits) % p @ places]


def _powers_of_a_generator(p: int, k: int) -> np.ndarray:
    """x**0, x**1, ... as polynomials modulo one of degree k for which they are all the field but 0: [p**k - 1, k]."""
    one = np.eye(1, k, dtype=np.int64)[0]
    for coefficients in product(range(p), repeat=k):
        reduction = np.array(coefficients, dtype=np.int64)  # x**k equals this
        element = one
        powers: list[np.ndarray] = []
        while not powers or (element.any() and not (element == one).all() and len(powers) < p**k):
            powers.append(element)
            element = (np.append(0, element[:-1]) + element[-1] * reduction) % p
        if len(powers) == p**k - 1 and element.any():
            return np.stack(powers)
    raise AssertionError("every finite field has a generator")
