"""Text to token ids and back: plain bytes, or any `tokenizer.json`."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from penteract.errors import BadInput, CorruptData

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

Ids = npt.NDArray[np.unsignedinteger]

# The special tokens with which published base models end a document; the first one that a tokenizer has is used.
END_OF_DOCUMENT = (
    "<|endoftext|>",  # GPT-2, GPT-NeoX, Qwen, SmolLM
    "<|end_of_text|>",  # Llama 3
    "</s>",  # Llama 1 and 2, Mistral, T5
    "<eos>",  # Gemma
    "<\uff5cend\u2581of\u2581sentence\uff5c>",  # DeepSeek: full-width bars and low blocks
    "<|eot_id|>",  # Llama 3 instruct
    "<|im_end|>",  # ChatML
    "[SEP]",  # BERT
)


class TextTokenizer(Protocol):
    """Text <-> ids in [0, vocab_size)."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def end_of_document(self) -> int:
        """The id that ends every document; `encode` never produces it."""
        ...

    @property
    def digest(self) -> str:
        """Differs between tokenizers that could give different ids for a text; part of a cached corpus's name."""
        ...

    def encode(self, text: str) -> Ids:
        """Ids [tokens], uint16 when the vocabulary fits and uint32 otherwise; no special tokens are added."""
        ...

    def encode_many(self, texts: Sequence[str]) -> list[Ids]: ...
    def decode(self, ids: Sequence[int] | npt.NDArray[np.integer]) -> str:
        """The text, without special tokens."""
        ...


def id_type(vocab_size: int) -> np.dtype[np.unsignedinteger]:
    """The narrowest of uint16 and uint32 that holds every id (little-endian, as on disk)."""
    return np.dtype("<u2" if vocab_size <= 2**16 else "<u4")


class ByteTokenizer:
    """UTF-8 bytes are ids 0..255, and 256 ends a document. It needs no download, and every text has a round trip."""

    vocab_size = 257
    end_of_document = 256
    digest = "bytes"

    def encode(self, text: str) -> Ids:
        return np.frombuffer(_utf8(text), np.uint8).astype(id_type(self.vocab_size))

    def encode_many(self, texts: Sequence[str]) -> list[Ids]:
        return [self.encode(t) for t in texts]

    def decode(self, ids: Sequence[int] | npt.NDArray[np.integer]) -> str:
        array = _ids_in(np.asarray(ids, np.int64), self.vocab_size)
        return array[array < 256].astype(np.uint8).tobytes().decode("utf-8", errors="replace")


class FileTokenizer:
    """A `tokenizer.json` as the `tokenizers` library reads it."""

    def __init__(self, path: Path) -> None:
        self._backend, self.digest = _load(path)
        vocabulary = self._backend.get_vocab(with_added_tokens=True)
        special = {t.content: i for i, t in self._backend.get_added_tokens_decoder().items() if t.special}
        self.vocab_size = max(vocabulary.values(), default=-1) + 1  # ids may have gaps, so their number is not a bound
        found = [name for name in END_OF_DOCUMENT if name in special]
        if not found:
            raise BadInput(
                "END_OF_DOCUMENT", "the tokenizer has no special token that ends a document", where=str(path),
                found=" ".join(special) or "no special token", allowed=" ".join(END_OF_DOCUMENT),
                fix='add one of these to "added_tokens" in tokenizer.json, with "special": true',
            )  # fmt: skip
        self.end_of_document = special[found[0]]
        self._type = id_type(self.vocab_size)

    def encode(self, text: str) -> Ids:
        return self.encode_many([text])[0]

    def encode_many(self, texts: Sequence[str]) -> list[Ids]:
        for text in texts:
            _utf8(text)
        encoded = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.asarray(e.ids, self._type) for e in encoded]

    def decode(self, ids: Sequence[int] | npt.NDArray[np.integer]) -> str:
        array = _ids_in(np.asarray(ids, np.int64), self.vocab_size)
        return self._backend.decode(array.tolist(), skip_special_tokens=True)


def open_tokenizer(name: str) -> TextTokenizer:
    """`bytes`, or the path of a `tokenizer.json` or of the folder that holds one.

    Raises BadInput when there is no such file or no end of document in it, CorruptData when it cannot be parsed.
    """
    if name == "bytes":
        return ByteTokenizer()
    path = Path(name).expanduser()
    path = path / "tokenizer.json" if path.is_dir() else path
    if not path.is_file():
        raise BadInput("TOKENIZER", "no such tokenizer", found=name, allowed="bytes, or the path of a tokenizer.json",
                       fix="--tokenizer bytes needs no file")  # fmt: skip
    return FileTokenizer(path)


def _load(path: Path) -> tuple[Backend, str]:
    try:
        from tokenizers import Tokenizer as Backend
    except ImportError as e:
        raise BadInput("NO_TOKENIZERS", "reading a tokenizer.json needs the library `tokenizers`", where=str(path),
                       fix='pip install "penteract[hf]", or use the tokenizer bytes') from e  # fmt: skip
    raw = path.read_bytes()
    try:
        backend = Backend.from_str(raw.decode())
    except Exception as e:  # the library raises bare Exception
        raise CorruptData("TOKENIZER", "not a tokenizer.json", where=str(path), found=e,
                          fix="download the file again") from e  # fmt: skip
    # Files have the settings of their last user: truncation would silently drop text, and padding would add some.
    # A document that quotes "<|endoftext|>" must not end there.
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = True
    return backend, hashlib.sha256(raw).hexdigest()


def _utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as e:
        raise CorruptData("TEXT", "the text holds half of a surrogate pair", found=repr(text[e.start : e.end]),
                          allowed="Unicode text", fix="repair or drop this document") from e  # fmt: skip


def _ids_in(ids: npt.NDArray[np.int64], vocab_size: int) -> npt.NDArray[np.int64]:
    if ids.size and (ids.min() < 0 or ids.max() >= vocab_size):
        raise BadInput("TOKEN_ID", "token ids outside the vocabulary", found=f"{ids.min()}..{ids.max()}",
                       allowed=f"0..{vocab_size - 1}", fix="use the tokenizer that made these ids")  # fmt: skip
    return ids
