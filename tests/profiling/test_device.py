"""Profiles of models on an accelerator: events instead of the host's clock."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import device_cases as cases
import pytest

from helpers import accelerator
from helpers.pool import Pool

pytestmark = pytest.mark.skipif(bool(accelerator.why_not()), reason=accelerator.why_not())


@pytest.fixture(scope="module")
def worker() -> Iterator[Pool]:
    """A process that loads the device before anything runs backward."""
    made = Pool(1, default_group=False)
    yield made
    made.close()


@pytest.mark.parametrize(
    "case",
    [
        cases.marks_are_times_of_the_device_and_do_not_wait_for_it,
        cases.parameters_on_two_devices_are_refused,
    ],
    ids=lambda case: case.__name__,
)
def test_profile_on_a_device(worker: Pool, case: Callable[[], None]) -> None:
    worker.run(case, deadline=60.0)
