from __future__ import annotations

import pytest

from potluck.client.transfer.upload import may_help_to_retry
from potluck.common import errors


@pytest.mark.parametrize(
    ("error", "helps"),
    [
        (errors.UnreachableError, True),
        (errors.TruncatedError, True),
        (errors.DigestMismatchError, True),
        (errors.StorageError, True),
        (errors.NotFoundError, True),
        (errors.PotluckError, True),
        (errors.TooLargeError, False),
        (errors.LayoutError, False),
        (errors.NotFiniteError, False),
        (errors.RoundClosedError, False),
        (errors.IdentityError, False),
        (errors.ProtocolError, False),
    ],
)
def test_upload_is_retried_only_after_temporary_errors(
    error: type[errors.PotluckError], helps: bool
) -> None:
    assert may_help_to_retry(error("trouble")) is helps
