"""Guests import public modules of the core, apart from listed ones, and plug-ins are not imported.

The core is `common`, `server` and `client`. Public are the modules at the root of these packages,
and the modules of the core in docs/reference/api. Each list has the other modules of the core that
a guest imports. A list must equal the imports, so each further import shows in a change of it.
"""

import re

import pytest
from support.repository import ROOT
from support.source_imports import imports_by_module

CORE = ("common", "server", "client")
PLUG_INS = {
    "selectors": "potluck.server.selectors",
    "strategies": "potluck.server.strategies",
    "objectives": "potluck.client.training.objectives",
    "questions": "potluck.client.training.questions",
}
GUESTS = {
    **PLUG_INS,
    "integrations": "potluck.integrations",
    "privacy": "potluck.privacy",
    "secagg": "potluck.secagg",
    "verifiable": "potluck.verifiable",
}

DEEPER: dict[str, set[str]] = {
    "selectors": {
        "potluck.common.learning.heterogeneity",
        "potluck.common.learning.output_layer",
        "potluck.common.learning.step_by_step",
        "potluck.common.settings.extras",
    },
    "strategies": {
        "potluck.common.learning.optimizers",
        "potluck.common.settings.plugins",
        "potluck.common.tensors.digest",
        "potluck.common.tensors.large_arrays",
        "potluck.common.tensors.layout",
        "potluck.server.selectors.parts.k_means",
    },
    "objectives": set(),
    "questions": {
        "potluck.client.training.samples",
        "potluck.common.learning.evaluation",
        "potluck.common.learning.output_layer",
        "potluck.common.learning.sample_counts",
        "potluck.common.learning.step_by_step",
    },
    "integrations": {
        "potluck.common.models.members",
        "potluck.common.monitoring.definitions",
        "potluck.common.monitoring.instruments",
        "potluck.common.monitoring.metric_labels",
        "potluck.common.net.build_version",
        "potluck.common.net.protocol",
        "potluck.common.net.proxies",
        "potluck.common.net.transfer",
        "potluck.common.net.web_origin",
        "potluck.common.settings.extras",
        "potluck.common.settings.option_checks",
        "potluck.common.tables.round_columns",
        "potluck.common.tables.table_files",
        "potluck.common.tensors.digest",
        "potluck.server.store.model_files",
    },
    "privacy": {
        "potluck.client.base.state_directory",
        "potluck.client.disclosure.disclosure_policy",
        "potluck.client.disclosure.outgoing_log",
        "potluck.client.disclosure.privacy_budget",
        "potluck.client.handlers.instruction_log",
        "potluck.client.training.plugin_options",
        "potluck.client.training.steps.loop",
        "potluck.common.learning.optimizers",
        "potluck.common.learning.local_steps",
        "potluck.common.learning.task_loading",
        "potluck.common.learning.training",
        "potluck.common.records.privacy_loss",
        "potluck.common.settings.configuration",
        "potluck.common.settings.extras",
        "potluck.common.settings.plugins",
        "potluck.common.tensors.digest",
        "potluck.common.tensors.flat",
        "potluck.server.reduce.model_work",
        "potluck.server.reduce.move_by_sum",
        "potluck.server.reduce.update_files",
        "potluck.server.reduce.update_norms",
        "potluck.server.machine.events",
        "potluck.server.plan.pretraining",
        "potluck.server.plan.update_noise",
        "potluck.server.live.models",
        "potluck.server.live.run",
        "potluck.server.updates.update_path",
    },
    "secagg": {
        "potluck.client.disclosure.laplace",
        "potluck.client.base.state_directory",
        "potluck.client.disclosure.disclosure_policy",
        "potluck.client.disclosure.member_keys",
        "potluck.client.disclosure.privacy_budget",
        "potluck.client.handlers.sum_participant",
        "potluck.client.training.unmasked_update",
        "potluck.common.learning.step_by_step",
        "potluck.common.monitoring.metric_labels",
        "potluck.common.net.membership",
        "potluck.common.net.membership_in_force",
        "potluck.common.net.protocol",
        "potluck.common.tensors.flat",
        "potluck.common.tensors.layout",
        "potluck.common.tensors.tensor_files",
        "potluck.common.updates.sum_files",
        "potluck.common.updates.training_agreement",
        "potluck.common.updates.update_report",
        "potluck.server.reduce.move_by_sum",
        "potluck.server.reduce.update_files",
        "potluck.server.eligibility.collected_sums",
        "potluck.server.hosts.attendance",
        "potluck.server.hosts.instructions",
        "potluck.server.profiles.trust",
        "potluck.server.machine.events",
        "potluck.server.plan.path_rules",
        "potluck.server.plan.plan",
        "potluck.server.machine.troubles",
        "potluck.server.plan.update_noise",
        "potluck.server.live.models",
        "potluck.server.live.run",
        "potluck.server.updates.update_path",
        "potluck.server.store",
        "potluck.server.store.records",
        "potluck.server.store.store_thread",
    },
    "verifiable": {
        "potluck.client.disclosure.member_keys",
        "potluck.client.disclosure.weightings",
        "potluck.client.handlers.instruction_log",
        "potluck.common.net.key_files",
        "potluck.common.net.membership",
        "potluck.common.net.membership_in_force",
        "potluck.common.settings.configuration",
        "potluck.server.plan.cohort_limits",
        "potluck.server.eligibility.alarms",
        "potluck.server.eligibility.eligibility",
        "potluck.server.hosts.gather",
        "potluck.server.profiles.profile_reader",
        "potluck.server.profiles.trust",
        "potluck.server.plan.plan",
        "potluck.server.machine.troubles",
        "potluck.server.select.cohort_hosts",
        "potluck.server.select.interview",
        "potluck.server.live.run",
        "potluck.server.select.selection_record",
        "potluck.server.store.attempt_table",
        "potluck.server.store.client_table",
        "potluck.server.store.records",
        "potluck.server.store.round_table",
        "potluck.server.store.run_table",
        "potluck.server.store.sql.reading",
    },
}
"""Modules of the core that are not public, by the guest that imports them."""

IMPORTED_PLUG_INS = {
    (
        "potluck.client.training.lanes.group_training",
        "potluck.client.training.objectives.cross_entropy",
    ): "batched steps have written-out gradients for this objective",
    (
        "potluck.client.training.lanes.group_training",
        "potluck.client.training.objectives.fedprox",
    ): "batched steps have written-out gradients for this objective",
    (
        "potluck.client.training.samples",
        "potluck.client.training.objectives.noise_robust",
    ): "the question `context` scores samples by FLASH's loss",
    (
        "potluck.client.training.triplet_estimate",
        "potluck.client.training.objectives.generalized_cross_entropy",
    ): "FedDiverse trains its biased model with this loss",
    (
        "potluck.server.strategies.fedconcat",
        "potluck.server.selectors.parts.k_means",
    ): "the strategy groups clients with the selectors' clustering",
}
"""Reason for each import of a plug-in by a module outside the plug-in's subpackage."""


def within(module: str, place: str) -> bool:
    """Return True if a module is this package or in it."""
    return f"{module}.".startswith(f"{place}.")


def documented() -> set[str]:
    """Return the names of the modules and classes in the reference of the Python interface."""
    pages = (ROOT / "docs" / "reference" / "api").glob("*.md")
    return {
        name
        for page in pages
        for name in re.findall(r"^::: ([\w.]+)", page.read_text(), re.MULTILINE)
    }


def is_public(module: str, documented: set[str]) -> bool:
    """Return True if a module of the core is at a package's root, or if it or one of its classes is
    documented."""
    path = module.split(".")
    folder = ROOT.joinpath(path[1], *path)
    at_the_root = len(path) == 3 and not folder.is_dir()
    return at_the_root or any(within(name, module) for name in documented)


def deeper_imports(guest: str) -> set[str]:
    """Return the modules of the core that a guest imports and that are not public."""
    own, known = GUESTS[guest], documented()
    return {
        other
        for module, others in imports_by_module().items()
        if within(module, own)
        for other in others
        if other.split(".")[1] in CORE and not within(other, own) and not is_public(other, known)
    }


@pytest.mark.parametrize("guest", GUESTS)
def test_guests_import_only_public_and_listed_modules_of_the_core(guest: str) -> None:
    assert sorted(deeper_imports(guest)) == sorted(DEEPER[guest])


def test_public_modules_are_those_at_the_root_and_documented_ones() -> None:
    known = documented()
    assert is_public("potluck.server.selection", known)
    assert is_public("potluck.common.run_file.run_settings", known)
    assert not is_public("potluck.server.store", known)
    assert not is_public("potluck.common.settings.plugins", known)


def test_plug_ins_are_imported_only_by_their_subpackage_and_listed_modules() -> None:
    imports = imports_by_module()
    assert all(any(within(module, place) for module in imports) for place in GUESTS.values())
    found = {
        (module, other)
        for module, others in imports.items()
        for other in others
        for place in PLUG_INS.values()
        if within(other, place) and not within(module, place)
    }
    assert found == set(IMPORTED_PLUG_INS)
