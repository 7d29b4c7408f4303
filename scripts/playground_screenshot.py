"""A picture of the playground after a run, for the README.

    python scripts/playground_screenshot.py http://127.0.0.1:8000/ playground.png --warm
    python scripts/playground_screenshot.py http://127.0.0.1:8000/ phone.png --warm --width 390
    --height 1230

Needs the package `playwright` and a `chromium` on the path.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from pathlib import Path

from playwright.sync_api import Page, sync_playwright


def screenshot(url: str, args: argparse.Namespace) -> None:
    """Race with the first ready prompt and take the picture."""
    chromium = shutil.which("chromium")
    if chromium is None:
        sys.exit("no `chromium` on the path; on Debian: apt-get install chromium")
    sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []  # Chromium has no sandbox for root
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=sandbox)
        viewport = {"width": args.width, "height": args.height or 900}
        page = browser.new_page(
            viewport=viewport,
            color_scheme="dark" if args.dark else "light",
            device_scale_factor=1.5,
        )
        page.goto(url)
        if args.warm:
            race(page, 3)
            page.reload()
        race(page, 0)
        page.set_checked("#ghosts", args.ghosts)
        if args.details:
            page.click("#details summary")
            show_a_mixed_round(page)
        tops = "for (const lane of document.querySelectorAll('.paper')) lane.scrollTop = 0"
        page.evaluate(f"document.activeElement.blur(); {tops}; scrollTo(0, 0)")
        page.screenshot(path=args.out, full_page=args.height == 0)
        browser.close()


def race(page: Page, ready: int) -> None:
    """Run a ready prompt with speculation and without."""
    page.locator("#ready button").nth(ready).click()
    page.click("#run:enabled")
    page.locator("#run:enabled").wait_for(timeout=120_000)


def show_a_mixed_round(page: Page) -> None:
    """Step to the first round with an accepted and a rejected token, or stay at the end."""
    page.click("#round-first")
    for _ in range(int(page.get_attribute("#round-slider", "max") or 1)):
        if (
            page.locator("#round-nodes .accepted").count()
            and page.locator("#round-nodes .rejected").count()
        ):
            return
        page.click("#round-next")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("url")
    parser.add_argument("out", type=Path)
    parser.add_argument("--width", type=int, default=1280)
    parser.add_argument("--height", type=int, default=900, help="0 for the whole page")
    parser.add_argument("--dark", action="store_true")
    parser.add_argument("--ghosts", action="store_true", help="show rejected tokens")
    parser.add_argument(
        "--details",
        action="store_true",
        help="open the details at a round that kept and lost something",
    )
    parser.add_argument(
        "--warm",
        action="store_true",
        help="race once before with another prompt: costs are known then",
    )
    args = parser.parse_args()
    screenshot(args.url, args)


if __name__ == "__main__":
    main()
