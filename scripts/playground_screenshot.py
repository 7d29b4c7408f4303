"""A picture of the playground after a run, for the README.

    python scripts/playground_screenshot.py http://127.0.0.1:8000/ OUT.png [--dark] [--ghosts] [--width 375 --height 0]

Needs the package `playwright` and a `chromium` on the path.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from pathlib import Path

from playwright.sync_api import Page, sync_playwright


def screenshot(
    url: str, out: Path, size: tuple[int, int] = (1280, 900), dark: bool = False, ghosts: bool = False
) -> None:
    """Run what the page proposes, open the first round that both kept and lost something, and take the picture."""
    chromium = shutil.which("chromium")
    if chromium is None:
        sys.exit("no `chromium` on the path; on Debian: apt-get install chromium")
    sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []  # Chromium has no sandbox for root
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=sandbox)
        viewport = {"width": size[0], "height": size[1] or 900}
        scheme = "dark" if dark else "light"
        page = browser.new_page(viewport=viewport, color_scheme=scheme, device_scale_factor=2)
        page.goto(url)
        page.click("#run:enabled")
        page.locator("#run:enabled").wait_for(timeout=120_000)
        page.set_checked("#ghosts", ghosts)
        show_a_mixed_round(page)
        page.evaluate("document.activeElement.blur(); document.getElementById('output').scrollTop = 0; scrollTo(0, 0)")
        page.screenshot(path=out, full_page=size[1] == 0)
        browser.close()


def show_a_mixed_round(page: Page) -> None:
    """Step to the first round with an accepted and a rejected token, or stay at the end."""
    page.click("#round-first")
    for _ in range(int(page.get_attribute("#round-slider", "max") or 1)):
        if page.locator("#round-nodes .accepted").count() and page.locator("#round-nodes .rejected").count():
            return
        page.click("#round-next")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("out", type=Path)
    parser.add_argument("--width", type=int, default=1280)
    parser.add_argument("--height", type=int, default=900, help="0 for the whole page")
    parser.add_argument("--dark", action="store_true")
    parser.add_argument("--ghosts", action="store_true", help="show rejected tokens")
    args = parser.parse_args()
    screenshot(args.url, args.out, (args.width, args.height), args.dark, args.ghosts)


if __name__ == "__main__":
    main()
