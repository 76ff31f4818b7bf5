"""Channels of a link keep apart; the tests of whole channels are those of several models."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from wingbeat.errors import UsageError
from wingbeat.transport.link import (
    MAX_CHANNELS,
    TAG_BITS,
    ChannelLink,
    lowest_free,
)


class Recorder:
    """A link that notes tags."""

    name = "eth7"

    def __init__(self) -> None:
        self.tags: list[tuple[str, int, int]] = []

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> Any:
        self.tags.append(("send", peer, tag))

    def recv(self, tensor: torch.Tensor, peer: int, tag: int) -> Any:
        self.tags.append(("recv", peer, tag))

    def close(self) -> None:
        """Nothing to close."""


def test_no_two_channels_share_a_tag_and_all_tags_are_valid() -> None:
    recorder = Recorder()
    last = (1 << TAG_BITS) - 1
    for channel in range(MAX_CHANNELS + 1):
        link = ChannelLink(recorder, channel)
        for tag in (0, last):
            link.send(torch.empty(0), 1, tag)
    tags = [tag for _, _, tag in recorder.tags]
    # Ascending without overlap: each channel's last tag is below the next one's first.
    assert tags == sorted(set(tags))
    assert tags[0] == 0


def test_both_ends_agree_on_the_tag() -> None:
    recorder = Recorder()
    link = ChannelLink(recorder, 3)
    link.send(torch.empty(0), 1, 42)
    link.recv(torch.empty(0), 2, 42)
    (_, to, sent), (_, source, received) = recorder.tags
    assert (to, source) == (1, 2)
    assert sent == received


def test_the_lowest_free_channel_is_taken_and_the_last_one_too() -> None:
    assert lowest_free([]) == 1
    assert lowest_free([3, 1]) == 2
    assert lowest_free(range(1, MAX_CHANNELS)) == MAX_CHANNELS
    with pytest.raises(UsageError, match=rf"more than {MAX_CHANNELS} channels are open"):
        lowest_free(range(1, MAX_CHANNELS + 1))
