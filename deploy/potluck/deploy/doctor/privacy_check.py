"""The check of `potluck doctor` on trainings with noise: software and ledgers of a host."""

from __future__ import annotations

import json
from collections.abc import Iterable

from potluck.client.base.state_directory import PRIVACY
from potluck.client.config import ClientConfig
from potluck.common.errors import PotluckError
from potluck.common.records.privacy_loss import NEAR_LIMIT
from potluck.common.settings.extras import require
from potluck.common.settings.plugins import integration
from potluck.deploy.doctor.diagnosis import Finding, Verdict

_ABOUT = "noise"
_LIBRARIES = ("dp_accounting", "opacus")
_NAMED = 5


def private_trainings(config: ClientConfig) -> Iterable[Finding]:
    """Return the findings on a host that trains with noise; none for a host that never has.

    A host needs the software if its owner allows only updates with noise, or if it has ledgers.
    """
    policy, folder = config.disclosure, config.state_directory / PRIVACY
    only = policy.updates == "private"
    if not only and not (folder.is_dir() and any(folder.iterdir())):
        return
    try:
        for library in _LIBRARIES:
            require(library, "potluck[privacy]")
        values = integration("privacy-report")(config.state_directory, policy).values()
    except PotluckError as error:
        found, _, remedy = error.message.partition("; ")
        yield Finding(_ABOUT, Verdict.ERROR, found, remedy)
        return
    spent = {
        each["client"]: each["training"]["epsilon_spent"] for each in json.loads(values)["clients"]
    }
    limit = policy.training_limit
    near = [client for client, loss in spent.items() if loss >= NEAR_LIMIT * limit]
    found = f"{len(spent)} ledgers; largest ε {max(spent.values(), default=0.0):.4g} of {limit:g}"
    if not near:
        yield Finding(_ABOUT, Verdict.OK, found)
        return
    more = f" and {len(near) - _NAMED} more" if len(near) > _NAMED else ""
    yield Finding(
        _ABOUT,
        Verdict.WARNING,
        f"{found}; near the limit: {', '.join(near[:_NAMED])}{more}",
        "the host will refuse further trainings of these clients; only the owner can raise "
        "disclosure.training_epsilon",
    )
