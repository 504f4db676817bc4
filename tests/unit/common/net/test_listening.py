"""Error messages about addresses that can't be listened on."""

from __future__ import annotations

import errno
import os
import socket

import pytest

from potluck.common.errors import UnreachableError
from potluck.common.net.listening import check_not_in_use, explained, not_listening


def test_error_about_a_port_used_by_another_process_states_that_it_is_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        assert not_listening(address).message == (
            f"can't listen on {address}: the port is in use; stop the process that listens there, "
            "or choose another with `listen` or --listen"
        )


def test_check_of_a_port_fails_only_while_another_process_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(UnreachableError, match=f"can't listen on {address}: the port is in"):
            check_not_in_use(address)
    check_not_in_use(address)
    check_not_in_use("192.0.2.1:7443")  # no address of this machine: the server reports that


def test_error_about_listening_on_an_address_of_another_machine_names_the_cause() -> None:
    assert "this machine does not have this address" in not_listening("192.0.2.1:7443").message


def test_error_about_a_privileged_port_names_the_missing_capability() -> None:
    for number in (errno.EACCES, errno.EPERM):
        message = explained(OSError(number, os.strerror(number)), 443)
        assert "may not use ports below 1024" in message
        assert "CAP_NET_BIND_SERVICE" in message
        assert "in use" not in message


@pytest.mark.parametrize(("number", "port"), [(errno.EACCES, 7443), (errno.ENOBUFS, 443)])
def test_other_listening_errors_contain_the_message_of_the_system(number: int, port: int) -> None:
    assert os.strerror(number) in explained(OSError(number, os.strerror(number)), port)
