"""The command line: its commands, and what they all have in common.

Exit statuses: 0 done; 1 unexpected; 2 wrong usage or input; 3 coverage too low; 4 a numeric
check failed; 130 interrupted. Errors are plain text on stderr. Nothing heavy is imported before
a command runs.
"""

from __future__ import annotations

import errno
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Annotated

import typer
from typer.models import CommandInfo

from qgraph._version import __version__
from qgraph.cli.bench import bench
from qgraph.cli.capture import capture
from qgraph.cli.compare import compare
from qgraph.cli.demo import demo
from qgraph.cli.explain import explain
from qgraph.cli.export import export
from qgraph.cli.generate import generate
from qgraph.cli.import_ import import_
from qgraph.cli.inspect import inspect
from qgraph.cli.optimize import optimize
from qgraph.cli.quantize import quantize
from qgraph.errors import InputError, QGraphError

INTERRUPTED = 130
# What a shell shows for a program that SIGPIPE ended.
BROKEN_PIPE = 141
USAGE = 2
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""What a write meets on a full disk, at a limit, or where a terminal is gone: no fault of ours."""
# typer carries its own copy of click, so the class is reached through what typer exports.
_UsageError = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "UsageError")

_HELP = ["-h", "--help"]

app = typer.Typer(
    name="qgraph",
    help="A compiler for quantized models: ONNX in, fused low-bit kernels out, "
    "every node explained.",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": _HELP},
)
app.command()(optimize)
app.command()(explain)
app.command()(compare)
app.command()(bench)
app.command()(capture)
app.command("import")(import_)
app.command()(export)
app.command()(quantize)
app.command()(inspect)
app.command()(generate)
app.command()(demo)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"qgraph {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _common(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        *names, last = (_named(command) for command in app.registered_commands)
        raise InputError(f"no command given: {', '.join(names)} or {last}\ntry: qgraph --help")


def _named(command: CommandInfo) -> str:
    """What users type for it."""
    return command.name or str(getattr(command.callback, "__name__", ""))


def run(arguments: Sequence[str]) -> int:
    """Run the command line `qgraph ARGUMENTS`; the exit status."""
    if sys.stdout is None:  # it was closed
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    try:
        status = _status(arguments)
        sys.stdout.flush()
    except (KeyboardInterrupt, typer.Abort) as stop:
        return _say(_noted("interrupted", stop), INTERRUPTED)
    except BrokenPipeError:
        _drop_output()
        return BROKEN_PIPE
    except Exception as error:
        return _failed(error)
    return status


def _status(arguments: Sequence[str]) -> int:
    if any(name in arguments for name in _HELP):
        from qgraph.cli.help_tables import keep_names_whole

        keep_names_whole()
    try:
        command = typer.main.get_command(app)
        with command.make_context("qgraph", list(arguments)) as context:
            command.invoke(context)
    except typer.Exit as stop:
        return stop.exit_code
    return 0


def _drop_output() -> None:
    """Leave out what stdout did not take: the interpreter would flush it once more at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _failed(error: Exception) -> int:
    if os.environ.get("QGRAPH_DEBUG"):
        traceback.print_exception(error)
    if isinstance(error, QGraphError):
        return _say(_noted(str(error), error), error.exit_status)
    if isinstance(error, _UsageError):
        return _say(_usage(error), USAGE)
    if isinstance(error, MemoryError):
        return _say(_noted("out of memory", error), 1)
    if isinstance(error, OSError) and error.errno in _FULL:
        _drop_output()
        what = error.filename or "the output, or a temporary file,"
        return _say(_noted(f"{what} cannot be written: {error.strerror}", error), 1)
    hint = "this is a fault in qgraph: QGRAPH_DEBUG=1 shows where"
    return _say(_noted(f"{type(error).__name__}: {error}\n{hint}", error), 1)


def _noted(message: str, error: BaseException) -> str:
    """The message, and what was noted of the error on its way: how to go on."""
    return "\n".join([message, *getattr(error, "__notes__", ())])


def _usage(error: Exception) -> str:
    message = getattr(error, "format_message", error.__str__)()
    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else "qgraph"
    return f"{message}\ntry: {path} --help"


def _say(message: str, status: int) -> int:
    from qgraph.console import error_text

    sys.stderr.write(error_text(message))
    return status
