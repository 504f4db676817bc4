"""An inventory becomes containers; differing containers become steps. Without an engine."""

from __future__ import annotations

import contextlib
import string
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tomlkit
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from potluck.client.config import ClientConfig
from potluck.common.errors import ConfigurationError, IdentityError, PotluckError
from potluck.common.net.identity import Role
from potluck.common.net.tls import TlsFiles
from potluck.common.settings.configuration import parse
from potluck.deploy.machines.container_start import count_events
from potluck.deploy.machines.deploy_plan import (
    Observed,
    ObservedContainer,
    Step,
    StepKind,
    plan,
    roll_out_order,
)
from potluck.deploy.machines.desired_state import (
    CONFIGURATION,
    DesiredContainer,
    PartyFiles,
    desired_on,
)
from potluck.deploy.machines.inventory import Inventory, example_inventory, load_inventory
from potluck.deploy.machines.machine_images import fingerprint
from potluck.deploy.machines.party_files import (
    Party,
    issue_missing,
    missing,
    parties_on,
    read_files,
)
from potluck.deploy.pki import authority as pki
from potluck.deploy.pki.federation_root import add_members, create_root, make_next_keys
from potluck.relay.config import RelayConfig
from potluck.server.config import CoordinatorConfig

FILES = {
    "coordinator": PartyFiles(tls={"certificate.pem": b"c"}),
    "gpu-1-a": PartyFiles(tls={"certificate.pem": b"a"}),
}


def inventory(text: str | None = None) -> Inventory:
    return parse(Inventory, text or example_inventory(), source="federation.toml")


def desired(found: Inventory) -> list[DesiredContainer]:
    return desired_on(found.machines[0], found, FILES)


def with_host(**values: Any) -> Inventory:
    document = tomlkit.parse(example_inventory()).unwrap()
    document["machines"][0]["hosts"][0].update(values)
    return inventory(tomlkit.dumps(document))


def observed(containers: list[DesiredContainer], **changed: Any) -> Observed:
    """Return an observation in which these containers exist; `changed` applies to each."""
    found = {
        one.name: replace(
            ObservedContainer(
                name=one.name,
                party=one.party,
                digest=one.digest,
                image="i",
                running=True,
                state="running",
                configuration_digest=one.configuration_digest,
                tls_digest=one.tls_digest,
            ),
            **changed,
        )
        for one in containers
    }
    return Observed(containers=found, images={one.image: "i" for one in containers})


def kinds(steps: list[Any]) -> list[StepKind]:
    return [step.kind for step in steps]


def test_deployed_configurations_are_accepted_by_the_programs() -> None:
    coordinator, host = desired(inventory())
    assert (coordinator.role, host.role) == (Role.COORDINATOR, Role.HOST)
    server = parse(
        CoordinatorConfig, coordinator.files.others["potluck.toml"].decode(), source="there"
    )
    assert server.listen == "0.0.0.0:7443"
    assert str(server.revoked) == "/etc/potluck/tls/revoked.pem"
    client = parse(ClientConfig, host.files.others["potluck.toml"].decode(), source="there")
    assert client.coordinator == "gpu-1.example.org:7443"
    assert client.device == "cpu"


def with_relay(**relay: Any) -> Inventory:
    """Return the example inventory, with its host behind a relay on the same machine."""
    document = tomlkit.parse(example_inventory()).unwrap()
    [machine] = document["machines"]
    machine["relays"] = [{"name": "gate", "address": "gate.example.org:8443", **relay}]
    machine["hosts"][0]["relay"] = "gate"
    return inventory(tomlkit.dumps(document))


def test_hosts_of_a_relay_connect_to_it_and_the_relay_to_the_coordinator(tmp_path: Path) -> None:
    found = with_relay(port=8443, memory="2g").model_copy(update={"pki": tmp_path / "pki"})
    parties = parties_on(found.machines, found)
    issue_missing(parties, found)
    files = {party.name: read_files(party, found) for party in parties}
    _, relay, host = desired_on(found.machines[0], found, files)
    assert relay.options["ports"]["7443/tcp"] == 8443
    assert relay.options["mem_limit"] == 2 << 30
    assert relay.options["entrypoint"][0] == "potluck-relay"
    text = relay.files.others["potluck.toml"].decode()
    config = parse(RelayConfig, text, source="there")
    assert (config.listen, config.coordinator) == ("0.0.0.0:7443", "gpu-1.example.org:7443")
    assert str(config.revoked) == "/etc/potluck/tls/revoked.pem"
    assert set(relay.files.tls) == {"certificate.pem", "key.pem", "authority.pem", "revoked.pem"}
    client = parse(ClientConfig, host.files.others["potluck.toml"].decode(), source="there")
    assert client.coordinator == "gate.example.org:8443"
    identity = TlsFiles(
        certificate=found.pki / "gate.pem",
        key=found.pki / "gate.key",
        authority=found.pki / "authority.pem",
    ).load(Role.RELAY)
    assert identity.identity.may_speak_for("client-5")
    assert not identity.identity.may_speak_for("client-6")
    elsewhere = replace(parties[1], clients=("client-0:9",), names=("gate.example.org", "far"))
    with pytest.raises(ConfigurationError, match=r"name far; .*--host far --clients client-0:9"):
        read_files(elsewhere, found)


def test_plan_creates_missing_containers_and_leaves_matching_ones() -> None:
    wanted = desired(inventory())
    images = {one.image: "i" for one in wanted}
    nothing = Observed(containers={}, images={})
    assert kinds(plan(wanted, nothing, images)) == [
        *(StepKind.PUT_IMAGE, StepKind.PUT_IMAGE, StepKind.CREATE, StepKind.CREATE)
    ]
    assert plan(wanted, observed(wanted), images) == []
    # Images from a registry: any version on the machine is accepted.
    assert plan(wanted, observed(wanted), {}) == []


@pytest.mark.parametrize(
    ("changed", "kind"),
    [
        ({"digest": "x"}, StepKind.REPLACE),
        ({"image": "j"}, StepKind.REPLACE),
        ({"configuration_digest": ""}, StepKind.RECONFIGURE),
        ({"tls_digest": "x"}, StepKind.REFRESH),
        ({"running": False, "state": "exited"}, StepKind.START),
        ({"digest": "x", "tls_digest": "x", "running": False}, StepKind.REPLACE),
    ],
)
def test_difference_of_a_container_determines_the_plan_step(
    changed: dict[str, Any], kind: StepKind
) -> None:
    wanted = desired(inventory())
    assert set(kinds(plan(wanted, observed(wanted, **changed), {}))) == {kind}


def test_container_missing_from_the_inventory_is_removed() -> None:
    wanted = desired(inventory())
    [step] = plan(wanted[:1], observed(wanted), {})
    assert (step.kind, step.subject) == (StepKind.REMOVE, "potluck-demo-gpu-1-a")


def test_unfinished_replacement_of_a_container_is_repeated() -> None:
    wanted = desired(inventory())
    found = dict(observed(wanted).containers)
    host = wanted[1]
    found[host.before] = replace(found[host.name], name=host.before, running=False)
    for containers in (found, {n: each for n, each in found.items() if n != host.name}):
        [step] = plan(wanted, Observed(containers=containers, images={}), {host.image: "i"})[-1:]
        assert (step.kind, step.subject) == (StepKind.REPLACE, host.name)
        assert step.why == "an earlier replacement was not finished"


def test_roll_out_starts_with_the_coordinator_and_relays() -> None:
    def step(kind: StepKind, subject: str) -> Step:
        return Step(kind=kind, subject=subject, why="")

    image = step(StepKind.PUT_IMAGE, "potluck/client:2")
    host_1, gone = step(StepKind.REPLACE, "host-1"), step(StepKind.REMOVE, "moved")
    coordinator, host_2 = step(StepKind.REPLACE, "c"), step(StepKind.CREATE, "host-2")
    relay, moved = step(StepKind.RECONFIGURE, "gate"), step(StepKind.CREATE, "moved")
    plans = {"one": [image, host_1, gone], "two": [coordinator, relay, host_2, moved]}
    hosts = dict.fromkeys(("host-1", "host-2", "moved"), Role.HOST)
    roles = {"c": Role.COORDINATOR, "gate": Role.RELAY, **hosts}
    assert roll_out_order(plans, roles) == [
        *(("one", gone), ("two", coordinator), ("two", relay)),
        *(("one", host_1), ("two", host_2), ("two", moved)),
    ]


def test_connection_event_is_found_in_both_log_formats() -> None:
    lines = '{"host": "a", "event": "attending", "level": "info"}\n'
    assert count_events("attending", "no such thing\n" + lines)
    assert count_events("attending", "2026-01-01T00:00:00Z [info     ] attending      host=a\n")
    assert not count_events(
        "attending", '{"event": "not connected", "cause": "none is attending"}\n'
    )
    assert not count_events("attending", "2026-01-01T00:00:00Z [warning  ] not attending\n")
    assert not count_events("attending", "")


def test_log_level_above_info_marks_a_container_as_quiet() -> None:
    assert [one.quiet for one in desired(with_host(settings={"log_level": "error"}))] == [
        *(False, True)
    ]


def test_changed_image_is_copied_and_its_containers_are_replaced() -> None:
    wanted = desired(inventory())
    images = {one.image: "new" for one in wanted}
    steps = plan(wanted, observed(wanted), images)
    assert kinds(steps) == [
        StepKind.PUT_IMAGE,
        StepKind.PUT_IMAGE,
        StepKind.REPLACE,
        StepKind.REPLACE,
    ]


def test_gpus_limits_and_data_folder_are_passed_to_the_engine() -> None:
    found = with_host(
        gpus=["1"], memory="16g", cpus=4, shared_memory="1g", data_directory="/srv/data"
    )
    [_, host] = desired(found)
    [request] = host.options["device_requests"]
    assert request["DeviceIDs"] == ["1"]
    assert host.options["mem_limit"] == 16 << 30
    assert host.options["nano_cpus"] == 4_000_000_000
    assert {mount["Target"]: mount.get("ReadOnly") for mount in host.options["mounts"]} == {
        "/etc/potluck": False,
        "/var/lib/potluck": False,
        "/data": True,
    }
    text = host.files.others["potluck.toml"].decode()
    assert parse(ClientConfig, text, source="there").device == "cuda:0"
    assert host.digest != desired(inventory())[1].digest


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"ssh://ops@gpu-1.example.org"', '"http://gpu-1"', "'machines.0.engine': must be ssh://"),
        ('"ssh://ops@gpu-1.example.org"', '"ssh://-oProxyCommand=x"', "must be ssh://"),
        ('"ssh://ops@gpu-1.example.org"', '"tcp://gpu-1:2376"', "needs its table `tls`"),
        ('machine = "gpu-1"', 'machine = "gpu-9"', "'gpu-9' is not one of the machines gpu-1"),
        ("gpus = []", 'gpus = ["all"]', "'all' is not the index or the UUID of a GPU"),
        ("gpus = []", "gpsu = []", "unknown key 'machines.0.hosts.0.gpsu' (did you mean 'gpus'?)"),
        ("gpu-1.example.org:7443", "gpu-1.example.org", "'address': must be HOST:PORT"),
        ("# data_directory =", 'data_directory = "data"', "must be an absolute path on that"),
        ("[machines.hosts.settings]", '[[machines.hosts]]\nname = "b"\nclients = ["client-5"]',
         "client 'client-5' is listed twice"),
        ("[machines.hosts.settings]", '[[machines.hosts]]\nname = "gpu-1-a"\nclients = ["c"]',
         "host or relay 'gpu-1-a' occurs 2 times"),
        ('"gpu-1-a"', '"coordinator"', "a host or relay can't be called 'coordinator'"),
        ('"gpu-1-a"', '"gpu-1-before"', "can't be called 'gpu-1-before', because -before marks"),
        ("# relay =", 'relay = "gate"', "'gate', which is not one of the relays (none)"),
        ("# [[machines.relays]]", '[[machines.relays]]\nname = "gate"\naddress = "gate:7443"',
         "relay 'gate' has no hosts; set"),
    ],
)  # fmt: skip
def test_inventory_mistakes_are_named_with_their_place(old: str, new: str, message: str) -> None:
    text = example_inventory()
    assert old in text
    last = "data_directory" in old  # replace the host's key, not the coordinator's
    text = new.join(text.rsplit(old, 1)) if last else text.replace(old, new, 1)
    with pytest.raises(ConfigurationError) as caught:
        inventory(text)
    assert message in caught.value.message
    assert "\n" not in caught.value.message


TEXTS = st.text(alphabet=string.printable, max_size=30)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=5,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path] if path else []
    items: list[tuple[Any, Any]] = list(value.items()) if isinstance(value, dict) else []
    items = list(enumerate(value)) if isinstance(value, list) else items
    return found + [each for key, inner in items for each in places(inner, (*path, key))]


@settings(deadline=None)
@given(data=st.data())
def test_any_inventory_value_is_accepted_or_refused_in_one_line(data: st.DataObject) -> None:
    document = tomlkit.parse(example_inventory()).unwrap()
    *path, last = data.draw(st.sampled_from(places(document)))
    inner = document
    for key in path:
        inner = inner[key]
    inner[last] = data.draw(VALUES)
    try:
        text = tomlkit.dumps(document)
    except (TypeError, ValueError):  # values that TOML can't represent
        return
    with contextlib.suppress(ConfigurationError):  # no other error is allowed
        found = inventory(text)
        for machine in found.machines:
            files = {party.name: PartyFiles(tls={}) for party in parties_on([machine], found)}
            assert all(one.digest for one in desired_on(machine, found, files))


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.binary(max_size=300))
def test_any_bytes_as_an_inventory_are_refused_in_one_line(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "federation.toml"
    path.write_bytes(content)
    with pytest.raises(ConfigurationError, match=r"federation\.toml"):
        load_inventory(path)


def test_missing_certificates_are_issued_once(tmp_path: Path) -> None:
    found = inventory().model_copy(update={"pki": tmp_path / "pki"})
    parties = parties_on(found.machines, found)
    assert [party.name for party in parties] == ["coordinator", "gpu-1-a"]
    assert len(issue_missing(parties, found)) == 2
    assert issue_missing(parties, found) == []
    assert missing(parties, found.pki) == []
    files = read_files(parties[0], found)
    assert set(files.tls) == {"certificate.pem", "key.pem", "authority.pem", "revoked.pem"}


@pytest.mark.parametrize(
    ("party", "message"),
    [
        (Party(name="gpu-1-a", role=Role.HOST, clients=("client-9",)),
         r"does not name client-9; issue a new certificate with .* --clients client-9 --force"),
        (Party(name="coordinator", role=Role.COORDINATOR, names=("elsewhere",)),
         r"does not name elsewhere; .* --host elsewhere --force"),
        (Party(name="coordinator", role=Role.HOST), "is for the role coordinator, but host is"),
    ],
)  # fmt: skip
def test_certificate_that_does_not_match_the_inventory_is_refused(
    tmp_path: Path, party: Party, message: str
) -> None:
    found = inventory().model_copy(update={"pki": tmp_path / "pki"})
    issue_missing(parties_on(found.machines, found), found)
    with pytest.raises((ConfigurationError, IdentityError), match=message):
        read_files(party, found)


def with_root(folder: Path) -> Inventory:
    document = tomlkit.parse(example_inventory()).unwrap()
    document |= {"pki": str(folder / "pki"), "federation_root": str(folder / "root")}
    return inventory(tomlkit.dumps(document))


def test_federation_root_provides_all_files_for_secure_sums(tmp_path: Path) -> None:
    found = with_root(tmp_path)
    parties = parties_on(found.machines, found)
    issue_missing(parties, found)
    create_root(tmp_path / "root", found.federation)
    [settings] = found.machines[0].hosts
    with pytest.raises(ConfigurationError, match=r"potluck pki member .* client-0 --host gpu-1-a"):
        read_files(parties[1], found)
    keys = add_members(tmp_path / "root", settings.clients, settings.name).keys
    files = {party.name: read_files(party, found) for party in parties}
    public = (tmp_path / "root" / "root.pub").read_bytes()
    assert {each.others["root.pub"] for each in files.values()} == {public}
    assert not any("root.key" in each.others for each in files.values())
    assert {tuple(each.others) for each in files.values()} == {("root.pub",)}
    names = {"members.json", *(f"members/{key.name}" for key in keys)}
    host, coordinator = files["gpu-1-a"].tls.keys(), files["coordinator"].tls.keys()
    assert {each for each in host if each.startswith("members")} == names
    assert {each for each in coordinator if each.startswith("members")} == {"members.json"}
    make_next_keys(tmp_path / "root", ["client-0"])
    assert read_files(parties[1], found).tls.keys() - host == {"members/next/client-0.key"}
    texts = [
        one.files.others["potluck.toml"].decode()
        for one in desired_on(found.machines[0], found, files)
    ]
    served = parse(CoordinatorConfig, texts[0], source="potluck.toml")
    client = parse(ClientConfig, texts[1], source="potluck.toml")
    for config in (served, client):
        assert config.federation_root == Path(CONFIGURATION, "root.pub")
        assert config.members == Path(CONFIGURATION, "tls", "members.json")
    assert client.member_key == Path(CONFIGURATION, "tls", "members")


def test_member_list_change_does_not_restart_containers(tmp_path: Path) -> None:
    found = with_root(tmp_path)
    parties = parties_on(found.machines, found)
    issue_missing(parties, found)
    create_root(tmp_path / "root", found.federation)
    [settings] = found.machines[0].hosts
    add_members(tmp_path / "root", settings.clients, settings.name)

    def desired() -> list[DesiredContainer]:
        files = {party.name: read_files(party, found) for party in parties}
        return desired_on(found.machines[0], found, files)

    before = desired()
    make_next_keys(tmp_path / "root", ["client-0"])
    add_members(tmp_path / "root", ["client-9"], "elsewhere")
    for old, new in zip(before, desired(), strict=True):
        assert new.configuration_digest == old.configuration_digest
        assert new.tls_digest != old.tls_digest


def test_root_of_another_federation_is_refused(tmp_path: Path) -> None:
    found = with_root(tmp_path)
    parties = parties_on(found.machines, found)
    issue_missing(parties, found)
    create_root(tmp_path / "root", "another")
    with pytest.raises(
        ConfigurationError, match="belongs to federation another, but the inventory"
    ):
        read_files(parties[0], found)


def test_certificate_without_its_private_key_on_this_machine_is_refused(tmp_path: Path) -> None:
    found = inventory().model_copy(update={"pki": tmp_path / "pki"})
    parties = parties_on(found.machines, found)
    issue_missing(parties, found)
    (found.pki / "gpu-1-a.key").unlink()
    with pytest.raises(
        ConfigurationError, match=r"is not on this machine, because host .* created it and keeps it"
    ):
        read_files(parties[1], found)


def test_certificates_of_another_federation_are_refused(tmp_path: Path) -> None:
    pki.create_authority(tmp_path / "pki", "other")
    found = inventory().model_copy(update={"pki": tmp_path / "pki"})
    parties = parties_on(found.machines, found)
    issue_missing(parties, found)
    with pytest.raises(
        PotluckError, match="belongs to federation other, but the inventory to federation demo"
    ):
        read_files(parties[0], found)


def test_image_fingerprint_depends_only_on_its_contents() -> None:
    image = {"Id": "a", "RootFS": {"Layers": ["x", "y"]}, "Config": {"Cmd": ["run"]}}
    assert fingerprint(image) == fingerprint(image | {"Id": "b"})
    assert fingerprint(image) != fingerprint(image | {"RootFS": {"Layers": ["x"]}})
    assert fingerprint(image) != fingerprint(image | {"Config": {"Cmd": ["other"]}})
    assert fingerprint({}) == fingerprint({"Config": None})
