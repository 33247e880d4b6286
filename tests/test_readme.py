"""The README is short, and works wherever it is shown."""

from documents import GITHUB, RAW, README, Page

MOST_BYTES = 8192
PAGE = Page(README)


def test_it_is_short() -> None:
    assert len(README.read_bytes()) <= MOST_BYTES


def test_it_works_on_a_package_index() -> None:
    assert len(PAGE.links) >= 10
    for link in PAGE.links:
        assert link.startswith((GITHUB, RAW, "https://")), link


def test_the_two_commands_are_there() -> None:
    for command in (
        "python3 -m venv .venv && .venv/bin/pip install . "
        "&& .venv/bin/leakfrontier run --preset quick",
        'python3 -m venv .venv && .venv/bin/pip install -e ".[test]" && .venv/bin/pytest',
    ):
        assert f"\n{command}\n" in PAGE.text


def test_every_method_is_named() -> None:
    from leakfrontier.adversaries import ADVERSARIES
    from leakfrontier.defenses import DEFENSES

    missing = [name for name in (*ADVERSARIES, *DEFENSES) if f"`{name}`" not in PAGE.text]
    assert missing in ([], ["none"])
