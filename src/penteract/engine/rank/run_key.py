"""The key of a run: who does not have it cannot write a row that its ranks believe. Imports no torch.

The launcher makes one for each run, and hands it over in the environment of its ranks, which take it out at once. It is
in no file, no argument and no message. Ranks that something else starts, such as torchrun, have one if whoever starts
them has exported one.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import MutableMapping
from dataclasses import dataclass, field

VARIABLE = "PENTERACT_RUN_KEY"
_MARK = b"hmac-sha256:"


class NotSigned(ValueError):
    """A row that no process with this key wrote under this name. The text says what it has instead."""


@dataclass(frozen=True, slots=True)
class RunKey:
    """`secret`: b"" where there is none; then rows are as they are. `at`: the store's address, for messages."""

    secret: bytes = field(default=b"", repr=False)
    at: str = ""

    def seal(self, name: str, row: bytes) -> bytes:
        """The row with a signature of its name and content."""
        return _MARK + self._digest(name, row) + b":" + row if self.secret else row

    def open(self, name: str, sealed: bytes) -> bytes:
        """The row of `seal`. Raises NotSigned, also if it was signed for another name."""
        marked = sealed.startswith(_MARK)
        if not self.secret:
            if marked:
                raise NotSigned("a signature, and this rank has no key")
            return sealed
        if not marked:
            raise NotSigned("no signature")
        signature, _, row = sealed[len(_MARK) :].partition(b":")
        if not hmac.compare_digest(signature, self._digest(name, row)):
            raise NotSigned("a signature by another key, or for another row")
        return row

    def _digest(self, name: str, row: bytes) -> bytes:
        text = name.encode()
        return hmac.digest(self.secret, len(text).to_bytes(8, "big") + text + row, "sha256").hex().encode()


def new_key() -> str:
    """A key as the environment holds it."""
    return secrets.token_hex(32)


def take_key(environment: MutableMapping[str, str]) -> RunKey:
    """The key that the environment holds, which then no longer holds it: no child of a rank needs it."""
    at = f"{environment.get('MASTER_ADDR', '')}:{environment.get('MASTER_PORT', '')}"
    return RunKey(environment.pop(VARIABLE, "").strip().encode(), at)
