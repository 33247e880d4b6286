"""Signed statements: who ran which claims of a pack again, with which versions and outcome.

A statement is a small JSON file beside a pack. An ed25519 key signs it, and it names the checksum
of the pack. So nobody can alter it or move it to another pack. A key shows only that two statements
are by the same person. Anybody can make keys, and statements of strangers prove little.

References:
    Josefsson, Liusvaara, "Edwards-Curve Digital Signature Algorithm (EdDSA)", RFC 8032,
    https://www.rfc-editor.org/rfc/rfc8032
"""

from __future__ import annotations

import glob
import json
import os
import re
import stat
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, get_args

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)

from ..foundations.errors import UserError
from ..foundations.foreign import parse_json
from ..foundations.terminal import printable
from .judgement import Decision, Judgement, worst

FORMAT = 1
MOST_BYTES, MOST_CLAIMS, MOST_TEXT, MOST_FILES = 2**18, 500, 300, 1000
"""The limits of a statement, and of the number of statements beside a pack."""

LEAST_SEEDS = 3
"""The seeds of a claim that must have run again for a confirmation, if it has as many."""

_PURPOSE = b"leakfrontier verification statement\n"
_DATE = "%Y-%m-%dT%H:%M:%SZ"
_MOST_KEY = 2**14


class StatementError(UserError):
    """A file is not a valid statement on a pack. The message says why."""


@dataclass(frozen=True)
class Stated:
    """What a statement says about one claim.

    Attributes:
        scenario: The name of the scenario.
        checkpoint: The attacked round.
        defense: The defense.
        decision: The outcome.
        trainings: How many of its trainings ran again, and how many it has.
        attacks: The same for its attacks.
        equal: How many of these cells were equal in every bit.
        reason: The first reason against a confirmation.
    """

    scenario: str
    checkpoint: int
    defense: str
    decision: Decision
    trainings: tuple[int, int]
    attacks: tuple[int, int]
    equal: int
    reason: str

    @property
    def is_enough(self) -> bool:
        """Return whether as much ran again as `leakfrontier verify` runs by default."""
        return self.trainings[0] >= min(LEAST_SEEDS, self.trainings[1]) and self.attacks[0] > 0


@dataclass(frozen=True)
class Statement:
    """A valid statement on a pack.

    Attributes:
        key: The public key of its author, in hexadecimal.
        date: When it was signed, according to its author.
        versions: The versions with which the claims ran again.
        claims: The outcomes.
        problems: The problems of the pack as a whole. They refute every claim.
    """

    key: str
    date: str
    versions: Mapping[str, str]
    claims: tuple[Stated, ...]
    problems: tuple[str, ...]

    @property
    def author(self) -> str:
        """Return a short name of the key."""
        return self.key[:16]

    def on(self, scenario: str, checkpoint: int, defense: str) -> Decision | None:
        """Return the outcome of a claim; None if the statement does not mention it.

        A claim is undecided if fewer seeds than `LEAST_SEEDS` ran again, though it has more.
        """
        if self.problems:
            return "refuted"
        place = (scenario, checkpoint, defense)
        found: set[Decision] = {
            "undecided" if one.decision == "confirmed" and not one.is_enough else one.decision
            for one in self.claims
            if (one.scenario, one.checkpoint, one.defense) == place
        }
        return worst(found) if found else None


def signing_key(path: Path) -> tuple[Ed25519PrivateKey, bool]:
    """Return the private key in a file, and whether it is new. A missing file is written.

    Raises:
        UserError: If the file is not such a key, or others can read it.
    """
    try:
        with path.open("rb") as file:
            body, mode = file.read(_MOST_KEY), os.fstat(file.fileno()).st_mode
    except FileNotFoundError:
        return _new_key(path), True
    except OSError as error:
        raise UserError(f"cannot read the key {path}: {error.strerror}") from error
    if os.name == "posix" and stat.S_IMODE(mode) & 0o077:
        raise UserError(f"others can read the private key {path}: run `chmod 600 {path}`")
    try:
        key = load_pem_private_key(body, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise UserError(_not_a_key(path)) from error
    if not isinstance(key, Ed25519PrivateKey):
        raise UserError(_not_a_key(path))
    return key, False


def _not_a_key(path: Path) -> str:
    return (
        f"{path} is not an ed25519 private key (PEM, without a password): name a file that does "
        "not exist, and a new key is written to it"
    )


def _new_key(path: Path) -> Ed25519PrivateKey:
    key = Ed25519PrivateKey.generate()
    body = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        raise UserError(f"cannot write the key {path}: {error.strerror}") from error
    with os.fdopen(file, "wb") as opened:
        opened.write(body)
    return key


def public_key(key: Ed25519PrivateKey) -> str:
    """Return the public key in hexadecimal."""
    return key.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw).hex()


def signed(
    judgements: Sequence[Judgement],
    problems: Sequence[str],
    *,
    pack: str,
    environment: Mapping[str, Any],
    key: Ed25519PrivateKey,
    date: datetime,
) -> bytes:
    """Return a signed statement.

    Args:
        judgements: The outcomes of the claims.
        problems: The problems of the pack as a whole.
        pack: The checksum of the pack's bytes.
        environment: The versions, code and machine of the reruns.
        key: The key of the author.
        date: The time of the statement.
    """
    if len(judgements) > MOST_CLAIMS:
        raise UserError(f"a statement has at most {MOST_CLAIMS} claims: choose with --defense")
    content = {
        "format": FORMAT,
        "pack": pack,
        "key": public_key(key),
        "date": date.astimezone(UTC).strftime(_DATE),
        "versions": {_text(k): _text(v) for k, v in environment["versions"].items()},
        "machine": {_text(k): _text(v) for k, v in environment["machine"].items()},
        "code": _text(environment["code"]),
        "claims": [_claim(one) for one in judgements],
        "problems": [_text(one) for one in problems[:MOST_CLAIMS]],
    }
    return _written({**content, "signature": key.sign(_message(content)).hex()})


def _claim(judgement: Judgement) -> dict[str, Any]:
    claim = judgement.claim
    return {
        "scenario": _text(claim.scenario),
        "checkpoint": claim.checkpoint,
        "defense": _text(claim.defense),
        "decision": judgement.decision,
        "trainings": [claim.trainings_chosen, len(claim.trainings)],
        "attacks": [claim.attacks_chosen, len(claim.attacks)],
        "equal": judgement.equal,
        "reason": _text(next(iter(judgement.reasons), "")),
    }


def path_beside(pack: Path, key: str) -> Path:
    """Return the path of the statement on a pack by a key."""
    return pack.with_name(f"{pack.name}.statement-{key[:16]}.json")


def statements_beside(
    path: Path, pack: str, keys: Iterable[str] = ()
) -> tuple[list[Statement], list[str]]:
    """Return the valid statements beside a pack, and why other files do not count.

    Args:
        path: The path of the pack.
        pack: The checksum of its bytes.
        keys: The public keys that count; empty if all do.
    """
    trusted = {*keys}
    found, refused = [], []
    for file in sorted(path.parent.glob(f"{glob.escape(path.name)}.statement-*.json"))[:MOST_FILES]:
        try:
            statement = read_statement(file, pack)
        except StatementError as error:
            refused.append(str(error))
            continue
        if trusted and statement.key not in trusted:
            refused.append(f"{file} does not count: its key {statement.author} is not among --key")
        else:
            found.append(statement)
    return found, refused


def read_statement(path: Path, pack: str) -> Statement:
    """Return a valid statement on a pack.

    Args:
        path: The file.
        pack: The checksum of the pack's bytes.

    Raises:
        StatementError: If it is not one.
    """
    try:
        return _parsed(_body(path), pack)
    except (ValueError, OSError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise StatementError(f"{path} does not count as a statement: {reason}") from error


def _body(path: Path) -> bytes:
    if not path.is_file():
        raise ValueError("it is not a file")
    with path.open("rb") as file:
        body = file.read(MOST_BYTES + 1)
    if len(body) > MOST_BYTES:
        raise ValueError(f"it is larger than {MOST_BYTES:,} bytes")
    return body


def _parsed(body: bytes, pack: str) -> Statement:
    content = parse_json(body)
    _check(content, _CONTENT, "a statement")
    if content["format"] != FORMAT:
        raise ValueError(f"its format is {content['format']}, but this version reads {FORMAT}")
    if _written(content) != body:
        raise ValueError("it is not written as leakfrontier writes statements")
    for claim in content["claims"]:
        _check(claim, _CLAIM, "a claim")
    datetime.strptime(content["date"], _DATE).replace(tzinfo=UTC)
    key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(content["key"]))
    unsigned = {name: value for name, value in content.items() if name != "signature"}
    try:
        key.verify(bytes.fromhex(content["signature"]), _message(unsigned))
    except InvalidSignature:
        raise ValueError("its signature is wrong, so it was altered or forged") from None
    if content["pack"] != pack:
        raise ValueError("it is on another pack, or on other bytes of this pack")
    pairs = ("trainings", "attacks")
    claims = [claim | {name: tuple(claim[name]) for name in pairs} for claim in content["claims"]]
    return Statement(
        content["key"],
        content["date"],
        content["versions"],
        tuple(Stated(**claim) for claim in claims),
        tuple(content["problems"]),
    )


def _written(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, indent=1, sort_keys=True, allow_nan=False) + "\n").encode()


def _message(content: Mapping[str, Any]) -> bytes:
    """Return the signed bytes: canonical JSON, after the purpose of the signature."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return _PURPOSE + text.encode()


def _text(value: object) -> str:
    """Return a text as it may be in a statement: printable and short."""
    return printable(" ".join(str(value).split()))[:MOST_TEXT]


_Test = Callable[[Any], bool]


def _check(value: object, tests: Mapping[str, _Test], what: str) -> None:
    """Raise a ValueError if an object does not have exactly the right keys and values."""
    if not isinstance(value, dict) or {*value} != {*tests}:
        raise ValueError(f"{what} must be an object with {', '.join(tests)}")
    for name, test in tests.items():
        if not test(value[name]):
            raise ValueError(f"{name!r} of {what} has a value that leakfrontier does not write")


def _is_text(value: object) -> bool:
    return isinstance(value, str) and len(value) <= MOST_TEXT and value.isprintable()


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**31


def _is_pair(value: object) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(map(_is_count, value))


def _are_texts(value: object) -> bool:
    return isinstance(value, list) and len(value) <= MOST_CLAIMS and all(map(_is_text, value))


def _are_named(value: object) -> bool:
    if not isinstance(value, dict) or len(value) > MOST_CLAIMS:
        return False
    return all(map(_is_text, (*value, *value.values())))


def is_hexadecimal(value: object, size: int) -> bool:
    """Return whether a value is a text of some bytes in hexadecimal."""
    return isinstance(value, str) and bool(re.fullmatch(f"[0-9a-f]{{{2 * size}}}", value))


_CONTENT: dict[str, _Test] = {
    "format": _is_count,
    "pack": lambda value: is_hexadecimal(value, 32),
    "key": lambda value: is_hexadecimal(value, 32),
    "date": _is_text,
    "versions": _are_named,
    "machine": _are_named,
    "code": _is_text,
    "claims": lambda value: isinstance(value, list) and len(value) <= MOST_CLAIMS,
    "problems": _are_texts,
    "signature": lambda value: is_hexadecimal(value, 64),
}
_CLAIM: dict[str, _Test] = {
    "scenario": _is_text,
    "checkpoint": _is_count,
    "defense": _is_text,
    "decision": lambda value: value in get_args(Decision),
    "trainings": _is_pair,
    "attacks": _is_pair,
    "equal": _is_count,
    "reason": _is_text,
}
