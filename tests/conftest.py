"""What most tests need: seeds, tiny models, masks."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from tests.helpers.features import claimed_kinds_are_tested  # noqa: F401
from tests.helpers.models import VARIANTS


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what needs a compiler where there is none: what is skipped in every run is never looked at."""
    if shutil.which("g++"):
        return
    left = [item for item in items if item.get_closest_marker("compiler")]
    config.hook.pytest_deselected(items=left)
    items[:] = [item for item in items if item not in left]


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(params=VARIANTS)
def variant(request: pytest.FixtureRequest) -> str:
    """Each registered variant and the mixtures that the library promises."""
    return request.param


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model for the GLUE examples."""
    from tests.helpers.glue_rows import write_model  # not above: most tests need none of what it imports

    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def glue_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiny data for the GLUE examples."""
    from tests.helpers.glue_rows import write_tasks

    return write_tasks(tmp_path_factory.mktemp("glue"))
