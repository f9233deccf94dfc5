"""What every test shares: `gpu` says why it did not run, hypothesis allows for compile times."""

import pytest
import torch
from hypothesis import settings

# An example may compile; the same examples every time, so that a red run can be repeated.
settings.register_profile("inductor_q", deadline=None, derandomize=True)
settings.load_profile("inductor_q")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip `gpu` tests, asked for with `-m gpu`, where there is no device."""
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)
