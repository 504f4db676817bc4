from __future__ import annotations

from pathlib import Path

import pytest

from potluck.client.config import load_config as load_host
from potluck.common.errors import ConfigurationError
from potluck.relay.config import RelayConfig, example_config, load_config


def test_example_relay_configuration_has_the_default_values(tmp_path: Path) -> None:
    path = tmp_path / "relay.toml"
    path.write_text(example_config())
    config = load_config(path, {})
    required = {"coordinator", "listen", "state_directory", "tls"}
    for name, field in RelayConfig.model_fields.items():
        assert field.description
        if name not in required:
            assert getattr(config, name) == field.get_default(call_default_factory=True)
    assert config.tls.key == tmp_path / "pki" / "gate.key"


def test_relay_flags_override_the_file_and_invalid_addresses_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "relay.toml"
    path.write_text(example_config())
    assert load_config(path, {"listen": "[::]:0"}).listen == "[::]:0"
    with pytest.raises(ConfigurationError, match="must be HOST:PORT"):
        load_config(path, {"listen": "gate"})


def test_host_program_given_a_relay_configuration_names_it_in_the_error(tmp_path: Path) -> None:
    path = tmp_path / "relay.toml"
    path.write_text(example_config())
    with pytest.raises(ConfigurationError, match="the configuration of a relay"):
        load_host(path, {})
