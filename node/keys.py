"""Private keys: the node's own, kept in a file, and the short-lived ones of each lease.

The node key is a raw 32-byte Ed25519 seed in a 0600 file, made at first start. It is refused when others could
have read or replaced it (permissions, owner, symbolic link), and on a network file system, where two machines
would sign as one and convict each other. State lives in a directory named after the machine, so that a copied
home or a cloned disk makes a new key. Refuses to print, pickle or log any secret.
"""

import os
import re
import secrets
import stat
from contextlib import suppress
from pathlib import Path
from typing import Self

from blake3 import blake3
from nacl.signing import SigningKey

from node.errors import KeyFileError
from node.log import get_logger
from protocol.identity import KEY_SIZE, NodeId, peer_id

log = get_logger(__name__)

MACHINE_ID_FILES = (Path("/etc/machine-id"), Path("/var/lib/dbus/machine-id"))
PRODUCT_UUID_FILE = Path("/sys/class/dmi/id/product_uuid")
"""The firmware's own id of the machine: a cloned disk image keeps its machine id, but not this. Root reads it."""
MOUNTINFO = Path("/proc/self/mountinfo")
UNIDENTIFIED = "unidentified"
"""Name of the state root on a machine that has no machine id (some containers)."""

NETWORK_FILE_SYSTEMS = frozenset(
    {
        "nfs", "nfs4", "cifs", "smb2", "smb3", "smbfs", "ncpfs", "afs", "auristorfs", "coda", "ceph", "glusterfs",
        "lustre", "gpfs", "beegfs", "pvfs2", "orangefs", "gfs2", "ocfs2", "panfs", "wekafs", "davfs", "acfs",
        "fuse.sshfs", "fuse.ceph", "fuse.ceph-fuse", "fuse.glusterfs", "fuse.beegfs", "fuse.rclone", "fuse.s3fs",
        "fuse.juicefs", "fuse.mfs", "fuse.davfs", "fuse.gcsfuse", "fuse.curlftpfs", "fuse.smbnetfs",
    }
)  # fmt: skip
"""File system types, as mountinfo names them, that a second machine may have mounted too."""

_MACHINE_ID = re.compile(r"[0-9a-f]{32}")
_OCTAL_ESCAPE = re.compile(r"\\([0-7]{3})")


class _Key:
    """An Ed25519 key pair whose secret half stays inside."""

    __slots__ = ("_key",)

    def __init__(self, seed: bytes) -> None:
        if len(seed) != KEY_SIZE:
            raise ValueError(f"an Ed25519 seed has {KEY_SIZE} bytes")
        self._key = SigningKey(seed)

    @property
    def public_key(self) -> bytes:
        """The 32-byte Ed25519 public key."""
        return self._key.verify_key.encode()

    def sign(self, message: bytes) -> bytes:
        """Return the 64-byte Ed25519 signature of `message` (RFC 8032)."""
        return self._key.sign(message).signature

    def reveal_seed(self) -> bytes:
        """Return the 32-byte seed: the secret itself. Only for whoever must hold the key too."""
        return self._key.encode()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({peer_id(self.public_key)})"

    def __reduce__(self) -> str:
        raise TypeError("a private key is not pickled")


class NodeKey(_Key):
    """The key that a node is known by. A `protocol.identity.Signer`; never leaves the daemon."""

    __slots__ = ()

    @property
    def node(self) -> NodeId:
        """The node id: the public key."""
        return NodeId(self.public_key)

    @property
    def peer_id(self) -> str:
        """The node id as people see it: "12D3Koo..."."""
        return peer_id(self.public_key)


class LeaseKey(_Key):
    """A key made for one lease: of its tunnel, or of its vouchers. A `protocol.identity.Signer`."""

    __slots__ = ()

    @classmethod
    def new(cls) -> Self:
        """Return a fresh random key."""
        return cls(secrets.token_bytes(KEY_SIZE))


def state_root(
    state_dir: Path,
    *,
    machine_id_files: tuple[Path, ...] = MACHINE_ID_FILES,
    product_uuid_file: Path = PRODUCT_UUID_FILE,
) -> Path:
    """Return the directory of this machine's state: `state_dir`/<machine id>[-<hash of the firmware's id>].

    Another machine that finds a copy of `state_dir` uses another directory, and so makes a key of its own. Does
    not create anything.
    """
    machine = UNIDENTIFIED
    for path in machine_id_files:
        text = _read_line(path)
        if _MACHINE_ID.fullmatch(text):
            machine = text
            break
    else:
        log.warning("keys.no_machine_id", files=[str(path) for path in machine_id_files])
    product = _read_line(product_uuid_file)
    if product:
        machine += "-" + blake3(product.lower().encode()).hexdigest(length=4)
    return state_dir / machine


def load_or_create(path: Path, *, mountinfo: Path = MOUNTINFO) -> NodeKey:
    """Return the node key in the file `path`, made there when there is none.

    The directory is created (0700) when missing. Two processes that start at once get the same key. Raises
    KeyFileError for a file or directory that can't be trusted with a secret.
    """
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        refuse_network_file_system(path.parent, mountinfo=mountinfo)
        if path.parent.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise KeyFileError(
                f"the key file {path} can be replaced by others: they may write to its directory",
                f"chmod go-w {path.parent}",
            )
        for attempt in (_read_key, _create_key, _read_key):
            key = attempt(path)
            if key is not None:
                return key
    except OSError as error:
        raise KeyFileError(f"the key file {path} can't be used: {error.strerror}", "check its directory") from None
    raise KeyFileError(f"the key file {path} vanishes while it is read", "does something clean that directory?")


def refuse_network_file_system(directory: Path, *, mountinfo: Path = MOUNTINFO) -> None:
    """Raise KeyFileError when `directory` (which exists) is on a file system that other machines may share."""
    kind = file_system_type(directory, mountinfo=mountinfo)
    if kind in NETWORK_FILE_SYSTEMS:
        raise KeyFileError(
            f"{directory} is on a network file system ({kind}), which another machine may use too",
            "set state_dir to a directory on a local disk, such as /var/lib/gpunode",
        )


def file_system_type(directory: Path, *, mountinfo: Path = MOUNTINFO) -> str:
    """Return the type ("ext4", "nfs4") of the file system that `directory` is on; "" when nothing tells.

    From /proc/self/mountinfo, see proc(5): the mount point that is the longest prefix; of several there, the last.
    """
    real = directory.resolve()
    best, kind = -1, ""
    try:
        lines = mountinfo.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return ""
    for line in lines:
        before, separator, after = line.partition(" - ")
        fields = before.split(" ")
        if not separator or len(fields) < 5:
            continue
        point = Path(_OCTAL_ESCAPE.sub(lambda match: chr(int(match[1], 8)), fields[4]))
        depth = len(point.parts)
        if depth >= best and real.is_relative_to(point):
            best, kind = depth, after.split(" ", 1)[0]
    return kind


def _read_key(path: Path) -> NodeKey | None:
    """Return the key in the file, or None when there is no file."""
    try:
        # O_NONBLOCK: opening a FIFO must not hang.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        if path.is_symlink():
            raise KeyFileError(
                f"the key file {path} is a symbolic link", "put the key file itself there"
            ) from None
        raise KeyFileError(f"the key file {path} can't be read: {error.strerror}", "check its owner") from None
    try:
        _refuse_exposed(path, os.fstat(descriptor))
        seed = os.read(descriptor, KEY_SIZE + 1)
    finally:
        os.close(descriptor)
    if len(seed) != KEY_SIZE:
        raise KeyFileError(
            f"the key file {path} holds no key: not {KEY_SIZE} bytes", "restore it, or move it away for a new key"
        )
    return NodeKey(seed)


def _refuse_exposed(path: Path, status: os.stat_result) -> None:
    """Raise KeyFileError for a file that another user could have read."""
    if not stat.S_ISREG(status.st_mode):
        raise KeyFileError(f"the key file {path} is not a regular file", "put the key file itself there")
    if status.st_uid != os.geteuid():
        raise KeyFileError(
            f"the key file {path} belongs to uid {status.st_uid}, not to uid {os.geteuid()} who runs this",
            f"run gpunode as that user, or set another state_dir, or chown {os.geteuid()} {path}",
        )
    if status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise KeyFileError(
            f"the key file {path} can be read by others (mode {stat.S_IMODE(status.st_mode):04o})",
            f"if nobody else has read it: chmod 600 {path}; else move it away, and a new key is made",
        )


def _create_key(path: Path) -> NodeKey | None:
    """Make a key and its file, whole or not at all; None when somebody else made one meanwhile."""
    seed = secrets.token_bytes(KEY_SIZE)
    unfinished = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(seed)
            file.flush()
            os.fsync(descriptor)
        # A link, unlike a rename, never replaces a key that another process has made.
        with suppress(FileExistsError):
            path.hardlink_to(unfinished)
            _sync_directory(path.parent)
            log.info("keys.node_key_made", path=str(path))
            return NodeKey(seed)
        return None
    finally:
        unfinished.unlink()


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read_line(path: Path) -> str:
    """Return the first line of a small file; "" when it can't be read."""
    try:
        with path.open("rb") as file:
            return file.read(256).decode("ascii", errors="replace").partition("\n")[0].strip()
    except OSError:
        return ""
