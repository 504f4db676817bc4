"""The version of a build: from git in a checkout, from the contents without git."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
from packaging.version import Version
from support.repository import ROOT

from potluck.common.net.build_version import (
    RELEASE,
    VERSION_VARIABLE,
    software_version,
    source_version,
)


def git(folder: Path, *arguments: str) -> str:
    who = {"NAME": "a", "EMAIL": "a@example.org"}
    people = {f"GIT_{by}_{key}": it for by in ("AUTHOR", "COMMITTER") for key, it in who.items()}
    plain = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
    done = subprocess.run(
        ["git", *arguments],
        cwd=folder,
        env={**os.environ, **people, **plain},
        check=True,
        capture_output=True,
        text=True,
    )
    return done.stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Create a repository with two commits."""
    folder = tmp_path / "checkout"
    module = folder / "common" / "potluck" / "module.py"
    module.parent.mkdir(parents=True)
    git(folder, "init", "--quiet")
    for text in ("x = 1\n", "x = 2\n"):
        module.write_text(text)
        git(folder, "add", ".")
        git(folder, "commit", "--quiet", "--message", text)
    return folder


def commit_of(folder: Path) -> str:
    return git(folder, "rev-parse", "HEAD")[:9]


def test_version_of_a_checkout_has_the_commit_count_and_the_last_commit(checkout: Path) -> None:
    version = source_version(checkout)
    assert version == f"{RELEASE}.dev2+g{commit_of(checkout)}"
    assert str(Version(version)) == version
    assert Version(version) < Version(RELEASE)


def test_changed_files_mark_the_version_as_dirty_and_new_files_do_not(checkout: Path) -> None:
    (checkout / "notes.txt").write_text("new")
    assert not source_version(checkout).endswith(".dirty")
    (checkout / "common" / "potluck" / "module.py").write_text("x = 3\n")
    assert source_version(checkout) == f"{RELEASE}.dev2+g{commit_of(checkout)}.dirty"


def test_version_of_the_tagged_commit_is_the_release(checkout: Path) -> None:
    git(checkout, "tag", f"v{RELEASE}")
    assert source_version(checkout) == RELEASE
    (checkout / "common" / "potluck" / "module.py").write_text("x = 3\n")
    assert source_version(checkout).endswith(".dirty")


def test_version_of_a_git_worktree_equals_that_of_the_checkout(
    checkout: Path, tmp_path: Path
) -> None:
    git(checkout, "worktree", "add", "--quiet", str(tmp_path / "other"), "HEAD")
    assert (tmp_path / "other" / ".git").is_file()
    assert source_version(tmp_path / "other") == source_version(checkout)


def test_version_of_a_shallow_clone_has_a_commit_count_of_0(checkout: Path, tmp_path: Path) -> None:
    git(tmp_path, "clone", "--quiet", "--depth=1", checkout.as_uri(), "shallow")
    assert source_version(tmp_path / "shallow") == f"{RELEASE}.dev0+g{commit_of(checkout)}"


def test_git_variables_of_a_hook_do_not_change_the_version(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = source_version(checkout)
    monkeypatch.setenv("GIT_DIR", str(checkout / "nowhere"))
    assert source_version(checkout) == before


def test_version_of_sources_without_git_is_a_content_hash(checkout: Path) -> None:
    (checkout / ".git").rename(checkout.parent / "history")
    first = source_version(checkout)
    assert first.startswith(f"{RELEASE}.dev0+s")
    assert str(Version(first)) == first
    (checkout / "common" / "potluck" / "__pycache__").mkdir()
    (checkout / "common" / "potluck" / "__pycache__" / "module.pyc").write_text("cached")
    assert source_version(checkout) == first
    (checkout / "common" / "potluck" / "module.py").write_text("x = 3\n")
    assert source_version(checkout) != first


def test_version_of_a_checkout_without_the_git_program_is_a_content_hash(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(checkout))
    assert source_version(checkout).startswith(f"{RELEASE}.dev0+s")


def test_running_software_has_the_version_of_its_checkout() -> None:
    assert software_version() == source_version(ROOT)


def test_importing_the_programs_does_not_run_git() -> None:
    code = """
import potluck.client.cli, potluck.deploy.cli, potluck.federation, potluck.relay.cli
import potluck.server.cli
from potluck.common.net.build_version import software_version
print(software_version.cache_info().currsize)
assert potluck.federation.__version__ == software_version()
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == "0\n"


def built(source: Path, kind: str, into: Path, **environment: str) -> Path:
    command = [sys.executable, "-m", "build", f"--{kind}", "--no-isolation", "--outdir"]
    subprocess.run(
        [*command, str(into), str(source)],
        env=os.environ | environment,
        check=True,
        capture_output=True,
    )
    [found] = into.iterdir()
    return found


def version_of(wheel: Path) -> str:
    with zipfile.ZipFile(wheel) as files:
        [name] = [name for name in files.namelist() if name.endswith(".dist-info/METADATA")]
        return str(Parser().parsestr(files.read(name).decode())["Version"])


def test_wheel_built_from_a_source_distribution_has_the_version_of_the_commit(
    tmp_path: Path,
) -> None:
    sources = built(ROOT, "sdist", tmp_path / "sdist")
    with tarfile.open(sources) as files:
        files.extractall(tmp_path, filter="data")
    [folder] = tmp_path.glob("potluck-*")
    assert version_of(built(folder, "wheel", tmp_path / "wheel")) == source_version(ROOT)
    (folder / "PKG-INFO").unlink()
    assert version_of(built(folder, "wheel", tmp_path / "none")) == source_version(folder)
    given = built(folder, "wheel", tmp_path / "given", **{VERSION_VARIABLE: "0.1.0.dev5+gabc"})
    assert version_of(given) == "0.1.0.dev5+gabc"
