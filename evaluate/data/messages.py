"""Short messages as people type them on a phone. They were written for this project, free to use.

The messages are templates with blanks that are filled at random. Nobody in them is real. The blanks
hold the private content: who, when, where, how much.
"""

from __future__ import annotations

import random

from .text import LabelledText

COUNT = 30
"""Messages per template. Every fifth of them is held out for testing."""

BLANKS: dict[str, tuple[str, ...]] = {
    "name": (
        *("Amira", "Ben", "Carla", "Dmitri", "Elena", "Farid", "Greta", "Hiro", "Ines", "Jonas"),
        *("Keisha", "Liam", "Mei", "Noor", "Oskar", "Priya", "Quentin", "Rosa", "Samir", "Tess"),
    ),
    "relative": (
        *("mother", "father", "sister", "brother", "aunt", "uncle", "daughter", "son", "wife"),
        *("husband", "niece", "grandmother"),
    ),
    "day": ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"),
    "time": ("seven", "eight", "half past nine", "ten", "noon", "one", "two", "three", "midnight"),
    "city": (
        *("Bergen", "Cairo", "Dakar", "Geneva", "Hanoi", "Lima", "Lyon", "Osaka", "Porto", "Quito"),
        *("Riga", "Seville", "Tunis", "Utrecht", "Vienna", "Zagreb"),
    ),
    "amount": (
        *("forty", "sixty", "ninety", "two hundred", "three hundred", "five hundred"),
        *("eight hundred", "two thousand", "six thousand", "nine thousand"),
    ),
    "illness": (
        *("asthma", "diabetes", "migraine", "anaemia", "arthritis", "eczema", "a hernia", "gout"),
        *("an ulcer", "insomnia"),
    ),
    "drug": ("insulin", "aspirin", "steroids", "penicillin", "iron tablets", "eye drops"),
    "body": ("knee", "shoulder", "back", "wrist", "hip", "left ear", "stomach", "right foot"),
    "code": (
        *("red fox", "blue whale", "old bridge", "quiet river", "paper crane", "green door"),
        *("silver spoon", "winter rose"),
    ),
    "thing": (
        *("the kettle", "the bike", "the spare key", "the laptop", "the piano", "the old car"),
        *("the ladder", "the camera", "the tent", "the sofa"),
    ),
    "food": ("lentil soup", "dumplings", "a lemon cake", "fried rice", "pancakes", "an apple pie"),
}
"""The words that can fill a blank."""

TEMPLATES: dict[str, tuple[str, ...]] = {
    "health": (
        "The doctor says that my {relative} has {illness}.",
        "{name} is back from the hospital in {city} since {day}.",
        "Please tell {name} to take the {drug} at {time}.",
        "My {body} still hurts, so I will see {name} on {day}.",
        "They found {illness} when my {relative} had the blood test.",
        "Can you pick up {drug} for my {relative} before {time}?",
        "{name} cannot come on {day} because of {illness}.",
        "The operation on my {body} is on {day} at {time}.",
        "I have not told my {relative} about {illness} yet.",
        "The clinic in {city} moved my {body} scan to {day}.",
    ),
    "money": (
        "I owe {name} {amount} and have to pay on {day}.",
        "The bank in {city} sent my {relative} a bill of {amount}.",
        "My new password is {code}, do not tell {name}.",
        "{name} lost {amount} on the train to {city}.",
        "Could you lend my {relative} {amount} until {day}?",
        "We sold {thing} to {name} for {amount}.",
        "They pay {name} {amount} a week, which is more than me.",
        "The loan of {amount} ends on {day}, says my {relative}.",
        "I hid {amount} behind {thing} for my {relative}.",
        "{name} still has not paid the rent of {amount}.",
    ),
    "travel": (
        "My train to {city} leaves at {time} on {day}.",
        "I am in {city} with {name}, please do not call.",
        "We fly from {city} to see my {relative} on {day}.",
        "{name} missed the bus to {city} at {time}.",
        "The hotel in {city} has our room until {day}.",
        "Meet me in {city} at {time}, and bring {thing}.",
        "My {relative} left {thing} at the station in {city}.",
        "{name} drives to {city} on {day} and has a free seat.",
        "Nobody knows that {name} moved to {city} on {day}.",
        "We are in {city} from {day}, and the house is empty.",
    ),
    "home": (
        "Dinner is at {time}, my {relative} makes {food}.",
        "{name} broke {thing} and has not said a word.",
        "The code of the door is {code}, come at {time}.",
        "Can you feed the cat on {day} while I am in {city}?",
        "I told my {relative} that {name} comes on {day}.",
        "There is {food} left for {name} in the kitchen.",
        "{name} and my {relative} had a fight about {thing}.",
        "Please leave {thing} with {name} before {time}.",
        "My {relative} turns sixty on {day}, bring {food}.",
        "We are giving {thing} to {name}, it is a secret.",
    ),
}
"""Messages with blanks, by topic."""


def messages() -> tuple[list[LabelledText], list[LabelledText]]:
    """Return messages with their topics, for training and for testing. They are always the same."""
    rng = random.Random(0)
    train: list[LabelledText] = []
    test: list[LabelledText] = []
    for topic, templates in TEMPLATES.items():
        for template in templates:
            filled: dict[str, None] = {}
            while len(filled) < COUNT:
                filled[_filled(template, rng)] = None
            for number, text in enumerate(filled):
                line = LabelledText(text, topic, "messages")
                (test if number % 5 == 4 else train).append(line)
    return train, test


def _filled(template: str, rng: random.Random) -> str:
    chosen = {blank: rng.choice(choices) for blank, choices in BLANKS.items()}
    return template.format(**chosen)
