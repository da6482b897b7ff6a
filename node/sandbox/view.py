"""What a bubblewrap job sees: the arguments that lay out its file system, and its environment variables.

The `host` environment is this machine's own programs, read-only: /usr and the directories beside it, and what
the configuration names. Everything of /etc that a job needs is made up. Refuses to show /etc, /home, /root,
/srv, /mnt, /opt and file systems mounted over the network unless the configuration names them.

The job's own directory is mounted last, and nothing is laid out below it: bubblewrap prepares the view with
the host's root still in reach, and a job that ran here before may have left symbolic links.
"""

import posixpath
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path

from node.errors import SandboxError
from node.ports import SandboxSpec
from node.sandbox.hierarchy import Mount

JOB_UID = 1000
"""uid and gid inside, for every job; outside it is the lease's own."""
JOB_DIR = "/job"
PROGRAMS = "/usr"
BESIDE_PROGRAMS = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
"""Links into /usr on a merged system, directories of their own on an old one."""
SHOWN_IF_THERE = (
    "/etc/alternatives",  # links only: without them awk, editor, python3 and the like dangle
    "/etc/ld.so.cache",
    "/sys/devices/system/cpu",  # thread pools and memory allocators count processors and NUMA nodes here
    "/sys/devices/system/node",
)
MIB = 1 << 20
NETWORK_KINDS = frozenset(
    {
        "9p",
        "afs",
        "beegfs",
        "ceph",
        "cifs",
        "coda",
        "fuse.glusterfs",
        "fuse.rclone",
        "fuse.sshfs",
        "fuse.s3fs",
        "gfs2",
        "glusterfs",
        "gpfs",
        "lustre",
        "nfs",
        "nfs4",
        "orangefs",
        "panfs",
        "smb3",
        "virtiofs",
        "weka",
    }
)
"""File system types whose content comes from other machines."""
TAKEN = ("/dev", "/etc/passwd", "/etc/group", JOB_DIR, "/proc", "/tmp")
"""Places that a mount from the configuration or a CDI file may not cover."""


def synthetic_files(user: str = "job") -> dict[str, bytes]:
    """Return the files of /etc that every job gets."""
    return {
        "/etc/passwd": (
            f"root:x:0:0:root:/nonexistent:/usr/sbin/nologin\n{user}:x:{JOB_UID}:{JOB_UID}::{JOB_DIR}:/bin/sh\n"
            "nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n"
        ).encode(),
        "/etc/group": f"root:x:0:\n{user}:x:{JOB_UID}:\nnogroup:x:65534:\n".encode(),
        "/etc/hosts": b"127.0.0.1 localhost job\n::1 localhost\n",
        "/etc/hostname": b"job\n",
        "/etc/nsswitch.conf": b"passwd: files\ngroup: files\nhosts: files dns\n",
    }


def layout(
    spec: SandboxSpec,
    *,
    job_dir: str,
    shown: Iterable[Path],
    mounts: Iterable[Mount],
    files: Mapping[str, int],
) -> list[str]:
    """Return bubblewrap's arguments for the file system.

    `job_dir` is what gets mounted at /job; `shown` the configured host paths; `files` the descriptors of the
    synthetic files. Raises SandboxError for a device or mount that may not be shown.
    """
    args = ["--ro-bind", PROGRAMS, PROGRAMS]
    for name in BESIDE_PROGRAMS:
        path = Path("/", name)
        if path.is_symlink():
            args += ["--symlink", str(path.readlink()), str(path)]
        else:
            args += ["--ro-bind-try", str(path), str(path)]
    args += ["--perms", "0755", "--dir", "/etc"]
    for name in SHOWN_IF_THERE:
        args += ["--ro-bind-try", name, name]
    for target, fd in files.items():
        args += ["--perms", "0444", "--file", str(fd), target]
    # What the configuration shows may lie below these, so they come first.
    args += ["--perms", "1777", "--size", str(spec.limits.tmp_mib * MIB), "--tmpfs", "/tmp"]
    args += ["--perms", "0755", "--dir", "/run", "--perms", "0755", "--dir", "/var"]
    visible = [str(path) for path in shown]
    for name in visible:
        args += ["--ro-bind", name, name]
    for name in _mounted_from_network(mounts, visible):
        args += ["--perms", "0555", "--size", "4096", "--tmpfs", name, "--remount-ro", name]
    args += ["--proc", "/proc", "--dev", "/dev"]
    for node in spec.device_nodes:
        args += ["--dev-bind", _device(node), node]
    args += ["--perms", "1777", "--size", str(spec.limits.shm_mib * MIB), "--tmpfs", "/dev/shm"]
    args += ["--remount-ro", "/dev"]
    for source, target in spec.read_only_mounts:
        args += ["--ro-bind", source, _free(target)]
    return [*args, "--bind", job_dir, JOB_DIR, "--remount-ro", "/", "--chdir", inside(spec.workdir)]


def variables(spec: SandboxSpec, prefixes: Iterable[Path] = ()) -> dict[str, str]:
    """Return the job's environment: our defaults, the job's own variables, then the devices it may use."""
    binaries = [*(f"{prefix}/bin" for prefix in prefixes if Path(prefix, "bin").is_dir())]
    defaults = {
        "PATH": ":".join(
            [*binaries, "/usr/local/bin", "/usr/bin", "/bin", "/usr/local/sbin", "/usr/sbin", "/sbin"]
        ),
        "HOME": JOB_DIR,
        "USER": "job",
        "LOGNAME": "job",
        "SHELL": "/bin/sh",
        "LANG": "C.UTF-8",
        "TMPDIR": "/tmp",
    }
    return {**defaults, **spec.variables, **device_variables(spec)}


def device_variables(spec: SandboxSpec) -> dict[str, str]:
    """Return the variables by which CUDA and NVIDIA's libraries are told what to use."""
    devices = ",".join(spec.visible_devices)
    return {"NVIDIA_VISIBLE_DEVICES": devices or "void", "CUDA_VISIBLE_DEVICES": devices}


def _mounted_from_network(mounts: Iterable[Mount], visible: list[str]) -> list[str]:
    """Return the network mounts below shown directories that the configuration does not name."""
    roots = [PROGRAMS, *visible]
    return [
        mount.point
        for mount in mounts
        if mount.kind in NETWORK_KINDS
        and mount.point not in visible
        and any(mount.point.startswith(root.rstrip("/") + "/") for root in roots)
    ]


def _device(node: str) -> str:
    if posixpath.normpath(node) != node or not node.startswith("/dev/"):
        raise SandboxError(f"{node} is no device node below /dev")
    try:
        mode = Path(node).stat().st_mode
    except OSError as error:
        raise SandboxError(f"the device node {node} cannot be shown: {error.strerror}") from error
    if not stat.S_ISCHR(mode):
        raise SandboxError(f"{node} is not a character device")
    return node


def _free(target: str) -> str:
    # normpath leaves two slashes at the beginning alone.
    if posixpath.normpath(target) != target or target[:1] != "/" or target[1:2] in ("", "/"):
        raise SandboxError(f"{target!r} is no place to mount something in a job")
    for taken in TAKEN:
        if target == taken or target.startswith(taken + "/"):
            raise SandboxError(f"a mount at {target} would cover the job's own {taken}")
    return target


def inside(workdir: str) -> str:
    """Return `workdir` when it is /job or below it. Raises SandboxError."""
    if posixpath.normpath(workdir) != workdir.rstrip("/") or not (workdir + "/").startswith(JOB_DIR + "/"):
        raise SandboxError(f"the working directory {workdir!r} is not below {JOB_DIR}")
    return workdir
