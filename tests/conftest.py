"""What most tests need: seeds, tiny models, masks."""

from __future__ import annotations

import pytest
import torch

from tests.models import VARIANTS


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(params=VARIANTS)
def variant(request: pytest.FixtureRequest) -> str:
    """Each registered variant and the mixtures that the library promises."""
    return request.param
