"""What all presets have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod

from wingbeat.settings import Settings
from wingbeat.strategies.strategy import Strategy
from wingbeat.traits import Traits
from wingbeat.types import Choices


class Preset(Settings, ABC):
    """A strategy under a name of its own, with the options that belong to it."""

    @abstractmethod
    def compose(self) -> Strategy:
        """Return the parts that it stands for."""

    @property
    def traits(self) -> Traits:
        """What may be relied on, with these options."""
        return self.compose().traits

    def choices(self) -> Choices:
        """Return the answers to the five questions of the design, for the engine."""
        return self.compose().choices()
