"""The wire format: what goes through, and that nothing else does, opens anything or leaves a descriptor open."""

from __future__ import annotations

import os
import pickle
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from doubles.host_files import count_fds
from kvferry.errors import KVFerryError, ShareError, WireError
from kvferry.ipc import wire
from kvferry.ipc.host import HostIPCWrapper
from kvferry.ipc.shared_memory import allocate_shared
from kvferry.ipc.table import process_table
from kvferry.ipc.wrapper import DeviceIPCWrapper


def _exported(number: int = 3) -> list[DeviceIPCWrapper]:
    tensor = allocate_shared((number, 8), torch.float16)
    return [HostIPCWrapper(row) for row in tensor]


def _ext(fields: dict[str, Any], code: int = wire.EXT_CODE) -> msgspec.msgpack.Ext:
    return msgspec.msgpack.Ext(code, msgspec.msgpack.encode(fields))


def _message(wrappers: object, version: object = wire.VERSION, **more: object) -> bytes:
    return msgspec.msgpack.encode({"kvferry": version, "wrappers": wrappers, **more})


def _fields() -> dict[str, Any]:
    """The fields of a good descriptor, as on the wire."""
    with _exported(1)[0] as wrapper:
        fields = msgspec.to_builtins(wrapper.descriptor, builtin_types=(bytes,))
    assert isinstance(fields, dict)
    return fields


def _spare_fds(number: int) -> list[int]:
    return [os.open("/dev/null", os.O_RDWR) for _ in range(number)]


def test_a_list_comes_back_equal_in_order_and_with_its_classes() -> None:
    wrappers = _exported()
    data, fds = wire.encode(wrappers)
    assert len(fds) == 3
    arrived = wire.decode(data, fds)
    assert arrived == wrappers
    assert [type(w) for w in arrived] == [HostIPCWrapper] * 3
    assert [w.to_tensor().shape for w in arrived] == [(8,)] * 3
    for wrapper in (*arrived, *wrappers):
        wrapper.close()


def test_an_empty_list_and_every_buffer_type() -> None:
    data, fds = wire.encode([])
    assert fds == []
    for kind in (bytes, bytearray, memoryview):
        assert wire.decode(kind(data)) == []


def test_the_base_class_is_one_extension_code_and_the_class_a_tag() -> None:
    with _exported(1)[0] as wrapper:
        message = msgspec.msgpack.decode(wire.encode_descriptors([wrapper]))
    assert message["kvferry"] == 1
    [ext] = message["wrappers"]
    assert ext.code == 1
    assert msgspec.msgpack.decode(ext.data)["kind"] == "host"


def test_other_messages_can_carry_wrappers() -> None:
    class Request(msgspec.Struct):
        caches: list[DeviceIPCWrapper]
        name: str

    [wrapper] = _exported(1)
    data = msgspec.msgpack.encode(Request([wrapper], "x"), enc_hook=wire.enc_hook)
    arrived = msgspec.msgpack.decode(data, type=Request, ext_hook=wire.ext_hook)
    assert arrived.caches == [wrapper]
    wrapper.close()
    with pytest.raises(NotImplementedError, match="object"):
        msgspec.msgpack.encode([object()], enc_hook=wire.enc_hook)


def test_every_registered_class_has_a_kind_of_its_own() -> None:
    kinds = [kind.descriptor_type.__struct_config__.tag for kind in wire.WRAPPER_TYPES]
    assert all(isinstance(kind, str) for kind in kinds)
    assert len(set(kinds)) == len(kinds)


def _bad_messages() -> dict[str, Any]:
    good = _ext(_fields())
    return {
        "empty": b"",
        "a pickle": pickle.dumps({"kvferry": 1, "wrappers": []}),
        "no map": msgspec.msgpack.encode([1, 2]),
        "no version": msgspec.msgpack.encode({"wrappers": []}),
        "version 0": _message([good], 0),
        "version 2": _message([good], 2),
        "version of text": _message([good], "1"),
        "no wrappers": msgspec.msgpack.encode({"kvferry": 1}),
        "one more field": _message([good], more=1),
        "trailing byte": _message([]) + b"\0",
        "two messages": _message([]) * 2,
        "wrapper as map": _message([_fields()]),
        "wrapper as nil": _message([None]),
        "other extension": _message([_ext(_fields(), 2)]),
        "pickle in the extension": _message([msgspec.msgpack.Ext(1, pickle.dumps(1))]),
        "empty extension": _message([msgspec.msgpack.Ext(1, b"")]),
        "trailing byte inside": _message([msgspec.msgpack.Ext(1, bytes(good.data) + b"\0")]),
        "unknown kind": _message([_ext({**_fields(), "kind": "disk"})]),
        "no kind": _message([_ext({k: v for k, v in _fields().items() if k != "kind"})]),
        "unknown field": _message([_ext({**_fields(), "run": "x"})]),
        "missing field": _message([_ext({k: v for k, v in _fields().items() if k != "inode"})]),
        "unknown dtype": _message([_ext({**_fields(), "dtype": "__class__"})]),
        "negative size": _message([_ext({**_fields(), "shape": [-8]})]),
        "huge size": _message([_ext({**_fields(), "shape": [2**63 - 1, 2**63 - 1], "stride": [1, 1]})]),
        "wrong bytes": _message([_ext({**_fields(), "nbytes": 17})]),
        "beyond the file": _message([_ext({**_fields(), "offset": 1 << 40})]),
        "array longer than the bytes": b"\x82\xa7kvferry\x01\xa8wrappers\xdd\xff\xff\xff\xff",
        "deeply nested": b"\x82\xa7kvferry\x01\xa8wrappers" + b"\x91" * 100_000,
    }


@pytest.mark.parametrize("name", list(_bad_messages()))
def test_bad_bytes_are_one_error_and_open_nothing(name: str) -> None:
    data = _bad_messages()[name]
    before, opens = count_fds(), process_table().mappings.stats().opens
    with pytest.raises(WireError):
        wire.decode(data, _spare_fds(1))
    assert count_fds() == before
    assert process_table().mappings.stats().opens == opens


def test_errors_name_the_version_and_the_known_kinds() -> None:
    with pytest.raises(WireError, match="wire format 7 is not spoken here, only 1"):
        wire.decode(_message([], 7))
    with pytest.raises(WireError, match="host"):
        wire.decode(_message([_ext({**_fields(), "kind": "disk"})]))


def test_too_large_messages_are_not_looked_at() -> None:
    with pytest.raises(WireError, match="at most"):
        wire.decode(bytes(wire.MAX_MESSAGE_BYTES + 1))
    with pytest.raises(WireError):
        wire.decode(_message([_ext({})] * (wire.MAX_WRAPPERS + 1)))
    [wrapper] = _exported(1)
    with pytest.raises(ValueError, match="send several"):
        wire.encode([wrapper] * (wire.MAX_WRAPPERS + 1))
    wrapper.close()


@pytest.mark.parametrize("change", [-3, -1, 1, 5])
def test_a_wrong_number_of_descriptors_is_refused_and_all_are_closed(change: int) -> None:
    wrappers = _exported()
    before = count_fds()
    data, fds = wire.encode(wrappers)
    for _ in range(-change):
        os.close(fds.pop())
    with pytest.raises(WireError, match=f"needs 3 file descriptors, {3 + change} came"):
        wire.decode(data, fds + _spare_fds(change))
    assert count_fds() == before
    for wrapper in wrappers:
        wrapper.close()


def test_the_same_descriptor_twice_is_refused_and_closed_once() -> None:
    [wrapper] = _exported(1)
    before = count_fds()
    data = wire.encode_descriptors([wrapper, wrapper])
    fd = wrapper.export_fd(0)
    with pytest.raises(WireError, match="twice"):
        wire.decode(data, [fd, fd])
    assert count_fds() == before
    wrapper.close()


def test_a_wrong_descriptor_in_the_middle_undoes_all() -> None:
    wrappers = _exported()
    before = count_fds()
    data, fds = wire.encode(wrappers)
    os.close(fds[1])
    fds[1] = _spare_fds(1)[0]
    with pytest.raises(ShareError, match="not a memory file"):
        wire.decode(data, fds)
    assert count_fds() == before
    for wrapper in wrappers:
        wrapper.close()


def test_an_export_that_fails_in_the_middle_closes_what_was_made() -> None:
    wrappers = _exported()
    wrappers[2].close()
    before = count_fds()
    with pytest.raises(ShareError):
        wire.encode(wrappers)
    assert count_fds() == before
    for wrapper in wrappers:
        wrapper.close()


def test_truncation_at_every_byte_is_refused() -> None:
    wrappers = _exported(2)
    data = wire.encode_descriptors(wrappers)
    for length in range(len(data)):
        with pytest.raises(WireError):
            wire.decode(data[:length])
    for wrapper in wrappers:
        wrapper.close()


_GOOD = wire.encode_descriptors(_exported(2))


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_any_changed_bytes_are_refused_or_mean_descriptors(data: st.DataObject) -> None:
    changed = bytearray(_GOOD)
    for position in data.draw(st.lists(st.integers(0, len(changed) - 1), min_size=1, max_size=4)):
        changed[position] = data.draw(st.integers(0, 255))
    _decode_hostile(bytes(changed))


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.binary(max_size=300))
def test_any_bytes_are_refused(data: bytes) -> None:
    _decode_hostile(data)


_JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=6,
)


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from(sorted(_fields())), _JSON)
def test_any_value_in_any_field_is_refused_or_checked(field: str, value: object) -> None:
    _decode_hostile(_message([_ext({**_fields_once, field: value})]))


_fields_once = _fields()


def _decode_hostile(data: bytes) -> None:
    before = count_fds()
    try:
        wrappers = wire.decode(data, _spare_fds(1))
    except KVFerryError:  # not only WireError: a good descriptor may meet a wrong file
        pass
    else:
        for wrapper in wrappers:
            wrapper.close()
    assert count_fds() == before
