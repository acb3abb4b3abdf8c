"""``python -m halfulp.compress.lowering``: make legality.toml anew, with the compiler that is installed."""

from __future__ import annotations

from pathlib import Path

from ._legality import generate

if __name__ == "__main__":
    text = generate()
    Path(__file__).with_name("legality.toml").write_text(text, encoding="utf-8")
