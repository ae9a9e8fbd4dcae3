"""The distribution of requests over servers: contiguous chunks in order (semantics, section 11)."""

from __future__ import annotations


def contiguous_chunks(n: int, servers: int) -> list[tuple[int, int]]:
    """Split requests 0..n-1 into at most one half-open range [start, end) for each server.

    Every server but the last gets ceil(n / servers) requests; a server that would get none has an empty range
    (start == end) and is not called. The list has one range for each server, in server order.

    >>> contiguous_chunks(7, 3)
    [(0, 3), (3, 6), (6, 7)]
    """
    size = -(-n // servers)
    return [(min(i * size, n), min((i + 1) * size, n)) for i in range(servers)]
