"""A browser for the tests of pages."""

from playwright.sync_api import Page


def chart_marks(page: Page) -> int:
    """Return the least number of drawn marks over all charts."""
    return int(
        page.evaluate(
            "Math.min(...[...document.querySelectorAll('.chart')]"
            ".map(c => c.querySelectorAll('svg .role-mark path, svg .role-mark text').length))"
        )
    )
