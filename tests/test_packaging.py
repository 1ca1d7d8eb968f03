"""What users install: the wheel and the sdist hold every module, the type markers and the reference of the settings."""

import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

from kvcascade.config import VERSION

ROOT = Path(__file__).parents[1]
PACKAGES = ("config", "tiers", "daemon", "connectors")
NOT_SOURCES = shutil.ignore_patterns(".*", "build", "dist", "typing", "*.egg-info", "__pycache__")

BUILD = """
import sys
from setuptools import build_meta
folder = sys.argv[1]
print(build_meta.build_wheel(folder), build_meta.build_sdist(folder))
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A wheel and an sdist, built offline from a copy of the sources that is no git repository."""
    folder = tmp_path_factory.mktemp("packaging")
    shutil.copytree(ROOT, folder / "source", ignore=NOT_SOURCES)
    done = subprocess.run(
        [sys.executable, "-P", "-c", BUILD, str(folder)], cwd=folder / "source", capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    wheel, sdist = done.stdout.split()[-2:]
    return folder / wheel, folder / sdist


def package_files() -> set[str]:
    """Every file of the packages that users need, as `daemon/cli.py`."""
    found = {
        str(path.relative_to(ROOT))
        for package in PACKAGES
        for pattern in ("*.py", "py.typed", "*.toml", "deploy/*")
        for path in (ROOT / package).rglob(pattern)
    }
    assert {"config/kvcascade.toml", "daemon/py.typed", "tiers/block.py"} <= found
    return found


def test_the_wheel_holds_every_module_and_its_data(built: tuple[Path, Path]) -> None:
    names = zipfile.ZipFile(built[0]).namelist()
    assert {name for name in names if ".dist-info/" not in name} == {f"kvcascade/{file}" for file in package_files()}
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


def test_the_sdist_holds_the_sources_the_tests_and_the_documents(built: tuple[Path, Path]) -> None:
    with tarfile.open(built[1]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    tests = {str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("*.py")}
    assert package_files() | tests <= names
    assert {"README.md", "LICENSE", "CHANGELOG.md", "Makefile", "constraints.txt", "pyproject.toml"} <= names
    assert not [name for name in names if "__pycache__" in name]


def test_the_wheel_works_where_there_is_no_checkout(built: tuple[Path, Path], tmp_path: Path) -> None:
    zipfile.ZipFile(built[0]).extractall(tmp_path)
    script = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); sys.meta_path[:] = [f for f in sys.meta_path "
        "if 'editable' not in getattr(f, '__module__', '') + getattr(f, '__name__', '')]; "
        "import kvcascade.daemon.cli as cli; print(cli.__file__); sys.exit(cli.main(['version']))"
    )
    done = subprocess.run([sys.executable, "-P", "-c", script], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.splitlines() == [str(tmp_path / "kvcascade/daemon/cli.py"), f"kvcascade {VERSION}"], done.stderr


def test_every_package_folder_is_listed() -> None:
    """A folder that is not listed is missing from the wheel only; here it is missing from the list."""
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    folders = {path.parent for package in PACKAGES for path in (ROOT / package).rglob("*.py")}
    assert {f"kvcascade.{str(path.relative_to(ROOT)).replace('/', '.')}" for path in folders} == set(listed)
    assert all((path / "py.typed").exists() for path in folders)


def test_the_metadata_tells_what_users_need_to_know(built: tuple[Path, Path]) -> None:
    (installed,) = metadata.distributions(path=[str(built[0])])
    about = installed.metadata
    assert (about["Version"], about["License-Expression"]) == (VERSION, "Apache-2.0")
    needed = {re.split(r"[^\w-]", one)[0] for one in installed.requires or () if "extra ==" not in one}
    assert needed == {"cbor2", "lz4", "numpy", "redis", "rich", "uvloop", "xxhash", "zstandard"}
    # Fault N2: a new major version of the encoder may name every block anew.
    assert {"cbor2<7,>=6"} <= {*(installed.requires or ())}
    (command,) = installed.entry_points.select(group="console_scripts", name="kvcascade")
    assert command.value == "kvcascade.daemon.cli:main"


def test_the_changelog_begins_with_this_version() -> None:
    assert re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.M)[1] == VERSION  # type: ignore[index]
