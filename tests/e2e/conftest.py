"""A federation that all tests of a module use, if they have no other."""

from __future__ import annotations

import pytest_asyncio
from support.federation import Federation


@pytest_asyncio.fixture(loop_scope="module")
async def federation(shared: Federation) -> Federation:
    """Return the module's fixture `shared`, without points, once all hosts attend."""
    shared.points.clear()
    await shared.until_attending()
    return shared
