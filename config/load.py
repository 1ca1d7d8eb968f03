"""Settings from a file, the environment and flags: flag > environment > file > default, for each setting by itself.

What is not recognised is refused by name, with the nearest valid one; an error names the setting and where its
value stands. All three sources are texts by the time they reach the constructors of `settings.py`, so one value
means the same wherever it is written.
"""

import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import ConfigError
from .settings import SECTIONS, SHORTHANDS, SettingError, Settings, all_settings, did_you_mean, nearest

PREFIX = "KVCASCADE_"
CONFIG_VARIABLE = "KVCASCADE_CONFIG"

# Kubernetes describes a Service named `kvcascade` to every pod of its namespace by variables of these names.
_SERVICE_VARIABLE = re.compile(r"KVCASCADE_(\w+_)?(SERVICE_(HOST|PORT\w*)|PORT(_\d+_(TCP|UDP|SCTP)\w*)?)", re.ASCII)


@dataclass(frozen=True, slots=True)
class _Given:
    setting: str
    text: str
    source: str


def load_settings(
    config: Path | None = None,
    *,
    environ: Mapping[str, str] = os.environ,
    flags: Mapping[str, str] | None = None,
) -> Settings:
    """The settings of one process.

    Args:
        config: the file; without it the one that KVCASCADE_CONFIG names, if any. It must exist.
        environ: `KVCASCADE_<SECTION>_<KEY>`, and the shorthands (`KVCASCADE_SOCKET`). An empty variable is not set.
        flags: by name without the dashes: `dram-capacity`, or a shorthand (`dram`).

    Raises ConfigError for an unusable file, an unknown name, a setting that one source gives twice, and a value
    that its setting refuses.
    """
    if config is None and environ.get(CONFIG_VARIABLE):
        config = Path(environ[CONFIG_VARIABLE])
    given: dict[str, _Given] = {}
    if config is not None:
        given |= _once(_from_file(config))
    given |= _once(_from_environ(environ))
    given |= _once(_from_flags(flags or {}))
    return _build(given)


def _build(given: Mapping[str, _Given]) -> Settings:
    sections: dict[str, Any] = {}
    for section, cls in SECTIONS.items():
        values = {
            one.setting.partition(".")[2]: one.text for one in given.values() if one.setting.startswith(f"{section}.")
        }
        try:
            sections[section] = cls(**values)
        except SettingError as error:
            source = given[error.setting].source if error.setting in given else "default"
            raise ConfigError(f"{error.setting} ({source}): {error.reason}") from error
    return Settings(**sections)


def _once(found: Iterator[_Given]) -> dict[str, _Given]:
    given: dict[str, _Given] = {}
    for one in found:
        if one.setting in given:
            raise ConfigError(
                f"{one.setting} is given twice: by {given[one.setting].source} and by {one.source}; drop one"
            )
        given[one.setting] = one
    return given


# ---- the three sources


def _from_flags(flags: Mapping[str, str]) -> Iterator[_Given]:
    names = {info.flag.removeprefix("--"): info.dotted for info in all_settings()} | SHORTHANDS
    for name, text in flags.items():
        if name not in names:
            raise ConfigError(f"unknown flag --{name}{did_you_mean(nearest(name, names))}")
        yield _Given(names[name], text, f"--{name}")


def _from_environ(environ: Mapping[str, str]) -> Iterator[_Given]:
    names = {info.variable: info.dotted for info in all_settings()}
    names |= {PREFIX + short.upper().replace("-", "_"): dotted for short, dotted in SHORTHANDS.items()}
    for name, text in sorted(environ.items()):
        if not name.startswith(PREFIX) or name == CONFIG_VARIABLE or not text:
            continue
        if name in names:
            yield _Given(names[name], text, name)
        elif not _SERVICE_VARIABLE.fullmatch(name):
            hint = did_you_mean(nearest(name, [*names, CONFIG_VARIABLE]))
            raise ConfigError(f"unknown setting {name} in the environment{hint}")


def _from_file(path: Path) -> Iterator[_Given]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read the settings file {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"the settings file {path} is not UTF-8 text") from error
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"the settings file {path} is not valid TOML: {error}") from error
    known = {info.dotted for info in all_settings()}
    anywhere = {name.partition(".")[2]: name for name in sorted(known, reverse=True)}

    def elsewhere(key: str) -> str | None:
        close = nearest(key, anywhere)
        return anywhere[close] if close else None

    lines = _lines(text)
    for section, table in document.items():
        where = f"{path}:{lines.get(section, 1)}"
        if section not in SECTIONS:
            hint = did_you_mean(nearest(section, SECTIONS) or elsewhere(section))
            raise ConfigError(f"unknown section or setting {section!r} ({where}){hint}")
        if not isinstance(table, dict):
            raise ConfigError(f"{section} ({where}) is a section: write [{section}] and its settings below it")
        for key, value in table.items():
            setting = f"{section}.{key}"
            source = f"{path}:{lines.get(setting, lines.get(section, 1))}"
            if setting not in known:
                here = [name.partition(".")[2] for name in known if name.startswith(f"{section}.")]
                hint = did_you_mean(nearest(key, here) or elsewhere(key))
                raise ConfigError(f"unknown setting {setting} ({source}){hint}")
            if isinstance(value, list) and all(isinstance(part, str) and "," not in part for part in value):
                value = ", ".join(value) or ""
            if not isinstance(value, str | bool | int | float):
                raise ConfigError(f"{setting} ({source}): takes one value, not a {_toml_kind(value)}")
            yield _Given(setting, str(value).lower() if isinstance(value, bool) else str(value), source)


def _toml_kind(value: object) -> str:
    return {"dict": "table"}.get(type(value).__name__, type(value).__name__)


def _lines(text: str) -> dict[str, int]:
    """Where each `section` and `section.key` stands, for messages; tomllib does not tell."""
    lines: dict[str, int] = {}
    section = ""
    for number, line in enumerate(text.splitlines(), 1):
        if header := re.match(r"\s*\[+([^]#]+)\]", line):
            section = re.sub(r"[\s\"']", "", header[1])
            lines.setdefault(section, number)
        elif key := re.match(r"([\w.\"' \t-]+)=", line):
            name = re.sub(r"[\s\"']", "", key[1])
            lines.setdefault(f"{section}.{name}" if section else name, number)
    return lines
