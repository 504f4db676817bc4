"""Rules of the layout: source roots, directions of imports, one version, a complete wheel."""

import ast
import re
import subprocess
import sys
import sysconfig
import tomllib
from collections import Counter
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from importlib.metadata import (
    PackageNotFoundError,
    distribution,
    distributions,
    packages_distributions,
)
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version
from support.source_imports import (
    SOURCE_ROOTS,
    imported_names,
    imports_by_module,
    names_imported_by,
    packages,
    statements,
    written_packages,
)

HOUSE = Path(__file__).resolve().parents[2]
MAY_IMPORT = {
    "client": {"client", "common", "rpc"},
    "common": {"common", "rpc"},
    "deploy": {"client", "common", "deploy", "rpc", "server"},
    "experiments": {"client", "common", "deploy", "experiments", "federation", "rpc", "server"},
    "federation": {"client", "common", "deploy", "federation", "rpc", "server"},
    "integrations": {"client", "common", "integrations", "rpc", "server"},
    "page": {"common", "deploy", "page", "rpc"},
    "privacy": {"client", "common", "privacy", "rpc", "server"},
    "relay": {"client", "common", "relay", "rpc", "server"},
    "rpc": {"rpc"},
    "secagg": {"client", "common", "rpc", "secagg", "server"},
    "server": {"server", "common", "rpc"},
    "verifiable": {"client", "common", "rpc", "server", "verifiable"},
}


ROOMS = {
    "common": (
        "plain_text errors disk interruptible names settings real_time trainer task models "
        "tasks learning records tables disclosure tensors net "
        "updates run_file signal built_in_signals "
        "process monitoring tracing"
    ),
    "server": (
        "clock config state store.sql store file_store selection strategy sink selectors.parts "
        "strategies selectors.asking selectors.bandits selectors machine plan hosts profiles "
        "eligibility reduce live updates select run sinks service cli __main__"
    ),
    "client": (
        "base disclosure config objective correction training.objectives training.samples "
        "question training.steps private_training training training.questions transfer handlers "
        "control agent cli __main__"
    ),
    "deploy": ("operator terminal view cards pki machines local doctor commands cli __main__"),
    "integrations": "trackers adapters tracing s3",
    "secagg": (
        "protocol.rules protocol.primitives protocol.wire protocol.vectors protocol.policy "
        "protocol.client protocol.coordinator protocol masked_vectors coordinator host"
    ),
    "experiments": (
        "templates tasks models weights data_sets traces presets grid cluster reports benchmark "
        "commands"
    ),
    "federation": (
        "rounds run_html run_settings_text session_plugins background frames local_party "
        "trained_model model_report run federation __init__ result_commands"
    ),
    "page": (
        "__init__ page_shapes event_stream page_access coordinator_link disclosed_shown page_guard "
        "run_draft run_shown hosts_shown run_watch overview_watch page_app page_command"
    ),
    "privacy": (
        "__init__ accounting rdp_filter planned_training privacy_plan coordinator host plan_command"
    ),
    "relay": (
        "__init__ relay_metrics relay_state config relay_check upstream expected_updates "
        "held_updates relayed_sums relayed_updates relay_service cli __main__"
    ),
    "verifiable": (
        "__init__ documents draws stored_lines chain rules coordinator host audit_command"
    ),
}
"""The subpackages of each package and the modules at its root, lowest layer first: each may import
those named before it. `__init__` is the package's own `__init__.py`, if it has one."""


def package_folder(name: str) -> Path:
    [folder] = [folder for folder in packages() if folder.name == name]
    return folder


def packages_imported_by(source: str, package: str) -> set[str]:
    """Return the names of the packages under `potluck` that a module of `package` imports from."""
    names = imported_names(source, package)
    return {name.split(".")[1] for name in names if name.startswith("potluck.")}


def pyproject() -> dict[str, Any]:
    return tomllib.loads((HOUSE / "pyproject.toml").read_text())


def test_no_source_root_makes_potluck_a_regular_package() -> None:
    assert [
        root for root in SOURCE_ROOTS if (HOUSE / root / "potluck" / "__init__.py").exists()
    ] == []


def test_every_list_of_source_roots_is_complete() -> None:
    # Imported here: if the import fails, the other tests still run and show the cause.
    from potluck.common.net.build_version import SOURCE_ROOTS as OF_THE_VERSION

    roots = set(SOURCE_ROOTS)
    tool = pyproject()["tool"]
    wheel = tool["hatch"]["build"]["targets"]["wheel"]
    images = (HOUSE / "deploy" / "assets" / "images" / "Dockerfile").read_text()
    stages = {stage.split("\n")[0].split()[-1]: stage for stage in images.split("\nFROM ")}
    [cleaned] = re.findall(r"find \$\(wildcard (.*?)\)", (HOUSE / "Makefile").read_text())
    lists = {
        "folders": {folder.parent.name for folder in HOUSE.glob("*/potluck")} - {"protos"},
        "build_version.py": set(OF_THE_VERSION),
        "dev-mode-dirs": set(tool["hatch"]["build"]["dev-mode-dirs"]),
        "only-include": {path.removesuffix("/potluck") for path in wheel["only-include"]},
        "sources": set(wheel["sources"]),
        "mypy_path": {*tool["mypy"]["mypy_path"].split(":")},
        "pyright": set(tool["pyright"]["extraPaths"]),
        "ruff": set(tool["ruff"]["src"]),
        "Makefile": set(cleaned.split()),
        ".dockerignore": {*re.findall(r"^!(\w+)$", (HOUSE / ".dockerignore").read_text(), re.M)},
        "Dockerfile, version": {*re.findall(r"COPY (\w+) \1\n", stages["version"])},
    }
    assert {name: roots - found for name, found in lists.items() if roots - found} == {}
    assert lists["folders"] == roots


def test_folder_created_by_the_four_terminals_tutorial_is_git_ignored() -> None:
    page = (HOUSE / "docs" / "start" / "four-terminals.md").read_text()
    [folder] = re.findall(r"^mkdir -p (\w+)/[\w-]+ && cd", page, re.MULTILINE)
    assert f"/{folder}/" in (HOUSE / ".gitignore").read_text().splitlines()


def test_every_package_has_a_py_typed_marker() -> None:
    assert [folder.name for folder in packages() if not (folder / "py.typed").is_file()] == []
    assert {folder.name for folder in packages()} == set(MAY_IMPORT)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import potluck.client.agent", {"client"}),
        ("import numpy, potluck.rpc.v1 as wire", {"rpc"}),
        ("from potluck import client, common", {"client", "common"}),
        ("from potluck.client.agent import Agent", {"client"}),
        ("def later():\n    from potluck.deploy import pki", {"deploy"}),
        ("if TYPE_CHECKING:\n    import potluck.client", {"client"}),
        ("from . import spool", {"server"}),
        ("from ..common import errors", {"common"}),
        ("from .. import client", {"client"}),
        ("import os\nfrom pathlib import Path", set()),
    ],
)
def test_imports_in_every_form_are_detected(source: str, expected: set[str]) -> None:
    assert packages_imported_by(source, "potluck.server") == expected


@pytest.mark.parametrize("name", MAY_IMPORT)
def test_packages_import_only_permitted_packages(name: str) -> None:
    folder = package_folder(name)
    modules = [*folder.rglob("*.py"), *folder.rglob("*.pyi")]
    offenders = {
        str(module.relative_to(HOUSE)): sorted(forbidden)
        for module in modules
        if (
            forbidden := packages_imported_by(
                module.read_text(), ".".join(module.relative_to(folder.parents[1]).parent.parts)
            )
            - MAY_IMPORT[name]
        )
    }
    assert offenders == {}


@pytest.fixture(scope="module")
def imports() -> dict[str, set[str]]:
    """Return the product modules that each module imports, at any depth, by importing module."""
    return imports_by_module()


def room_of(module: str) -> tuple[str, int]:
    """Return a module's package and its subpackage's place in `ROOMS`. Raises KeyError."""
    package, inside = module.split(".")[1], ".".join(module.split(".")[2:]) or "__init__"
    places = {room: place for place, room in enumerate(ROOMS[package].split())}
    within = [room for room in places if f"{inside}.".startswith(f"{room}.")]
    return package, places[max(within, key=len)]


def test_layers_name_every_package_and_only_existing_modules() -> None:
    assert set(ROOMS) == {folder.name for folder in written_packages()}
    missing = [
        f"{package}.{name}"
        for package, names in ROOMS.items()
        for name in names.split()
        if not (path := package_folder(package).joinpath(*name.split("."))).is_dir()
        and not path.with_suffix(".py").is_file()
    ]
    assert missing == []


def test_subpackages_import_only_lower_layers(imports: dict[str, set[str]]) -> None:
    upwards = []
    for module, others in imports.items():
        package, place = room_of(module)
        for other in others:
            other_package, other_place = room_of(other)
            if other_package == package and other_place > place:
                upwards.append(f"{module} imports {other}")
    assert upwards == []


def test_guest_modules_loaded_by_hosts_import_only_common(
    imports: dict[str, set[str]],
) -> None:
    loaded = (
        "potluck.experiments.tasks",
        "potluck.experiments.models",
        "potluck.integrations.adapters",
        "potluck.integrations.tracing",
        "potluck.integrations.s3.store_requests",
    )
    allowed = (*loaded, "potluck.common")
    offenders = {
        module: sorted(other for other in others if not other.startswith(allowed))
        for module, others in imports.items()
        if module.startswith(loaded)
    }
    assert offenders
    assert {module: others for module, others in offenders.items() if others} == {}


COMMON = ("potluck.common", "potluck.rpc")
SHARED = {  # what the images of both hosts and coordinators use
    "secagg": ("protocol", "masked_vectors"),
    "privacy": ("accounting", "planned_training", "rdp_filter"),
    "verifiable": ("chain", "documents", "draws", "rules", "stored_lines"),
}
SIDES = {"host": "potluck.client", "coordinator": "potluck.server"}


def allowed_by_side() -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield each shared module or side of a guest, and the modules that it may import."""
    for guest, names in SHARED.items():
        shared = tuple(f"potluck.{guest}.{name}" for name in names)
        yield from ((module, (*COMMON, *shared)) for module in shared)
        for side, core in SIDES.items():
            yield f"potluck.{guest}.{side}", (*COMMON, *shared, f"potluck.{guest}.{side}", core)


@pytest.mark.parametrize(("side", "allowed"), [*allowed_by_side()])
def test_host_and_coordinator_sides_of_guests_do_not_import_each_other(
    side: str, allowed: tuple[str, ...], imports: dict[str, set[str]]
) -> None:
    modules = [module for module in imports if within(module, (side,))]
    assert modules
    strangers = {
        module: sorted(other for other in imports[module] if not within(other, allowed))
        for module in modules
    }
    assert {module: others for module, others in strangers.items() if others} == {}


def within(module: str, places: tuple[str, ...]) -> bool:
    """Return True if a module is one of these places, or in one of them."""
    return any(f"{module}.".startswith(f"{place}.") for place in places)


def test_module_imports_have_no_cycle(imports: dict[str, set[str]]) -> None:
    TopologicalSorter(imports).prepare()


def test_sink_and_tracing_libraries_are_imported_only_on_use() -> None:
    libraries = {"alembic", "mlflow", "opentelemetry", "pyarrow", "tensorboard", "wandb"}
    offenders = [
        module.stem
        for name in ("client", "common", "integrations", "server")
        for module in package_folder(name).rglob("*.py")
        for node in statements(module.read_text())
        if node.col_offset == 0  # not in a function
        for imported in names_imported_by([node], "potluck.any")
        if imported.partition(".")[0] in libraries
    ]
    assert set(offenders) == {"exporting"}  # imported only if traces are on


def test_every_subpackage_has_a_docstring() -> None:
    silent = [
        str(module.relative_to(HOUSE))
        for folder in written_packages()
        for module in folder.rglob("__init__.py")
        if not ast.get_docstring(ast.parse(module.read_text()))
    ]
    assert silent == []


TWICE = {"frames", "rules", "run"}
"""Names of two modules each: `frames` and `run` are in the Python interface and in the core, and
`rules` is in two guests. May only shrink."""


def test_module_names_are_unique() -> None:
    doors = {"__init__", "__main__", "cli", "config"}  # every program has these
    names = Counter(
        module.stem
        for folder in written_packages()
        for module in folder.rglob("*.py")
        if module.stem not in doors
    )
    assert {name for name, count in names.items() if count > 1} == TWICE


def test_class_names_are_unique_in_each_package() -> None:
    places: dict[tuple[str, str], list[str]] = {}
    for folder in written_packages():
        for module in folder.rglob("*.py"):
            for node in statements(module.read_text()):
                if isinstance(node, ast.ClassDef):
                    found = places.setdefault((folder.name, node.name), [])
                    found.append(str(module.relative_to(HOUSE)))
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_changelog_has_a_section_for_the_release() -> None:
    # Imported here: if the import fails, the other tests still run and show the cause.
    from potluck.common.net.build_version import RELEASE

    assert f"## [{RELEASE}]" in (HOUSE / "CHANGELOG.md").read_text()


def test_declared_python_versions_are_the_tested_ones() -> None:
    """They agree in the classifiers, in the workflow and in the interpreters `make` looks for."""
    project = pyproject()["project"]
    prefix = "Programming Language :: Python :: 3."
    named = [text.removeprefix(prefix) for text in project["classifiers"] if prefix in text]
    workflow = yaml.safe_load((HOUSE / ".github" / "workflows" / "tests.yml").read_text())
    [matrix] = [job["strategy"]["matrix"] for job in workflow["jobs"].values() if "strategy" in job]
    assert matrix["python"] == [f"3.{minor}" for minor in named]
    assert project["requires-python"] == f">=3.{named[0]}"
    looked_for = re.findall(r"python3\.(\d+)", (HOUSE / "Makefile").read_text())
    assert set(looked_for) == set(named)


def test_minimum_library_versions_equal_those_of_the_generated_stubs() -> None:
    stubs = HOUSE / "common" / "potluck" / "rpc" / "v1"
    floors = {
        requirement.name: {Version(part.version) for part in requirement.specifier}
        for requirement in map(Requirement, pyproject()["project"]["dependencies"])
    }
    for name, pattern, files in [
        ("grpcio", r"GRPC_GENERATED_VERSION = '([\d.]+)'", "*_pb2_grpc.py"),
        ("protobuf", r"# Protobuf Python Version: ([\d.]+)", "*_pb2.py"),
    ]:
        texts = [stub.read_text() for stub in stubs.glob(files)]
        assert {Version(found) for text in texts for found in re.findall(pattern, text)} == floors[
            name
        ]


def test_type_checkers_cover_every_folder() -> None:
    products = {"build", "dist", "node_modules"}
    loose = {"examples"}  # its modules share names, so only pyright checks it, strictly
    folders = {
        folder.name
        for folder in HOUSE.iterdir()
        if folder.is_dir()
        and not folder.name.startswith(".")
        and folder.name not in products
        and any(folder.rglob("*.py"))
    }
    tool = pyproject()["tool"]
    assert folders - set(tool["mypy"]["files"]) - loose == set()
    assert folders - set(tool["pyright"]["include"]) == set()


OF_CUDA = re.compile(r"(nvidia|cuda)-|triton$")


def unpinned(requirements: list[str], pins: set[str]) -> Iterator[str]:
    """Yield unpinned names among requirements and, if installed, among what these require.

    A requirement on one exact version needs no other pin. CUDA libraries are left to torch: one
    build needs CUDA 12, another CUDA 13, the CPU build none.
    """
    pending: list[tuple[Requirement, tuple[str, ...]]] = [
        (Requirement(text), ("",)) for text in requirements
    ]
    seen = set[str]()
    while pending:
        requirement, extras = pending.pop()
        name = canonicalize_name(requirement.name)
        if name == "potluck":  # its own extras, all of which are in `requirements`
            continue
        if requirement.marker and not any(
            requirement.marker.evaluate({"extra": extra}) for extra in extras
        ):
            continue
        if name not in pins:
            if not any(part.operator == "==" for part in requirement.specifier):
                yield name
            continue
        key = str(sorted({name, *requirement.extras}))
        if key in seen:
            continue
        seen.add(key)
        try:
            requires = distribution(name).requires or []
        except PackageNotFoundError:  # of an extra not installed here
            continue
        brought = [(Requirement(text), ("", *requirement.extras)) for text in requires]
        pending += [each for each in brought if name != "torch" or not OF_CUDA.match(each[0].name)]


def test_constraints_pin_every_dependency() -> None:
    project = pyproject()["project"]
    lines = (HOUSE / "constraints.txt").read_text().splitlines()
    pins = [Requirement(line) for line in lines if line and not line.startswith("#")]
    exact = re.compile(r"==(\d+!)?[\d.]+(b\d+)?")
    assert [str(pin) for pin in pins if not exact.fullmatch(str(pin.specifier))] == []
    extras = project["optional-dependencies"].values()
    declared = [*project["dependencies"], *chain.from_iterable(extras)]
    names = {str(canonicalize_name(pin.name)) for pin in pins}
    assert sorted(set(unpinned(declared, names))) == []


def required_name(text: str) -> str:
    """Return the name of a library required without any extra; empty if an extra requires it."""
    requirement = Requirement(text)
    return "" if requirement.marker and "extra" in str(requirement.marker) else requirement.name


@cache
def providers() -> dict[str, list[str]]:
    """Return the distributions that provide each module."""
    return {name: list(found) for name, found in packages_distributions().items()}


EXTRAS = {
    "client": ("gpu",),
    "common": ("parquet",),
    "deploy": ("operator",),
    "experiments": ("experiments", "ray"),
    "federation": ("notebook",),
    "integrations": (
        "lightning",
        "lora",
        "mlflow",
        "monai",
        "parquet",
        "s3",
        "tensorboard",
        "tracing",
        "transformers",
        "wandb",
    ),
    "page": ("page",),
    "privacy": ("privacy",),
    "server": ("postgresql", "server"),
}
"""The extras whose libraries a package may import, by package."""


@pytest.mark.parametrize("package", EXTRAS)
def test_packages_import_only_their_declared_libraries(package: str) -> None:
    project = pyproject()["project"]
    extras = [project["optional-dependencies"][extra] for extra in EXTRAS[package]]
    named = [Requirement(text).name for text in chain(project["dependencies"], *extras)]
    brought = chain.from_iterable(distribution(name).requires or () for name in named)
    declared = {canonicalize_name(name) for name in (*named, *map(required_name, brought))}
    provided_by = providers()
    modules = package_folder(package).rglob("*.py")
    libraries = {
        name.partition(".")[0]
        for module in modules
        for name in imported_names(module.read_text(), f"potluck.{package}.any")
    } - {"potluck", *sys.stdlib_module_names}
    undeclared = [
        library
        for library in libraries
        if declared.isdisjoint(map(canonicalize_name, provided_by.get(library, ())))
    ]
    assert libraries
    assert undeclared == []


_SHIPPED = {".css", ".gz", ".html", ".js", ".py", ".pyi", ".sbatch", ".svg", ".typed"}


def source_files(parent: Path, package: str) -> set[Path]:
    """Return the source files of a package, as paths beginning with its name."""
    return {
        path.relative_to(parent)
        for path in (parent / package).rglob("*")
        if path.is_file() and path.suffix in _SHIPPED
    }


@pytest.fixture(scope="module")
def house_files() -> set[Path]:
    """Return the files that the wheel must contain, listed before it is built."""
    return set().union(*(source_files(folder.parent, folder.name) for folder in packages()))


@pytest.fixture(scope="module")
def unpacked_wheel(tmp_path_factory: pytest.TempPathFactory, house_files: set[Path]) -> Path:
    """Return a folder in which the wheel of this tree, and nothing else, is installed."""
    built, target = tmp_path_factory.mktemp("built"), tmp_path_factory.mktemp("target")
    python = [sys.executable, "-m"]
    build = [*python, "build", "--wheel", "--no-isolation", "--outdir", str(built), str(HOUSE)]
    subprocess.run(build, check=True, capture_output=True)
    [wheel] = built.glob("*.whl")
    install = [*python, "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-compile"]
    subprocess.run([*install, "--target", str(target), str(wheel)], check=True)
    return target


def run_with_wheel(unpacked: Path, program: str) -> str:
    """Run a program that finds the dependencies and the wheel, but not this tree.

    Without `site`, the editable install's path file is not read.
    """
    paths = [str(unpacked), *{sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}]
    command = [sys.executable, "-I", "-S", "-c", f"import sys\nsys.path[:0] = {paths}\n{program}"]
    result = subprocess.run(
        command, cwd=unpacked, capture_output=True, text=True, check=False, timeout=120
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_wheel_contains_every_source_file(unpacked_wheel: Path, house_files: set[Path]) -> None:
    contents = unpacked_wheel / "potluck"
    assert {path.name for path in contents.iterdir()} == {folder.name for folder in packages()}
    unpacked = set().union(*(source_files(contents, folder.name) for folder in packages()))
    assert house_files - unpacked == set()


def test_packages_are_imported_from_the_wheel(unpacked_wheel: Path) -> None:
    program = """
import importlib, pathlib
for name in ("server", "client", "common", "deploy", "experiments", "rpc"):
    package = importlib.import_module("potluck." + name)
    for folder in package.__path__:
        print(pathlib.Path(folder).parents[1])
from potluck.server import selection
print(pathlib.Path(selection.__file__).parents[2])
"""
    assert set(run_with_wheel(unpacked_wheel, program).split()) == {str(unpacked_wheel)}


def test_the_wheel_has_the_version_of_this_checkout(unpacked_wheel: Path) -> None:
    from potluck.common.net.build_version import source_version

    program = """
from importlib.metadata import version
from potluck.common.net.build_version import software_version
print(version("potluck"), software_version())
"""
    told = run_with_wheel(unpacked_wheel, program).split()
    assert told == [source_version(HOUSE)] * 2


def test_every_entry_point_of_the_wheel_names_an_existing_object(unpacked_wheel: Path) -> None:
    [wheel] = distributions(name="potluck", path=[str(unpacked_wheel)])
    project = pyproject()["project"]
    groups = {**project["entry-points"], "console_scripts": project["scripts"]}
    declared = {(group, name) for group, names in groups.items() for name in names}
    assert {(entry.group, entry.name) for entry in wheel.entry_points} == declared
    missing = [
        f"{entry.group}: {entry.name} = {entry.value}"
        for entry in wheel.entry_points
        if entry.attr
        not in names_at_the_top(unpacked_wheel / f"{entry.module.replace('.', '/')}.py")
    ]
    assert missing == []


def names_at_the_top(module: Path) -> set[str]:
    """Return the names of the functions, classes and variables at the top of a module."""
    found = set[str]()
    for node in ast.parse(module.read_text()).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.Assign):
            found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return found


@pytest.mark.slow  # it imports the libraries of all extras
def test_every_entry_point_of_the_wheel_loads(unpacked_wheel: Path) -> None:
    program = """
from importlib.metadata import distribution
for entry in distribution("potluck").entry_points:
    try:
        entry.load()
    except (ImportError, AttributeError) as error:
        print(f"{entry.group}: {entry.name} = {entry.value}: {error}")
"""
    assert run_with_wheel(unpacked_wheel, program) == ""


def test_state_machine_of_a_run_imports_neither_clock_nor_disk_nor_network() -> None:
    imports = imports_by_module()
    package = "potluck.server.machine"
    pending, machine = [f"{package}.machine"], set[str]()
    while pending:
        module = pending.pop()
        machine.add(module)
        inside = {other for other in imports[module] if within(other, (package,))}
        pending += inside - machine
    libraries = {
        name.partition(".")[0]
        for module in machine
        for name in imported_names(source_of(module), package)
    }
    pure = {"__future__", "collections", "dataclasses", "enum", "math", "numpy", "potluck"}
    assert len(machine) > 5
    assert libraries <= pure


def source_of(module: str) -> str:
    """Return the source of a module that is not a package."""
    return HOUSE.joinpath(module.split(".")[1], *module.split(".")).with_suffix(".py").read_text()


UNPICKLING = {
    "potluck.client.training.processes.device_process": "results of the host's own worker",
    "potluck.client.training.processes.training_jobs": "its own errors, as a check",
    "potluck.client.training.processes.training_worker": "jobs of its own host",
    "potluck.experiments.traces.fedscale": "FedScale's files, with plain dictionaries only",
    "potluck.experiments.weights": "pretrained weights, by torch with weights_only",
    "potluck.federation.session_plugins": "classes of a notebook, written by the same user",
}
"""Modules that can unpickle, and what they read."""


def test_only_listed_modules_can_unpickle() -> None:
    libraries = {"cloudpickle", "dill", "joblib", "marshal", "multiprocessing", "pickle", "shelve"}
    calls = re.compile(r"allow_pickle=True|weights_only=False|torch\.load\((?!.*weights_only=True)")
    found = set[str]()
    for folder in written_packages():
        for path in folder.rglob("*.py"):
            source = path.read_text()
            names = imported_names(source, f"potluck.{folder.name}")
            if calls.search(source) or libraries & {name.partition(".")[0] for name in names}:
                found.add(".".join(path.relative_to(folder.parents[1]).with_suffix("").parts))
    assert found == set(UNPICKLING)
