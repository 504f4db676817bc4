"""Random histories of secure sums, and a solver that searches them for revealed inputs.

Clients are real state machines. The coordinator lies: it shows different clients different sets,
loses any client at any stage and leaves sessions unfinished. It has colluders that sign everything,
remember nothing and hand over all they hold. Meanwhile members join, leave and change their keys,
and the coordinator continues sessions of an older membership. Its view is linear: each masked
vector is an input plus masks, some of which it knows. Each combination in which the unknown masks
cancel must cover at least as many honest clients as a set's minimum.

For updates, the coordinator also chooses coefficients (each client's weight, up to the weight
bound), settings, and models so similar that a client's updates of both are equal.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import combinations
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.secure_sums import NOW, Federation, member_key

from potluck.common.net.membership import public_text
from potluck.secagg.protocol import (
    ClientPolicy,
    ClientSession,
    Envelope,
    Expectation,
    Header,
    Ledger,
    MessageType,
    Purpose,
    Situation,
    client,
    complete_thresholds,
    decode,
    encode,
)
from potluck.secagg.protocol.client import client_stages
from potluck.secagg.protocol.client.client_session import Shared
from potluck.secagg.protocol.primitives import sharing
from potluck.secagg.protocol.primitives.agreement import agree, open_pair, pair_seed, self_seed
from potluck.secagg.protocol.wire.messages import (
    Certificate,
    CertifiedSet,
    Consent,
    Delivery,
    Endorsement,
    Invitation,
    Reveal,
    RosterMessage,
    SealedShare,
    Secret,
    Shares,
    Survivors,
)
from potluck.secagg.protocol.wire.transcript import Roster, sharers_digest, sign, survivors_digest

PRIME = 2**61 - 1
SAMPLES = (120, 900, 340, 510, 700, 250, 430, 80, 610, 160, 820)
"""Number of samples of each client, in name order: its weight, up to the weight bound."""
Row = dict[Any, Any]
"""How often each input, and each mask, is in a vector.

An input is a client's label counts, or its update of a family of models, and the part of that
update that depends on one of its samples. Its key begins with the client.
"""
Set = frozenset[str]


def echelon(rows: Iterable[Row], columns: Sequence[Any], prime: int | None) -> dict[Any, Row]:
    """Return rows in echelon form, by their first column: modulo a prime, or in fractions for
    None."""
    place = {column: index for index, column in enumerate(columns)}
    pivots: dict[Any, Row] = {}
    for row in rows:
        left: Row = {c: v if prime else Fraction(v) for c, v in row.items() if c in place}
        while left:
            first = min(left, key=place.__getitem__)
            if first not in pivots:
                unit = pow(left[first], -1, prime) if prime else 1 / left[first]
                pivots[first] = {
                    c: v * unit % prime if prime else v * unit for c, v in left.items()
                }
                break
            factor = left[first]
            for c, v in pivots[first].items():
                value = left.get(c, 0) - factor * v
                left[c] = value % prime if prime else value
            left = {c: v for c, v in left.items() if v}
    return pivots


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The coordinator's actions in one session. The sets hold clients that are lost or excluded.

    update: family of models of the updates; None for label counts. model: index in the family,
    whose models are so similar that their updates are equal. run: number of the run. settings: 0,
    or the number of the client for which training treats one sample differently than settings 0
    do. weight_bound: maximum of a client's weight. deceived: clients that receive the second set of
    survivors. shown: True if the certificates of earlier sessions are sent along. held: True if no
    client receives a set for now. resumed: True if earlier sessions are continued. members: index
    in `MEMBERSHIPS` of the newest one that the root has signed; an older one never returns.
    """

    update: int | None = None
    model: int = 0
    run: int = 1
    settings: int = 0
    weight_bound: int = 1000
    away: Set = frozenset()
    unshared: Set = frozenset()
    unsent: Set = frozenset()
    dead: Set = frozenset()
    deceived: Set = frozenset()
    dead_for_deceived: Set = frozenset()
    unasked: Set = frozenset()
    restarted: Set = frozenset()
    shown: bool = False
    held: bool = False
    resumed: bool = False
    members: int = 0


@dataclass(frozen=True, kw_only=True)
class Change:
    """A membership: number of key rotations by client, and the clients that are not members."""

    rotated: Mapping[str, int] = field(default_factory=dict)
    strangers: Set = frozenset()


MEMBERSHIPS = (
    Change(),
    Change(rotated={"a": 1}),
    Change(rotated={"a": 1}, strangers=frozenset("b")),
    Change(rotated={"a": 2, "c": 1}, strangers=frozenset("d")),
)
"""Memberships by epoch: keys change, then a member leaves, then it returns and another leaves."""


@dataclass
class World:
    """Clients with their ledgers, and all that a coordinator and its colluders have seen.

    limits: the owners' limits on runs and rounds.
    """

    clients: int
    colluders: int
    least_hosts: int = 4
    limits: Mapping[str, Any] = field(default_factory=dict)
    ledgers: dict[str, Ledger] = field(default_factory=dict)
    live: dict[str, dict[bytes, ClientSession]] = field(default_factory=lambda: defaultdict(dict))
    vectors: list[tuple[Row, set[bytes]]] = field(default_factory=list)
    known: set[bytes] = field(default_factory=set)
    certified: list[CertifiedSet] = field(default_factory=list)
    sums: int = 0
    attacks: list[Attack] = field(default_factory=list)

    def __post_init__(self) -> None:
        policy = ClientPolicy(
            least_hosts=self.least_hosts,
            colluding_hosts=self.colluders,
            disclosures=frozenset({"cells", "update"}),
            **self.limits,
        )
        self.federations = {
            (purpose, epoch): Federation(
                clients=self.clients,
                purpose=purpose,
                policy=policy,
                epoch=epoch + 1,
                rotated=change.rotated,
                strangers=change.strangers,
            )
            for purpose in (Purpose.HISTOGRAM, Purpose.UPDATE)
            for epoch, change in enumerate(MEMBERSHIPS)
        }
        self.members = 0
        self.names = self.federations[Purpose.HISTOGRAM, 0].names
        self.colluding = frozenset(self.names[self.clients - self.colluders :])
        self.honest = [name for name in self.names if name not in self.colluding]
        self.begun = 0

    def situation(self, name: str) -> Situation:
        self.begun += 1
        seed = self.begun.to_bytes(8, "little")

        def random(size: int) -> bytes:
            return hashlib.shake_256(seed + name.encode()).digest(size)

        ledger = Ledger() if name in self.colluding else self.ledgers.get(name, Ledger())
        return Situation(now=NOW, random=random, ledger=ledger, revoked=self.revoked)

    @property
    def revoked(self) -> frozenset[tuple[str, str]]:
        """Keys of former members; keys that were only rotated do not count."""
        return frozenset(
            (name, public_text(member_key(name, generation)))
            for name in MEMBERSHIPS[self.members].strangers
            for generation in range(3)
        )

    def forget(self, names: Iterable[str]) -> None:
        """Restart the clients' hosts: they lose their sessions and keep their ledgers."""
        for name in names:
            self.live[name].clear()

    def follow(self, plan: Plan) -> None:
        """Play one session, as far as the clients take part."""
        self.forget(plan.restarted)
        self.members = max(self.members, plan.members)
        attack = Attack(self, plan)
        attack.collect()
        for each in [*(self.attacks if plan.resumed else []), *([] if plan.held else [attack])]:
            each.finish(plan)
        self.attacks.append(attack)

    def found(self, prime: int | None = PRIME) -> list[Set]:
        """Return the groups of honest clients that are too small, and whose sum a combination
        reveals."""
        masks = sorted({seed for _, seeds in self.vectors for seed in seeds} - self.known)
        inputs = sorted({c for row, _ in self.vectors for c in row if isinstance(c, tuple)})
        rows = [{c: v for c, v in row.items() if c not in self.known} for row, _ in self.vectors]
        free = [row for c, row in echelon(rows, [*masks, *inputs], prime).items() if c in inputs]
        least = self.least_hosts - self.colluders
        groups = []
        for few in combinations(self.honest, least - 1):
            rest = [c for c in inputs if c[0] not in few]
            within = [c for c in inputs if c[0] in few]
            if any(c in within for c in echelon(free, [*rest, *within], prime)):
                groups.append(frozenset(few))
        return groups


class Attack:
    """One session of a lying coordinator."""

    def __init__(self, world: World, plan: Plan) -> None:
        self.world, self.plan = world, plan
        purpose = Purpose.HISTOGRAM if plan.update is None else Purpose.UPDATE
        self.federation = world.federations[purpose, world.members]
        out = plan.away | self.federation.strangers
        self.invited = [name for name in world.names if name not in out]
        hosts = [self.federation.hosts[name] for name in self.invited]
        sizes = complete_thresholds(hosts, world.colluders)
        of_update = {}
        if plan.update is not None:
            of_update = {
                "model_digest": bytes([plan.update, plan.model]) * 16,
                "training_sha256": bytes([plan.settings]) * 32,
                "weight_bound": plan.weight_bound,
            }
        self.header: Header = self.federation.header(
            session_id=world.begun.to_bytes(16, "big"),
            run=f"run-{plan.run}",
            colluding_hosts=world.colluders,
            threshold=sizes.threshold,
            quorum=sizes.quorum,
            **of_update,
        )
        self.sessions: dict[str, ClientSession] = {}
        self.shares: dict[tuple[str, Secret], dict[int, int]] = defaultdict(dict)
        self.sharers: tuple[str, ...] = ()
        self.uploaded: list[str] = []

    def tell(self, name: str, kind: MessageType, message: Any) -> Envelope | None:
        """Return a client's answer; None if it refuses or no longer has the session."""
        world = self.world
        session_id = self.header.session_id
        envelope = Envelope(kind, encode(message))
        if kind is MessageType.INVITATION:
            others = [] if name in world.colluding else list(world.live[name].values())
            step = client.begin(
                self.federation.parties[name],
                envelope,
                self._expected(),
                world.situation(name),
                others=others,
            )
            for each in step.superseded:
                world.live[name].pop(each, None)
        elif name not in self.sessions or session_id not in world.live[name]:
            return None
        else:
            step = client.handle(self.sessions[name], envelope, world.situation(name))
        self.sessions[name] = world.live[name][session_id] = step.session
        ledger = world.ledgers.get(name, Ledger())
        world.ledgers[name] = ledger.with_entries(step.entries)
        if step.session.over:
            world.live[name].pop(session_id, None)
        return step.replies[0] if step.replies and step.refusal is None else None

    def _expected(self) -> Expectation:
        if self.plan.update is None:
            return self.federation.expected(self.header)
        settings = self.header.training_sha256
        return self.federation.expected(
            self.header, settings_sha256=settings, data="updates/epoch 1"
        )

    def tell_all(
        self, names: Iterable[str], kind: MessageType, message: Any
    ) -> dict[str, Envelope]:
        answers = {name: self.tell(name, kind, message) for name in names}
        return {name: answer for name, answer in answers.items() if answer is not None}

    def collect(self) -> None:
        """Have clients upload."""
        plan, world, session_id = self.plan, self.world, self.header.session_id
        certified = tuple(world.certified) if plan.shown else ()
        invitation = Invitation(encode(self.header), certified)
        adverts = self.tell_all(self.invited, MessageType.INVITATION, invitation)
        roster_message = RosterMessage(session_id, tuple(adverts[name] for name in sorted(adverts)))
        answers = self.tell_all(adverts, MessageType.ROSTER, roster_message)
        shared = {
            name: {each.client: each.ciphertext for each in decode(Shares, answer.payload).shares}
            for name, answer in answers.items()
            if name not in plan.unshared
        }
        sharers = tuple(sorted(shared))
        if not sharers:
            return
        self.sharers = sharers
        state = self.sessions[sharers[0]].state
        assert isinstance(state, Shared)
        self.roster: Roster = state.roster
        self.sharers_sha256 = sharers_digest(self.roster.digest, sharers)
        for name in world.colluding.intersection(sharers):
            self._collude(name, shared)
        for name in sharers:
            if name in plan.unsent:
                continue
            sealed = [SealedShare(other, shared[other][name]) for other in sharers if other != name]
            self.tell(name, MessageType.DELIVERY, Delivery(session_id, sharers, tuple(sealed)))
            masking = self.sessions[name].masking
            if masking is not None:
                self._see(name, masking.masks)
                self.uploaded.append(name)
                step = client.uploaded(self.sessions[name], bytes(32))
                self.sessions[name] = world.live[name][session_id] = step.session

    def finish(self, plan: Plan) -> None:
        """Have clients give their shares."""
        uploaded = self.uploaded
        if not uploaded:
            return
        others = [name for name in uploaded if name not in plan.deceived]
        self._unmask(plan, others, [name for name in uploaded if name not in plan.dead])
        second = [name for name in uploaded if name not in plan.dead_for_deceived]
        self._unmask(plan, [name for name in uploaded if name in plan.deceived], second)
        self._learn()

    def _collude(self, name: str, shared: Mapping[str, Mapping[str, bytes]]) -> None:
        """Add a colluder's knowledge: its own masks, and a share of both secrets of all clients."""
        state = self.sessions[name].state
        assert isinstance(state, Shared)
        people, number = self.roster.participants, self.roster.participants[name].number
        pairs = {name: state.own_pair}
        for other, sealed in shared.items():
            if other != name:
                pairs[other] = open_pair(
                    sealed[name],
                    state.channels[other],
                    self.roster.digest,
                    people[other].number,
                    number,
                )
        for owner, pair in pairs.items():
            self.shares[owner, Secret.SEED][number] = sharing.from_bytes(pair.seed_share)
            self.shares[owner, Secret.MASK_KEY][number] = sharing.from_bytes(pair.mask_key_share)
        self._know(name, Secret.SEED, state.keys.seed)
        self._know(name, Secret.MASK_KEY, state.keys.mask_key.private_bytes_raw())

    def _see(self, name: str, masks: Mapping[str, Sequence[Any]]) -> None:
        """Record a masked vector: the input of a client, and the vector's masks."""
        if name in self.world.colluding:
            return
        plan, place = self.plan, self.world.names.index(name)
        row: Row = {(name, -1, 0): 1}
        if plan.update is not None:
            weight = min(SAMPLES[place], plan.weight_bound)
            row = {(name, plan.update, 0): weight}
            if plan.settings == place + 1:
                row[name, plan.update, plan.settings] = weight
        for mask in masks[self.header.vectors[0].name]:
            row[mask.seed] = row.get(mask.seed, 0) + (-1 if mask.negative else 1)
        self.world.vectors.append((row, {c for c in row if isinstance(c, bytes)}))

    def _unmask(self, plan: Plan, group: Sequence[str], told: Sequence[str]) -> None:
        """Send a group a set; colluders consent to any set."""
        world, session_id = self.world, self.header.session_id
        survivors = tuple(sorted({*told, *world.colluding.intersection(self.roster.participants)}))
        digest = survivors_digest(self.sharers_sha256, survivors)
        consent = encode(Consent(self.roster.digest, self.sharers_sha256, digest))
        asked = [name for name in group if name not in world.colluding]
        answers = self.tell_all(asked, MessageType.SURVIVORS, Survivors(session_id, survivors))
        signed = {name: answer.signature for name, answer in answers.items()}
        for name in world.colluding.intersection(survivors):
            key = self.federation.parties[name].key
            signed[name] = sign(key, MessageType.CONSENT, consent).signature
        endorsements = tuple(Endorsement(name, signed[name]) for name in sorted(signed))
        if len(endorsements) >= self.header.quorum:
            world.certified.append(CertifiedSet(session_id, survivors, endorsements))
        revealing = [name for name in answers if name not in plan.unasked]
        certificate = Certificate(session_id, endorsements)
        for name, answer in self.tell_all(revealing, MessageType.CERTIFICATE, certificate).items():
            number = self.roster.participants[name].number
            for each in decode(Reveal, answer.payload).shares:
                self.shares[each.owner, each.secret][number] = sharing.from_bytes(each.share)

    def _learn(self) -> None:
        """Rebuild every secret of which there are enough shares."""
        enough = self.header.threshold
        rebuilt = 0
        for (owner, kind), shares in list(self.shares.items()):
            if owner in self.sharers and len(shares) >= enough:
                secret = sharing.combine(dict(list(shares.items())[:enough]))
                assert secret is not None
                self._know(owner, kind, secret)
                rebuilt += 1
        self.world.sums += rebuilt >= len(self.sharers)

    def _know(self, owner: str, kind: Secret, secret: bytes) -> None:
        people, vector = self.roster.participants, self.header.vectors[0].name
        number, known = people[owner].number, self.world.known
        if kind is Secret.SEED:
            known.add(self_seed(secret, self.sharers_sha256, number, vector))
            return
        private = X25519PrivateKey.from_private_bytes(secret)
        for other, person in people.items():
            if other != owner:
                agreed = agree(private, person.advert.mask_key)
                known.add(pair_seed(agreed, self.sharers_sha256, number, person.number, vector))


def played(plans: Sequence[Plan], clients: int, colluders: int, **limits: int) -> World:
    world = World(clients, colluders, limits=limits)
    for plan in plans:
        world.follow(plan)
    return world


def check(world: World) -> None:
    groups = world.found()
    if groups:
        groups = world.found(prime=None)  # exact fractions, not modulo a prime
    assert groups == []


def but(names: str, *of: str) -> Set:
    return frozenset("".join(of)) - frozenset(names)


ELEVEN = "abcdefghijk"
SEVEN = "abcdefg"
OVERLAPPING = [Plan(away=but("abcde", ELEVEN)), Plan(away=but("fghij", ELEVEN)), Plan()]
"""Sums over two halves and over all clients. One client is in neither half, so the sums reveal its
counts."""
TWICE = [Plan(update=1, away=frozenset("f")), Plan(update=1)]
"""Two sums of the same training; the second one includes one more client."""
UNASKED = [
    Plan(update=1, unasked=frozenset("a"), dead=frozenset("c")),
    Plan(update=1, dead=frozenset("d")),
]
"""Two sums of the same training; in the first, client a uploads, but is not asked for shares."""


@pytest.mark.parametrize(
    ("plans", "clients", "colluders"),
    [
        pytest.param(OVERLAPPING, 11, 0, id="overlapping totals"),
        pytest.param(TWICE, 7, 1, id="the same training twice"),
        pytest.param(UNASKED, 7, 1, id="uploaded and not asked"),
    ],
)
def test_solver_finds_inputs_revealed_by_clients_without_a_ledger(
    plans: Sequence[Plan], clients: int, colluders: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(played(plans, clients, colluders))
    monkeypatch.setattr(client_stages, "_check_group", lambda *_: None)
    monkeypatch.setattr(client_stages, "_check_set", lambda *_: None)
    world = played(plans, clients, colluders)
    assert world.sums == len(plans)
    assert world.found()
    assert world.found(prime=None) == world.found()


@pytest.mark.parametrize("members", [1, 2, 3])
def test_new_membership_does_not_allow_a_second_sum_of_the_same_training(members: int) -> None:
    """The same training is refused after members left, joined or changed their keys."""
    world = played([Plan(update=1, away=frozenset("e")), Plan(update=1, members=members)], 7, 1)
    assert world.sums == 1
    check(world)


def test_sums_of_new_trainings_continue_with_new_members() -> None:
    history = [Plan(update=members, members=members) for members in range(len(MEMBERSHIPS))]
    world = played(history, 7, 1)
    assert world.sums == len(history)
    check(world)


def test_permitted_sums_are_completed() -> None:
    world = played([Plan(), Plan(), Plan(update=1, away=frozenset("a")), Plan(update=2)], 7, 1)
    assert world.sums == 4
    check(world)


# Runs and rounds over the same data ---------------------------------------------------------------


SECOND_RUNS = {
    "one client less": Plan(update=1, run=2, away=frozenset("f")),
    "one sample trained on otherwise": Plan(update=1, run=2, settings=3),
    "a bound on the weight of one client": Plan(update=1, run=2, weight_bound=700),
}
"""Second runs by their difference from the first run, which has all clients, default settings and a
weight bound above all weights."""


@pytest.mark.parametrize("second", SECOND_RUNS.values(), ids=SECOND_RUNS.keys())
@pytest.mark.parametrize("model", [0, 1], ids=["the same model", "a model beside it"])
@pytest.mark.parametrize("runs", [1, 2])
def test_second_run_over_the_same_data_reveals_a_client_only_if_owners_allow_it(
    second: Plan, model: int, runs: int
) -> None:
    """The same model is refused in any case: a vector goes into only one set."""
    plans = [Plan(update=1), replace(second, model=model)]
    world = played(plans, 7, 0, runs_per_epoch=runs)
    if runs == 1 or model == 0:
        assert world.sums == 1
        check(world)
    else:
        assert world.sums == 2
        assert world.found(prime=None)


@pytest.mark.parametrize("rounds", [1, 2])
@pytest.mark.parametrize("away", ["", "f"], ids=["the same clients", "one client less"])
def test_rounds_with_an_unchanged_model_reveal_a_client_only_by_different_cohorts(
    rounds: int, away: str
) -> None:
    """An operator may choose steps so small that all models of a run are alike."""
    plans = [Plan(update=1), Plan(update=1, model=1, away=frozenset(away))]
    world = played(plans, 7, 0, rounds_per_epoch=rounds)
    assert world.sums == rounds
    if rounds == 1 or not away:
        check(world)
    else:  # masks promise nothing over several rounds
        assert world.found(prime=None)


@pytest.mark.parametrize(
    "changed",
    [Plan(update=1, model=1, settings=3), Plan(update=1, model=1, weight_bound=700)],
)
def test_round_with_settings_other_than_those_of_the_first_round_gives_no_sum(
    changed: Plan,
) -> None:
    plans = [Plan(update=1), changed]
    world = played(plans, 7, 0, runs_per_epoch=9)
    assert world.sums == 1
    check(world)


few = st.frozensets(st.sampled_from(SEVEN), max_size=2)
some = st.frozensets(st.sampled_from(SEVEN), max_size=4)
plans = st.builds(
    Plan,
    update=st.sampled_from([None, None, 1, 1, 2]),
    away=few,
    unshared=st.one_of(st.just(frozenset()), few),
    unsent=st.one_of(st.just(frozenset()), few),
    dead=few,
    deceived=st.one_of(st.just(frozenset()), some),
    dead_for_deceived=few,
    unasked=some,
    restarted=few,
    shown=st.booleans(),
    held=st.sampled_from([False, False, True]),
    resumed=st.booleans(),
    members=st.sampled_from([0, 0, 0, 1, 2, 3]),
)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("colluders", [0, 1, 2])
@settings(
    max_examples=300,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(history=st.lists(plans, min_size=2, max_size=4))
def test_no_history_of_sums_reveals_fewer_clients_than_the_minimum(
    history: list[Plan], colluders: int
) -> None:
    check(played(history, 7, colluders))


runs = st.builds(
    lambda of, **choices: Plan(update=of[0], run=of[1], model=of[2], **choices),
    # (family, run, model): each run has its own model of family 1; both have the same of family 2.
    st.sampled_from([(1, 1, 0), (1, 2, 1), (2, 1, 0), (2, 2, 0)]),
    settings=st.sampled_from([0, 0, 1, 3]),
    weight_bound=st.sampled_from([1000, 700, 300]),
    away=few,
    unsent=st.one_of(st.just(frozenset()), few),
    dead=few,
    restarted=few,
    held=st.sampled_from([False, False, True]),
    resumed=st.booleans(),
)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("colluders", [0, 1])
@settings(
    max_examples=60,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(history=st.lists(runs, min_size=3, max_size=6))
def test_no_runs_within_the_limits_reveal_fewer_clients_than_the_minimum(
    history: list[Plan], colluders: int
) -> None:
    check(played(history, 7, colluders))
