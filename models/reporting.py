"""What `python -m qgraph.models.NAME` says on stderr: what it is doing, and what went wrong."""

import contextlib
import sys
from collections.abc import Iterator

from qgraph import console
from qgraph.errors import QGraphError

_INTERRUPTED = 130


@contextlib.contextmanager
def reported(heading: str = "") -> Iterator[console.Stages]:
    """Print the heading and the stages of the work inside; end with a line where it fails.

    Raises:
        SystemExit: the work raised an error that its user can mend; with the status that the
            command line has for it.
    """
    out = console.messages()
    if heading:
        console.print_line(out, heading)
    try:
        with console.Stages(out) as stages:
            yield stages
    except QGraphError as error:
        sys.stderr.write(console.error_text(str(error)))
        raise SystemExit(error.exit_status) from None
    except OSError as error:
        what = error.filename or "a file"
        message = f"{what} cannot be read or written: {error.strerror or error}"
        sys.stderr.write(console.error_text(message))
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        sys.stderr.write(console.error_text("interrupted"))
        raise SystemExit(_INTERRUPTED) from None
