"""Secure aggregation: the sum over a group of clients, and nothing about any one of them.

The protocol is that of Bonawitz et al. (CCS 2017) with signed identities, a set of survivors that a
quorum certifies, and rules that every client enforces by itself. docs/security/specification.md
specifies it. Nothing in this package opens a socket, reads a clock or draws randomness: that comes
in
through arguments, so that a session can be driven over any transport, and tested without one.

How a session is driven
-----------------------

Both sides are state machines over immutable sessions. A step gives the next session, what to send,
and the refusal where a rule was broken; it never raises for what the other side said. Messages are
`Envelope`s; `encode` and `decode(Envelope, …)` turn them into bytes and back.

Coordinator                                          Client

    thresholds = complete_thresholds(hosts)
    header = Header(…)
    step = coordinator.invite(header, hosts, root)
       ── INVITATION ─────────────────────────────▶  step = client.begin(party, envelope, expected,
                                                                         situation, used=…)
       ◀──────────────────────────────── ADVERT ──
    step = coordinator.receive(session, who, envelope, now)
       ── ROSTER ─────────────────────────────────▶  step = client.handle(session, envelope,
       ◀──────────────────────────────── SHARES ──                        situation)
       ── DELIVERY ───────────────────────────────▶  step = client.handle(…): store
                                                     step.entries, then encode the input into
                                                     words, and session.masking.add_masks(lane,
                                                     words, first) block by block, in place, in
                                                     any order and thread
       ◀ · · · · · · · · · · · · the masked vector   (outside of the session)
       ◀────────────────────────── MASKED_INPUT ──   step = client.uploaded(session, digest)
    coordinator.receive(…, upload_digest=that of what arrived)
       ── SURVIVORS ──────────────────────────────▶  step = client.handle(…)
       ◀─────────────────────────────── CONSENT ──
       ── CERTIFICATE ────────────────────────────▶  step = client.handle(…); store step.entries,
       ◀──────────────────────────────── REVEAL ──   then send
    session.unmasking is there:
    sum the words of unmasking.survivors modulo 2^32 or 2^64, and
    unmasking.remove(lane, words, first) on any slice of the sum, in any order and thread

The caller that drives a session keeps these promises:

- *Before sending.* `ClientStep.entries` are in the ledger, on disk, before `replies` are sent, and
  after a DELIVERY before a byte of the masked vector is. `CoordinatorSession.certificate` is on
  disk before the `messages` that come with it are sent.
- *One line of history.* The newest session replaces the older one; sessions are never written down.
- *Time.* When a stage takes too long, `coordinator.close(session)`; when a client is gone for good,
  `coordinator.lost(session, client)`. A client drops its session at `header.expires_at`.
- *Identity.* `receive`'s `client` is the one that the transport authenticated.
- *Uploads.* All lanes' words, little-endian, `header.upload_bytes` in all. The file around them is
  the driver's, and so is its digest: 32 bytes of a cryptographic hash that both sides use, over the
  whole file. Models are named likewise. Only complete uploads are summed.
- *One session over an input.* `begin` gets the client's sessions under way, and those that it says
  are superseded are forgotten before its reply is sent.
- *Certificates.* A session over inputs of an earlier one, whose sum was certified, shows its
  certificate with the invitation: a client that was cut off then refuses otherwise.

A message may come twice: the same bytes get the same answer, and the step says `repeated`. A vector
is encoded and masked once for each session: two of them give their difference away. A coordinator
that restarts has lost its sessions; it begins new ones with `coordinator.retry_header`.

Where the parts are
-------------------

`client` and `coordinator` are the two sides. `policy` has a client's own rules and its ledger,
`vectors` turns counts, model updates and noise into words, `wire` has the messages, and
`primitives` the masks, shares, keys and thresholds underneath, each of use alone. `rules` names
what a session can be ended for. Subpackages import downwards in this order.
"""

from potluck.secagg.protocol import client, coordinator
from potluck.secagg.protocol.client.client_session import (
    ClientSession,
    ClientStep,
    Masking,
    Situation,
    SumParty,
)
from potluck.secagg.protocol.coordinator.coordinator_session import (
    CoordinatorSession,
    CoordinatorStep,
    SetCertificate,
)
from potluck.secagg.protocol.coordinator.session_record import SessionRecord, session_record
from potluck.secagg.protocol.coordinator.unmasking import Unmasking
from potluck.secagg.protocol.policy.ledger import Ledger, entry_from_json
from potluck.secagg.protocol.policy.sum_policy import ClientPolicy, Expectation
from potluck.secagg.protocol.primitives.masks import StreamCipher
from potluck.secagg.protocol.primitives.thresholds import Thresholds, complete_thresholds
from potluck.secagg.protocol.rules import BrokenRuleError, Refusal, Rule
from potluck.secagg.protocol.wire.message_encoding import decode, encode
from potluck.secagg.protocol.wire.messages import (
    Envelope,
    Header,
    Lane,
    LaneEncoding,
    MessageType,
    Noise,
    Purpose,
)
from potluck.secagg.protocol.wire.transcript import FederationRoot

__all__ = [
    "BrokenRuleError",
    "ClientPolicy",
    "ClientSession",
    "ClientStep",
    "CoordinatorSession",
    "CoordinatorStep",
    "Envelope",
    "Expectation",
    "FederationRoot",
    "Header",
    "Lane",
    "LaneEncoding",
    "Ledger",
    "Masking",
    "MessageType",
    "Noise",
    "Purpose",
    "Refusal",
    "Rule",
    "SessionRecord",
    "SetCertificate",
    "Situation",
    "StreamCipher",
    "SumParty",
    "Thresholds",
    "Unmasking",
    "client",
    "complete_thresholds",
    "coordinator",
    "decode",
    "encode",
    "entry_from_json",
    "session_record",
]
