"""`penteract explore`: a page in the browser that shows where the memory of a layout goes. Needs no torch."""

from __future__ import annotations

import json as to_json
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from penteract.config.files.read import read_text
from penteract.config.hardware import cluster
from penteract.errors import BadInput
from penteract.explore.answers.questions import DEGREES, model_of, opening_question, read_question
from penteract.planner.ask import parse_settings
from penteract.planner.question import question as asked
from penteract.planner.question import refuse_other_file
from penteract.planner.token_counts import parse_batch, parse_length

if TYPE_CHECKING:
    from penteract.explore.schemas.page_values import ModelQuestion, Question

EXAMPLES = (
    "penteract explore",
    "penteract explore llama-3.1-70b --gpus 64xH100 --layout tp=8,pp=2,zero=1",
    "penteract explore path/to/config.json --gpus 8xH200",
    "penteract explore --port 8265 --no-browser",
    "penteract explore --runs runs",
    "penteract explore --profiles profiles",
    "penteract explore --sweeps sweeps",
    "penteract explore --export site",
)
_NEEDED = ("starlette", "uvicorn")


def explore(  # noqa: PLR0913 (the options of a verb are its parameters)
    model: Annotated[str, Parameter(help="What the page opens with: a published model, or a config.json.")] = "",
    /,
    *,
    gpus: Annotated[
        str, Parameter(help="The GPUs that the page opens with: 8xH200, or 64x8xH100 (nodes x GPUs).")
    ] = "8xH200",
    layout: Annotated[
        str, Parameter(help="The layout that the page opens with, as in `penteract plan --layout`; dp follows.")
    ] = "",
    seq: Annotated[
        str | None, Parameter(help="Tokens a sequence, as 8192 or 8Ki; that by default, or the model's limit.")
    ] = None,
    batch: Annotated[
        str, Parameter(help="Global batch size of a step: in tokens (1Mi) or sequences (128seqs).")
    ] = "1Mi",
    precision: Annotated[str, Parameter(help="A precision recipe: bf16, fp8_tensorwise.")] = "bf16",
    runs: Annotated[Path | None, Parameter(help="A folder of runs, or one run, to show; read, never written.")] = None,
    profiles: Annotated[
        Path | None, Parameter(help="A folder of profiles, or one profile, to show; read, never written.")
    ] = None,
    sweeps: Annotated[
        Path | None, Parameter(help="A folder of sweeps of bench, or one sweep, to show; read, never written.")
    ] = None,
    port: Annotated[int, Parameter(help="The port on this machine; 0 takes a free one.")] = 0,
    browser: Annotated[bool, Parameter(help="Open the page in a browser.")] = True,
    export: Annotated[
        Path | None, Parameter(help="Write the page into this folder instead, as files for any web server.")
    ] = None,
    json: Annotated[
        bool, Parameter(negative="", help="Print one JSON object: schema_version, and address or folder.")
    ] = False,
) -> int:
    """Show in the browser where the memory of a layout goes, and what would make it fit.

    The page is served on this machine until Ctrl-C, from 127.0.0.1 alone. The printed address opens it once. On another
    machine, forward the port: ssh -L 8265:127.0.0.1:8265 HOST.

    With --export the page is written as files, in which the planner runs in the browser; --sweeps and
    --profiles add those of a folder.
    """
    for flag, given in (("--runs", runs), ("--profiles", profiles), ("--sweeps", sweeps)):
        if given is not None and not given.is_dir():
            raise BadInput("FOLDER", "no such folder", where=flag, found=given,
                           fix=f"name a folder of {flag[2:]}, such as {flag[2:]}")  # fmt: skip
    if export is not None:
        if runs is not None:
            raise BadInput("USAGE", "files for a web server cannot follow runs", where="--runs", found="--export too",
                           fix="leave one of them out")  # fmt: skip
        return _export(export, _opening(model, gpus, layout, seq, batch, precision), sweeps, profiles, json=json)
    if missing := [name for name in _NEEDED if find_spec(name) is None]:
        raise BadInput("EXTRA", f"explore needs {' and '.join(missing)}", found="none",
                       fix="pip install 'penteract[explore]'")  # fmt: skip
    if not 0 <= port < 2**16:
        raise BadInput("PORT", "no port", where="--port", found=port, allowed="0 to 65535", fix="--port 0")
    opening = _opening(model, gpus, layout, seq, batch, precision)
    from penteract.explore.server.routes import Given  # imported here: the server is an extra
    from penteract.explore.server.serving import serve

    def tell(address: str) -> None:
        if json:
            print(to_json.dumps({"schema_version": 1, "address": address}), flush=True)
        else:
            print(f"The explorer is at {address}\nThis address opens once. Ctrl-C ends it.", flush=True)

    folders = (at.resolve() if at else None for at in (runs, profiles, sweeps))
    serve(opening, port=port, browser=browser, tell=tell, given=Given(*folders))
    return 0


def _export(folder: Path, opening: Question, sweeps: Path | None, profiles: Path | None, *, json: bool) -> int:
    """Write the page as files, with the sweeps and the profiles of folders."""
    from penteract.explore.measured_sweeps.read_sweeps import SweepFolders  # imported here: serving does without
    from penteract.explore.static_site import export_site
    from penteract.explore.training_runs.read_profiles import ProfileFolders

    export_site(
        folder, opening, SweepFolders(sweeps.resolve(), dated=False) if sweeps else None,
        ProfileFolders((profiles.resolve(),), dated=False) if profiles else None,
    )  # fmt: skip
    if json:
        print(to_json.dumps({"schema_version": 1, "folder": str(folder)}))
    else:
        print(f"The page is in {folder}. Any web server serves it: python -m http.server --directory {folder}")
    return 0


def _opening(model: str, gpus: str, layout: str, seq: str | None, batch: str, precision: str) -> Question:
    """The question that the page opens with. Raises BadInput for what `penteract plan` refuses too."""
    where = cluster(gpus)
    if where.gpu is None or cluster(f"{where.gpus}x{where.gpu.name}").name != where.name:
        raise BadInput("CLUSTER", "the page knows the usual nodes of published GPUs", where="--gpus", found=gpus,
                       fix=f"--gpus {where.gpus}x{where.gpu.name if where.gpu else 'H200'}")  # fmt: skip
    named = _named(model or "llama-3.1-8b")
    try:
        m = model_of(named)
    except BadInput:
        if "config" not in named:
            refuse_other_file(model)
        raise
    text = layout or ("" if model else "mbs=2,zero=1")
    given = parse_settings(text, flag="--layout", several=False)
    length = min(8192, m.max_positions) if seq is None else parse_length(seq)
    if layout:
        from penteract.planner.plan import exact  # imported here: it takes a while

        exact(asked(m, gpus, sequence_length=length, batch=batch, precision=precision), given)
    settings = {setting: values[0] for setting, values in given.items()}
    if "dp" not in settings:
        used = 1
        for axis in DEGREES:
            used *= int(settings.get(axis, 1))
        text = ",".join(filter(None, (f"dp={max(1, where.gpus // used)}", text)))
    opening = opening_question(
        named, where.gpu.name, text, sequence_length=length, global_batch_size=parse_batch(batch, length),
        precision=precision,
    )  # fmt: skip
    read_question(opening)
    return opening


def _named(model: str) -> ModelQuestion:
    """The model of a question; a config.json is read here, and the page gets its content."""
    path = Path(model)
    if path.suffix != ".json" and not path.is_dir():
        return {"name": model}
    file = path / "config.json" if path.is_dir() else path
    try:
        content: object = to_json.loads(read_text(file))
    except (ValueError, RecursionError) as error:
        raise BadInput("CONFIG", f"no JSON: {error}", where=str(file)) from None
    if not isinstance(content, dict):
        raise BadInput("CONFIG", "not a JSON object", where=str(file))
    return {"name": file.parent.name or file.name, "config": content}
