"""What holds for every verb: exit codes, streams, and how little is imported."""

from __future__ import annotations

import io
import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from roost import __version__
from roost.cli import app
from roost.cli._exit_codes import Group
from roost.errors import (
    ExecutionError,
    GraphError,
    Infeasible,
    InputError,
    MissingExtra,
    UnknownName,
)

ROOST = [sys.executable, "-c", "from roost.cli import main; main()"]
HEAVY = {"torch", "numba", "scipy", "onnx", "ray"}


def imported_by(*args: str) -> set[str]:
    """The modules that a call leaves imported."""
    code = (
        "import sys; from roost.cli import main\n"
        "try: main()\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "print(*sys.modules, file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *args], capture_output=True, text=True, check=True
    )
    assert done.stdout
    return set(done.stderr.split())


@pytest.mark.parametrize("args", [["--help"], ["--version"], ["simulate", "--help"]])
def test_help_and_version_import_nothing_but_the_command_line(args: list[str]) -> None:
    assert not imported_by(*args) & {*HEAVY, "numpy", "msgspec", "roost.core.graph"}


@pytest.mark.parametrize("args", [["clusters"], ["clusters", "--json"], ["clusters", "k80x4"]])
def test_clusters_imports_nothing_heavy(args: list[str]) -> None:
    assert not imported_by(*args) & HEAVY


def test_version() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.stdout) == (0, f"roost {__version__}\n")


def test_help_lists_every_verb_with_a_sentence_that_is_not_cut() -> None:
    text = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "80"}).stdout
    verbs = dict(re.findall(r"^  (\w+)  +([A-Z].*)$", text, re.MULTILINE))
    assert set(verbs) == {
        command.callback.__name__ for command in app.registered_commands if command.callback
    }
    assert all(
        sentence.endswith(".") and not sentence.endswith("...") for sentence in verbs.values()
    )


def test_every_verb_takes_json() -> None:
    for command in app.registered_commands:
        assert command.callback is not None
        help_text = CliRunner().invoke(app, [command.callback.__name__, "--help"]).stdout
        assert "--json" in help_text


def ending(error: BaseException) -> Any:
    """How a verb that raises this ends."""
    small = typer.Typer(cls=Group, pretty_exceptions_enable=False)

    @small.command()
    def fail() -> None:
        raise error

    @small.command()
    def other() -> None: ...

    return CliRunner().invoke(small, ["fail"])


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InputError("mend\nthis"), 2),
        (GraphError("mend this"), 2),
        (UnknownName("mend", "this", []), 2),
        (MissingExtra("mend", "this"), 2),
        (Infeasible("mend this"), 3),
        (ExecutionError("mend this"), 1),
        (FileNotFoundError(2, "mend this"), 2),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_error_is_one_line_and_an_exit_code(error: Exception, code: int) -> None:
    result = ending(error)
    assert result.exit_code == code
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert "mend" in result.stderr
    assert "this" in result.stderr


def test_a_long_error_stays_one_line() -> None:
    assert ending(InputError("long " * 100)).stderr.count("\n") == 1


def test_what_is_not_ours_is_a_bug_and_keeps_its_traceback() -> None:
    result = ending(ZeroDivisionError("oops"))
    assert isinstance(result.exception, ZeroDivisionError)


def test_a_verb_may_end_with_4() -> None:
    assert ending(typer.Exit(4)).exit_code == 4


@pytest.mark.usefixtures("control_c")
@pytest.mark.parametrize("told", [signal.SIGINT, signal.SIGTERM])
def test_control_c_ends_with_130_and_no_traceback(tmp_path: Path, told: signal.Signals) -> None:
    code = """
import pathlib, time
from roost.cli import main
from roost.core import formats
def load(path):
    pathlib.Path("began").touch()
    time.sleep(60)
formats.load = load
main()
"""
    (tmp_path / "graph.json").touch()
    command = [sys.executable, "-c", code, "simulate", "graph.json", "--on", "cpu"]
    running = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=tmp_path)
    while running.poll() is None and not (tmp_path / "began").exists():
        time.sleep(0.01)
    running.send_signal(told)
    _, stderr = running.communicate(timeout=60)
    assert running.returncode == 130
    assert "Traceback" not in stderr


def test_control_c_while_the_command_is_imported_is_no_traceback() -> None:
    code = """
import runpy, sys
import roost
class Interrupted:
    def find_spec(self, name, *rest):
        if name == "roost.cli":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupted())
runpy.run_module("roost.__main__", run_name="__main__")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (130, "")


def test_the_command_imports_nothing_slow_before_it_can_catch_control_c() -> None:
    code = """
import __future__, importlib, signal, sys
before = {*sys.modules}
from roost.cli import main
print(*sorted({*sys.modules} - before))
"""
    done = subprocess.run(
        [sys.executable, "-S", "-c", code],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": os.pathsep.join(sys.path)},
        check=True,
    )
    assert done.stdout.split() == ["roost", "roost.cli"]


@pytest.mark.parametrize("args", [["clusters"], ["clusters", "--json"], ["--help"]])
def test_a_closed_pipe_is_no_traceback(args: list[str]) -> None:
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [*ROOST, *args], stdout=write, stderr=subprocess.PIPE, text=True, check=False
    )
    os.close(write)
    assert done.returncode == 1
    assert done.stderr == ""


def test_a_full_disk_is_an_error_line() -> None:
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [*ROOST, "clusters"], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert "Traceback" not in done.stderr


def test_the_command_itself_refuses_without_a_traceback(files: Path) -> None:
    args = ["simulate", str(files / "graph.json"), "--on", "k80x5"]
    done = subprocess.run([*ROOST, *args], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == "error: no preset called 'k80x5'; did you mean 'k80x4'?\n"


@pytest.mark.parametrize(
    "args", [["simulat"], ["simulate"], ["simulate", "x", "--frob"], ["clusters", "a", "b"]]
)
def test_bad_usage_ends_with_2(args: list[str]) -> None:
    result = CliRunner().invoke(app, args)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "Error: " in result.stderr


def test_no_colour_in_a_pipe(roost: Callable[..., Any], files: Path) -> None:
    result = roost(
        "simulate",
        files / "graph.json",
        "--on",
        files / "small.toml",
        "--placement",
        files / "placement.json",
    )
    assert "\x1b" not in result.output


def test_names_from_files_cannot_steer_the_terminal(tmp_path) -> None:
    path = tmp_path / "graph.json"
    path.write_text(
        '{"format":"roost.graph","version":1,"name":"\\u001b[31mred\\u0007","ops":[{"name":"a"}]}'
    )
    result = CliRunner().invoke(app, ["simulate", str(path), "--on", "cpu"])
    assert result.exit_code == 0
    assert "\x1b" not in result.output
    assert "\\x1b[31mred" in result.output
    result = CliRunner().invoke(app, ["simulate", str(path), "--on", "\x1b[2J"])
    assert "\x1b" not in result.output


@pytest.mark.parametrize(
    "args", [["clusters"], ["clusters", "--json"], ["--help"], ["clusters", "nosuch"]]
)
def test_closed_streams_are_no_traceback(args: list[str], tmp_path: Path) -> None:
    command = " ".join(f"'{word}'" for word in [*ROOST, *args])
    done = subprocess.run(
        ["sh", "-c", f"{command} >&-"], stderr=subprocess.PIPE, text=True, check=False
    )
    assert done.returncode == (2 if "nosuch" in args else 0)
    assert "Traceback" not in done.stderr


def test_control_c_while_the_verbs_are_imported_is_no_traceback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from roost import cli

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "roost.cli._app")
    monkeypatch.setattr("importlib._bootstrap_external.SourceFileLoader.exec_module", interrupted)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 130


def test_why_it_takes_long_is_said_only_once_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    from roost.cli import _console

    waiting = _console.LiveLine("preparing", "compiling")
    assert str(waiting.__rich__()) == "preparing"
    monkeypatch.setattr(waiting, "began", waiting.began - 10)
    assert str(waiting.__rich__()) == "preparing (compiling)"


def test_what_the_library_says_of_long_work_is_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the line that is drawn on a terminal, or a line of its own; nothing else that is
    logged."""
    from rich.console import Console

    from roost.cli import _console

    _console.listen()
    _console.listen()
    logging.getLogger("roost.presets.probe").info("measuring")
    logging.getLogger("roost.placers.auto").info("without metis")
    assert capsys.readouterr().err == "measuring\n"
    monkeypatch.setattr(Console, "is_terminal", True)
    line = _console.LiveLine("preparing")
    with _console.drawn(Console(file=io.StringIO()), line):
        logging.getLogger("roost.simulator.compiling").info("compiling")
        assert str(line.__rich__()) == "preparing (compiling)"
    assert not _console._drawn
    assert "compiling" not in capsys.readouterr().err


def test_a_live_line_is_cut_and_not_folded() -> None:
    from rich.console import Console
    from rich.spinner import Spinner

    from roost.cli import _console, _search

    out = Console(width=40)
    for line in (_console.LiveLine("long " * 20), _search.SearchLine("long " * 20, out)):
        with out.capture() as drawn:
            out.print(Spinner("dots", line))
        assert len(drawn.get().splitlines()) == 1


def test_python_m_roost_is_the_command_and_completes_its_words() -> None:
    """As a shell asks for completion, through `python -m roost`."""
    asked = {"_ROOST_COMPLETE": "complete_bash", "COMP_WORDS": "roost pl", "COMP_CWORD": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "roost"],
        env=os.environ | asked,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.split() == ["place", "placers"], done.stderr
