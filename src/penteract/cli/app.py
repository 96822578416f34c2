"""The program `penteract`: its verbs, and errors as lines and exit codes."""

from __future__ import annotations

import errno
import json
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

from cyclopts import App, CycloptsError, UnknownOptionError, UnusedCliTokensError

from penteract._version import __version__
from penteract.cli.resolve.overrides import split_overrides
from penteract.config.files.keys import ELSEWHERE, nearest_key, show_key
from penteract.errors import BadInput, Bug, PenteractError
from penteract.units import printable

VERBS = (
    "plan",
    "rehearse",
    "train",
    "bench",
    "checkpoints",
    "convert",
    "doctor",
    "calibrate",
    "report",
    "profile",
    "init",
    "explore",
)  # each a module of this folder, with a function of its name

_HELP = "Train large language models split over many GPUs, and see what each way to split them does."
_EXAMPLES = (
    "penteract train",
    "penteract train --parallel.tp 2 --compare latest",
    "penteract plan llama-3.1-8b --gpus 8xH200",
    "penteract init run.toml",
)
_MEANT = {  # names that are tried as options, and the keys of a run that they probably mean
    **ELSEWHERE,
    "precision": "precision.dtype", "optimizer": "optimizer.kind", "data": "data.source",
    "tokenizer": "tokenizer.source", "batch": "batch.global_batch_size", "gpus": "parallel.dp",
    "seq": "batch.sequence_length",
}  # fmt: skip
_OF_A_RUN = ("train", "rehearse", "profile", "bench")  # verbs that take each value of a run; plan takes some
_NO_PATH = (errno.ENAMETOOLONG, errno.EACCES)  # what pathlib raises where it is asked whether a file is there


@dataclass(frozen=True, slots=True)
class _ErrorOutput:
    """How errors are printed. Read from the raw words, because the command line itself may be wrong."""

    debug: bool
    json: bool


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code. Errors go to stderr, at most three lines, each `error[CODE]: …`."""
    words = list(sys.argv[1:] if argv is None else argv)
    output = _ErrorOutput(debug="--debug" in words, json="--json" in words)
    try:
        code = _run(words)
        if sys.stdout is not None:  # closed by the caller
            sys.stdout.flush()  # here, because it may fail
        return code
    except PenteractError as error:
        return _report(error, output)
    except CycloptsError as error:
        return _report(_usage(error, next((word for word in words if word in VERBS), "")), output)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        return 141
    except Exception as error:
        return _report(_unforeseen(error, output), output)


def _unforeseen(error: Exception, output: _ErrorOutput) -> PenteractError:
    """A path that cannot be looked at is one that was given; all else is a bug."""
    if isinstance(error, OSError) and error.errno in _NO_PATH:
        where = show_key(str(error.filename))
        return BadInput("FILE", f"cannot be used: {error.strerror}", where=where, fix="check the path")
    fix = "see the traceback above" if output.debug else "run again with --debug for the traceback, and report it"
    return Bug("BUG", f"{type(error).__name__}: {error}", fix=fix)


def _run(words: Sequence[str]) -> int:
    verb, overrides = split_overrides(words)
    app = _app(next((word for word in verb if word in VERBS), ""))
    command, bound, injected = app.parse_args(verb, print_error=False, exit_on_error=False)
    if "overrides" in injected:
        command = partial(command, overrides=overrides)
    elif overrides:
        raise BadInput("USAGE", "takes no values of a run", found=show_key(overrides[0]), fix="penteract train --help")
    return _exit_code(command, bound.args, bound.kwargs)


def _exit_code(command: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    result = command(*args, **kwargs)
    return result if isinstance(result, int) else 0


def _app(chosen: str) -> App:
    """All verbs. Only the `chosen` one is imported; with "", all are."""
    app = App(
        name="penteract", help=_HELP, help_epilogue=_examples(_EXAMPLES), help_format="markdown", version=__version__,
        result_action="return_value",
    )  # fmt: skip
    for verb in VERBS:
        if chosen in ("", verb):
            module = import_module(f"penteract.cli.{verb}")
            command = getattr(module, verb)
            if isinstance(command, App):  # a verb with verbs of its own
                command.help_epilogue = _examples(module.EXAMPLES)
                app.command(command)
            else:
                app.command(command, help_epilogue=_examples(module.EXAMPLES))
        else:
            app.command(f"penteract.cli.{verb}:{verb}", name=verb)
    return app


def _examples(examples: Sequence[str]) -> str:
    """The examples below a verb's options, one a line."""
    return "Examples:\n\n" + "\n".join(f"- {line}" for line in examples)


def _usage(error: CycloptsError, verb: str) -> BadInput:
    """A parse error of the command line as one line, with the help of the verb in use. The fix for a run's key without
    its section names the section."""
    token = getattr(error, "token", None)
    word = str(getattr(token, "keyword", None) or getattr(token, "value", "")).removeprefix("--")
    name = word.replace("-", "_")
    meant = _MEANT if verb in _OF_A_RUN else {}
    near = meant.get(name) or nearest_key(name) if isinstance(error, UnknownOptionError) and name else ""
    if (near.endswith(f".{name}") and verb in (*_OF_A_RUN, "plan")) or (near and name in meant):
        return BadInput("USAGE", "a value of the run is named with its section", found=f"--{word}", fix=f"--{near}")
    fix = f"penteract {verb} --help" if verb else "penteract --help"
    if isinstance(error, UnusedCliTokensError) and error.unused_tokens:
        return BadInput("USAGE", "no option takes this", found=printable(" ".join(error.unused_tokens)), fix=fix)
    what = " ".join(str(error).split()) or "the command line is not understood"
    return BadInput("USAGE", what[:300], fix=fix)


def _report(error: PenteractError, output: _ErrorOutput) -> int:
    """Print the error on stderr and, with --json, as an object on stdout; returns its exit code."""
    if output.debug:
        traceback.print_exc()
    print(error, file=sys.stderr)
    if output.json:
        print(json.dumps({"error": error.as_dict()}))
    return error.exit_code
