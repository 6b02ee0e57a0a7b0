"""Addresses of databases and servers, as they may be shown."""

from __future__ import annotations

import re


def masked(text: str) -> str:
    """`text` with `***` for user and password in every address: `http://user:password@host` -> `http://***@host`."""
    return re.sub(r"//[^/\s]*@", "//***@", text)
