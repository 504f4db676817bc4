"""Checks a session's header and roster against a client's own configuration.

A header with less protection than the client's policy requires is refused, never negotiated.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

from potluck.common.disclosure import (
    LEAST_HOSTS,
    ROUNDS_PER_EPOCH,
    RUNS_PER_EPOCH,
    SMALLEST_LEAST_HOSTS,
)
from potluck.common.errors import ConfigurationError
from potluck.secagg.protocol.primitives.masks import StreamCipher
from potluck.secagg.protocol.primitives.thresholds import (
    assumed_colluding_hosts,
    circulant_is_safe,
    colluding_clients,
    majority,
)
from potluck.secagg.protocol.rules import Rule, require
from potluck.secagg.protocol.vectors.noise import LEAST_RATE
from potluck.secagg.protocol.vectors.word_limits import check_vector
from potluck.secagg.protocol.wire.messages import (
    DIGEST_BYTES,
    MAXIMUM_CLIENTS,
    VERSION,
    Header,
    Purpose,
    VectorEncoding,
)
from potluck.secagg.protocol.wire.transcript import Roster


@dataclass(frozen=True, kw_only=True)
class ClientPolicy:
    """A client's own rules for secure sums.

    least_hosts: minimum number of distinct hosts in a set whose sum is released, ≥ 3; values below
    5 deserve a warning. colluding_hosts: hosts assumed to collude with the coordinator; ⌊(h − 1) /
    3⌋ of a roster's h hosts if None. disclosures: the values of a header's `disclosure` that are
    allowed. unprotected: allowed values for which the owner has switched off the rules on earlier
    sums. noisy: allowed values that require noise. one_set: True if an input without noise may be
    summed over one set of clients only, always as the same vector. runs_per_epoch,
    rounds_per_epoch: maximum number of runs, and of rounds' models, for which a client sends masked
    updates from one data epoch. largest_epsilon: maximum ε of one noisy sum. sensitivity: minimum
    sensitivity that the noise must cover: 1 if neighbouring data have one sample more or less, 2 if
    one sample is exchanged. circulant: True if the experimental graph is allowed.
    """

    least_hosts: int = LEAST_HOSTS
    colluding_hosts: int | None = None
    disclosures: frozenset[str] = frozenset({"update"})
    unprotected: frozenset[str] = frozenset()
    noisy: frozenset[str] = frozenset()
    one_set: bool = True
    runs_per_epoch: int = RUNS_PER_EPOCH
    rounds_per_epoch: int = ROUNDS_PER_EPOCH
    largest_epsilon: float = 1.0
    sensitivity: int = 2
    ciphers: frozenset[StreamCipher] = frozenset(StreamCipher)
    circulant: bool = False
    largest_upload_bytes: int = 2**34
    clock_tolerance_seconds: float = 120.0
    longest_session_seconds: float = 86_400.0

    def __post_init__(self) -> None:
        if self.least_hosts < SMALLEST_LEAST_HOSTS:
            raise ConfigurationError(
                f"least_hosts is {self.least_hosts}, but a sum over fewer than "
                f"{SMALLEST_LEAST_HOSTS} hosts protects no client; set at least "
                f"{SMALLEST_LEAST_HOSTS}",
                least_hosts=self.least_hosts,
            )

    def assumed_colluding_hosts(self, hosts: int) -> int:
        """Return the number of hosts assumed to collude, of `hosts` distinct hosts."""
        if self.colluding_hosts is not None:
            return self.colluding_hosts
        return assumed_colluding_hosts(hosts)


@dataclass(frozen=True, kw_only=True)
class Expectation:
    """Properties that a sum must have, derived from the task and data of the invited client.

    input_id: the client's own name for the vector that it will send, e.g. "labels/epoch 3". Equal
    vectors have equal names; releases are recorded under the name. lengths: number of words of each
    vector, by name. model_digest: digest of the model that an update starts from.
    training_sha256: digest of the parts of the training instruction that must be equal for all
    clients of the sum. settings_sha256: digest of those parts that are equal in all rounds of a
    run. data: version name of the data that an update is made of; empty for label counts.
    header_fields: further fields of the header that must have these values. within: the only
    clients that the sum may include; None for any.
    """

    purpose: Purpose
    input_id: str
    lengths: Mapping[str, int]
    model_digest: bytes = b""
    training_sha256: bytes = b""
    settings_sha256: bytes = b""
    data: str = ""
    metrics: tuple[str, ...] = ()
    header_fields: Mapping[str, object] = field(default_factory=dict)
    within: frozenset[str] | None = None


def check_header(
    header: Header, policy: ClientPolicy, expected: Expectation, federation: str, now: datetime
) -> None:
    """Raise BrokenRuleError unless the client may answer an invitation with this header."""
    require(
        header.version == VERSION,
        Rule.VERSION,
        f"the session uses protocol version {header.version}, but this client supports {VERSION}",
    )
    require(
        header.federation == federation, Rule.VERSION, "the invitation is from another federation"
    )
    _check_times(header, policy, now)
    _check_expectation(header, expected)
    _check_protection(header, policy)
    _check_form(header, policy)


def check_roster(roster: Roster, policy: ClientPolicy) -> None:
    """Raise BrokenRuleError unless thresholds and sizes are sound for these participants."""
    header = roster.header
    clients = len(roster.participants)
    hosts = len(set(roster.listed_hosts))
    require(
        hosts >= max(header.least_hosts, policy.least_hosts),
        Rule.TOO_FEW,
        f"the roster has {hosts} hosts, but at least "
        f"{max(header.least_hosts, policy.least_hosts)} hosts are required",
    )
    require(
        clients <= MAXIMUM_CLIENTS,
        Rule.MALFORMED,
        f"the roster has {clients} clients, more than the maximum of {MAXIMUM_CLIENTS}",
    )
    assumed = policy.assumed_colluding_hosts(hosts)
    require(
        header.colluding_hosts >= assumed,
        Rule.POLICY,
        f"the session assumes that {header.colluding_hosts} hosts collude, but this client "
        f"assumes {assumed}",
    )
    colluding = colluding_clients(roster.listed_hosts, header.colluding_hosts)
    enough = majority(clients, colluding)
    require(
        enough <= header.quorum <= clients,
        Rule.THRESHOLD,
        f"a quorum of {header.quorum} is too small or too large: {clients} clients, of which "
        f"{colluding} may collude, need at least {enough}",
    )
    if 0 < header.degree < clients - 1:
        sound = circulant_is_safe(clients, colluding, header.degree, header.threshold)
    else:
        sound = enough <= header.threshold <= clients
    require(
        sound,
        Rule.THRESHOLD,
        f"a threshold of {header.threshold} is not secure for {clients} clients, of which "
        f"{colluding} may collude",
    )
    for vector in header.vectors:
        check_vector(vector, header, clients)
    if header.noise is not None:
        honest = header.quorum - colluding
        require(
            header.noise.contributors <= honest,
            Rule.POLICY,
            f"the noise needs {header.noise.contributors} honest clients, but only {honest} are "
            "certain to be honest",
        )


def _check_times(header: Header, policy: ClientPolicy, now: datetime) -> None:
    at = now.timestamp()
    apart = header.issued_at - at
    require(
        apart <= policy.clock_tolerance_seconds,
        Rule.CLOCKS,
        f"the session begins {apart:.0f} s in the future; set the clocks of the coordinator and "
        "of this host",
    )
    require(
        header.expires_at > at,
        Rule.EXPIRED,
        f"the session ended {at - header.expires_at:.0f} s ago",
    )
    lasts = header.expires_at - header.issued_at
    require(
        0 < lasts <= policy.longest_session_seconds,
        Rule.CLOCKS,
        f"the session lasts {lasts} s, but at most {policy.longest_session_seconds:.0f} s are "
        "allowed",
    )


def _check_expectation(header: Header, expected: Expectation) -> None:
    found = {vector.name: vector.length for vector in header.vectors}
    require(
        header.purpose is expected.purpose,
        Rule.HEADER,
        "the sum has another purpose than this client expects",
    )
    require(
        found == dict(expected.lengths),
        Rule.INPUT,
        "the sum's vectors have other names or lengths than this client expects",
    )
    require(
        header.model_digest == expected.model_digest,
        Rule.HEADER,
        "the sum names another model than this client's training",
    )
    require(
        header.training_sha256 == expected.training_sha256,
        Rule.HEADER,
        "the sum names another training than the one that this client received",
    )
    require(
        header.metrics == expected.metrics,
        Rule.HEADER,
        "the sum has other metrics than this client's training",
    )
    for name, value in expected.header_fields.items():
        require(
            getattr(header, name) == value,
            Rule.HEADER,
            f"the sum's header has another {name} than this client expects",
        )


def _check_protection(header: Header, policy: ClientPolicy) -> None:
    require(
        header.disclosure in policy.disclosures,
        Rule.POLICY,
        f"the data owner does not allow disclosure {header.disclosure[:40]!r}",
    )
    require(
        header.least_hosts >= policy.least_hosts,
        Rule.POLICY,
        f"the sum needs only {header.least_hosts} hosts, but the data owner requires at least "
        f"{policy.least_hosts}",
    )
    require(
        header.cipher in policy.ciphers,
        Rule.POLICY,
        f"the data owner does not allow cipher {header.cipher.name}",
    )
    require(
        header.degree == 0 or policy.circulant,
        Rule.POLICY,
        "the data owner does not allow the circulant graph",
    )
    require(
        header.noise is not None or header.disclosure not in policy.noisy,
        Rule.POLICY,
        "the sum has no noise, but the data owner does not allow exact_sums; set "
        'profiles.sum_mode = "noisy" in the run file',
    )
    if header.noise is not None:
        asked = header.noise.epsilon
        require(
            math.isfinite(asked) and 0 < asked <= policy.largest_epsilon,
            Rule.POLICY,
            f"the sum has ε = {asked:g}, but the data owner allows at most "
            f"{policy.largest_epsilon:g}; lower profiles.sum_epsilon in the run file",
        )
        require(
            header.noise.sensitivity >= policy.sensitivity,
            Rule.POLICY,
            f"the sum's noise covers a sensitivity of {header.noise.sensitivity}, but the data "
            f"owner requires {policy.sensitivity}",
        )


def _check_form(header: Header, policy: ClientPolicy) -> None:
    names = [vector.name for vector in header.vectors]
    require(bool(names), Rule.MALFORMED, "the sum's header has no vector")
    require(
        len(set(names)) == len(names),
        Rule.DUPLICATE,
        "two vectors of the sum's header have the same name",
    )
    require(
        header.upload_bytes <= policy.largest_upload_bytes,
        Rule.POLICY,
        f"the sum needs an upload of {header.upload_bytes} bytes, but at most "
        f"{policy.largest_upload_bytes} are allowed",
    )
    require(header.degree % 2 == 0, Rule.MALFORMED, "the degree of the sum's graph must be even")
    require(header.threshold >= 2, Rule.THRESHOLD, "the threshold must be at least 2 shares")
    require(
        header.purpose is not Purpose.UPDATE or len(header.model_digest) == DIGEST_BYTES,
        Rule.MALFORMED,
        "the header of a sum of updates must name a model",
    )
    require(
        header.purpose is not Purpose.UPDATE or len(header.training_sha256) == DIGEST_BYTES,
        Rule.MALFORMED,
        "the header of a sum of updates must name a training",
    )
    for vector in header.vectors:
        check_vector(vector, header, 1)
    if header.noise is not None:
        counts = all(vector.encoding is VectorEncoding.COUNTS for vector in header.vectors)
        require(
            counts,
            Rule.MALFORMED,
            "the header asks for noise, which only vectors of counts can have",
        )
        require(
            header.noise.sensitivity in (1, 2),
            Rule.MALFORMED,
            "the sensitivity of the noise must be 1 or 2",
        )
        rate = header.noise.epsilon / header.noise.sensitivity
        require(
            rate >= LEAST_RATE,
            Rule.MALFORMED,
            f"the noise has ε/Δ = {rate:g}, below the minimum of {LEAST_RATE:g}",
        )
        require(
            header.noise.contributors >= 1,
            Rule.MALFORMED,
            "the noise needs at least 1 contributing client",
        )
