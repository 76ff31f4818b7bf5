"""What exchanges that divide buckets have in common."""

from __future__ import annotations

from typing import TYPE_CHECKING

from wingbeat.errors import UsageError

if TYPE_CHECKING:
    from wingbeat.parts.strategy import Strategy
    from wingbeat.traits import ExchangePart


def check_divided(exchange: ExchangePart, strategy: Strategy, pieces: str, plan: str) -> None:
    """Refuse codecs, whose payloads cannot be divided, and plans for whole all-reduces.

    Args:
        exchange: the part of the strategy that divides buckets.
        strategy: all parts.
        pieces: what the exchange sends, for messages.
        plan: a plan that is allowed, for messages.

    Raises:
        UsageError: the strategy has a codec, or merges layers.
    """
    where = f"Strategy(exchange={exchange!r}"
    if strategy.codec is not None:
        raise UsageError(
            f"{where}, compression={strategy.codec!r}): {pieces} travel as they are, or rounded; "
            'allowed: "fp32", "bf16", or a topology as the exchange'
        )
    if strategy.plan.merging() is not None:
        raise UsageError(
            f"{where}, plan={strategy.plan!r}): layers are merged by what whole all-reduces cost; "
            f"allowed: another plan, such as {plan}, or a topology as the exchange"
        )
