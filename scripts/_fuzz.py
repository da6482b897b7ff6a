"""The second half of `scripts/fuzz`: hostile bytes against every decoder of a peer's bytes.

A case is a valid message, drawn from the types of its fields, that was then spoiled: as bytes (flips, cuts,
copies, lengths that lie) or as a tree (odd values in odd places, signed again by its author). Each case depends on
the seed and its number only. Refuses to judge speed finely: only what takes a hundred times too long counts.
"""

import argparse
import random
import secrets
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import cbor2
from msgspec import inspect
from nacl.signing import SigningKey

from node.swarm.hello import HelloFailed, HelloProof, decode_hello_untrusted
from protocol import codec, frames, manifest
from protocol.book import Digest
from protocol.envelope import KINDS, Envelope, open_untrusted, signing_bytes
from protocol.errors import BadManifest, BadSignature, MalformedRecord, WrongKind
from protocol.identity import network_id
from protocol.records import Job
from protocol.records.job import JOB_SIZE_MAX

NETWORK = network_id("fuzz")
KEY = SigningKey(bytes(32))
SLOW_S = 1.0
"""CPU time of one message that is held against its decoder; the largest manifests are not drawn."""
LIST_DRAWN_MAX = 4
TEXT_DRAWN_MAX = 20

ODD_BYTES = (
    b"\x9b" + b"\xff" * 8, b"\x5b\x7f" + b"\xff" * 7, b"\xbb\x00\x00\x00\x01" + b"\0" * 4,
    b"\x9f", b"\xff", b"\xf7", b"\xfb", b"\xc2\x58\x20", b"\xd8\x23", b"\xd8\x1c", b"\xd8\x1d\x00",
    b"\xd9\x01\x00", b"\xc5\x82", b"\x1b" + b"\xff" * 8, b"\x81" * 40, b"\xa1\x61a" * 40, b"\xc1" * 40, b"\0" * 64,
    b"\x18\x00", b"\x61\xff", b"\xa2\x61a\x00\x61a\x00",
)  # fmt: skip
ODD_VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**31, 2**53, 2**62, 2**63 - 1, 2**63, 2**64, -(2**63), -(2**64), 2**300,
    0.0, 1.5, float("nan"), float("inf"), b"", b"\0" * 16, b"\0" * 31, b"\0" * 32, b"\0" * 33, b"\0" * 64,
    "", "\n", "a\n", "\x1b[2J", "\u202e", "..", "/", "../..", "a" * 300, "\u00e9" * 64,
    [], {}, [[]], {"": 0}, {"type": "offer"}, {1: 2}, [0] * 300, cbor2.undefined,
    cbor2.CBORTag(35, "(a+)+"), cbor2.CBORTag(0, "2026-01-01T00:00:00Z"), cbor2.CBORTag(30, [1, 0]),
)  # fmt: skip


class Target(NamedTuple):
    """A decoder, what it may raise, and how to draw valid messages for it."""

    name: str
    decode: Callable[[bytes], object]
    allowed: tuple[type[Exception], ...]
    draw: Callable[[random.Random], bytes]
    record_type: type[Any] | None = None
    """What is taken is compared with itself, encoded and decoded again."""


class Finding(Exception):
    """A decoder did what it must not; the text says what."""


def draw_value(info: inspect.Type, rng: random.Random) -> Any:  # noqa: ANN401 - a tree of the codec's subset
    """Return a value of a field's type: usually valid, sometimes against a rule that spans fields."""
    match info:
        case inspect.StructType():
            tree = {
                field.encode_name: draw_value(field.type, rng)
                for field in info.fields
                if field.required or rng.random() < 0.5
            }
            if info.array_like:
                return [draw_value(field.type, rng) for field in info.fields]
            return tree | ({str(info.tag_field): info.tag} if info.tag_field else {})
        case inspect.IntType():
            low = info.ge if info.ge is not None else (info.gt or 0) + 1
            high = info.le if info.le is not None else (info.lt or 2**62) - 1
            return rng.choice((low, high, rng.randint(low, high), min(high, low + rng.randrange(1000))))
        case inspect.BytesType():
            low, high = info.min_length or 0, info.max_length or 64
            return rng.randbytes(rng.randint(low, min(high, max(low, 64))))
        case inspect.StrType():
            low, high = max(info.min_length or 0, 1), min(info.max_length or TEXT_DRAWN_MAX, TEXT_DRAWN_MAX)
            return "".join(rng.choices("abcXYZ019", k=rng.randint(low, high)))
        case inspect.VarTupleType() | inspect.ListType():
            low = info.min_length or 0
            size = rng.randint(low, max(low, LIST_DRAWN_MAX))
            return [draw_value(info.item_type, rng) for _ in range(size)]
        case inspect.DictType():
            pairs = range(rng.randrange(LIST_DRAWN_MAX))
            return {draw_value(info.key_type, rng): draw_value(info.value_type, rng) for _ in pairs}
        case inspect.EnumType():
            return rng.choice([member.value for member in info.cls])
        case inspect.LiteralType():
            return rng.choice(info.values)
        case inspect.UnionType():
            return draw_value(rng.choice(info.types), rng)
        case inspect.BoolType():
            return rng.random() < 0.5
        case _:
            return None


def draw_struct(record_type: Any, rng: random.Random) -> Any:  # noqa: ANN401
    """Return the tree of a message of `record_type` (a struct, or a union of some)."""
    tree = draw_value(inspect.type_info(record_type), rng)
    if isinstance(tree, dict):
        if "expires_at" in tree and "issued_at" in tree:
            tree["expires_at"] = tree["issued_at"] + rng.randint(1, 3_600_000)
        if "free" in tree:
            tree["free"] = min(tree["free"], tree["quantity"])
        if "curve" in tree:
            tree["curve"]["reserve"] = min(tree["curve"]["reserve"], tree["curve"]["start"])
    return tree


def spoil_tree(tree: Any, rng: random.Random) -> Any:  # noqa: ANN401
    """Return `tree` with one value in it replaced, added or taken away."""
    if isinstance(tree, dict) and tree and rng.random() < 0.85:
        key = rng.choice(list(tree))
        if rng.random() < 0.15:
            return {other: value for other, value in tree.items() if other != key}
        if rng.random() < 0.1:
            return tree | {rng.choice(["", "extra", f"{key}\n", "\u202e" * 9]): rng.choice(ODD_VALUES)}
        return tree | {key: spoil_tree(tree[key], rng)}
    if isinstance(tree, list) and tree and rng.random() < 0.8:
        index = rng.randrange(len(tree))
        if rng.random() < 0.2:
            return tree[:index] + tree[index:] * rng.choice((0, 2, 40))
        return [*tree[:index], spoil_tree(tree[index], rng), *tree[index + 1 :]]
    if type(tree) is int and rng.random() < 0.5:
        return tree + rng.choice((-1, 1, 2**32, 2**62))
    return rng.choice(ODD_VALUES)


def spoil_bytes(data: bytes, rng: random.Random) -> bytes:
    """Return `data` after a few edits."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4, 16))):
        at = rng.randrange(len(out) + 1)
        match rng.randrange(6):
            case 0 if at < len(out):
                out[at] ^= 1 << rng.randrange(8)
            case 1 if at < len(out):
                out[at] = rng.randrange(256)
            case 2:
                out[at:at] = rng.choice(ODD_BYTES)
            case 3:
                del out[at : at + rng.choice((1, 2, 8, 64))]
            case 4:
                end = min(len(out), at + rng.randrange(64))
                out[at:at] = out[at:end]
            case _:
                del out[rng.randrange(len(out) + 1) :]
    return bytes(out)


def signed(kind: str, body: bytes) -> bytes:
    """Return an envelope around any body, truly signed."""
    signature = KEY.sign(signing_bytes(NETWORK, kind, body)).signature
    return codec.encode(Envelope(kind, body, bytes(KEY.verify_key), signature))


def spoiled(record_type: Any, rng: random.Random) -> bytes:  # noqa: ANN401
    """Return a message of `record_type` as bytes: valid, or with odd values in it."""
    tree = draw_struct(record_type, rng)
    for _ in range(rng.choice((0, 1, 1, 2))):
        tree = spoil_tree(tree, rng)
    try:
        return cbor2.dumps(tree, canonical=rng.random() < 0.95)
    except (cbor2.CBOREncodeError, ValueError):
        return codec.encode({})


def draw_manifest(rng: random.Random) -> bytes:
    """Return bytes that begin as a manifest does."""
    entries, chunks = rng.randrange(4), rng.randrange(4)
    head = manifest.MAGIC + rng.choice((entries, 2**31, 2**32 - 1)).to_bytes(4, "big")
    return head + chunks.to_bytes(4, "big") + rng.randbytes(rng.randrange(200))


def draw_envelope(rng: random.Random) -> bytes:
    """Return an envelope of any kind."""
    kind = rng.choice(sorted(KINDS))
    body = spoiled(KINDS[kind], rng)
    return signed(kind, spoil_bytes(body, rng) if rng.random() < 0.2 else body)


def targets() -> list[Target]:
    """Return everything that decodes a peer's bytes and needs no IO."""
    malformed = (MalformedRecord,)

    def of_type(record_type: type[Any], size_max: int) -> Target:
        return Target(
            record_type.__name__,
            lambda data: codec.decode_untrusted(data, record_type, size_max),
            malformed,
            lambda rng: spoiled(record_type, rng),
            record_type,
        )

    return [
        Target(
            "envelope",
            lambda data: open_untrusted(data, NETWORK),
            (MalformedRecord, WrongKind, BadSignature),
            draw_envelope,
        ),
        *(of_type(KINDS[kind], codec.RECORD_SIZE_MAX) for kind in sorted(KINDS)),
        of_type(Job, JOB_SIZE_MAX),
        of_type(Digest, codec.RECORD_SIZE_MAX),
        Target("frame", frames.parse_untrusted, malformed, lambda rng: spoiled(frames.Frame, rng)),
        Target("manifest", manifest.parse_untrusted, (BadManifest,), draw_manifest),
        Target(
            "hello",
            lambda data: decode_hello_untrusted(data, HelloProof),
            (MalformedRecord, HelloFailed),
            lambda rng: spoiled(HelloProof, rng),
        ),
    ]


def attempt(target: Target, data: bytes) -> bool:
    """Decode `data` and return whether it was taken. Raises Finding."""
    began = time.process_time()
    value, refusal = decoded(target, data)
    took_s = time.process_time() - began
    if took_s > SLOW_S:
        raise Finding(f"it took {took_s:.1f} s for {len(data)} bytes")
    if refusal is not None:
        if len(refusal) > 4 * codec.ERROR_TEXT_MAX or not refusal.isprintable():
            raise Finding(f"an error quotes a peer at length, or unprintably: {refusal[:200]!r}")
        return False
    if target.record_type is not None:
        again = codec.encode(value)
        if codec.decode_untrusted(again, target.record_type, JOB_SIZE_MAX) != value:
            raise Finding("what it took comes out otherwise when it is encoded again")
    return True


def decoded(target: Target, data: bytes) -> tuple[object, str | None]:
    """Return what `data` decodes to, or the text of the error that refuses it. Raises Finding for any other."""
    try:
        return target.decode(data), None
    except target.allowed as error:
        return None, str(error)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # also a panic of a library in Rust, which is no Exception
        raise Finding(f"it raised {type(error).__name__}: {error}") from error


def run_case(number: int, seed: int, everything: list[Target]) -> bool:
    """Run one case; return whether its message was taken. Prints and raises what was found."""
    rng = random.Random(f"{seed}/{number}")  # noqa: S311 - repeatable by design
    target = everything[number % len(everything)]
    data = target.draw(rng)
    if rng.random() < 0.4:
        data = spoil_bytes(data, rng)
    try:
        return attempt(target, data)
    except Finding as finding:
        print(f"{target.name}: {finding}\nbytes: {data.hex()}\nagain: scripts/fuzz --seed {seed} --case {number}")
        raise


def main() -> int:
    """Fuzz until the time is over; return the exit status."""
    parser = argparse.ArgumentParser(prog="scripts/fuzz", description="hostile bytes against every decoder")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long (default: 60)")
    parser.add_argument("--seed", type=int, default=secrets.randbelow(10**9), help="default: another each time")
    parser.add_argument("--case", type=int, help="only this case")
    arguments = parser.parse_args()
    everything = targets()
    print(f"seed {arguments.seed}, {len(everything)} decoders", flush=True)
    first = arguments.case if arguments.case is not None else 0
    number, taken, until = first, 0, time.monotonic() + arguments.seconds
    try:
        while True:
            taken += run_case(number, arguments.seed, everything)
            number += 1
            if arguments.case is not None or time.monotonic() > until:
                break
    except Finding:
        return 1
    except KeyboardInterrupt:
        pass
    print(f"{number - first} cases, {taken} of them taken as valid: nothing found")
    return 0


if __name__ == "__main__":
    sys.exit(main())
