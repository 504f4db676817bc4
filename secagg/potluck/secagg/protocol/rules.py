"""The rules of a session, and the refusals that name a broken rule.

A rule is one word, for logs and for programs. The party that detects the breach names the rule.
Whether a rule is broken never depends on a client's input, so a refusal discloses nothing about
data.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from potluck.common.errors import ProtocolError


class Rule(StrEnum):
    """The rules of a session. A member's value is its name in messages."""

    MALFORMED = "malformed"
    """A message is not a canonical serialisation of its type, or a field is out of range."""
    STAGE = "stage"
    """A message does not belong to this stage of the session."""
    SESSION = "session"
    """A message is of another session, or a session's id was used before."""
    HEADER = "header"
    """The two sides have different headers."""
    VERSION = "version"
    """The message is for another version of the protocol, or another federation."""
    CLOCKS = "clocks"
    """The session begins in the future, or too long ago, by this side's clock."""
    EXPIRED = "expired"
    """The session's time is over."""
    POLICY = "policy"
    """The header asks for less protection, or more disclosure, than this client's policy allows."""
    WRAP = "wrap"
    """Sums of permitted inputs could exceed the modulus."""
    MEMBER = "member"
    """A client has no member record, or its record is expired, not yet valid or revoked."""
    MEMBERSHIP = "membership"
    """The session has another membership than the one in force here."""
    SIGNATURE = "signature"
    """A signature was not made with the member key."""
    DUPLICATE = "duplicate"
    """An id, a key or a message occurs twice."""
    ROSTER = "roster"
    """The roster is unsorted, lacks this client, or changed its advert."""
    TOO_FEW = "too-few"
    """There are too few clients or hosts to continue."""
    THRESHOLD = "threshold"
    """The threshold or quorum is too low for this cohort and its assumed colluders."""
    KEY = "key"
    """A public key is of low order, or does not match its commitment."""
    SHARE = "share"
    """An encrypted share is missing, was not requested, or can't be decrypted."""
    EVIDENCE = "evidence"
    """Evidence against another client is not valid."""
    SET = "set"
    """A set of clients holds a client that can't be in it, or lacks this client."""
    CERTIFICATE = "certificate"
    """A certificate lacks a quorum of valid, distinct consents to this very set."""
    INPUT = "input"
    """An input is out of bounds, of the wrong length, or not finite."""
    UPLOAD = "upload"
    """An uploaded vector is not the one that its client confirmed."""
    BUDGET = "budget"
    """The privacy budget does not allow another release."""
    RELEASED = "released"
    """This input is, or may be, in a sum over another set, or in a sum in progress."""
    RECONSTRUCTION = "reconstruction"
    """Shares do not give the secret that its owner committed to."""


@dataclass(frozen=True)
class Refusal:
    """A breach of a rule, in one line for people. Never holds inputs, counts or keys."""

    rule: Rule
    detail: str

    def __str__(self) -> str:
        return f"{self.rule}: {self.detail}"


class BrokenRuleError(ProtocolError):
    """A rule was broken. The state machines turn this error into a `Refusal`."""

    def __init__(self, rule: Rule, detail: str) -> None:
        super().__init__(f"{rule}: {detail}", rule=rule)
        self.rule = rule
        self.detail = detail

    @property
    def refusal(self) -> Refusal:
        """The refusal that names the broken rule."""
        return Refusal(self.rule, self.detail)


def require(holds: bool, rule: Rule, detail: str) -> None:
    """Raise BrokenRuleError unless the rule holds."""
    if not holds:
        raise BrokenRuleError(rule, detail)
