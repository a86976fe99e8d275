"""What each kernel must do at the least, against which a run on a GPU is judged.

B requests, D positions, K candidates, r rank of the selector, N nodes, V words, H channels, G rows of
a block. A floor counts every byte that must cross to or from memory once, though much of it may still
lie in a cache, and a multiplication and an addition as two operations.
"""

from __future__ import annotations

from typing import NamedTuple

SECTOR = 32  # bytes, the least that is read from memory for one number
FLOAT, INT = 4, 8


class Floor(NamedTuple):
    """bytes moved, operations, kernel launches, and steps of which each waits for the one before."""

    bytes: int
    operations: int
    launches: int = 1
    steps: int = 1

    def seconds(self, bandwidth: float, rate: float, launch: float = 0.0) -> float:
        """bandwidth in bytes/s, rate in operations/s, launch in seconds a launch."""
        return self.launches * launch + max(self.bytes / bandwidth, self.operations / rate)


def lattice(B: int, D: int, K: int, rank: int, itemsize: int = 2) -> Floor:
    """With the selector; itemsize is of the codebooks and the hidden codes."""
    rows = B * (1 + (D - 1) * K) + B * D * K  # of the two codebooks
    given = B * D * K * (INT + FLOAT) + B * D * (FLOAT + rank * itemsize) + B * INT
    moved = given + rows * rank * itemsize + B * D * K * K * FLOAT
    return Floor(moved, B * D * K * (rank + K * (2 * rank + 5)))


def plain_lattice(B: int, D: int, K: int) -> Floor:
    """Without a selector: one row a position."""
    return Floor(B * D * K * (INT + 2 * FLOAT) + B * D * FLOAT, 8 * B * D * K)


def tree(B: int, K: int, N: int) -> Floor:
    """Every node's row of the lattice is read; a node can be chosen only after its parent."""
    read = B * (N * K * FLOAT + (N - 1) * SECTOR + INT)
    written = B * N * (5 * INT + FLOAT + N)
    return Floor(read + written, B * N * (N + 2 * K), steps=N - 1)


def drawn_tree(B: int, D: int, K: int, N: int) -> Floor:
    """With random children, whose law is written over all candidates. Without filters.

    Coins and candidates of a depth lie side by side. A row's candidates are ordered, which takes K log K
    comparisons, and some 16 numbers are computed of each.
    """
    plain, depths = tree(B, K, N), min(D, N)
    read = B * (N * K * FLOAT + depths * (K * INT + SECTOR) + INT + 1)
    written = B * N * (5 * INT + FLOAT + N) + B * N * (1 + K * (INT + FLOAT))
    operations = plain.operations + B * N * K * (16 + K.bit_length())
    return Floor(read + written, operations, steps=N)


def greedy_walk(B: int, N: int, P: int) -> Floor:
    """P nodes on the longest path."""
    return Floor(B * (N * (4 * INT + N) + (P + 2) * INT), 2 * B * N * N)


def sampling_walk(B: int, N: int, P: int, V: int, K: int = 0, itemsize: int = 4) -> Floor:
    """One row of the target's probabilities a request, and one number a node; K of random children.

    itemsize is of the probabilities. The block that holds the coin is read twice, which is not counted.
    """
    read = N * (3 * INT + N + SECTOR) + 2 * P * FLOAT + V * itemsize
    read += N * (1 + K * (INT + FLOAT + SECTOR)) if K else 0
    return Floor(B * (read + (P + 2) * INT), B * (3 * N * N + 3 * N * K + 2 * V), launches=3)


def convolve(B: int, G: int, H: int, taps: int, groups: int, itemsize: int = 2) -> Floor:
    """One side of it: rows in and out, this side's share of the projection, the base."""
    rows = B * G
    moved = rows * (2 * H + taps * groups) * itemsize + taps * H * FLOAT
    return Floor(moved, 3 * rows * H * taps)
