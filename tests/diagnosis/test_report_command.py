"""`overlaplab report`: exit codes, JSON, the page, and one line for bad input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result

from overlaplab import cli


def report(*arguments: object) -> Result:
    return CliRunner().invoke(cli.main, ["report", *map(str, arguments)])


def kernel(name: str, stream: int, start_us: int, end_us: int, number: int) -> Any:
    args = {"stream": stream, "device": 0, "correlation": number}
    return {
        "ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": stream,
        "ts": start_us, "dur": end_us - start_us, "args": args,
    }  # fmt: skip


def launched(number: int, at_us: int) -> Any:
    return {
        "ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 1,
        "tid": 1, "ts": at_us, "dur": 2, "args": {"correlation": number},
    }  # fmt: skip


def step(number: int, start_us: int, end_us: int) -> Any:
    return {
        "ph": "X", "cat": "user_annotation", "name": f"ProfilerStep#{number}",
        "pid": 1, "tid": 1, "ts": start_us, "dur": end_us - start_us,
    }  # fmt: skip


def write(
    path: Path, *, sending: str = "ncclDevKernel_AllReduce_Sum_f32_RING_LL"
) -> Path:
    """Two steps of 100 us of computation, 40 of communication, 10 of them hidden."""
    events: list[Any] = []
    for index, at in enumerate((0, 200)):
        events.append(step(index + 1, at, at + 190))
        for place, (name, stream, start, end) in enumerate(
            (("gemm", 7, 10, 110), (sending, 20, 50, 60), (sending, 20, 110, 140))
        ):
            number = 10 * index + place + 1
            events.append(launched(number, at + place * 2))
            events.append(kernel(name, stream, at + start, at + end, number))
    path.write_text(json.dumps({"traceEvents": events}))
    return path


def test_the_text_has_numbers_findings_and_names(tmp_path: Path):
    result = report(write(tmp_path / "a.json"))
    assert result.exit_code == 0, result.output
    assert "10 of 40 us" in result.output
    assert "last-bucket" in result.output and "nccl" in result.output


def test_json_is_one_object_with_the_exact_numbers(tmp_path: Path):
    result = report(write(tmp_path / "a.json"), "--json")
    assert result.exit_code == 0
    record = json.loads(result.output)
    assert [(s["step"], s["hidden_ns"], s["exposed_ns"]) for s in record["steps"]] == [
        (1, 10_000, 30_000),
        (2, 10_000, 30_000),
    ]
    assert record["findings"][0]["kind"] == "last-bucket"


def test_one_step_can_be_asked_for_and_an_unknown_one_is_an_error(tmp_path: Path):
    path = write(tmp_path / "a.json")
    record = json.loads(report(path, "--step", 2, "--json").output)
    assert [s["step"] for s in record["steps"]] == [2]
    result = report(path, "--step", 9)
    assert result.exit_code == 2
    assert "no step 9" in result.output and "(1, 2)" in result.output


def test_no_communication_is_exit_code_3_until_its_name_is_given(tmp_path: Path):
    path = write(tmp_path / "a.json", sending="my_exchange")
    result = report(path)
    assert result.exit_code == 3
    assert "no communication kernels found" in result.output
    assert json.loads(report(path, "--json").output)["has_communication"] is False
    again = report(path, "--communication", "my_exch")
    assert again.exit_code == 0 and "my_exch" in again.output


def test_a_folder_of_ranks_is_one_report(tmp_path: Path):
    folder = tmp_path / "ranks"
    folder.mkdir()
    for rank in (0, 1):
        path = write(folder / f"rank_{rank}.json")
        trace = json.loads(path.read_text())
        trace["distributedInfo"] = {"rank": rank, "world_size": 2}
        path.write_text(json.dumps(trace))
    record = json.loads(report(folder, "--json").output)
    assert {s["rank"] for s in record["steps"]} == {0, 1}
    files = sorted(folder.iterdir())
    assert json.loads(report(*files, "--json").output)["steps"] == record["steps"]


def test_a_serial_run_says_what_was_saved(tmp_path: Path):
    path = write(tmp_path / "a.json")
    result = report(path, "--serial", path, "--json")
    assert json.loads(result.output)["steps"][0]["alone_is_known"] == (
        "measured in the serial run"
    )


def test_the_page_is_written_beside_the_text(tmp_path: Path):
    out = tmp_path / "report.html"
    result = report(write(tmp_path / "a.json"), "--html", out)
    assert result.exit_code == 0 and f"Page: {out}" in result.output
    assert 'data-kind="last-bucket"' in out.read_text()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.json", "report.html"]


def test_bad_input_is_one_line_and_exit_code_2(tmp_path: Path):
    no_trace = tmp_path / "notes.json"
    no_trace.write_text("hello")
    good = write(tmp_path / "a.json")
    for arguments in (
        (tmp_path / "none.json",),
        (no_trace,),
        (good, "--hardware", "h900"),
        (good, "--communication", "("),
        (good, "--html", tmp_path / "none" / "a.html"),
        (good, "--serial", tmp_path / "none.json"),
    ):
        result = report(*arguments)
        assert result.exit_code == 2, arguments
        assert result.output.startswith("overlaplab: "), arguments
        assert "Traceback" not in result.output
        assert result.output.count("\n") == 1, result.output


def test_a_page_never_replaces_a_trace(tmp_path: Path):
    path = write(tmp_path / "a.json")
    before = path.read_bytes()
    link = tmp_path / "link.html"
    link.symlink_to(path)
    for out in (path, link, tmp_path / "new.json", ""):
        result = report(path, "--html", out)
        assert result.exit_code == 2 and "--html" in result.output, out
    assert path.read_bytes() == before and link.is_symlink()
    assert not (tmp_path / "new.json").exists()


def test_without_a_trace_the_usage_is_shown():
    result = report()
    assert result.exit_code == 2 and "TRACE" in result.output


def test_help_documents_the_exit_codes():
    said = " ".join(report("--help").output.split())
    assert "3 if no kernel communicates" in said and "2 if a trace cannot" in said
