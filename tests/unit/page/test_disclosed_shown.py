"""Label mixes and spent privacy, computed from the coordinator's disclosures."""

from support.operator_service import committed, member

from potluck.common.records.round_message import round_of
from potluck.page.disclosed_shown import shown_disclosures, shown_mix
from potluck.page.hosts_shown import shown_hosts
from potluck.rpc.v1 import operator_pb2
from potluck.rpc.v1.operator_pb2 import MemberState

PROFILES = [
    operator_pb2.ClientProfile(client_id="client-0", samples=4, label_counts=[4.0, 0.0]),
    operator_pb2.ClientProfile(client_id="client-1", samples=4, label_counts=[-1.0, 4.0]),
    operator_pb2.ClientProfile(client_id="client-2", samples=4),
]


def test_label_mix_of_a_cohort_is_the_sum_over_its_clients() -> None:
    lost = member(1, MemberState.MEMBER_STATE_LOST)
    rounds = [
        committed(1, 0.5, member(0), lost),
        committed(2, 0.5, member(0), member(2)),
        committed(3, 0.5, member(2)),
    ]
    mix = shown_mix([round_of(each.committed) for each in rounds], 2, PROFILES)
    assert (mix.clients, mix.disclosed, mix.federation) == (3, 2, [0.5, 0.5])
    first, second, third = mix.rounds
    assert (first.selected, first.included, first.entropy) == ([0.5, 0.5], [1.0, 0.0], 1.0)
    assert (second.selected, second.entropy) == ([1.0, 0.0], 0.0)
    assert (third.selected, third.entropy) == (None, None)


def test_label_mix_is_empty_without_disclosed_label_counts() -> None:
    mix = shown_mix([round_of(committed(1, 0.5).committed)], 2, PROFILES[2:])
    assert (mix.clients, mix.disclosed, mix.federation, mix.rounds) == (1, 0, None, [])


def test_spent_privacy_is_summed_over_secure_sums_and_releases() -> None:
    sums = [
        operator_pb2.AuditedSum(
            released=True, epsilon=0.5, hosts={"client-0": "host-0", "client-10": "host-1"}
        ),
        operator_pb2.AuditedSum(released=False, epsilon=9.0, hosts={"client-2": "host-0"}),
    ]
    profile = operator_pb2.AuditedProfile(
        client_id="client-2", signal="label_counts", data_epoch=3, epsilon=1.25
    )
    audit = operator_pb2.AuditDisclosuresResponse(sums=sums, profiles=[profile])
    found = shown_disclosures([], 2, PROFILES, [audit], "")
    assert found.roster == ["client-0", "client-1", "client-2"]
    privacy = found.privacy
    assert [(each.client, each.epsilon, each.sums) for each in privacy.clients] == [
        ("client-0", 0.5, 1),
        ("client-2", 1.25, 0),
        ("client-10", 0.5, 1),
    ]
    assert privacy.clients[1].disclosed == ["label_counts (epoch 3)"]
    assert privacy.clients[0].least_hosts == 2
    assert (privacy.largest, privacy.median) == (1.25, 0.5)
    assert (privacy.sums_released, privacy.sums_aborted) == (1, 1)
    assert privacy.holds_against.startswith("an honest-but-curious coordinator only")


def test_host_list_groups_clients_and_shows_connected_hosts_first() -> None:
    def client(number: int, host: str, **values: object) -> operator_pb2.ClientStatus:
        found = operator_pb2.ClientStatus(client_id=f"client-{number}", host_id=host, **values)  # type: ignore[arg-type]  # by name
        found.last_seen.seconds = 1000 + number
        return found

    clients = [
        client(2, "host-1", device="cpu"),
        client(10, "host-0", attending=True, device="cuda:0 (H100)", software_version="0.1.0"),
        client(9, "host-0", attending=True, quarantined=True, quarantine_reason="odd"),
    ]
    clients[1].tags["site"] = "Lund"
    found = shown_hosts(clients)
    assert [host.host for host in found.hosts] == ["host-0", "host-1"]
    first = found.hosts[0]
    assert (first.device, first.version, first.tags) == ("cuda:0 (H100)", "0.1.0", "site=Lund")
    assert [(each.client, each.note) for each in first.clients] == [
        ("client-9", "in quarantine: odd"),
        ("client-10", ""),
    ]
    assert found.summary == "1 host with 2 clients connected, 1 disconnected, 1 in quarantine"
