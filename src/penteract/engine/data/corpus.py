"""Sources of documents: Python's own library, local files and folders, and Hugging Face datasets to stream.

The files of a folder are read in the order of a digest of each file's relative path. This order is the same on every
machine, and unrelated to names: validation is the tail of a corpus, and the tail of an alphabet (`z*.py`) would not be
like the rest.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import os
import platform
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple, cast

from penteract.errors import BadInput, CorruptData
from penteract.units import MIB

BUILTIN_LIMIT = 4 * MIB
MAX_ENTRIES = 50_000  # files and folders in a source: what is listed and looked at in half a second
MAX_PART = MIB // 2  # characters; a longer document is tokenised in parts

_BUILTIN_SKIP = frozenset({
    "__pycache__", "dist-packages", "encodings", "ensurepip", "idle_test", "idlelib", "lib2to3", "lib-dynload",
    "site-packages", "test", "tests",
})  # fmt: skip
# Written when this Python was built or configured, so they differ between machines.
_BUILTIN_LOCAL = ("_sysconfigdata", "sitecustomize", "usercustomize")

_SUFFIXES = frozenset({".txt", ".jsonl", ".bin"})
_ALLOWED = "builtin, a .txt, .jsonl or .bin file, a folder of them, or hf:NAME"


class TextPart(NamedTuple):
    """Part of a document, in order; `ends_document` marks its last part."""

    text: str
    ends_document: bool


@dataclass(frozen=True)
class TextCorpus:
    """Files of text. A `.jsonl` file has one document on each line; any other file is one document."""

    name: str
    files: tuple[Path, ...]
    tag: str = ""  # anything else on which the text depends

    def parts(self) -> Iterator[TextPart]:
        """Parts of all documents, file after file in order."""
        for path in self.files:
            yield from _read_jsonl(path) if path.suffix == ".jsonl" else _read_text(path)

    def size(self) -> int:
        """Bytes on disk."""
        return sum(p.stat().st_size for p in self.files)

    def digest(self) -> str:
        """Changes when a file is added, removed or written to (by size and time of change: contents are not read)."""
        rows = [(str(p), p.stat().st_size, p.stat().st_mtime_ns) for p in self.files]
        return hashlib.sha256(repr((rows, self.tag)).encode()).hexdigest()


@dataclass(frozen=True)
class TokenCorpus:
    """Files of token ids: each `.bin` has a `.bin.json` (see `tokens`)."""

    files: tuple[Path, ...]


@dataclass(frozen=True)
class StreamedCorpus:
    """A Hugging Face dataset; `config` may be empty. `revision`: a commit, a branch or a tag; "": the newest."""

    name: str
    config: str
    revision: str = ""


def find_corpus(source: str | tuple[str, ...]) -> TextCorpus | TokenCorpus | StreamedCorpus:
    """What `source` names; several files or folders are read one after the other.

    Raises BadInput when it names nothing, or things that cannot be joined.
    """
    names = (source,) if isinstance(source, str) else source
    streamed = [n for n in names if n.startswith("hf:")]
    if streamed and len(names) == 1:
        return _streamed(names[0])
    if streamed or not names:
        raise BadInput("SOURCE", "a dataset is streamed alone" if streamed else "no data is named",
                       found=" ".join(names) or "nothing", allowed=_ALLOWED, fix="name one source")  # fmt: skip
    files = tuple(path for name in names for path in (_builtin() if name == "builtin" else _local(name)))
    if not any(p.suffix == ".bin" for p in files):
        return TextCorpus("builtin" if names == ("builtin",) else Path(names[0]).stem, files, platform.python_version())
    if not all(p.suffix == ".bin" for p in files):
        raise BadInput("SOURCE", "data are text or tokens, not both", where=" ".join(names),
                       found=" ".join(sorted({p.suffix for p in files})),
                       fix="name the .bin files alone, or keep them in a folder of their own")  # fmt: skip
    return TokenCorpus(files)


def _streamed(source: str) -> StreamedCorpus:
    name, _, config = source.removeprefix("hf:").partition(":")
    if not name:
        raise BadInput("SOURCE", "hf: needs the name of a dataset", found=source, allowed="hf:NAME or hf:NAME:CONFIG",
                       fix="hf:roneneldan/TinyStories")  # fmt: skip
    return StreamedCorpus(name, config)


def _local(source: str) -> list[Path]:
    """The file, or the data files of the folder in the order of their digests."""
    path = Path(source).expanduser().absolute()
    if not path.exists():
        raise BadInput("SOURCE", "no such data", found=source, allowed=_ALLOWED, fix="builtin needs no file")
    if path.is_dir():
        files = _in_fair_order(path, list(_below(path)))
        if files:
            return files
    elif path.suffix in _SUFFIXES and path.is_file():
        return [path]
    what = "no data files in this folder" if path.is_dir() else "not a kind of data file"
    if not path.is_dir() and not path.is_file():
        what = "a pipe, a socket or a device"
    raise BadInput("SOURCE", what, found=source, allowed=_ALLOWED, fix="rename files of plain text to .txt")


def _below(root: Path) -> Iterator[Path]:
    """The data files of a folder and of those in it."""
    seen = 0
    for folder, folders, names in os.walk(root):
        seen += len(folders) + len(names)
        if seen > MAX_ENTRIES:
            raise BadInput("SOURCE", "a folder with too many files", where=str(root), found=f"more than {MAX_ENTRIES}",
                           allowed=f"{MAX_ENTRIES} files and folders",
                           fix="join documents in .jsonl files, or name a folder in it")  # fmt: skip
        paths = (Path(folder, name) for name in names)
        yield from (path for path in paths if path.suffix in _SUFFIXES and path.is_file())


def _in_fair_order(root: Path, files: list[Path]) -> list[Path]:
    return sorted(files, key=lambda p: hashlib.sha256(p.relative_to(root).as_posix().encode()).digest())


@cache
def _builtin() -> tuple[Path, ...]:
    """The sources of the standard library, up to BUILTIN_LIMIT bytes: the same for the same Python version. A rank asks
    three times as it starts, and has to look at thousands of files."""
    root, found = Path(sysconfig.get_path("stdlib")), list[Path]()
    for folder, folders, names in os.walk(root):
        folders[:] = [f for f in folders if f not in _BUILTIN_SKIP]
        found += [Path(folder, n) for n in names if n.endswith(".py") and not n.startswith(_BUILTIN_LOCAL)]
    chosen, left = list[Path](), BUILTIN_LIMIT
    for path in _in_fair_order(root, found):
        size = path.stat().st_size
        if size <= left:
            chosen.append(path)
            left -= size
    if not chosen:
        raise BadInput("SOURCE", "this Python has no sources of its library", where=str(root), found="builtin",
                       allowed=_ALLOWED, fix="name a text file instead")  # fmt: skip
    return tuple(chosen)


def _read_text(path: Path) -> Iterator[TextPart]:
    """One document; if it is longer than MAX_PART characters, in parts, cut after a newline if possible."""
    decoder, rest, at = codecs.getincrementaldecoder("utf-8")(), "", 0
    with path.open("rb") as file:
        while chunk := file.read(MAX_PART):
            pending = len(decoder.getstate()[0])
            try:
                text = rest + decoder.decode(chunk)
            except UnicodeDecodeError as e:
                raise _not_utf8(path, f"byte {at - pending + e.start}", e) from e
            at += len(chunk)
            cut = 0
            if len(text) > MAX_PART:
                # Never at the very end: the last part must not be empty.
                cut = text.rfind("\n", 0, len(text) - 1) + 1 or len(text) - 1
                yield TextPart(text[:cut], ends_document=False)
            rest = text[cut:]
    try:
        rest += decoder.decode(b"", final=True)
    except UnicodeDecodeError as e:
        raise _not_utf8(path, f"byte {at - len(e.object)}", e) from e
    if rest:
        yield TextPart(rest, ends_document=True)


def _read_jsonl(path: Path) -> Iterator[TextPart]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            where = f"{path}:{number}"
            try:
                row: object = json.loads(line.decode())
            except UnicodeDecodeError as e:
                raise _not_utf8(path, f"line {number}", e) from e
            except (ValueError, RecursionError) as e:
                raise CorruptData("JSONL", "not a line of JSON", where=where, found=str(e)[:120],
                                  allowed='{"text": "…"}', fix="repair or delete this line") from e  # fmt: skip
            text = cast("dict[str, object]", row).get("text") if isinstance(row, dict) else None
            if not isinstance(text, str):
                found = ", ".join(cast("dict[str, object]", row)) if isinstance(row, dict) else type(row).__name__
                raise BadInput("JSONL", 'no field "text" that holds a string', where=where, found=found or "nothing",
                               allowed='{"text": "…"}', fix='name the field "text"')  # fmt: skip
            if not _is_unicode(text):
                raise CorruptData("TEXT", "half of a surrogate pair in the text", where=where, allowed="Unicode text",
                                  fix="repair or delete this line")  # fmt: skip
            if text:
                yield TextPart(text, ends_document=True)


def _is_unicode(text: str) -> bool:
    try:
        _ = text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _not_utf8(path: Path, where: str, e: UnicodeDecodeError) -> CorruptData:
    return CorruptData("TEXT", "not UTF-8", where=f"{path}, {where}", found=f"0x{e.object[e.start]:02x}",
                       allowed="UTF-8 text", fix=f"iconv -f latin1 -t utf-8 {path.name}, if it is Latin-1")  # fmt: skip
