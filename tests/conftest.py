"""What every test shares: `gpu` says why it did not run, hypothesis allows for compile times, and
`device` is where a test of both groups runs."""

import pytest
import torch
from hypothesis import settings

# An example may compile; the same examples every time, so that a red run can be repeated.
settings.register_profile("inductor_q", deadline=None, derandomize=True)
settings.load_profile("inductor_q")


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """For a test that holds on any device: a CPU in the default group, a GPU with `-m gpu`."""
    name: str = request.param
    return name


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip `gpu` tests, asked for with `-m gpu`, where there is no device."""
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)
