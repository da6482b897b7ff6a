"""What a probe runs inside a tier, and what the answers mean.

A tier is offered only when a job that tries to break out, by the simplest means, could not. Refuses to prove
more than it tried: `Probe.proves` lists what was tried.
"""

import os
import shutil
import tempfile
from pathlib import Path
from typing import Protocol

import trio

from node.errors import SandboxError
from node.ports import Probe, RunningJob, SandboxLimits, SandboxSpec

PROBE_MS_MAX = 20_000
OUTPUT_SIZE_MAX = 65_536
LIMITS = SandboxLimits(cpus_milli=1_000, memory_mib=64, pids=32, shm_mib=1, tmp_mib=1)
SCRIPT = r"""
say() { echo "$1"; }
(read line < /etc/shadow) 2>/dev/null && say "it can read /etc/shadow"
while read -r line; do case $line in
  lo:*) ;; *:*) say "it sees the network device ${line%%:*}";;
esac; done < /proc/net/dev
for p in /proc/[0-9]*; do [ "${p#/proc/}" -le 64 ] || say "it sees the process ${p#/proc/}"; done
while read -r key value rest; do case $key in
  Uid:) [ "$value" = 1000 ] || say "its uid is $value";;
  CapEff:|CapBnd:) [ "$value" = 0000000000000000 ] || say "it has capabilities $key $value";;
  NoNewPrivs:) [ "$value" = 1 ] || say "it may gain privileges";;
  Seccomp:) [ "$value" = 2 ] || say "it has no seccomp filter";;
esac; done < /proc/self/status
(: > /usr/gpunode-probe) 2>/dev/null && say "it can write to /usr"
(: > /etc/gpunode-probe) 2>/dev/null && say "it can write to /etc"
(: > /job/probe) 2>/dev/null || say "it cannot write to /job"
for d in /home /root /srv /mnt; do [ -e "$d" ] && say "it sees $d"; done
unshare --user true 2>/dev/null && say "it can make a user namespace"
say done
"""
PROVES = (
    "a job ran here; it saw no /etc/shadow, /home, /root, /srv or /mnt, no process and no network of the host, "
    "could write neither to /usr nor to /etc, and had no capability, no new user namespace and a seccomp filter; "
    "{terms}. It shares the host's kernel"
)


class Starter(Protocol):
    """A tier that can be probed."""

    @property
    def tier(self) -> str:
        """Its name."""

    async def start(self, spec: SandboxSpec) -> RunningJob:
        """Start a job."""


async def run(sandbox: Starter, uid: int, script: str) -> tuple[int, str]:
    """Run a shell script as a job of `uid` in a directory of its own; return its status and its output.

    Raises SandboxError, also when it takes too long.
    """
    directory = Path(tempfile.mkdtemp(prefix="gpunode-probe-"))
    output = os.memfd_create("output")
    try:
        root = directory / "job"
        root.mkdir(mode=0o700)
        os.chown(root, uid, -1)
        spec = SandboxSpec(
            name=f"probe-{os.getpid()}-{output}",
            argv=("/bin/sh", "-c", script),
            variables={},
            root=root,
            workdir="/job",
            uid=uid,
            limits=LIMITS,
            stdout=output,
            stderr=output,
        )
        job = await sandbox.start(spec)
        with trio.move_on_after(PROBE_MS_MAX / 1_000) as patience:
            end = await job.wait()
        if patience.cancelled_caught:
            await job.kill()
            raise SandboxError("the probe did not end in time")
        return end.status, os.pread(output, OUTPUT_SIZE_MAX, 0).decode(errors="replace")
    finally:
        os.close(output)
        shutil.rmtree(directory, ignore_errors=True)


async def probe(sandbox: Starter, *, uid: int, terms: str) -> Probe:
    """Run SCRIPT in `sandbox` as `uid`; the tier works when it finds nothing to complain of.

    `terms` says what the script cannot see: whose uid it is outside, and how it is limited.
    """
    try:
        status, output = await run(sandbox, uid, SCRIPT)
    except SandboxError as error:
        return Probe(sandbox.tier, False, str(error), error.hint)
    except OSError as error:
        return Probe(sandbox.tier, False, f"the probe could not be prepared: {error}")
    found = output.split("\n")
    if status != 0 or found[-2:] != ["done", ""]:
        return Probe(sandbox.tier, False, f"the probe ended with {status}: {output.strip()[:400]}", hint(output))
    if complaints := found[:-2]:
        return Probe(sandbox.tier, False, f"a job is not confined: {'; '.join(complaints)[:400]}", hint(output))
    return Probe(sandbox.tier, True, PROVES.format(terms=terms))


def hint(complaint: str, root: Path = Path("/")) -> str:
    """Return the command that mends what bubblewrap complains of, as far as this machine's settings tell."""
    sysctl = root / "proc/sys"
    if "nknown option" in complaint:
        return "bubblewrap 0.8 or newer is needed: apt install -t stable-backports bubblewrap"
    if "find source path" in complaint and "Permission denied" in complaint:
        return "jobs have uids of their own: make every directory above that path passable (chmod o+x)"
    if "proc" in complaint and "mount" in complaint.lower():
        return "in a container: run it with --security-opt systempaths=unconfined (podman: unmask=ALL)"
    for name, bad, mends in (
        ("kernel/unprivileged_userns_clone", "0", "sysctl -w kernel.unprivileged_userns_clone=1"),
        ("user/max_user_namespaces", "0", "sysctl -w user.max_user_namespaces=28633"),
        (
            "kernel/apparmor_restrict_unprivileged_userns",
            "1",
            "apt install apparmor-profiles, then: ln -s /usr/share/apparmor/extra-profiles/bwrap-userns-restrict "
            "/etc/apparmor.d/ && systemctl reload apparmor",
        ),
    ):
        try:
            if sysctl.joinpath(name).read_text().strip() == bad:
                return mends
        except OSError:
            continue
    return ""
