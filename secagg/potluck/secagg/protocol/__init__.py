"""Secure aggregation: discloses the sum over a group of clients, and nothing about a single one.

The protocol is that of Bonawitz et al. (CCS 2017) with signed identities, a set of survivors that a
quorum certifies, and rules that every client enforces by itself. docs/security/specification.md
specifies it. Nothing in this package opens a socket, reads a clock or draws randomness: messages,
times and random bytes are arguments. So a session works over any transport; tests need none.

How a session is driven
-----------------------

Both sides are state machines over immutable sessions. A step returns the next session, the messages
to send, and a refusal if a rule was broken. A step never raises because of a received message.
Messages are `Envelope`s; `encode` and `decode(Envelope, …)` turn them into bytes and back.

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
                                                     words, and session.masking.add_masks(vector,
                                                     words, first) block by block, in place, in
                                                     any order and thread
       ◀ · · · · · · · · · · · · the masked vector   (outside of the session)
       ◀────────────────────────── MASKED_INPUT ──   step = client.uploaded(session, digest)
    coordinator.receive(…, upload_digest=that of what arrived)
       ── SURVIVORS ──────────────────────────────▶  step = client.handle(…)
       ◀─────────────────────────────── CONSENT ──
       ── CERTIFICATE ────────────────────────────▶  step = client.handle(…); store step.entries,
       ◀──────────────────────────────── REVEAL ──   then send
    session.unmasking is set:
    sum the words of unmasking.survivors modulo 2^32 or 2^64, and
    unmasking.remove(vector, words, first) on any slice of the sum, in any order and thread

The caller that drives a session keeps these promises:

- *Before sending.* The caller writes `ClientStep.entries` to the ledger, on disk, before it sends
  `replies`; after a DELIVERY, before it sends any byte of the masked vector. It stores
  `CoordinatorSession.certificate` on disk before it sends that step's `messages`.
- *Only the newest session.* It replaces the older one; sessions are never stored.
- *Time.* If a stage takes too long, call `coordinator.close(session)`. If a client will not return,
  call `coordinator.lost(session, client)`. A client drops its session at `header.expires_at`.
- *Identity.* `client`, an argument of `receive`, is the client that the transport authenticated.
- *Uploads.* An upload contains all vectors' words, little-endian, `header.upload_bytes` in total.
  The caller chooses the file format and the digest: 32 bytes of a cryptographic hash over the whole
  file, the same hash on both sides. Model digests are made in the same way. Only complete uploads
  are summed.
- *One session per input.* `begin` gets the client's sessions in progress. The caller forgets those
  in `superseded` before it sends the reply.
- *Certificates.* If an earlier session over the same inputs was certified, the new invitation
  includes its certificate. Without it, a client that was disconnected then would refuse.

A message may arrive twice: the same bytes get the same answer, and the step is marked `repeated`. A
vector is encoded and masked only once per session: two masked vectors disclose their difference. A
coordinator that restarts has lost its sessions; it begins new ones with
`coordinator.retry_header`.

Where the parts are
-------------------

`client` and `coordinator` are the two sides. `policy` has a client's own rules and its ledger.
`vectors` encodes counts, model updates and noise as words. `wire` has the messages. `primitives`
has the masks, shares, keys and thresholds, which can also be used alone. `rules` lists the reasons
for which a session can end. In this order, a subpackage imports only later ones.
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
    MessageType,
    Noise,
    Purpose,
    SumVector,
    VectorEncoding,
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
    "SumVector",
    "Thresholds",
    "Unmasking",
    "VectorEncoding",
    "client",
    "complete_thresholds",
    "coordinator",
    "decode",
    "encode",
    "entry_from_json",
    "session_record",
]
