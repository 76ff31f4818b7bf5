"""What a bucket's encoding keeps for parameters that have no gradient now."""

from __future__ import annotations

import pytest
import torch

from wingbeat.codecs.coding import Region
from wingbeat.codecs.topk import TopKCodec
from wingbeat.integrations.ddp import HookBucket, _KeepingUnused
from wingbeat.types import Span


@pytest.mark.parametrize("span", [Span(0, 60), Span(15, 60)])
def test_what_waits_for_a_parameter_without_gradient_stays_as_it_is(span: Span) -> None:
    gradients = torch.linspace(1.0, 2.0, 60)
    gradients[20:50] = 0.0
    bucket = HookBucket(
        "bucket 0", gradients, ("a", "b", "c"), ((20,), (5, 6), (10,)), keep_unused=True
    )
    coding = _KeepingUnused([Region(Span(0, 60), TopKCodec(0.2, momentum=0.9))], bucket)
    residual, velocity = torch.full((60,), 8.0), torch.full((60,), 4.0)
    payload = torch.empty(coding.room(span), dtype=torch.uint8)
    coding.encode(gradients, span, payload, residual, velocity)
    sent = torch.zeros(60)
    coding.decode(payload, sent, span)
    unused = slice(20, 50)
    assert torch.equal(residual[unused], torch.full((30,), 8.0))
    assert torch.equal(velocity[unused], torch.full((30,), 4.0))
    assert not sent[unused].any()
    for used in (slice(span.start, 20), slice(50, 60)):
        got = sent[used] + residual[used]
        torch.testing.assert_close(got, 8.0 + 0.9 * 4.0 + gradients[used])
