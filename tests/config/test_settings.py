"""Settings: units, precedence, refusals by name, and the annotated file as the reference."""

import dataclasses
import tomllib
from importlib import resources
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcascade.config.errors import ConfigError
from kvcascade.config.load import load_settings
from kvcascade.config.settings import (
    SHORTHANDS,
    DiskSettings,
    DramSettings,
    HbmSettings,
    Settings,
    Share,
    all_settings,
    bytes_of,
    format_bytes,
)

REFERENCE = Path(str(resources.files("kvcascade.config") / "kvcascade.toml"))


def write(folder: Path, text: str) -> Path:
    path = folder / "kvcascade.toml"
    path.write_text(text, encoding="utf-8")
    return path


def refusal(folder: Path, text: str) -> str:
    """What loading a file with this text says; the file's path shortened to `FILE`."""
    path = write(folder, text)
    with pytest.raises(ConfigError) as caught:
        load_settings(path, environ={})
    return str(caught.value).replace(str(path), "FILE")


# ---- the reference file


def test_the_reference_file_lists_every_setting_with_its_default() -> None:
    listed = {
        f"{section}.{key}": str(value).lower() if isinstance(value, bool) else str(value)
        for section, table in tomllib.loads(REFERENCE.read_text(encoding="utf-8")).items()
        for key, value in table.items()
    }
    assert list(listed.items()) == [(info.dotted, info.default) for info in all_settings()]


def test_loading_the_reference_file_gives_the_defaults() -> None:
    assert load_settings(REFERENCE, environ={}) == Settings() == load_settings(environ={})


def test_every_setting_in_the_reference_file_has_a_comment_above_it() -> None:
    lines = REFERENCE.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines):
        if "=" in line and not line.startswith("#"):
            assert lines[number - 1].startswith("# "), line


# ---- quantities


@pytest.mark.parametrize(
    ("text", "size"),
    [("64GiB", 64 << 30), ("64 GiB", 64 << 30), ("1.5MiB", 3 << 19), ("500MB", 500_000_000), ("2097152B", 2 << 20)],
)
def test_a_size_carries_a_unit(text: str, size: int) -> None:
    assert load_settings(environ={"KVCASCADE_DISK_CAPACITY": text}).disk.capacity == size


@pytest.mark.parametrize("text", ["64", "64GB iB", "-1GiB", "GiB", "1e9B", "64Gb", "0x10MiB", "٣GiB", "inf"])
def test_what_is_not_a_size_is_refused_and_an_example_given(text: str) -> None:
    with pytest.raises(ConfigError, match=r"dram\.capacity \(KVCASCADE_DRAM_CAPACITY\): .*64GiB"):
        load_settings(environ={"KVCASCADE_DRAM_CAPACITY": text})


@pytest.mark.parametrize(("text", "seconds"), [("250ms", 0.25), ("30s", 30.0), ("1.5min", 90.0), ("1h", 3600.0)])
def test_a_duration_carries_a_unit(text: str, seconds: float) -> None:
    assert load_settings(environ={"KVCASCADE_LEASES_LOOKUP": text}).leases.lookup == pytest.approx(seconds)


def test_a_duration_without_a_unit_is_refused_in_the_file_too(tmp_path: Path) -> None:
    assert "'5' has no unit: write a number and a unit, such as 250ms" in refusal(tmp_path, "[leases]\nlookup = 5\n")


def test_a_share_is_taken_of_a_whole_and_a_size_is_not() -> None:
    assert bytes_of(DramSettings(capacity=Share(0.25)).capacity, 1000 << 20) == 250 << 20
    assert bytes_of(DramSettings(capacity=1 << 30).capacity, 1000 << 20) == 1 << 30


@pytest.mark.parametrize("text", ["0%", "101%", "-5%", "nan%"])
def test_a_share_out_of_range_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"disk\.capacity"):
        load_settings(environ={"KVCASCADE_DISK_CAPACITY": text})


@given(st.integers(min_value=1 << 20, max_value=1 << 60))
def test_a_size_means_the_same_as_a_number_and_as_text(size: int) -> None:
    number = DiskSettings(capacity=size)
    assert number == load_settings(environ={}, flags={"disk-capacity": f"{size}B"}).disk
    assert format_bytes(size)


@given(st.text(max_size=20).filter(lambda text: "\0" not in text))
def test_any_text_is_taken_or_refused_with_the_settings_name(text: str) -> None:
    for info in all_settings():
        try:
            load_settings(environ={}, flags={info.flag[2:]: text})
        except ConfigError as error:
            assert str(error).startswith(f"{info.dotted} ({info.flag})")


# ---- precedence


def test_a_flag_beats_the_environment_which_beats_the_file_which_beats_the_default(tmp_path: Path) -> None:
    path = write(tmp_path, '[disk]\nthreads = 1\ncapacity = "1GiB"\nwrite_policy = "through"\n')
    environ = {"KVCASCADE_DISK_THREADS": "2", "KVCASCADE_DISK_SIZE": "2GiB"}
    settings = load_settings(path, environ=environ, flags={"disk-threads": "3"})
    assert (settings.disk.threads, settings.disk.capacity, settings.disk.write_policy) == (3, 2 << 30, "through")
    assert settings.dram == DramSettings()


@pytest.mark.parametrize("info", list(all_settings()), ids=lambda info: info.dotted)
def test_every_setting_can_be_given_by_file_by_environment_and_by_flag(info, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    path = write(tmp_path, f'[{info.section}]\n{info.key} = "{info.default}"\n')
    by_environ = load_settings(environ={info.variable: info.default})
    assert (
        load_settings(path, environ={}) == by_environ == load_settings(environ={}, flags={info.flag[2:]: info.default})
    )


def test_the_short_names_work_as_flags_and_as_variables() -> None:
    values = {"socket": "/tmp/s", "dram": "1GiB", "disk": "/tmp/d", "disk-size": "2GiB"}
    by_flag = load_settings(environ={}, flags=values)
    by_environ = load_settings(environ={f"KVCASCADE_{k.upper().replace('-', '_')}": v for k, v in values.items()})
    assert by_flag == by_environ
    assert (by_flag.dram.capacity, by_flag.disk.directory) == (1 << 30, (Path("/tmp/d"),))
    assert set(SHORTHANDS.values()) <= {info.dotted for info in all_settings()}


def test_the_environment_names_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, "[disk]\nthreads = 7\n")
    assert load_settings(environ={"KVCASCADE_CONFIG": str(path)}).disk.threads == 7


def test_an_empty_variable_is_not_set() -> None:
    assert load_settings(environ={"KVCASCADE_DRAM": "", "KVCASCADE_CONFIG": ""}) == Settings()


def test_variables_that_kubernetes_sets_for_a_service_of_our_name_are_not_ours() -> None:
    environ = {
        "KVCASCADE_SERVICE_HOST": "10.0.0.1",
        "KVCASCADE_SERVICE_PORT_HTTP": "80",
        "KVCASCADE_PORT": "tcp://10.0.0.1:80",
        "KVCASCADE_PORT_80_TCP_ADDR": "10.0.0.1",
        "KVCASCADE_METRICS_SERVICE_HOST": "10.0.0.1",
    }
    assert load_settings(environ=environ) == Settings()


# ---- refusals


def test_an_unknown_key_is_refused_with_its_line_and_the_nearest_valid_one(tmp_path: Path) -> None:
    said = refusal(tmp_path, "# a comment\n[dram]\n\n  capacty = '1GiB'\n")
    assert said == "unknown setting dram.capacty (FILE:4); did you mean 'capacity'?"


def test_a_key_in_the_wrong_section_is_refused_with_its_right_place(tmp_path: Path) -> None:
    assert "did you mean 'disk.threads'" in refusal(tmp_path, "[dram]\nthreads = 4\n")


def test_a_key_outside_all_sections_is_refused(tmp_path: Path) -> None:
    said = refusal(tmp_path, "huge_pages = true\n")
    assert said == "unknown section or setting 'huge_pages' (FILE:1); did you mean 'dram.huge_pages'?"


def test_an_unknown_section_is_refused_with_the_nearest_valid_one(tmp_path: Path) -> None:
    assert refusal(tmp_path, "\n[drams]\n") == "unknown section or setting 'drams' (FILE:2); did you mean 'dram'?"


def test_a_section_given_a_value_is_refused(tmp_path: Path) -> None:
    assert refusal(tmp_path, "dram = '64GiB'\n") == "dram (FILE:1) is a section: write [dram] and its settings below it"


@pytest.mark.parametrize(("toml", "kind"), [("[1, 2]", "list"), ("{ a = 1 }", "table"), ("2026-01-01", "date")])
def test_a_value_that_is_not_one_value_is_refused(toml: str, kind: str, tmp_path: Path) -> None:
    assert refusal(tmp_path, f"[disk]\nthreads = {toml}\n") == f"disk.threads (FILE:2): takes one value, not a {kind}"


def test_an_unknown_variable_is_refused_with_the_nearest_valid_one() -> None:
    with pytest.raises(ConfigError, match="KVCASCADE_DARM in the environment; did you mean 'KVCASCADE_DRAM'"):
        load_settings(environ={"KVCASCADE_DARM": "1GiB"})


def test_an_unknown_flag_is_refused_with_the_nearest_valid_one() -> None:
    with pytest.raises(ConfigError, match="--disk-thread; did you mean 'disk-threads'"):
        load_settings(environ={}, flags={"disk-thread": "3"})


def test_a_setting_that_one_source_gives_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"dram\.capacity is given twice: by --dram-capacity and by --dram"):
        load_settings(environ={}, flags={"dram-capacity": "1GiB", "dram": "2GiB"})


def test_a_wrong_value_in_the_file_is_named_with_its_line(tmp_path: Path) -> None:
    said = refusal(tmp_path, "[daemon]\nseed = 0\n\n[daemon.extra]\n")
    assert said.startswith("unknown setting daemon.extra (FILE:4)")
    said = refusal(tmp_path, "[dram]\nlock = true\nwrite_policy = 'thru'\n")
    assert said == "dram.write_policy (FILE:3): 'thru' is not one of back, through; did you mean 'through'?"


@pytest.mark.parametrize("mode", ["0666", "0777", "0644", "438", ""])
def test_the_socket_is_never_open_to_everybody(mode: str) -> None:
    # Fault L3: who reaches the control socket reaches every verb, and the KV of every prompt.
    with pytest.raises(ConfigError, match=r"daemon\.socket_mode \(--daemon-socket-mode\): .*0600"):
        load_settings(environ={}, flags={"daemon-socket-mode": mode})


def test_settings_that_contradict_each_other_are_refused_with_the_source() -> None:
    with pytest.raises(ConfigError, match=r"dram\.capacity \(KVCASCADE_DRAM\): 16 MiB does not hold one slab"):
        load_settings(environ={"KVCASCADE_DRAM": "16MiB"})
    with pytest.raises(ConfigError, match=r"hbm\.device \(default\): hbm\.capacity is set, so say where"):
        load_settings(environ={}, flags={"hbm": "64MiB"})


@pytest.mark.parametrize("host", ["node..local", ".", "n" * 64, "10.0.0.999", "1.2.3", "[1::2::3]"])
def test_a_host_that_can_have_no_address_is_refused(host: str) -> None:
    with pytest.raises(ConfigError, match=r"peers\.advertise.*is no name of a host"):
        load_settings(environ={}, flags={"peers-listen": "127.0.0.1:0", "peers-advertise": f"{host}:7400"})


@pytest.mark.parametrize("host", ["0.0.0.0", "[::]", "224.0.0.1"])
def test_an_advertised_address_is_that_of_one_host(host: str) -> None:
    with pytest.raises(ConfigError, match=r"peers\.advertise.*is the address of no one host"):
        load_settings(environ={}, flags={"peers-listen": "127.0.0.1:0", "peers-advertise": f"{host}:7400"})


@pytest.mark.parametrize("host", ["a_b-c.d.", "10.0.0.9", "[fe80::1]", "7.example"])
def test_an_advertised_address_needs_one_to_listen_on(host: str) -> None:
    flags = {"peers-advertise": f"{host}:7400"}
    assert load_settings(environ={}, flags={**flags, "peers-listen": "0.0.0.0:7400"}).peers.advertise
    with pytest.raises(ConfigError, match=r"peers\.listen \(default\): peers\.advertise is set, so say where"):
        load_settings(environ={}, flags=flags)


def test_a_file_that_cannot_be_used_is_refused_by_its_path(tmp_path: Path) -> None:
    missing = tmp_path / "missing.toml"
    with pytest.raises(ConfigError, match=r"missing\.toml: No such file"):
        load_settings(missing, environ={})
    with pytest.raises(ConfigError, match="Is a directory"):
        load_settings(tmp_path, environ={})
    assert "is not valid TOML" in refusal(tmp_path, "[dram\n") and "line 1" in refusal(tmp_path, "[dram\n")
    path = tmp_path / "kvcascade.toml"
    path.write_bytes(b"\xff\xfe[dram]")
    with pytest.raises(ConfigError, match="is not UTF-8"):
        load_settings(path, environ={})


# ---- constructors used from code


def test_code_and_file_meet_the_same_checks() -> None:
    assert DramSettings(capacity=1 << 30) == DramSettings(capacity="1GiB")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"dram\.slab"):
        DramSettings(slab=3 << 20)
    with pytest.raises(ConfigError, match=r"disk\.threads: True is not a whole number"):
        DiskSettings(threads=True)
    with pytest.raises(ConfigError, match=r"hbm\.device"):
        HbmSettings(capacity=64 << 20, device="gpu0")


def test_settings_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Settings().dram.lock = False  # type: ignore[misc]


# ---- several directories


def test_directories_are_a_list_in_the_file_and_apart_by_commas_elsewhere(tmp_path: Path) -> None:
    path = write(tmp_path, '[disk]\ndirectory = ["/mnt/a", "/mnt/b"]\n')
    drives = (Path("/mnt/a"), Path("/mnt/b"))
    assert load_settings(path, environ={}).disk.directory == drives
    assert load_settings(environ={"KVCASCADE_DISK": "/mnt/a,/mnt/b"}).disk.directory == drives
    assert load_settings(environ={}, flags={"disk": " /mnt/a , /mnt/b"}).disk.directory == drives
    assert DiskSettings(directory=["/mnt/a", Path("/mnt/b")]).directory == drives  # type: ignore[arg-type]
    assert Settings().disk.directory == ()


def test_directories_that_cannot_be_meant_are_refused(tmp_path: Path) -> None:
    for text in ('["/mnt/a", "/mnt/a/"]', '"/mnt/a, /mnt//a"', '"/mnt/a, /mnt/a"'):
        assert "is named twice" in refusal(tmp_path, f"[disk]\ndirectory = {text}\n")
    assert "one of its paths is empty" in refusal(tmp_path, '[disk]\ndirectory = "/mnt/a,,/mnt/b"\n')
    assert "takes one value, not a list" in refusal(tmp_path, '[dram]\ncapacity = ["1GiB", 2]\n')
    many = ", ".join(f"/mnt/{number}" for number in range(65))
    assert "65 directories are too many" in refusal(tmp_path, f'[disk]\ndirectory = "{many}"\n')


def test_a_reserve_is_a_size_or_a_share_and_may_be_nothing() -> None:
    assert DiskSettings(reserve="0").reserve == 0  # type: ignore[arg-type]
    assert DiskSettings(reserve="10GiB").reserve == 10 << 30  # type: ignore[arg-type]
    assert bytes_of(DiskSettings().reserve, 100 << 20) == 5 << 20
