"""The coordinator's last step: secrets rebuilt from shares, and masks removed with them.

Every rebuilt secret is checked against its owner's advert. If that fails and there are more shares
than needed, all shares are decoded, so that a few wrong shares do no harm. The origin of a wrong
share can't be proven: its holder may have changed it, or its owner may have sent a wrong one. So
each wrong share gives a pair of owner and holder. Of each pair, the client that is in more pairs
becomes a suspect; in a tie, both do. If the shares of a secret can't be decoded, its owner and all
holders are suspects.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from potluck.secagg.protocol.primitives import sharing
from potluck.secagg.protocol.primitives.agreement import (
    agree,
    commitment,
    pair_seed,
    public_bytes,
    self_seed,
)
from potluck.secagg.protocol.primitives.masks import Mask, Words, add_masks
from potluck.secagg.protocol.primitives.share_decoding import decodings
from potluck.secagg.protocol.rules import BrokenRuleError, Rule
from potluck.secagg.protocol.wire.messages import Header, Reveal
from potluck.secagg.protocol.wire.transcript import Participant, Roster


class ReconstructionError(BrokenRuleError):
    """Raised if shares don't give the secret that its owner committed to.

    Either the owner sent wrong shares, or at least ⌊(m − t) / 2⌋ + 1 of the m holders of revealed
    shares did. suspects: the owner, then these holders.
    """

    def __init__(self, owner: str, holders: Collection[str], threshold: int) -> None:
        least = (len(holders) - threshold) // 2 + 1
        super().__init__(
            Rule.RECONSTRUCTION,
            f"the shares of client {owner!r} don't give the secret of this client; the client or "
            f"at least {least} of the {len(holders)} holders of these shares sent wrong ones",
        )
        self.suspects = (owner, *sorted(set(holders) - {owner}))


@dataclass(frozen=True, kw_only=True)
class Unmasking:
    """The masks in the sum of the survivors' vectors.

    masks: masks by vector. suspects: clients suspected of wrong shares; the sum is right
    nevertheless.
    """

    header: Header
    survivors: tuple[str, ...]
    participants: int
    masks: Mapping[str, tuple[Mask, ...]] = field(repr=False)
    suspects: tuple[str, ...] = ()

    def remove(self, vector: str, words: Words, first: int = 0) -> None:
        """Unmask words [first, first + words.size) of a vector's sum, in place.

        words: the sum modulo the vector's modulus over the uploads of exactly `survivors`. Safe for
        disjoint slices in several threads.
        """
        add_masks(words, self.masks[vector], first=first, cipher=self.header.cipher)


def unmask(
    roster: Roster,
    sharers_sha256: bytes,
    sharers: Sequence[str],
    survivors: Sequence[str],
    reveals: Mapping[str, Reveal],
) -> Unmasking:
    """Return the masks to remove, rebuilt from the clients' reveals, whose form has been checked.

    Raises ReconstructionError.
    """
    secrets, suspects = _rebuild_all(roster, sharers, survivors, reveals)
    vectors = [vector.name for vector in roster.header.vectors]
    masks: dict[str, list[Mask]] = {vector: [] for vector in vectors}
    alive = frozenset(survivors)
    for owner in sharers:
        who, secret = roster.participants[owner], secrets[owner]
        if owner in alive:
            for vector in vectors:
                seed = self_seed(secret, sharers_sha256, who.number, vector)
                masks[vector].append(Mask(seed, negative=True))
            continue
        private = X25519PrivateKey.from_private_bytes(secret)
        for other in sorted(roster.neighbours[owner] & alive):
            partner = roster.participants[other]
            shared = agree(private, partner.advert.mask_key)
            for vector in vectors:
                seed = pair_seed(shared, sharers_sha256, who.number, partner.number, vector)
                added = Mask(seed, negative=partner.number > who.number)
                masks[vector].append(added.opposite)
    return Unmasking(
        header=roster.header,
        survivors=tuple(survivors),
        participants=len(roster.participants),
        masks={vector: tuple(removed) for vector, removed in masks.items()},
        suspects=tuple(sorted(suspects)),
    )


def fewest_shares(sharers: Sequence[str], reveals: Mapping[str, Reveal]) -> int:
    """Return the smallest number of shares that any sharer's secret has."""
    counts = dict.fromkeys(sharers, 0)
    for reveal in reveals.values():
        for each in reveal.shares:
            counts[each.owner] += 1
    return min(counts.values())


def _rebuild_all(
    roster: Roster,
    sharers: Sequence[str],
    survivors: Sequence[str],
    reveals: Mapping[str, Reveal],
) -> tuple[dict[str, bytes], set[str]]:
    shares: dict[str, dict[int, int]] = {owner: {} for owner in sharers}
    for client, reveal in reveals.items():
        number = roster.participants[client].number
        for each in reveal.shares:
            shares[each.owner][number] = sharing.from_bytes(each.share)
    names = {each.number: client for client, each in roster.participants.items()}
    alive, doubtful = frozenset(survivors), set[int]()
    pairs: list[tuple[str, str]] = []
    secrets = {}
    for owner in sharers:
        who = roster.participants[owner]
        rebuilt = _rebuild(roster, who, shares[owner], owner in alive, doubtful)
        if rebuilt is None:
            holders = [names[holder] for holder in shares[owner]]
            raise ReconstructionError(owner, holders, roster.header.threshold)
        secrets[owner], wrong = rebuilt
        doubtful |= wrong
        pairs += [(owner, names[holder]) for holder in wrong]
    return secrets, _blamed(pairs)


def _blamed(pairs: Sequence[tuple[str, str]]) -> set[str]:
    """Return the clients to blame. pairs: (owner of a secret, holder of a wrong share of it). In
    each pair, blame the client that is in more pairs; in a tie, blame both."""
    met = Counter(client for pair in pairs for client in pair)
    return {
        client
        for pair in pairs
        for client in pair
        if met[client] == max(met[each] for each in pair)
    }


def _rebuild(
    roster: Roster,
    owner: Participant,
    shares: Mapping[int, int],
    survived: bool,
    doubtful: Collection[int],
) -> tuple[bytes, frozenset[int]] | None:
    """Return a secret that matches its commitment, and the holders whose shares don't match the
    secret. Return None if the shares don't give such a secret.

    doubtful: holders of wrong shares of other secrets. If there are none, as in most sessions, try
    the first shares without decoding.
    """
    threshold = roster.header.threshold
    if not doubtful:
        secret = sharing.combine({number: shares[number] for number in sorted(shares)[:threshold]})
        if secret is not None and _fits(roster, owner, secret, survived):
            return secret, frozenset()
    for secret, wrong in decodings(shares, threshold, doubtful):
        if _fits(roster, owner, secret, survived):
            return secret, wrong
    return None


def _fits(roster: Roster, owner: Participant, secret: bytes, survived: bool) -> bool:
    if survived:
        return commitment(secret, roster.header_sha256) == owner.advert.commitment
    return public_bytes(secret) == owner.advert.mask_key
