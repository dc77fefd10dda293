"""The end of every verb: an error said without a traceback, and the exit code."""

import sys
from collections.abc import Callable

import typer

from shardwise.errors import EXIT_INTERRUPTED, ShardwiseError


def reported(verb: Callable[[], int], as_json: bool) -> None:
    """Run a verb and leave with its exit code; a ShardwiseError is printed as what, why and fix."""
    try:
        code = verb()
    except ShardwiseError as error:
        from shardwise.report import errors

        print(errors.text(error), file=sys.stderr)
        if as_json:
            print(errors.as_json(error))
        code = error.exit_code
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        code = EXIT_INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output left, as `head` does: nothing more can be said.
        sys.stderr.close()
        code = 1
    raise typer.Exit(code)
