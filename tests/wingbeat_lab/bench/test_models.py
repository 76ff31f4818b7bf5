"""The real model of a bench."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from wingbeat.errors import UsageError
from wingbeat_lab.bench import models


@pytest.mark.parametrize("training", [True, False])
def test_testing_a_model_leaves_its_mode_as_it_was(training: bool) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Dropout(1.0), nn.Identity())
    model.train(training)
    images = torch.eye(4).view(4, 1, 2, 2)
    assert models.accuracy(model, images, torch.tensor([0, 1, 2, 0])) == 0.75
    assert all(module.training is training for module in model.modules())


def test_digits_without_scikit_learn_name_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    assert models.parse("digits").profile is None
    monkeypatch.setattr(models.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"needs scikit-learn; .* 'wingbeat\[bench\]'"):
        models.parse("digits")
    assert models.parse("paced:resnet50").profile is not None
