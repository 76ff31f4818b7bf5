"""Bytes that leave each host over time, as a monitor of its interfaces would show them."""

from __future__ import annotations


class Traffic:
    """Bytes sent by hosts, by intervals of time.

    Args:
        span_s: seconds of an interval.

    Attributes:
        sent: bytes by host.
    """

    def __init__(self, span_s: float = 0.5) -> None:
        self.span_s = span_s
        self.sent: dict[int, int] = {}
        self._spans: dict[int, list[float]] = {}

    def carried(self, host: int, start: float, end: float, nbytes: int) -> None:
        """Record that an interface of a host sends bytes evenly from ``start`` to ``end``."""
        self.sent[host] = self.sent.get(host, 0) + nbytes
        spans = self._spans.setdefault(host, [])
        first, last = int(start / self.span_s), int(end / self.span_s)
        if last >= len(spans):
            spans.extend([0.0] * (last + 1 - len(spans)))
        if first == last:
            spans[first] += nbytes
            return
        for number in range(first, last + 1):
            begin, stop = number * self.span_s, (number + 1) * self.span_s
            spans[number] += nbytes * (min(end, stop) - max(start, begin)) / (end - start)

    def utilisation(self, bytes_per_s: float, seconds: float) -> list[float]:
        """Return the utilisation of the interfaces in each interval, the mean over the hosts.

        Args:
            bytes_per_s: rate of all interfaces of a host together.
            seconds: end of the run; an incomplete interval at its end is omitted.
        """
        whole = bytes_per_s * self.span_s * max(len(self._spans), 1)
        return [
            sum(spans[number] for spans in self._spans.values() if number < len(spans)) / whole
            for number in range(int(seconds / self.span_s))
        ]
