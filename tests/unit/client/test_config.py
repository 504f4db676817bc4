from __future__ import annotations

from pathlib import Path

import pytest

from potluck.client.config import ENVIRONMENT_PREFIX, ClientConfig, example_config, load_config
from potluck.common.errors import ConfigurationError
from potluck.common.process.logs import LogFormat
from potluck.common.settings.configuration import parse


def write(folder: Path, extra: str = "") -> Path:
    path = folder / "host.toml"
    head, tail = example_config().split("[tls]")
    path.write_text(f"{head}{extra}\n[tls]{tail}")
    return path


def test_example_configuration_has_the_default_values(tmp_path: Path) -> None:
    config = load_config(write(tmp_path), {})
    required = {"coordinator", "clients", "state_directory", "data_directory", "tls"}
    for name, field in ClientConfig.model_fields.items():
        assert field.description
        if name not in required:
            assert getattr(config, name) == field.get_default(call_default_factory=True)
    assert config.client_ids() == [f"client-{number}" for number in range(6)]


def test_paths_in_the_host_file_are_relative_to_the_file(tmp_path: Path) -> None:
    config = load_config(write(tmp_path), {})
    assert config.state_directory == tmp_path / "state" / "host-0"
    assert config.tls.certificate.parent == tmp_path / "pki"


def test_flags_override_the_environment_which_overrides_the_host_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path)
    for name, value in {
        "COORDINATOR": "environment:1",
        "CLIENTS": "x,y-0:1",
        "THREADS": "3",
        "LOG_FORMAT": "json",
        "STATE_DIRECTORY": "here",
    }.items():
        monkeypatch.setenv(f"{ENVIRONMENT_PREFIX}_{name}", value)
    config = load_config(path, {"coordinator": "flag:1", "threads": None})
    assert config.coordinator == "flag:1"
    assert config.client_ids() == ["x", "y-0", "y-1"]
    assert config.threads == 3
    assert config.log_format is LogFormat.JSON
    assert config.state_directory == Path("here")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("thread = 2", "unknown key 'thread'"),
        ("device = 'gpu'", "auto, cpu, cuda:N"),
        ("clients = []", "clients"),
        ("threads = 0", "threads"),
    ],
)
def test_mistake_in_the_host_file_is_named_in_the_error(text: str, message: str) -> None:
    lines = example_config().splitlines()
    key = text.split(" ")[0]
    kept = [line for line in lines if not line.startswith(f"{key} =")]
    with pytest.raises(ConfigurationError, match=message) as raised:
        parse(ClientConfig, "\n".join([text, *kept]), source="host.toml")
    assert raised.value.message.startswith("host.toml: ")


def test_client_listed_twice_is_refused() -> None:
    text = example_config().replace('["client-0:5"]', '["client-0:5", "client-3"]')
    config = parse(ClientConfig, text, source="host.toml")
    with pytest.raises(ConfigurationError, match="'client-3' is listed twice"):
        config.client_ids()


def test_object_stores_are_spelled_as_http_clients_send_them(tmp_path: Path) -> None:
    stores = "https://Minio.example.org:443,http://minio:80,http://minio:9000"
    config = load_config(write(tmp_path), {"object_stores": stores})
    assert config.object_stores == (
        "https://minio.example.org",
        "http://minio",
        "http://minio:9000",
    )
