"""From a named source of text to samples: tokenise, pack, order, split.

    source -> corpus (documents) -> tokenizer -> tokens (one long stream) -> pack (windows) -> order (of the windows)

Everything here is numpy; nothing imports torch.
"""

from penteract.engine.data.open import DataChoice, open_samples
from penteract.engine.data.pack import Sample, Samples
from penteract.engine.data.revision import pin
from penteract.engine.data.stream.shared_blocks import SharedFolder
from penteract.engine.data.tokenizer import TextTokenizer, open_tokenizer
from penteract.engine.data.tokens import write_tokens
from penteract.engine.data.validate import check_data, check_vocabulary

__all__ = [
    "DataChoice",
    "Sample",
    "Samples",
    "SharedFolder",
    "TextTokenizer",
    "check_data",
    "check_vocabulary",
    "open_samples",
    "open_tokenizer",
    "pin",
    "write_tokens",
]
