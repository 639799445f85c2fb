"""Files that are no traces, damaged ones, and the law that nothing whole is lost."""

import bz2
import gzip
import io
import json
import lzma
import os
import tarfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import overlaplab as ol
from overlaplab.errors import TraceError
from tests.profiling.traces_by_hand import COMM, kernel, write


def some_events(number=50):
    return [kernel(f"k{i}", 7, 2 * i, 2 * i + 1) for i in range(number)]


def names(timeline):
    return [span.name for span in timeline.spans]


def remarks(timeline):
    return "; ".join(timeline.source.remarks)


ALL = [f"k{i}" for i in range(50)]


# --- forms ------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", ["json", "json.gz", "pt.trace", "txt"])
@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.parametrize("form", ["object", "list"])
def test_a_trace_is_known_by_its_content(tmp_path, suffix, compress, form):
    events = some_events()
    text = json.dumps(events) if form == "list" else events

    path = write(tmp_path / f"trace.{suffix}", text, compress=compress)

    timeline = ol.read_trace(path)
    assert names(timeline) == ALL
    assert timeline.source.dropped == ()
    assert "damaged" not in remarks(timeline)


def test_fields_before_and_after_the_events_are_read(tmp_path):
    device = {"id": 0, "name": 'The "traceEvents": [ one'}
    trace = {
        "deviceProperties": [device, {"id": 1, "name": "B"}],
        "traceEvents": some_events(),
        "more": [{"a": 1}, {"b": 2}],
        "distributedInfo": {"rank": 5},
    }
    path = write(tmp_path / "trace.json", json.dumps(trace, indent=2))

    for block_bytes in (7, 300, 1 << 18):
        timeline = ol.read_trace(path, block_bytes=block_bytes)

        assert names(timeline) == ALL
        assert {s.rank for s in timeline.spans} == {5}
        assert timeline.source.devices == ((5, device["name"]),)


def test_what_looks_like_a_border_of_events_inside_one_is_none(tmp_path):
    odd = kernel('k}, {"ph": "X"}, {', 7, 0, 1, more=[{"a": 1}, {"b": [{}, {}]}])
    path = write(tmp_path / "trace.json", [odd, *some_events(), odd])

    for block_bytes in (5, 64, 1000):
        timeline = ol.read_trace(path, block_bytes=block_bytes)
        assert (len(timeline.spans), timeline.source.dropped) == (52, ())


def test_a_list_may_end_without_its_bracket(tmp_path):
    text = json.dumps(some_events())[:-1] + ",\n"
    timeline = ol.read_trace(write(tmp_path / "trace.json", text))

    assert names(timeline) == ALL
    assert timeline.source.dropped == ()


def test_our_own_traces_are_read_as_what_they_were(tmp_path):
    timeline = ol.read_trace(write(tmp_path / "trace.json", some_events()))

    own = timeline.to_chrome(tmp_path / "own.json")

    assert ol.read_trace(own) == timeline
    own.write_bytes(gzip.compress(own.read_bytes()))
    assert ol.read_trace(own) == timeline


def test_gzip_of_several_members_is_one_text(tmp_path):
    text = json.dumps(some_events()).encode()
    path = tmp_path / "trace.gz"
    path.write_bytes(gzip.compress(text[:999]) + gzip.compress(text[999:]) + b"\0" * 9)

    assert names(ol.read_trace(path)) == ALL


# --- damage -----------------------------------------------------------------------


def test_of_a_file_that_is_cut_off_the_whole_events_are_read(tmp_path):
    text = json.dumps({"traceEvents": some_events()})
    cut = text.index('"k35"') + 20

    timeline = ol.read_trace(write(tmp_path / "trace.json", text[:cut]))

    assert names(timeline) == ALL[:35]
    assert timeline.source.dropped == (("cut off at the end of the file", 1),)
    start = text.rindex('{"ph"', 0, cut)
    assert f"damaged at byte {start}; 1 events dropped" in remarks(timeline)


def test_of_a_compressed_file_that_is_cut_off_the_whole_events_are_read(tmp_path):
    path = write(tmp_path / "trace.json", some_events(5000), compress=True)
    path.write_bytes(path.read_bytes()[: int(0.7 * path.stat().st_size)])

    timeline = ol.read_trace(path)

    assert 3000 < len(timeline.spans) < 5000
    assert names(timeline) == [f"k{i}" for i in range(len(timeline.spans))]
    assert f"damaged at its end, byte {path.stat().st_size}" in remarks(timeline)


def test_of_compressed_data_that_are_damaged_the_events_before_are_read(tmp_path):
    path = write(tmp_path / "trace.json", some_events(5000), compress=True)
    data = bytearray(path.read_bytes())
    middle = len(data) // 2
    data[middle : middle + 50] = b"\xff" * 50
    path.write_bytes(data)

    timeline = ol.read_trace(path)

    assert names(timeline)[:2000] == [f"k{i}" for i in range(2000)]
    assert "damaged" in remarks(timeline)


@pytest.mark.parametrize(
    "broken",
    [
        pytest.param('"k20\n and more"', id="newline"),
        pytest.param('"C:\\qkernel"', id="backslash"),
        pytest.param('"k20", "occupancy": NaN, "x": -inf', id="nan"),
    ],
)
def test_what_writers_forget_to_escape_is_repaired_and_reported(tmp_path, broken):
    text = json.dumps({"traceEvents": some_events()}).replace('"k20"', broken)

    timeline = ol.read_trace(write(tmp_path / "trace.json", text))

    assert len(timeline.spans) == 50
    assert timeline.source.dropped == ()
    assert "not quite JSON" in remarks(timeline)


def test_bytes_that_are_no_utf8_are_repaired(tmp_path):
    path = write(tmp_path / "trace.json", some_events())
    path.write_bytes(path.read_bytes().replace(b'"k20"', b'"k\xff\xfe20"'))

    assert len(ol.read_trace(path).spans) == 50


@pytest.mark.parametrize(
    ("good", "bad"),
    [
        pytest.param('"name": "k20"', '"name": "k20', id="missing quote"),
        pytest.param('"name": "k20"', '"name": k20"', id="missing first quote"),
        pytest.param('"name": "k20",', '"name": "k20"', id="missing comma"),
        pytest.param('"name": "k20"', '"name": ]["k20"', id="brackets"),
        pytest.param('"name": "k20"', '"name": ' + "[" * 5000, id="deep"),
    ],
)
def test_an_event_that_is_damaged_costs_no_other(tmp_path, good, bad):
    text = json.dumps({"traceEvents": some_events()})
    assert good in text
    path = write(tmp_path / "trace.json", text.replace(good, bad))

    for block_bytes in (100, 1 << 18):
        timeline = ol.read_trace(path, block_bytes=block_bytes)
        lost = set(ALL) - set(names(timeline))

        assert lost <= {"k20", "k21"}
        assert "k20" in lost
        assert timeline.source.num_dropped == len(lost)
        start = text.rindex('{"ph"', 0, text.index(good))
        assert f"damaged at byte {start}" in remarks(timeline)


def test_a_missing_comma_between_events_costs_none(tmp_path):
    text = json.dumps({"traceEvents": some_events()}).replace("}}, {", "}} {", 3)

    assert names(ol.read_trace(write(tmp_path / "trace.json", text))) == ALL


def test_elements_that_are_no_events_are_counted(tmp_path):
    path = write(tmp_path / "trace.json", [*some_events(), 3, None, "x", {"a": 1}])

    timeline = ol.read_trace(path)

    assert names(timeline) == ALL
    assert timeline.source.dropped == (("not an event", 4),)


def tar(name):
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as archive:
        archive.addfile(tarfile.TarInfo(name))
    return made.getvalue()


# --- no traces --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"trace\.json: empty file \(0 bytes\).*Was the run stopped"),
        (b" \n ", "blank"),
        (b"<!DOCTYPE html><html>", "HTML or XML"),
        (b"PK\x03\x04abc", "zip archive: unpack it first"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:1", "git lfs pull"),
        # A time in it would give each process of a parallel run another name.
        (gzip.compress(tar("rank0.json"), mtime=0), "a tar archive: unpack it first"),
        (gzip.compress(gzip.compress(b"{}", mtime=0), mtime=0), "twice by gzip"),
        (bz2.compress(b"{}"), "bzip2: decompress it first"),
        (lzma.compress(b"{}"), "xz: decompress it first"),
        ('{"traceEvents": []}'.encode("utf-16"), "UTF-16 or UTF-32: save it as UTF-8"),
        ('{"traceEvents": []}'.encode("utf-16-le"), "UTF-16 or UTF-32"),
        ('{"traceEvents": []}'.encode("utf-32-be"), "UTF-16 or UTF-32"),
        (b"[rank0]: Traceback", "begins with a bracket, as logs do"),
        (b'[{"loss": 3}, {"loss": 2}]', "a JSON list, but not of events"),
        (b"hello", "not JSON, it starts with b'hello'"),
        (b'{"schema": "1.0", "nodes": []}', "execution trace .*export_chrome_trace"),
        (b'{"a": 1}', "JSON without 'traceEvents'"),
        (b'{"a": 1', "damaged or cut off before its first event, at byte 7"),
        (b"[1, 2]", "a JSON list, but not of events"),
        (b'{"traceEvents": [{"ph": "X", ', "damaged from byte 17 on, no whole event"),
        (b"\x1f\x8b\x08\x00garbage", "damaged at its end, byte 11"),
    ],
)
def test_what_is_no_trace_is_one_clear_error(tmp_path, content, message):
    path = tmp_path / "trace.json"
    path.write_bytes(content)

    with pytest.raises(TraceError, match=message) as error:
        ol.read_trace(path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize(
    "text",
    [
        "[rank0]: Traceback\n[rank0]: more\n",
        '[2024-01-01 10:00] INFO {"loss": 3}, {"loss": 2}\n' * 50,
        "[tool.x]\na = {b = 1}\n",
        '[{"loss": 3}]',
    ],
)
def test_a_log_beside_traces_is_ignored_by_name(tmp_path, text):
    write(tmp_path / "trace.json", some_events())
    (tmp_path / "a.log").write_text(text)

    source = ol.read_trace(tmp_path).source
    assert [Path(name).name for name in source.files] == ["trace.json"]
    assert any("ignored: a.log" in remark for remark in source.remarks)


def test_a_missing_file_and_a_folder_without_traces_are_errors(tmp_path):
    with pytest.raises(
        TraceError, match=r"absent\.json: cannot be read \(No such file"
    ):
        ol.read_trace(tmp_path / "absent.json")
    (tmp_path / "rank0").mkdir()
    with pytest.raises(TraceError, match=r"no trace among its 0 files .*rank0"):
        ol.read_trace(tmp_path)
    with pytest.raises(ValueError, match="no path given"):
        ol.read_trace([])
    with pytest.raises(ValueError, match="a path is empty"):
        ol.read_trace("")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read_is_an_error(tmp_path):
    path = write(tmp_path / "trace.json", some_events())
    path.chmod(0)

    with pytest.raises(TraceError, match=r"cannot be read \(Permission"):
        ol.read_trace(path)


# --- laws -------------------------------------------------------------------------

_times = st.integers(0, 10**7)  # nanoseconds


@st.composite
def kernels(draw):
    start, length = draw(_times), draw(st.integers(1, 10**6))
    name = draw(st.sampled_from([COMM, "gemm", 'odd "}, {" name\\', "\u00e4\u4e2d"]))
    event = kernel(name, draw(st.integers(1, 3)), 0, 0, more=draw(st.just([{}, {}])))
    return {**event, "ts": start / 1000, "dur": length / 1000}, (start, start + length)


@given(
    events=st.lists(kernels(), min_size=1, max_size=20),
    as_list=st.booleans(),
    compress=st.booleans(),
    halves=st.booleans(),
    indent=st.sampled_from([None, 0, 2]),
    block_bytes=st.integers(1, 400),
)
def test_however_kernels_are_written_the_same_are_read(
    tmp_path_factory, events, as_list, compress, halves, indent, block_bytes
):
    for stream, (event, _) in enumerate(events):  # one works in order
        event |= {"tid": stream, "args": {**event["args"], "stream": stream}}
    rows = [row for event, _ in events for row in (split(event) if halves else [event])]
    trace = rows if as_list else {"a": [{}, {}], "traceEvents": rows, "b": [{}, {}]}
    path = tmp_path_factory.mktemp("law") / "trace"
    write(path, json.dumps(trace, indent=indent), compress=compress)

    timeline = ol.read_trace(path, block_bytes=block_bytes)

    zero_ns = min(start for _, (start, _) in events)
    assert timeline.source.zero_ns == zero_ns
    assert sorted((s.start_ns, s.end_ns) for s in timeline.spans) == sorted(
        (start - zero_ns, end - zero_ns) for _, (start, end) in events
    )
    communicates = [e["name"] == COMM for e, _ in events]
    kinds = [span.kind for span in timeline.spans]
    assert kinds.count("communication") == sum(communicates)


def split(event):
    end = {k: event[k] for k in ("pid", "tid", "name")}
    begin = {k: v for k, v in event.items() if k != "dur"}
    ts = round(event["ts"] * 1000) + round(event["dur"] * 1000)
    return {**begin, "ph": "B"}, {**end, "ph": "E", "ts": ts / 1000}


@given(
    cut=st.integers(0, 10_000),
    compress=st.booleans(),
    as_list=st.booleans(),
    block_bytes=st.integers(1, 2000),
    flip=st.none() | st.integers(0, 255),
)
def test_cut_or_spoilt_anywhere_a_file_gives_its_whole_events_or_one_error(
    tmp_path_factory, cut, compress, as_list, block_bytes, flip
):
    events = some_events(20)
    trace = events if as_list else {"traceEvents": events, "distributedInfo": {}}
    path = tmp_path_factory.mktemp("law") / "trace"
    data = write(path, json.dumps(trace), compress=compress).read_bytes()
    cut %= len(data)
    spoilt = (
        data[:cut] if flip is None else data[:cut] + bytes([flip]) + data[cut + 1 :]
    )
    path.write_bytes(spoilt)

    try:
        timeline = ol.read_trace(path, block_bytes=block_bytes)
    except TraceError as error:
        assert str(path) in str(error)
        return

    times = {(s.start_ns // 2000, s.duration_ns) for s in timeline.spans}
    if flip is None:
        assert names(timeline) == ALL[: len(timeline.spans)]
    elif not compress:
        # One byte spoils one event, or the place between two.
        assert len(timeline.spans) >= 18
    assert len(times) <= 20
