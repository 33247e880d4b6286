from string import Formatter

import pytest

from leakfrontier.evaluate.data.messages import BLANKS, COUNT, TEMPLATES, messages


def blanks(template: str) -> set[str]:
    return {name for _, name, _, _ in Formatter().parse(template) if name}


ALL = [template for templates in TEMPLATES.values() for template in templates]


def test_every_template_has_its_messages_and_a_fifth_is_held_out() -> None:
    train, test = messages()
    assert len(test) == len(ALL) * COUNT // 5
    assert len(train) == 4 * len(test)
    texts = [line.text for line in (*train, *test)]
    assert len({*texts}) == len(texts)  # nothing that is tested was trained on
    for topic, templates in TEMPLATES.items():
        assert sum(line.label == topic for line in test) == len(templates) * COUNT // 5


def test_they_are_always_the_same() -> None:
    assert messages() == messages()


@pytest.mark.parametrize("template", ALL)
def test_every_blank_is_filled_with_what_can_stand_there(template: str) -> None:
    used = blanks(template)
    assert used <= {*BLANKS}
    ways = 1
    for name in used:
        ways *= len(BLANKS[name])
    assert ways >= COUNT  # or it would never end


def test_nothing_is_left_blank_and_nothing_is_unused() -> None:
    assert not any("{" in line.text or "}" in line.text for part in messages() for line in part)
    assert set().union(*map(blanks, ALL)) == {*BLANKS}
