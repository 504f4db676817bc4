"""Successful attacks that secure sums do not prevent, as docs/security/threat-model.md states."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from numpy.typing import NDArray
from support.secure_sums import COUNTS, Federation, Run, member_key

from potluck.secagg.protocol import Envelope, MessageType, Rule, decode, encode
from potluck.secagg.protocol.coordinator.coordinator_session import Consenting
from potluck.secagg.protocol.primitives import sharing
from potluck.secagg.protocol.primitives.agreement import agree, pair_seed, self_seed
from potluck.secagg.protocol.primitives.masks import Mask, add_masks
from potluck.secagg.protocol.wire.messages import (
    Certificate,
    Consent,
    Endorsement,
    Reveal,
    Secret,
    Stage,
    Survivors,
)
from potluck.secagg.protocol.wire.transcript import sign, survivors_digest

CLIENTS = "abcdefghij"
VICTIM = "a"


@dataclass
class TwoViews:
    """Coordinator that sends two groups of honest clients two sets, as if the others were lost.

    Its colluders consent to both sets. For a client in only one set, the coordinator learns both
    secrets: the seed from one group, the mask key from the other.
    """

    colluders: str
    shares: dict[tuple[str, Secret], dict[int, int]] = field(
        default_factory=lambda: defaultdict(dict)
    )
    refusals: list[Rule] = field(default_factory=list)

    def __post_init__(self) -> None:
        run = self.run = Federation(clients=10).run().until(Stage.CONSENT)
        state = run.session.state
        assert isinstance(state, Consenting)
        self.state, self.people = state, state.roster.participants
        honest = [name for name in CLIENTS if name not in self.colluders]
        for name in self.colluders:
            self._collude(name)
        for group in (honest[: len(honest) // 2], honest[len(honest) // 2 :]):
            self._deceive(group)

    def _collude(self, name: str) -> None:
        """Add all that a colluder holds: shares of both secrets of all clients."""
        held = self.run.sessions[name].state.view.held  # type: ignore[union-attr]
        for owner, pair in held.items():
            number = self.people[name].number
            self.shares[owner, Secret.SEED][number] = sharing.from_bytes(pair.seed_share)
            self.shares[owner, Secret.MASK_KEY][number] = sharing.from_bytes(pair.mask_key_share)

    def _deceive(self, group: list[str]) -> None:
        run, state = self.run, self.state
        told = tuple(sorted([*group, *self.colluders]))
        digest = survivors_digest(state.sharers_sha256, told)
        consent = encode(Consent(state.roster.digest, state.sharers_sha256, digest))
        signed = {
            name: sign(member_key(name), MessageType.CONSENT, consent).signature
            for name in self.colluders
        }
        question = encode(Survivors(run.header.session_id, told))
        for name in group:
            step = run.tell(name, Envelope(MessageType.SURVIVORS, question))
            if step.refusal is not None:
                self.refusals.append(step.refusal.rule)
                return
            run.sessions[name] = step.session
            signed[name] = step.replies[0].signature
        endorsements = tuple(Endorsement(name, signed[name]) for name in sorted(signed))
        proof = encode(Certificate(run.header.session_id, endorsements))
        for name in group:
            step = run.tell(name, Envelope(MessageType.CERTIFICATE, proof))
            assert step.refusal is None
            for each in decode(Reveal, step.replies[0].payload).shares:
                shares = self.shares[each.owner, each.secret]
                shares[self.people[name].number] = sharing.from_bytes(each.share)

    def unmasked(self, name: str) -> NDArray[Any] | None:
        """Return a client's own vector, from the shares shown; None if they are too few."""
        seed, key = (self._secret(name, kind) for kind in (Secret.SEED, Secret.MASK_KEY))
        if seed is None or key is None:
            return None
        number, sharers = self.people[name].number, self.state.sharers_sha256
        masks = [Mask(self_seed(seed, sharers, number, COUNTS.name), negative=True)]
        private = X25519PrivateKey.from_private_bytes(key)
        for other, person in self.people.items():
            if other != name:
                secret = agree(private, person.advert.mask_key)
                found = pair_seed(secret, sharers, number, person.number, COUNTS.name)
                masks.append(Mask(found, negative=number < person.number))
        words = self.run.uploads[name][COUNTS.name].copy()
        add_masks(words, masks, first=0, cipher=self.run.header.cipher)
        return words

    def _secret(self, name: str, kind: Secret) -> bytes | None:
        shares, enough = self.shares[name, kind], self.run.header.threshold
        return (
            sharing.combine(dict(list(shares.items())[:enough])) if len(shares) >= enough else None
        )


def test_more_colluders_than_assumed_unmask_a_single_client() -> None:
    """Four of ten hosts, where three are assumed to collude."""
    attack = TwoViews(colluders="ghij")
    found = attack.unmasked(VICTIM)
    assert found is not None
    assert np.array_equal(found, attack.run.plain[VICTIM][COUNTS.name])


@pytest.mark.parametrize("colluders", ["hij", "j", ""])
def test_assumed_number_of_colluders_unmasks_no_client(colluders: str) -> None:
    attack = TwoViews(colluders=colluders)
    assert Rule.TOO_FEW in attack.refusals  # two quorums would share an honest client
    assert all(attack.unmasked(name) is None for name in CLIENTS if name not in colluders)


def test_coordinator_with_the_federation_root_unmasks_a_client_among_fake_members() -> None:
    """The coordinator knows the inputs of its fake members, so the sum reveals the real one."""
    run: Run = Federation(clients=6).run().finish()  # b to f are fake members
    assert run.is_exact()
    made_up = run.true_sum("bcdef")[COUNTS.name]
    found = run.total()[COUNTS.name] - made_up
    assert np.array_equal(found, run.plain[VICTIM][COUNTS.name])
