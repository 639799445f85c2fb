"""The command line: `overlaplab demo`, `grade`, `progress`, `report` and others.

Reads arguments and prints; what a command does is elsewhere. Heavy modules are imported
inside the commands, so that `--help` and `--version` answer at once.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import overlaplab
from overlaplab.errors import OverlaplabError, printable

if TYPE_CHECKING:
    from overlaplab.timeline import Timeline

NO_COMMUNICATION_CODE = 3  # of `report`: read, but no kernel communicates
NOT_JUDGED_CODE = 4  # of `grade`: neither right nor wrong


@contextmanager
def _one_error_line() -> Iterator[None]:
    """What the user can repair is said in a message, with exit code 2, no traceback."""
    try:
        yield
    except BrokenPipeError:
        raise  # click ends quietly: the reader has seen enough (`| head`)
    except (OverlaplabError, ValueError, TypeError, OSError) as error:
        click.echo(f"overlaplab: {printable(str(error))}", err=True)
        sys.exit(2)
    except KeyboardInterrupt:
        click.echo("overlaplab: interrupted", err=True)
        sys.exit(130)


class _Commands(click.Group):
    def invoke(self, ctx: click.Context) -> Any:
        with _one_error_line():
            return super().invoke(ctx)


def _print_version(context: click.Context, option: object, wanted: bool) -> None:
    if wanted:
        click.echo(f"overlaplab {overlaplab.__version__}")
        context.exit()


@click.group(
    cls=_Commands,
    context_settings={"help_option_names": ["-h", "--help"], "show_default": True},
)
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_version,
    help="Show the version and exit.",
)
def main() -> None:
    """Hide communication behind computation: a course and its library.

    To learn, start with lab 00: `make lab` opens it in JupyterLab. To see the idea in
    one figure, run `overlaplab demo`. To find out what your own training step loses,
    record a trace with torch.profiler and run `overlaplab report TRACE`.
    """


@main.command(
    "demo", short_help="Train a model in three ways; compare and draw a step."
)
@click.option(
    "--cluster",
    type=click.Choice(["virtual", "gloo", "nccl"]),
    default="virtual",
    help="virtual: on a computed clock; gloo: CPU processes; nccl: one process per "
    "GPU.",
)
@click.option(
    "--ranks",
    type=click.IntRange(1),
    default=4,
    help="Processes that train together.",
)
@click.option("--steps", default=4, help="Training steps, 2 or more.")
@click.option(
    "--hardware",
    help="Profile that times the virtual cluster, such as h100-nvlink.  "
    "[default: round numbers on which a small model has something to hide]",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    default=Path("demo.png"),
    help="Where the figure goes.",
)
def demo_command(
    cluster: str, ranks: int, steps: int, hardware: str | None, out: Path
) -> None:
    """Train with a serial, a per-parameter and a bucketed reducer; compare a step.

    Gradients are averaged after the backward pass, in one message per parameter, or in
    a few larger messages beside it. Prints a table and draws a figure.

    The exit code is 0 if all of them end with the right parameters, else 1.
    """
    from overlaplab import demo

    same = demo.demo(
        cluster=cluster,
        num_ranks=ranks,
        steps=steps,
        hardware=demo.DEMO_HARDWARE if hardware is None else hardware,
        out=out,
    )
    sys.exit(0 if same else 1)


@main.command("grade", short_help="Mark a notebook, or a folder of them.")
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print JSON, not a table.")
@click.option(
    "--csv",
    "table",
    type=click.Path(path_type=Path),
    help="PATH is a folder: a row for each notebook below it, written here.",
)
@click.option(
    "--html",
    "pages",
    type=click.Path(path_type=Path),
    help="With --csv: a folder for a page of feedback for each notebook.",
)
@click.option(
    "--jobs", type=click.IntRange(1), help="Notebooks at a time.  [default: all cores]"
)
def grade_command(
    path: Path,
    as_json: bool,
    table: Path | None,
    pages: Path | None,
    jobs: int | None,
) -> None:
    """Run a learner's notebook in a process of its own and print its marks.

    The exit code is 0 for full marks only, else 1; 2 if PATH is no lab's notebook; 4 if
    this machine was too busy to judge an exercise, which is neither right nor wrong.

    Of a folder, with --csv, every notebook is graded, several at a time. Started again
    it goes on where it was ended, and grades what has changed. The exit code is 0 if
    all were graded, whatever their marks, 1 if one could not be, 4 as above.
    """
    if table is not None:
        _grade_class(path, table, pages, jobs)
        return
    if path.is_dir() or pages is not None or jobs is not None:
        raise ValueError(
            f"{path} is a folder, whose marks need a table: overlaplab grade {path} "
            "--csv marks.csv"
            if path.is_dir()
            else f"{path} is one notebook; --html and --jobs are for a folder of them, "
            "with --csv"
        )
    from overlaplab.grading.notebook import grade_notebook

    # One line on a terminal, rewritten; a line that stays for each exercise.
    clear = "\r\x1b[K" if sys.stderr.isatty() else ""

    def progress(what: str) -> None:
        if clear:
            click.echo(f"{clear}{what} ...", err=True, nl=False)

    def done(result: object) -> None:
        click.echo(f"{clear}{result}", err=True)

    try:
        report = grade_notebook(path, progress=progress, done=done)
    finally:
        click.echo(clear, err=True, nl=False)
    click.echo(json.dumps(report.to_dict(), indent=2) if as_json else str(report))
    if not report.all_judged:
        sys.exit(NOT_JUDGED_CODE)
    sys.exit(0 if report.full_marks else 1)


def _grade_class(
    folder: Path, table: Path, pages: Path | None, jobs: int | None
) -> None:
    from overlaplab.grading.classroom import NOT_GRADED, NOT_JUDGED, grade_class

    def done(number: int, total: int, row: object) -> None:
        click.echo(f"{number}/{total} {row}", err=True)

    report = grade_class(folder, table, pages=pages, num_jobs=jobs, done=done)
    click.echo(str(report))
    outcomes = {row.outcome for row in report.rows}
    if NOT_JUDGED in outcomes:
        sys.exit(NOT_JUDGED_CODE)
    sys.exit(1 if NOT_GRADED in outcomes else 0)


@main.command("progress", short_help="Show what is solved, and what is next.")
@click.argument(
    "folder", type=click.Path(path_type=Path), default=Path("labs"), required=False
)
def progress_command(folder: Path) -> None:
    """Show which exercises of the labs in FOLDER are solved, and which is next.

    FOLDER is `labs` if you do not name one. Reads what your notebooks saved and runs
    nothing, so save them first.
    """
    from overlaplab.grading.progress import next_lab, read_progress

    if str(folder) == "labs" and not folder.exists():
        folder = Path()  # already in labs/, as a terminal of JupyterLab is
    labs = read_progress(folder)
    for lab in labs:
        click.echo(str(lab))
    solved = sum(len(lab.solved) for lab in labs)
    total = solved + sum(len(lab.left) for lab in labs)
    click.echo(f"{'all labs':28} {solved:2} of {total:2}")
    if following := next_lab(labs):
        name = printable(following.notebook.stem)
        click.echo(f"next: {name}, exercise {following.left[0]}")


@main.command(
    "doctor", short_help="Say what this machine can run, and how to repair it."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON, not text.")
def doctor_command(as_json: bool) -> None:
    """Say what this machine is, what that means for overlap, and what to do.

    The exit code is 0, or 1 if something is broken. A machine without GPUs is not.
    """
    from overlaplab.checkup import doctor

    # It asks processes that may hang, for two minutes at most.
    is_terminal = sys.stderr.isatty()
    if is_terminal:
        click.echo("overlaplab doctor: looking at this machine ...", err=True, nl=False)
    try:
        checkup = doctor()
    finally:
        if is_terminal:
            click.echo("\r\x1b[K", err=True, nl=False)
    click.echo(json.dumps(checkup.to_dict(), indent=2) if as_json else str(checkup))
    sys.exit(checkup.exit_code)


def _check_output(path: Path, inputs: Sequence[str]) -> None:
    """Refuse a page that would replace a trace."""
    if path in (Path(), Path("..")) or not path.name:
        raise ValueError("--html needs the name of a file, such as report.html")
    for name in inputs:
        if path.exists() and Path(name).exists() and path.samefile(name):
            raise ValueError(f"--html {path} is a trace to read; give another name")
    if path.name.endswith((".json", ".json.gz")):
        raise ValueError(f"--html {path} is named like a trace; give it .html")


@main.command(
    "report", short_help="Say what a traced training step loses, and to what."
)
@click.argument(
    "traces", nargs=-1, required=True, metavar="TRACE...", type=click.Path()
)
@click.option(
    "--hardware",
    help="Profile whose link bandwidths are compared with: a name, or a file (.json).  "
    "[default: guessed from the card's name]",
)
@click.option("--step", type=int, default=None, help="Only this step.  [default: all]")
@click.option(
    "--serial",
    "serial_path",
    type=click.Path(),
    help="Trace, or folder, of the same step without overlap: what overlap saved is "
    "then measured against it.",
)
@click.option(
    "--communication",
    multiple=True,
    metavar="PATTERN",
    help="A regular expression of kernels that communicate, besides those known. "
    "Repeat it for more.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON, not text.")
@click.option(
    "--html",
    "html_path",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write one self-contained page, too.",
)
def report_command(
    traces: tuple[str, ...],
    hardware: str | None,
    step: int | None,
    serial_path: str | None,
    communication: tuple[str, ...],
    as_json: bool,
    html_path: Path | None,
) -> None:
    """Say what a training step loses, to what, and what to change.

    TRACE is a file of torch.profiler (.json, .json.gz), several, or a folder with one
    of each rank. The exit code is 0; 3 if no kernel communicates, so that nothing can
    be said of overlap; 2 if a trace cannot be read.
    """
    from overlaplab.diagnosis import diagnose
    from overlaplab.diagnosis.text import text

    inputs = [*traces, *([] if serial_path is None else [serial_path])]
    if html_path is not None:
        _check_output(html_path, inputs)

    from overlaplab.profiling.read import read_trace

    def read(paths: tuple[str, ...]) -> Timeline:
        where = paths[0] if len(paths) == 1 else list(paths)
        return read_trace(where, communication=communication)

    found = diagnose(
        read(traces),
        hardware=hardware,
        step=step,
        serial=None if serial_path is None else read((serial_path,)),
    )
    if html_path is not None:
        found.save_html(html_path)
    click.echo(
        json.dumps(found.to_dict(), indent=2) if as_json else text(found, details=True)
    )
    if html_path is not None and not as_json:
        click.echo(f"\nPage: {html_path}")
    sys.exit(0 if found.has_communication else NO_COMMUNICATION_CODE)


@main.command("calibrate", short_help="Measure this machine as a hardware profile.")
@click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    default=Path("hardware.json"),
    help="Where the profile goes.",
)
@click.option(
    "--backend",
    type=click.Choice(["nccl", "gloo"]),
    help="nccl: one process per GPU; gloo: two on the CPU.  [default: nccl with GPUs]",
)
def calibrate_command(out: Path, backend: str | None) -> None:
    """Measure this machine and write a hardware profile of it.

    Matrix products, operators of small transformers, copies, launches, collectives, and
    what computing and sending cost one another. Then: ol.run(..., hardware=OUT).
    """
    from overlaplab.calibrate import calibrate, table, writes

    hardware = calibrate(out, backend=backend)
    if not writes():
        return
    click.echo(table(hardware))
    click.echo(f"Profile: {out}. Use it as ol.run(..., hardware={str(out)!r}).")
