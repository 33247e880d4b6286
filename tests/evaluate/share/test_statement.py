"""Only genuine statements on exactly these bytes count, and nothing in them is obeyed."""

import json
import os
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
)

from leakfrontier.evaluate.foundations.errors import UserError
from leakfrontier.evaluate.share import statement
from leakfrontier.evaluate.share.claims import PackClaim
from leakfrontier.evaluate.share.judgement import Decision, Judgement
from leakfrontier.evaluate.share.statement import (
    Statement,
    StatementError,
    path_beside,
    public_key,
    read_statement,
    signed,
    signing_key,
    statements_beside,
)

PACK, OTHER = "ab" * 32, "cd" * 32
KEY = Ed25519PrivateKey.generate()
HERE = {"versions": {"torch": "2.7"}, "machine": {"cores": 2}, "code": "1234"}
PLACE = ("mlp", 0, "Mine")
DATE = datetime(2026, 3, 4, 5, 6, 7, tzinfo=UTC)


def judged(decision: Decision = "confirmed", defense: str = "Mine", seeds: int = 3) -> Judgement:
    claim = PackClaim("mlp", 0, defense, False, (0, 1, 2), (3, 4), (*range(seeds), 3))
    return Judgement(claim, decision, 4, () if decision == "confirmed" else ("it differs",))


def body(*judgements: Judgement, pack: str = PACK, problems: tuple[str, ...] = ()) -> bytes:
    given = judgements or (judged(),)
    return signed(given, problems, pack=pack, environment=HERE, key=KEY, date=DATE)


def read(content: bytes, folder: Path, pack: str = PACK) -> Statement:
    path = folder / "pack.zip.statement-1.json"
    path.write_bytes(content)
    return read_statement(path, pack)


def test_a_statement_says_who_ran_what_again(tmp_path: Path) -> None:
    found = read(body(judged(), judged("refuted", "Other")), tmp_path)
    assert found.key == public_key(KEY)
    assert (found.date, found.versions) == ("2026-03-04T05:06:07Z", {"torch": "2.7"})
    assert found.on(*PLACE) == "confirmed"
    assert found.on("mlp", 0, "Other") == "refuted"
    assert found.on("mlp", 1, "Mine") is None
    assert (found.claims[0].trainings, found.claims[0].attacks) == ((3, 3), (1, 2))
    assert found.claims[1].reason == "it differs"
    assert body() == body()  # the same statement has the same bytes


def test_less_than_by_default_confirms_nothing_but_can_refute(tmp_path: Path) -> None:
    assert read(body(judged(seeds=1)), tmp_path).on(*PLACE) == "undecided"
    assert read(body(judged("refuted", seeds=1)), tmp_path).on(*PLACE) == "refuted"


def test_problems_refute_every_claim(tmp_path: Path) -> None:
    found = read(body(problems=("tables/rates.csv does not follow",)), tmp_path)
    assert found.on(*PLACE) == found.on("any", 7, "defense") == "refuted"


def test_a_statement_on_other_bytes_does_not_count(tmp_path: Path) -> None:
    with pytest.raises(StatementError, match="on another pack, or on other bytes"):
        read(body(), tmp_path, OTHER)
    moved = json.loads(body()) | {"pack": OTHER}
    with pytest.raises(StatementError, match="signature is wrong"):
        read(statement._written(moved), tmp_path, OTHER)


def _edited(change: Callable[[dict[str, Any]], object]) -> bytes:
    content = json.loads(body(judged("refuted")))
    change(content)
    return statement._written(content)


FORGED: dict[str, Callable[[dict[str, Any]], object]] = {
    "outcome": lambda c: c["claims"][0].update(decision="confirmed"),
    "defense": lambda c: c["claims"][0].update(defense="Other"),
    "date": lambda c: c.update(date="2027-01-01T00:00:00Z"),
    "another key": lambda c: c.update(key=public_key(Ed25519PrivateKey.generate())),
    "signature": lambda c: c.update(signature="00" * 64),
    "fewer claims": lambda c: c["claims"].clear(),
}


@pytest.mark.parametrize("change", FORGED.values(), ids=FORGED)
def test_an_altered_statement_does_not_count(
    tmp_path: Path, change: Callable[[dict[str, Any]], object]
) -> None:
    assert read(_edited(lambda _: None), tmp_path).on(*PLACE) == "refuted"
    with pytest.raises(StatementError, match="its signature is wrong"):
        read(_edited(change), tmp_path)


def resigned(change: Callable[[dict[str, Any]], object]) -> bytes:
    """Return a statement with other content and a right signature."""
    content = json.loads(body())
    del content["signature"]
    change(content)
    signature = KEY.sign(statement._message(content)).hex()
    return statement._written({**content, "signature": signature})


WRONG: dict[str, Callable[[dict[str, Any]], object]] = {
    "another format": lambda c: c.update(format=2),
    "a missing key": lambda c: c.pop("date"),
    "an unknown key": lambda c: c.update(more=1),
    "a long text": lambda c: c["claims"][0].update(reason="x" * 301),
    "a control character": lambda c: c["claims"][0].update(defense="\x1b[2J"),
    "a hidden direction": lambda c: c["claims"][0].update(reason="a\u202eb"),
    "an unknown outcome": lambda c: c["claims"][0].update(decision="great"),
    "a negative number": lambda c: c["claims"][0].update(equal=-1),
    "a flag": lambda c: c["claims"][0].update(checkpoint=True),
    "a wrong date": lambda c: c.update(date="yesterday"),
    "a claim that is none": lambda c: c.update(claims=[[]]),
    "claims that are none": lambda c: c.update(claims={}),
    "many claims": lambda c: c.update(claims=c["claims"] * 501),
    "versions of versions": lambda c: c.update(versions={"torch": {"torch": "2"}}),
    "problems": lambda c: c.update(problems="none"),
}


@pytest.mark.parametrize("change", WRONG.values(), ids=WRONG)
def test_what_we_do_not_write_does_not_count_even_if_signed(
    tmp_path: Path, change: Callable[[dict[str, Any]], object]
) -> None:
    assert read(resigned(lambda _: None), tmp_path).on(*PLACE) == "confirmed"
    with pytest.raises(StatementError, match="does not count as a statement"):
        read(resigned(change), tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff",
        b"[]",
        b"null",
        b"[" * 100_000,
        b"{}" + b" " * 2**18,
        body().replace(b'"format": 1', b'"format": 2, "format": 1'),
        body().replace(b'"format": 1', b'"format": 1e0'),
        body() + b" ",
    ],
)
def test_broken_files_do_not_count(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(StatementError, match="does not count as a statement"):
        read(content, tmp_path)


def test_statements_lie_beside_their_pack(tmp_path: Path) -> None:
    pack = tmp_path / "pack[1].zip"
    path = path_beside(pack, public_key(KEY))
    assert path.name == f"pack[1].zip.statement-{public_key(KEY)[:16]}.json"
    path.write_bytes(body())
    (tmp_path / "pack[1].zip.statement-x.json").write_bytes(b"{}")
    (tmp_path / "pack[1].zip.statement-y.json").mkdir()
    (tmp_path / "pack1.zip.statement-z.json").write_bytes(body())
    found, refused = statements_beside(pack, PACK)
    assert [one.author for one in found] == [public_key(KEY)[:16]]
    assert len(refused) == 2
    found, refused = statements_beside(pack, PACK, [OTHER])
    assert found == []
    assert any("is not among --key" in one for one in refused)
    assert len(statements_beside(pack, PACK, [public_key(KEY)])[0]) == 1


def test_what_is_written_is_short_and_printable(tmp_path: Path) -> None:
    found = read(body(judged(defense="\x1b[2J" + "x" * 999)), tmp_path)
    assert found.claims[0].defense.startswith("\\x1b[2Jxxx")
    assert len(found.claims[0].defense) == statement.MOST_TEXT
    with pytest.raises(UserError, match="at most 500 claims"):
        body(*[judged()] * 501)


def test_a_key_is_made_once_and_for_its_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "my.key"
    key, new = signing_key(path)
    assert new
    assert os.stat(path).st_mode & 0o777 == 0o600
    again, new = signing_key(path)
    assert not new
    assert public_key(again) == public_key(key)
    path.chmod(0o644)
    with pytest.raises(UserError, match=r"others can read the private key .*chmod 600"):
        signing_key(path)
    with pytest.raises(UserError, match="cannot write the key"):
        signing_key(tmp_path / "nowhere" / "my.key")
    with pytest.raises(UserError, match="cannot read the key"):
        signing_key(tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        b"PK\x03\x04 a pack",
        X25519PrivateKey.generate().private_bytes(
            Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()
        ),
        KEY.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret")),
    ],
    ids=["no key", "another kind", "a password"],
)
def test_other_files_are_not_keys_and_stay_as_they_are(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(UserError, match="is not an ed25519 private key"):
        signing_key(path)
    assert path.read_bytes() == content
