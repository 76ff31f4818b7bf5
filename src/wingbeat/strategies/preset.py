"""Base class of all presets."""

from __future__ import annotations

from abc import ABC, abstractmethod

from wingbeat.settings import Settings
from wingbeat.strategies.strategy import Strategy
from wingbeat.traits import Traits
from wingbeat.types import Choices


class Preset(Settings, ABC):
    """A named strategy with its own options."""

    @abstractmethod
    def compose(self) -> Strategy:
        """Return the strategy's parts."""

    @property
    def traits(self) -> Traits:
        """The strategy's guarantees with these options."""
        return self.compose().traits

    def choices(self) -> Choices:
        """Return the strategy in the form that the engine reads."""
        return self.compose().choices()
