"""The node key's file: made once, never shared, refused when others could have it."""

import os
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest

from node import keys
from node.errors import KeyFileError
from node.keys import LeaseKey, NodeKey
from protocol import identity

SEED = bytes(range(32))
LOCAL = "22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw\n"


@pytest.fixture
def key_path(tmp_path: Path) -> Path:
    return tmp_path / "machine" / "node.key"


@pytest.fixture
def mountinfo(tmp_path: Path) -> Callable[[str], Path]:
    def write(lines: str) -> Path:
        path = tmp_path / "mountinfo"
        path.write_text(lines)
        return path

    return write


def test_the_key_is_made_once_and_read_again(key_path: Path) -> None:
    first = keys.load_or_create(key_path)
    assert key_path.stat().st_mode & 0o7777 == 0o600
    assert key_path.parent.stat().st_mode & 0o7777 == 0o700
    assert key_path.read_bytes() == first.reveal_seed()
    assert [path.name for path in key_path.parent.iterdir()] == ["node.key"]
    assert keys.load_or_create(key_path).public_key == first.public_key


def test_a_key_signs_as_its_node() -> None:
    key = NodeKey(SEED)
    assert key.node == key.public_key
    assert key.peer_id == identity.peer_id(key.node)
    signer: identity.Signer = key
    assert identity.is_signature_valid(key.node, b"message", signer.sign(b"message"))
    assert not identity.is_signature_valid(key.node, b"other", key.sign(b"message"))


def test_secrets_are_neither_printed_nor_pickled() -> None:
    for key in (NodeKey(SEED), LeaseKey(SEED)):
        shown = repr(key) + str(key) + f"{key}"
        assert SEED.hex() not in shown
        assert repr(SEED)[2:-1] not in shown
        assert identity.peer_id(key.public_key) in shown
        with pytest.raises(TypeError, match="not pickled"):
            pickle.dumps(key)


def test_lease_keys_are_fresh_and_come_back_from_their_seed() -> None:
    first, second = LeaseKey.new(), LeaseKey.new()
    assert first.public_key != second.public_key
    assert LeaseKey(first.reveal_seed()).public_key == first.public_key
    with pytest.raises(ValueError, match="32 bytes"):
        LeaseKey(b"short")


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o610, 0o777])
def test_a_key_that_others_can_read_is_refused(key_path: Path, mode: int) -> None:
    keys.load_or_create(key_path)
    key_path.chmod(mode)
    with pytest.raises(KeyFileError, match="can be read by others") as caught:
        keys.load_or_create(key_path)
    assert f"chmod 600 {key_path}" in caught.value.hint


def test_a_key_that_others_can_replace_is_refused(key_path: Path) -> None:
    keys.load_or_create(key_path)
    key_path.parent.chmod(0o770)
    with pytest.raises(KeyFileError, match="can be replaced by others"):
        keys.load_or_create(key_path)


def test_a_symbolic_link_is_refused(key_path: Path, tmp_path: Path) -> None:
    real = tmp_path / "elsewhere"
    keys.load_or_create(real)
    key_path.parent.mkdir()
    key_path.symlink_to(real)
    with pytest.raises(KeyFileError, match="symbolic link"):
        keys.load_or_create(key_path)
    key_path.unlink()
    key_path.symlink_to(tmp_path / "nowhere")
    with pytest.raises(KeyFileError, match="symbolic link"):
        keys.load_or_create(key_path)
    assert not (tmp_path / "nowhere").exists()


def test_a_key_of_another_user_is_refused(key_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys.load_or_create(key_path)
    other = key_path.stat().st_uid + 1
    monkeypatch.setattr("os.geteuid", lambda: other)
    with pytest.raises(KeyFileError, match=f"not to uid {other}"):
        keys.load_or_create(key_path)


def test_what_is_no_key_file_is_refused(key_path: Path) -> None:
    key_path.parent.mkdir()
    for content in (b"", SEED[:31], SEED + b"\n"):
        key_path.write_bytes(content)
        key_path.chmod(0o600)
        with pytest.raises(KeyFileError, match="holds no key"):
            keys.load_or_create(key_path)
        assert key_path.read_bytes() == content
    key_path.unlink()
    os.mkfifo(key_path, 0o600)
    with pytest.raises(KeyFileError, match="not a regular file"):
        keys.load_or_create(key_path)
    key_path.unlink()
    key_path.mkdir()
    with pytest.raises(KeyFileError, match="not a regular file"):
        keys.load_or_create(key_path)


def test_a_directory_that_can_not_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(KeyFileError, match="can't be used"):
        keys.load_or_create(tmp_path / "file" / "below" / "node.key")


def test_of_two_that_start_at_once_both_get_the_same_key(key_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = keys.secrets.token_bytes

    def while_another_starts(size: int) -> bytes:
        monkeypatch.setattr(keys.secrets, "token_bytes", made)
        first.append(keys.load_or_create(key_path))
        return made(size)

    first: list[NodeKey] = []
    monkeypatch.setattr(keys.secrets, "token_bytes", while_another_starts)
    second = keys.load_or_create(key_path)
    assert second.public_key == first[0].public_key
    assert [path.name for path in key_path.parent.iterdir()] == ["node.key"]


@pytest.mark.parametrize("kind", ["nfs4", "cifs", "fuse.sshfs", "lustre", "gpfs", "beegfs", "afs", "smb2"])
def test_network_file_systems_are_refused(key_path: Path, mountinfo: Callable[[str], Path], kind: str) -> None:
    home = f"40 22 0:50 / {key_path.parents[1]} rw,relatime shared:9 - {kind} server:/home rw\n"
    with pytest.raises(KeyFileError, match="network file system") as caught:
        keys.load_or_create(key_path, mountinfo=mountinfo(LOCAL + home))
    assert "state_dir" in caught.value.hint
    assert not key_path.exists()
    assert keys.load_or_create(key_path, mountinfo=mountinfo(LOCAL)).public_key


def test_the_innermost_and_latest_mount_counts(tmp_path: Path, mountinfo: Callable[[str], Path]) -> None:
    spaced = tmp_path / "a b"
    spaced.mkdir()
    escaped = str(spaced).replace(" ", r"\040")
    outer = f"40 22 0:50 / {tmp_path} rw - nfs4 server:/home rw\n"
    inner = f"41 40 0:51 / {escaped} rw shared:1 master:2 - tmpfs tmpfs rw\n"
    over = f"42 41 0:52 / {escaped} rw - xfs /dev/sdb rw\n"
    sibling = f"43 40 0:53 / {tmp_path}/a rw - cifs //server/a rw\n"
    broken = "44 40\nno separator here at all\n"
    listing = mountinfo(LOCAL + outer + inner + over + sibling + broken)
    assert keys.file_system_type(spaced, mountinfo=listing) == "xfs"
    assert keys.file_system_type(tmp_path, mountinfo=listing) == "nfs4"
    assert keys.file_system_type(Path("/"), mountinfo=listing) == "ext4"
    assert keys.file_system_type(tmp_path, mountinfo=tmp_path / "none") == ""


def test_a_link_into_a_network_file_system_is_seen_through(
    tmp_path: Path, mountinfo: Callable[[str], Path]
) -> None:
    (tmp_path / "remote").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "remote")
    listing = mountinfo(LOCAL + f"40 22 0:50 / {tmp_path}/remote rw - nfs server:/x rw\n")
    with pytest.raises(KeyFileError, match="nfs"):
        keys.refuse_network_file_system(tmp_path / "link", mountinfo=listing)


def test_the_kernels_own_mount_table_is_understood() -> None:
    assert keys.file_system_type(Path("/proc")) == "proc"


def test_another_machine_gets_another_state_root(tmp_path: Path) -> None:
    here, copied, product = tmp_path / "here", tmp_path / "copied", tmp_path / "product"
    here.write_text("3d1219c7c4c5404aaa1f6d2a48adfda4\n")
    copied.write_text("9" * 32 + "\n")
    product.write_text("4C4C4544-0042-3010-8054-B4C04F4E3233\n")
    none = tmp_path / "none"
    state = tmp_path / "state"

    def root(machine_id: Path, firmware: Path = none) -> Path:
        return keys.state_root(state, machine_id_files=(none, machine_id), product_uuid_file=firmware)

    assert root(here) == state / "3d1219c7c4c5404aaa1f6d2a48adfda4"
    assert root(copied) == state / ("9" * 32)
    # A cloned disk: the same machine id, another machine.
    cloned = root(here, product)
    assert cloned.name.startswith("3d1219c7c4c5404aaa1f6d2a48adfda4-")
    product.write_text("another machine\n")
    assert root(here, product) not in (cloned, root(here))
    for wrong in ("", "uninitialized\n", "../../etc\n", "A" * 32):
        here.write_text(wrong)
        assert root(here) == state / keys.UNIDENTIFIED
    assert not state.exists()
    assert keys.state_root(state).parent == state
