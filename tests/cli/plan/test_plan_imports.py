"""How little `penteract plan` loads."""

from __future__ import annotations

import subprocess
import sys


def test_only_prices_are_loaded() -> None:
    """No torch, nothing that computes, and few modules: it starts in a blink."""
    code = (
        "import sys; from penteract.cli import main;"
        "code = main(['plan', 'tiny', '--gpus', '1xH200', '--layout', 'mbs=1', '--seq', '256', '--batch', '8seqs']);"
        "heavy = {'torch', 'numpy', 'safetensors', 'tokenizers'} & set(sys.modules);"
        "own = [m for m in sys.modules if m.startswith('penteract.engine')];"
        "sys.exit(str((code, heavy, own, len(sys.modules))) if code or heavy or len(sys.modules) > 700 else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
