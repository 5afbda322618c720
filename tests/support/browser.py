"""A page in a browser without a window."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
_FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)


def dom_after(page: Path, script: str, scratch: Path, *flags: str) -> str:
    """The document of a page as HTML, once a script has run at its end.

    Args:
        page: the file.
        script: JavaScript.
        scratch: an empty directory.
        flags: of Chromium.
    """
    assert CHROMIUM is not None
    scripted = scratch / "scripted.html"
    scripted.write_text(page.read_text().replace("</body>", f"<script>{script}</script></body>"))
    command = [CHROMIUM, *_FLAGS, f"--user-data-dir={scratch / 'profile'}", *flags, "--dump-dom", scripted.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
