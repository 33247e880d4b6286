"""A browser for the tests of pages."""

from typing import Any

from playwright.sync_api import Page

_CONTRASTS = """() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const channels = (colour) => {  // whatever way it is written
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data;
    return [r, g, b, a / 255];
  };
  const luminance = (rgb) => {
    const linear = rgb.slice(0, 3).map((c) => c / 255)
      .map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
  };
  const behind = (element) => {
    for (let one = element; one; one = one.parentElement) {
      const colour = channels(getComputedStyle(one).backgroundColor);
      if (colour[3] === 1) return colour;
    }
    return [255, 255, 255, 1];
  };
  const square = (text) => {  // the square of a heat map that a word is in
    const box = text.getBoundingClientRect();
    const x = box.x + box.width / 2, y = box.y + box.height / 2;
    const under = [...text.closest("svg").querySelectorAll(".mark-rect path")].filter((path) => {
      const b = path.getBoundingClientRect();
      return b.x < x && x < b.right && b.y < y && y < b.bottom;
    });
    return under.length ? channels(getComputedStyle(under.at(-1)).fill) : null;
  };
  const found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const text = walker.currentNode.textContent.trim(), element = walker.currentNode.parentElement;
    if (!text || !element.checkVisibility() || element.closest("script, style, .spoken")) continue;
    const style = getComputedStyle(element), drawn = element.closest("svg");
    if (drawn && style.fill === style.stroke) continue;  // the halo of a word
    const ink = channels(drawn ? style.fill : style.color);
    const ground = (drawn && square(element)) || behind(drawn || element);
    const [low, high] = [luminance(ink), luminance(ground)].sort((a, b) => a - b);
    const pixels = parseFloat(style.fontSize);
    const large = pixels >= 24 || (pixels >= 18.66 && style.fontWeight >= 700);
    const ratio = (high + 0.05) / (low + 0.05);
    found.push({ text: text.slice(0, 40), drawn: !!drawn, ratio, needed: large ? 3 : 4.5 });
  }
  return found;
}"""


def chart_marks(page: Page) -> int:
    """Return the least number of drawn marks over all charts."""
    return int(
        page.evaluate(
            "Math.min(...[...document.querySelectorAll('.chart')]"
            ".map(c => c.querySelectorAll('svg .role-mark path, svg .role-mark text').length))"
        )
    )


def wait_for_charts(page: Page) -> None:
    """Wait until all charts are drawn."""
    page.wait_for_function(
        "[...document.querySelectorAll('.chart')].every(c => c.querySelector('svg'))",
        timeout=60_000,
    )


def contrasts(page: Page) -> list[dict[str, Any]]:
    """Return the contrast of all visible text with what is behind it, and what WCAG AA needs.

    From computed styles, in charts too: https://www.w3.org/TR/WCAG22/#contrast-minimum
    """
    found: list[dict[str, Any]] = page.evaluate(_CONTRASTS)
    return found


def unnamed(page: Page) -> list[str]:
    """Return pictures, tables and parts of a page that have no name for the ear, or a wrong one."""
    found: list[str] = page.evaluate(
        """() => [
        ...document.querySelectorAll("img:not([alt]), img[alt=''], audio:not([aria-label])"),
        ...document.querySelectorAll("th:not([scope]), table:not(:has(> caption))"),
        ...document.querySelectorAll("nav:not([aria-label]), section:not([aria-labelledby])"),
        ...document.querySelectorAll(".scroll:not([aria-label]), .scroll:not([tabindex='0'])"),
        ...document.querySelectorAll(".chart:not([role='img'][aria-label][aria-describedby])"),
        ...["aria-labelledby", "aria-describedby"].flatMap((name) =>
          [...document.querySelectorAll(`[${name}]`)]
          .filter((e) => !document.getElementById(e.getAttribute(name)))),
        ].map((e) => e.outerHTML.slice(0, 120))"""
    )
    return found


def beyond(page: Page) -> list[str]:
    """Return what is wider than the window, and in no box of its own that scrolls."""
    found: list[str] = page.evaluate(
        """() => [...document.body.querySelectorAll("*")]
        .filter((e) => e.checkVisibility() && !e.closest(".scroll, pre, .spoken, .skip, .sounds"))
        .filter((e) => e.getBoundingClientRect().right > innerWidth + 0.5)
        .map((e) => e.outerHTML.slice(0, 120))"""
    )
    return found
