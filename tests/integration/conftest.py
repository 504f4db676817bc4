"""Certificates that all tests of a module use, if they have no other."""

from __future__ import annotations

import pytest
from support.pki import TestFederation, make_federation
from support.sum_federation import Members


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> TestFederation:
    return make_federation(tmp_path_factory.mktemp("pki"))


@pytest.fixture(scope="module")
def members(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Members:
    """Return members for the module's `CLIENTS`."""
    return Members.make(tmp_path_factory.mktemp("members"), request.module.CLIENTS)
