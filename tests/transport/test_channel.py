"""Channels of a link keep apart; the tests of whole channels are those of several models."""

from __future__ import annotations

import pytest

from wingbeat.errors import UsageError
from wingbeat.transport.link import (
    MAX_CHANNELS,
    TAG_BITS,
    channel_tag,
    lowest_free,
)


def test_no_two_channels_share_a_tag() -> None:
    tags = [
        channel_tag(channel, tag)
        for channel in range(MAX_CHANNELS + 1)
        for tag in (0, (1 << TAG_BITS) - 1)
    ]
    # Ascending without overlap: each channel's last tag is below the next one's first.
    assert tags == sorted(set(tags))
    assert tags[0] == 0


def test_the_lowest_free_channel_is_taken_and_the_last_one_too() -> None:
    assert lowest_free([]) == 1
    assert lowest_free([3, 1]) == 2
    assert lowest_free(range(1, MAX_CHANNELS)) == MAX_CHANNELS
    with pytest.raises(UsageError, match=rf"more than {MAX_CHANNELS} channels are open"):
        lowest_free(range(1, MAX_CHANNELS + 1))
