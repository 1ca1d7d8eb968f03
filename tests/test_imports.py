"""Who may import whom (design, section 3): read from the sources, and tried in a fresh interpreter."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("config", "tiers", "daemon", "connectors")

# Packages of ours: what each may import, whole packages or single modules.
OURS = {
    "config": {"config"},
    "tiers": {"tiers", "config"},
    "daemon": {"daemon", "tiers", "config"},
    "connectors": {
        "connectors",
        "daemon.attachment",
        "daemon.client",
        "daemon.protocol",
        "tiers.block",
        "tiers.memory",
        "tiers.namespace",
        "config.settings",
        "config.errors",
    },
}
# What is not ours, beside the standard library.
OTHERS = {
    "config": set[str](),
    "tiers": {"cbor2", "numpy", "xxhash"},
    "daemon": {"cbor2", "numpy", "rich", "uvloop"},
    "connectors": {"numpy", "torch"},
}
# Their engine is installed elsewhere; tests/connectors/test_vllm*.py run them.
ELSEWHERE = {f"connectors/{name}.py" for name in ("vllm", "vllm_metrics", "vllm_model", "vllm_pages", "vllm_tier")}
# Engines, devices and the like live in one file each.
ONLY_IN = {
    "cuda": {"tiers/memory.py"},
    "torch": {"tiers/memory.py"},
    "transformers": {"connectors/huggingface.py", "connectors/huggingface_model.py", "daemon/cli.py"},
    "vllm": ELSEWHERE,
    "huggingface_hub": {"connectors/vllm_model.py"},
    "redis": {"tiers/redis_wire.py"},
    "lz4": {"tiers/codec.py"},
    "zstandard": {"tiers/codec.py"},
}
# These run inside engines and in the command line: nothing but the standard library, cbor2 and errors when they load.
LIGHT = ("daemon/client.py", "daemon/protocol.py")
HEAVY = {"torch", "numpy", "transformers", "redis", "lz4", "zstandard", "cuda", "rich"}
MEDIA = {"tiers.hbm", "tiers.dram", "tiers.disk", "tiers.redis"}


class Import(NamedTuple):
    """One import statement's target: `lazy` inside a function, `typing` for type checkers alone."""

    name: str
    lazy: bool
    typing: bool


def sources() -> list[str]:
    return sorted(str(path.relative_to(ROOT)) for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def imports(file: str) -> Iterator[Import]:
    package = file.split("/")[0]
    modules = {f"kvcascade.{one}": {path.stem for path in (ROOT / one).glob("*.py")} for one in PACKAGES}

    def visit(node: ast.AST, lazy: bool, typing: bool) -> Iterator[Import]:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Lambda():
                lazy = True
            case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                typing = True
            case ast.Import(names=names):
                yield from (Import(one.name, lazy, typing) for one in names)
            case ast.ImportFrom(module=module, names=names, level=level):
                base = ".".join(filter(None, [f"kvcascade.{package}" if level else "", module]))
                for one in names:
                    yield Import(f"{base}.{one.name}" if one.name in modules.get(base, ()) else base, lazy, typing)
        for child in ast.iter_child_nodes(node):
            yield from visit(child, lazy, typing)

    return visit(ast.parse((ROOT / file).read_text(encoding="utf-8"), file), False, False)


def allowed(name: str, listed: set[str]) -> bool:
    return any(name == one or name.startswith(f"{one}.") for one in listed)


def test_the_sources_are_found() -> None:
    assert {"config/settings.py", "daemon/cli.py", "daemon/protocol.py"} <= set(sources())


@pytest.mark.parametrize("file", sources())
def test_a_package_imports_only_what_it_may(file: str) -> None:
    package = file.split("/")[0]
    for one in imports(file):
        ours, _, module = one.name.partition(".")
        if ours == "kvcascade":
            # `from kvcascade.config import VERSION` names the package itself; its __init__ holds nothing else.
            assert allowed(module, OURS[package]) or module == "config", f"{file} imports {one.name}"
            if package == "tiers" and module in MEDIA:
                own = f"{module.replace('.', '/')}.py"
                # drives.py is the disk tier too: several of what disk.py knows one of.
                assert file in (own, own.replace("disk", "drives")), f"{file} knows another tier: {one.name}"
        elif ours not in sys.stdlib_module_names and one.name != "_typeshed":
            here = OTHERS[package] | {other for other, files in ONLY_IN.items() if file in files}
            assert ours in here, f"{file} imports {one.name}"


@pytest.mark.parametrize("file", LIGHT)
def test_what_runs_inside_engines_loads_nothing_heavy(file: str) -> None:
    for one in imports(file):
        if not one.lazy and not one.typing:
            ours, _, module = one.name.partition(".")
            light = {"daemon.protocol", "config.errors", "config"} if ours == "kvcascade" else {"cbor2"}
            assert ours in sys.stdlib_module_names or ours in light or module in light, f"{file} imports {one.name}"


@pytest.mark.parametrize("module", ["kvcascade.daemon.client", "kvcascade.daemon.protocol", "kvcascade.tiers.block"])
def test_a_light_module_is_light_in_a_fresh_interpreter(module: str) -> None:
    script = f"import sys, {module}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-P", "-c", script], capture_output=True, text=True, check=True)
    assert not set(done.stdout.split()) & HEAVY


@pytest.mark.parametrize(
    "file", [file for file in sources() if not file.endswith("__init__.py") and file not in ELSEWHERE]
)
def test_a_module_imports_by_itself(file: str) -> None:
    """In any order: no module counts on another one having been loaded before. Nothing is printed or started."""
    module = "kvcascade." + file.removesuffix(".py").replace("/", ".")
    script = f"import threading, {module}; assert threading.active_count() == 1"
    done = subprocess.run([sys.executable, "-P", "-W", "error", "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
