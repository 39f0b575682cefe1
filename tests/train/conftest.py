"""A test of training that takes ``where`` runs for the three placements, unless it is parametrized with others."""

import pytest

from tests.train.helpers import PLACEMENTS


@pytest.fixture(params=PLACEMENTS)
def where(request: pytest.FixtureRequest) -> str:
    return str(request.param)
