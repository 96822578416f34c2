"""The commit of a Hugging Face dataset: looked up once, at a run's first start, and kept in its run file.

Names such as `main` move; a commit does not. So a run that resumes reads the rows that it would have read.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from penteract.config.files.regular import read_regular
from penteract.engine.data.corpus import StreamedCorpus, find_corpus
from penteract.engine.data.open import AUTO
from penteract.engine.data.stream.hub_documents import first_line, no_datasets, not_opened
from penteract.errors import BadInput

LOOK_S = 30.0  # for the hub to answer
_COMMIT = re.compile(r"[0-9a-f]{40}")


def pin(source: str | tuple[str, ...], revision: str, notify: Callable[[str], None] = lambda line: None) -> str:
    """The commit that `data.revision` names now, of a dataset of the hub; `revision` itself for any other source.

    Where the hub does not answer, a copy in its cache may have it; else `notify` gets a line, and a change will be
    found by the content alone. Raises BadInput if there is no such dataset or revision.
    """
    corpus = find_corpus(source)
    if not isinstance(corpus, StreamedCorpus) or Path(corpus.name).exists():
        return revision
    try:
        from huggingface_hub import HfApi
        from huggingface_hub.utils import RepositoryNotFoundError, RevisionNotFoundError
    except ImportError as e:
        raise no_datasets(corpus) from e
    asked = None if revision == AUTO else revision
    try:
        return HfApi().dataset_info(corpus.name, revision=asked, timeout=LOOK_S).sha or revision
    except RevisionNotFoundError as e:
        raise BadInput("REVISION", "the dataset no longer has this revision, or never had it",
                       where=f"data.revision of hf:{corpus.name}", found=revision,
                       fix="--data.revision auto --data.allow_change true goes on with the newest") from e  # fmt: skip
    except RepositoryNotFoundError as e:
        raise not_opened(corpus, e) from e
    except Exception as e:  # no network, a hub that is busy, an invalid name: opening the dataset says more
        commit = _cached(corpus.name, asked or "main") or (revision if _COMMIT.fullmatch(revision) else "")
        if not commit:
            notify(f"the commit of hf:{corpus.name} is not known, because the hub does not answer ({first_line(e)}): "
                   "a resume cannot ask for it")  # fmt: skip
        return commit or revision


def _cached(name: str, revision: str) -> str:
    """The commit that a revision had when the hub's cache was filled; "" if it is not there."""
    from huggingface_hub import constants

    try:
        path = Path(constants.HF_HUB_CACHE) / f"datasets--{name.replace('/', '--')}" / "refs" / revision
        found = read_regular(path, largest=100).decode().strip()
    except (OSError, ValueError):
        return ""
    return found if _COMMIT.fullmatch(found) else ""
