from __future__ import annotations

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck.common.errors import ConfigurationError, IdentityError
from potluck.common.net.identity import (
    MAXIMUM_URI_BYTES,
    ClientClaim,
    Identity,
    Role,
    expand_clients,
    parse_claims,
    parse_identity,
)

FIRST = string.ascii_lowercase + string.digits
NAMES = st.builds(
    str.__add__,
    st.sampled_from(FIRST),
    st.text(alphabet=FIRST + "._-", max_size=20),
)
EXACT = st.builds(lambda name: ClientClaim(prefix=name), NAMES)


@st.composite
def ranges(draw: st.DrawFn, most: int = 10**9) -> ClientClaim:
    prefix = draw(st.one_of(st.just(""), NAMES.map(lambda name: name.rstrip(string.digits))))
    first = draw(st.integers(0, 10**6))
    last = draw(st.integers(first, first + most))
    padding = draw(st.integers(0, 3))
    width = len(str(first)) + padding if padding else 1
    return ClientClaim(prefix=prefix, numbers=range(first, last + 1), width=width)


@st.composite
def identities(draw: st.DrawFn) -> Identity:
    role = draw(st.sampled_from(Role))
    claims = draw(st.lists(st.one_of(EXACT, ranges()), max_size=5)) if role is Role.HOST else []
    return Identity(federation=draw(NAMES), role=role, name=draw(NAMES), claims=tuple(claims))


def host(*claims: str) -> Identity:
    return Identity(federation="f", role=Role.HOST, name="h", claims=parse_claims(claims))


@given(identities())
def test_identity_is_parsed_from_its_own_uri(identity: Identity) -> None:
    assert parse_identity(identity.uri()) == identity


@given(st.one_of(st.text(), st.text().map("potluck://f/host/h?clients=".__add__)))
def test_any_text_parses_to_an_identity_with_that_uri_or_raises_identity_error(
    text: str,
) -> None:
    try:
        identity = parse_identity(text)
    except IdentityError as error:
        assert "\n" not in error.message  # noqa: PT017  # parsing may also succeed
    else:
        assert identity.uri() == text


@given(st.lists(st.text(alphabet=FIRST + ":,-0123456789", max_size=12), max_size=4))
def test_any_client_list_expands_to_distinct_ids_or_raises_configuration_error(
    texts: list[str],
) -> None:
    try:
        clients = expand_clients(texts)
    except ConfigurationError as error:
        assert "\n" not in error.message  # noqa: PT017  # parsing may also succeed
    else:
        assert len(set(clients)) == len(clients)
        assert all(host(*texts).may_speak_for(client) for client in clients)


@given(ranges(most=300), NAMES, st.integers(0, 2 * 10**6))
def test_host_may_act_for_exactly_the_client_ids_of_its_range(
    claim: ClientClaim, name: str, number: int
) -> None:
    identity = Identity(federation="f", role=Role.HOST, name="h", claims=(claim,))
    ids = set(claim.ids())
    assert claim.count == len(ids)
    assert all(map(identity.may_speak_for, ids))
    for other in (name, f"{claim.prefix}{number}", f"{claim.prefix}0{number}", claim.prefix):
        assert identity.may_speak_for(other) == (other in ids)


def test_identity_uris_equal_the_documented_examples() -> None:
    identity = host("hospital-a", "client-0:23", "silo-00:09")
    assert identity.uri() == "potluck://f/host/h?clients=hospital-a,client-0:23,silo-00:09"
    coordinator = Identity(federation="f", role=Role.COORDINATOR, name="coordinator")
    assert coordinator.uri() == "potluck://f/coordinator/coordinator"
    assert not coordinator.may_speak_for("hospital-a")


@pytest.mark.parametrize(
    ("client", "allowed"),
    [
        ("hospital-a", True),
        ("hospital-b", False),
        ("client-0", True),
        ("client-23", True),
        ("client-24", False),
        ("client-00", False),
        ("client-", False),
        ("client-٣", False),
        ("client-" + "9" * 5000, False),
        ("silo-03", True),
        ("silo-3", False),
        ("silo-10", False),
        ("", False),
    ],
)
def test_host_may_act_only_for_its_own_clients(client: str, allowed: bool) -> None:
    identity = host("hospital-a", "client-0:23", "silo-00:09")
    assert identity.may_speak_for(client) is allowed


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (["client-0:3"], ["client-0", "client-1", "client-2", "client-3"]),
        (["silo-08:11", "a"], ["silo-08", "silo-09", "silo-10", "silo-11", "a"]),
        (["b, a", "x9:10"], ["b", "a", "x9", "x10"]),
        (["5:5"], ["5"]),
        ([], []),
    ],
)
def test_client_ranges_are_expanded_to_ids(texts: list[str], expected: list[str]) -> None:
    assert expand_clients(texts) == expected


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["Client-0"], "'Client-0' is neither a client id"),
        ([""], "'' is neither a client id"),
        (["client-5:3"], "has a first number above its last"),
        (["silo-00:9"], "write 'silo-00:09'"),
        (["client-0:09"], "write 'client-0:9'"),
        (["-0:3"], "does not begin and end with client ids"),
        (["client-0:" + "9" * 80], "does not begin and end with client ids"),
        (["a", "a"], "client 'a' is listed twice"),
        (["client-0:5", "client-3"], "client 'client-3' is listed twice"),
        (["client-0:1000000"], "1000001 clients are listed"),
        (["client-0:" + "9" * 50], "clients are listed"),
    ],
)
def test_invalid_client_list_is_refused(texts: list[str], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        expand_clients(texts)


def test_client_list_of_a_million_ids_is_accepted() -> None:
    clients = expand_clients(["client-0:999999"])
    assert len(clients) == 1_000_000
    assert clients[-1] == "client-999999"


@pytest.mark.parametrize(
    ("uri", "message"),
    [
        ("https://f/host/h", "is not a Potluck identity"),
        ("potluck://f/host", "is not a Potluck identity"),
        ("potluck://f/host/h?clients=", "is not a Potluck identity"),
        ("potluck://f/host/h?clients=a&more=b", "neither a client id"),
        ("potluck://f/host/h?clients=a,,b", "neither a client id"),
        ("potluck://f/admin/h", "role 'admin' is unknown"),
        ("potluck://F/host/h", "federation name 'F' is not allowed"),
        ("potluck://f/host/..%2f", "host name"),
        ("potluck://f/operator/o?clients=a", "which only hosts and relays may have"),
        ("potluck://f/host/h?clients=" + "a," * MAXIMUM_URI_BYTES, "is not a Potluck identity"),
    ],
)
def test_invalid_identity_uri_is_refused(uri: str, message: str) -> None:
    with pytest.raises(IdentityError, match=message):
        parse_identity(uri)
