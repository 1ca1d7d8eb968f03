"""Frames and bodies: what is understood, and what is refused before anything is decoded or allocated for it."""

import math
import os
import pickle
import struct
import subprocess
import sys
import tracemalloc

import cbor2
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcascade.config.errors import CascadeError, DaemonUnavailable, ProtocolError, Refused
from kvcascade.daemon import protocol
from kvcascade.daemon.client import Client
from kvcascade.daemon.protocol import (
    HEADER,
    MAX_BODY,
    MAX_DEPTH,
    MAX_ITEMS,
    Frame,
    FrameDecoder,
    Kind,
    decode_body,
    encode,
    encode_error,
    encode_event,
    encode_request,
    error_from,
    pack_u8,
    pack_u32,
    pack_u64,
    split_hashes,
    take,
    take_hashes,
    take_u8,
    take_u32,
    take_u64,
)

scalars = st.none() | st.booleans() | st.integers(-(2**64), 2**64 - 1) | st.floats() | st.binary() | st.text()
bodies = st.dictionaries(
    st.text(), st.recursive(scalars, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=20)
)


def depth(value: object) -> int:
    if isinstance(value, dict):
        return 1 + max((depth(each) for each in value.values()), default=0)
    if isinstance(value, list):
        return 1 + max((depth(each) for each in value), default=0)
    return 0


def header(magic=b"KVCS", version=1, kind=1, descriptors=0, correlation=1, length=0) -> bytes:
    return struct.pack("<4sBBHQQ", magic, version, kind, descriptors, correlation, length)


# ---------------------------------------------------------------------------------------------------------- frames


@given(st.lists(st.binary(max_size=300)), st.lists(st.integers(1, 60)))
def test_frames_come_out_whole_however_the_stream_is_cut(payloads, cuts):
    stream = b"".join(encode(Kind.REPLY, number, {"p": each}) for number, each in enumerate(payloads))
    decoder = FrameDecoder()
    frames: list[Frame] = []
    at = 0
    for cut in [*cuts, len(stream)]:
        frames += decoder.feed(stream[at : at + cut])
        at += cut
    assert [(f.correlation, decode_body(f.body)["p"]) for f in frames] == list(enumerate(payloads))
    assert decoder.buffered == 0


@pytest.mark.parametrize(
    ("bad", "names"),
    [
        (header(magic=b"KVCX"), "magic"),
        (header(version=2), "version 2"),
        (header(kind=0), "kind 0"),
        (header(kind=5), "kind 5"),
        (header(descriptors=1), "1 descriptors"),
        (header(length=MAX_BODY + 1), str(MAX_BODY + 1)),
        (header(length=2**60), str(2**60)),
        (b"GET / HTTP/1.1\r\n", "magic"),
        (b"KVCX", "magic"),
        (b"\x80", "magic"),
        (pickle.dumps(print), "magic"),  # L1
    ],
)
@pytest.mark.parametrize("behind_a_good_frame", [False, True])
def test_a_bad_header_is_refused_by_name_before_its_body_comes(bad, names, behind_a_good_frame):
    decoder = FrameDecoder()
    with pytest.raises(ProtocolError, match=names):
        decoder.feed((encode_request(1, "ping") if behind_a_good_frame else b"") + bad)


@pytest.mark.parametrize("cut", [1, 4, 12, 23])
def test_a_bad_header_in_pieces_is_refused_too(cut):
    decoder = FrameDecoder()
    bad = header(length=2**60)
    assert decoder.feed(bad[:cut]) == []
    with pytest.raises(ProtocolError):
        decoder.feed(bad[cut:])


def test_a_frame_of_2_to_the_60_bytes_allocates_nothing():
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError):
            FrameDecoder().feed(header(length=2**60))
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


def test_a_reply_may_bring_descriptors_where_they_are_allowed():
    frame = encode(Kind.REPLY, 3, {}, 2)
    assert FrameDecoder(max_descriptors=2).feed(frame)[0].descriptors == 2
    with pytest.raises(ProtocolError, match="2 descriptors"):
        FrameDecoder(max_descriptors=1).feed(frame)


def test_a_body_above_the_limit_is_not_sent():
    with pytest.raises(ProtocolError, match="at most"):
        encode_request(1, "store", {"payload": bytes(MAX_BODY)})


@pytest.mark.parametrize("value", [object(), print, "\udcff"], ids=["object", "function", "lone surrogate"])
def test_what_cbor_does_not_have_is_refused_when_encoded(value):
    with pytest.raises(ProtocolError):
        encode_request(1, "op", {"value": value})


def test_requests_and_events_name_what_they_are():
    (request,) = FrameDecoder().feed(encode_request(7, "load", {"lease": 3}))
    assert (request.kind, request.correlation) == (Kind.REQUEST, 7)
    assert decode_body(request.body) == {"op": "load", "lease": 3}
    (event,) = FrameDecoder().feed(encode_event("fence", {"fence": 1}))
    assert (event.kind, event.correlation) == (Kind.EVENT, 0)
    assert decode_body(event.body) == {"event": "fence", "fence": 1}


@pytest.mark.parametrize(
    ("sent", "kind", "text"),
    [
        (Refused("lease 3 is of another attachment"), Refused, "^lease 3 is of another attachment$"),
        (ProtocolError("field 'x': missing"), ProtocolError, "field 'x'"),
        (ZeroDivisionError("oops"), CascadeError, "internal error ZeroDivisionError: oops"),
        (Refused("\udcff path" + "x" * 10_000), Refused, "path"),
    ],
)
def test_errors_cross_with_their_class_and_text(sent, kind, text):
    (frame,) = FrameDecoder().feed(encode_error(9, sent))
    assert frame.kind == Kind.ERROR
    with pytest.raises(kind, match=text) as caught:
        raise error_from(decode_body(frame.body))
    assert type(caught.value) is kind


def test_an_error_class_that_is_not_ours_is_never_looked_up():
    assert type(error_from({"error": "SystemExit", "message": "x"})) is CascadeError


# ---------------------------------------------------------------------------------------------------------- bodies


@given(bodies)
def test_bodies_come_back_as_they_were_sent_up_to_the_depth_allowed(body):
    encoded = cbor2.dumps(body)
    if depth(body) > MAX_DEPTH:
        with pytest.raises(ProtocolError, match="deeper"):
            decode_body(encoded)
    else:
        # Compared encoded: NaN equals itself then.
        assert cbor2.dumps(decode_body(encoded)) == encoded


@given(st.binary(max_size=200))
def test_garbage_is_a_protocol_error_and_nothing_else(data):
    for candidate in (data, b"\xa1\x61x" + data, b"\xb8\x01\x61x" + data):
        try:
            assert isinstance(decode_body(candidate), dict)
        except ProtocolError:
            pass


@given(bodies, st.data())
def test_a_truncated_body_is_refused(body, data):
    encoded = cbor2.dumps(body)
    with pytest.raises(ProtocolError):
        decode_body(encoded[: data.draw(st.integers(0, len(encoded) - 1))])


KEY = b"\xa1\x61x"

HOSTILE = {
    "empty": (b"", "not a CBOR map"),
    "an array": (b"\x80", "not a CBOR map"),
    "100,000 nested arrays": (KEY + b"\x81" * 100_000, "deeper"),
    "100,000 nested maps": (KEY * 100_000, "deeper"),
    "100,000 nested arrays, bare": (b"\x81" * 100_000, "not a CBOR map"),
    "an array of 2^60": (KEY + b"\x9b" + (2**60).to_bytes(8, "big"), "items"),
    "a map of 2^60": (b"\xbb" + (2**60).to_bytes(8, "big"), "items"),
    "a byte string of 2^60": (KEY + b"\x5b" + (2**60).to_bytes(8, "big"), "past the end"),
    "a text of 2^60": (KEY + b"\x7b" + (2**60).to_bytes(8, "big"), "past the end"),
    "a key of 2^60": (b"\xa1\x7b" + (2**60).to_bytes(8, "big"), "past the end"),
    "5 MB of tags": (KEY + b"\xc1" * 5_000_000, "a tag"),
    "a big number": (cbor2.dumps({"x": 2**80}), "a tag"),
    "shared references": (KEY + b"\xd8\x1c\x81\xd8\x1d\x00", "a tag"),
    "an indefinite byte string": (KEY + b"\x5f\x41a\xff", "an indefinite length"),
    "an indefinite text": (KEY + b"\x7f\x61a\xff", "an indefinite length"),
    "an indefinite array": (KEY + b"\x9f\x01\xff", "an indefinite length"),
    "an indefinite map": (b"\xbf\x61x\x01\xff", "an indefinite length"),
    "a break": (KEY + b"\xff", "an indefinite length"),
    "undefined": (KEY + b"\xf7", "unknown item"),
    "an unknown simple value": (KEY + b"\xf8\x40", "unknown item"),
    "a reserved length": (KEY + b"\x1c", "unknown item"),
    "a number as key": (b"\xa1\x01\x01", "not text"),
    "a number as key, inside": (KEY + b"\xa1\x01\x01", "not text"),
    "a list as key": (b"\xa1\x80\x01", "not text"),
    "bytes after the end": (b"\xa0\x00", "after the end"),
    "a field twice": (b"\xa2\x61x\x01\x61x\x02", "twice"),
    "text that is no UTF-8": (KEY + b"\x61\xff", "decoded"),
    "a key that is no UTF-8": (b"\xa1\x61\xff\x01", "decoded"),
    "too many items": (KEY + b"\x9a" + (MAX_ITEMS + 1).to_bytes(4, "big") + bytes(MAX_ITEMS + 1), "items"),
    "many small arrays": (KEY + b"\x99\xff\x00" + b"\x82\x00\x00" * 0xFF00, "items"),
    "a pickle": (pickle.dumps({"x": os.system}), "not a CBOR map"),  # L1
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_body_is_refused_before_decoding(name, monkeypatch):
    # L6. Text is only known to be wrong by decoding it, and a doubled key by the map that it leaves.
    data, reason = HOSTILE[name]
    if reason not in ("decoded", "twice"):
        monkeypatch.setattr(protocol.cbor2, "loads", lambda *_: pytest.fail("decoded"))
    with pytest.raises(ProtocolError, match=reason):
        decode_body(data)


def test_a_deep_but_allowed_body_is_decoded():
    body: dict[str, object] = {"x": 1}
    for _ in range(MAX_DEPTH - 1):
        body = {"x": body}
    assert decode_body(cbor2.dumps(body)) == body


def test_long_maps_and_long_keys_are_understood():
    body = {f"{'k' * 30}{number}": [number, {"a": b"x" * 70_000}] for number in range(40)}
    assert decode_body(cbor2.dumps(body)) == body


# ---------------------------------------------------------------------------------------------------------- fields


def test_fields_are_taken_by_type_and_bounds():
    body = {"n": 5, "b": b"abc", "t": "text", "f": 2, "yes": True, "nothing": None}
    assert take(body, "n", int, lo=5, hi=5) == 5
    assert take(body, "b", bytes, lo=3, hi=3) == b"abc"
    assert take(body, "f", float) == 2.0
    assert take(body, "absent", int, default=7) == 7
    assert take(body, "nothing", bytes, default=None) is None


@pytest.mark.parametrize(
    ("value", "kind", "bounds"),
    [
        ("5", int, {}),
        (True, int, {}),
        (1, bool, {}),
        (b"x", str, {}),
        ("x", bytes, {}),
        (5, int, {"hi": 4}),
        (-1, int, {"lo": 0}),
        (b"abc", bytes, {"hi": 2}),
        ([1], list, {"lo": 2}),
        (math.nan, float, {"lo": 0}),
        (10**400, float, {}),
        (None, int, {}),
    ],
)
def test_a_field_of_another_type_or_out_of_bounds_is_refused_by_name(value, kind, bounds):
    with pytest.raises(ProtocolError, match="field 'start'"):
        take({"start": value}, "start", kind, **bounds)


@given(st.lists(st.integers(0, 2**32 - 1)))
def test_packed_arrays_are_the_same_from_lists_arrays_and_bytes(values):
    packed = pack_u32(values)
    assert packed == pack_u32(np.array(values, np.uint32)) == pack_u32(np.array(values, np.int64)) == pack_u32(packed)
    assert take_u32({"a": packed}, "a").tolist() == values
    assert pack_u64(np.array(values, np.uint32)) == pack_u64(values)
    assert take_u64({"a": pack_u64(values)}, "a", count=len(values)).tolist() == values


@pytest.mark.parametrize(
    "values", [[-1], [2**32], np.array([-1]), np.array([2**32]), np.array([1.5]), ["x"], b"abc"], ids=repr
)
def test_what_does_not_fit_is_never_cut_to_size(values):
    with pytest.raises(ProtocolError):
        pack_u32(values)


def test_packed_arrays_of_a_wrong_length_are_refused_by_name():
    for bad in (b"abc", bytes(12)):
        with pytest.raises(ProtocolError, match="field 'blocks'"):
            take_u32({"blocks": bad}, "blocks", hi=2)
    with pytest.raises(ProtocolError, match="field 'tiers': 2 entries, 3"):
        take_u8({"tiers": pack_u8([1, 2])}, "tiers", count=3)
    assert take_u32({}, "blocks").size == 0


def test_hashes_of_the_wrong_width_are_refused_by_name():
    assert take_hashes({"hashes": bytes(64)}, "hashes", 32, hi=2) == bytes(64)
    assert list(split_hashes(b"aabbcc", 2)) == [b"aa", b"bb", b"cc"]
    with pytest.raises(ProtocolError, match="field 'hashes': 48 bytes"):
        take_hashes({"hashes": bytes(48)}, "hashes", 32)
    with pytest.raises(ProtocolError, match="field 'hashes': 3 hashes"):
        take_hashes({"hashes": bytes(96)}, "hashes", 32, hi=2)


# ---------------------------------------------------------------------------------------------------------- module


@pytest.mark.parametrize(
    ("uid", "runtime", "path"),
    [
        (0, "/run/user/0", "/run/kvcascade/kvcascade.sock"),
        (7, "/run/user/7", "/run/user/7/kvcascade/kvcascade.sock"),
        (7, None, "/tmp/kvcascade-7/kvcascade.sock"),
        (7, "", "/tmp/kvcascade-7/kvcascade.sock"),
        (7, "run", "/tmp/kvcascade-7/kvcascade.sock"),
    ],
)
def test_the_default_socket_is_the_users_own(monkeypatch, uid, runtime, path):
    monkeypatch.setattr(os, "getuid", lambda: uid)
    if runtime is None:
        monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    else:
        monkeypatch.setenv("XDG_RUNTIME_DIR", runtime)
    assert str(protocol.default_socket_path()) == path


def test_a_fallback_socket_in_a_folder_that_others_control_is_not_trusted(monkeypatch, tmp_path):
    # Anybody can make /tmp/kvcascade-UID first.
    uid = os.getuid()
    path = tmp_path / "kvcascade" / "kvcascade.sock"
    monkeypatch.setattr(protocol, "_fallback", lambda uid: path)
    assert protocol.distrust(path) == ""  # nothing is there
    path.parent.mkdir(mode=0o700)
    assert protocol.distrust(path) == ""
    path.parent.chmod(0o770)
    assert str(path.parent) in protocol.distrust(path)
    with pytest.raises(DaemonUnavailable, match="belongs to another user"):
        Client(path).connect()
    path.parent.chmod(0o700)
    monkeypatch.setattr(os, "getuid", lambda: uid + 1)
    assert str(path.parent) in protocol.distrust(path)
    assert protocol.distrust(tmp_path / "chosen" / "s") == ""
    path.parent.rename(tmp_path / "elsewhere")
    path.parent.symlink_to(tmp_path / "elsewhere")
    monkeypatch.setattr(os, "getuid", lambda: uid)
    assert str(path.parent) in protocol.distrust(path)


def test_protocol_client_and_attachment_import_nothing_heavy():
    heavy = ["torch", "numpy", "redis", "cuda", "pydantic", "asyncio", "uvloop"]
    code = (
        "import sys, kvcascade.daemon.protocol, kvcascade.daemon.client, kvcascade.daemon.attachment\n"
        f"print([m for m in {heavy} if m in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_the_header_is_24_bytes_on_every_machine():
    assert HEADER.size == 24
    assert encode(Kind.EVENT, 1, {})[:8] == b"KVCS\x01\x04\x00\x00"
