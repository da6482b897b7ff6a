"""The `bubblewrap` tier: namespaces, seccomp, a control group and a uid of its own for every job.

A job sees this machine's programs read-only, its own directory, private /tmp and /dev/shm, no other process,
no network but `lo`, and no way to a new namespace. Refuses to run a job as root, and to call itself a virtual
machine: jobs share the host's kernel, and the probe says so.

As root the job's uid is taken before bubblewrap starts (started as root it would map root into the job). As
any other user jobs run under the keeper's own uid, the namespaces alone keep them from the user's files, and
without a delegated control group the tier is not offered at all unless polled limits were chosen.

Start: unshare (private mounts) -> sh (join the group, mount /job's source where the uid can reach it) ->
prlimit -> setpriv (drop to the uid) -> bwrap -> sh (say that it got here) -> the job; each *becomes* the next.
"""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import trio

from node.errors import SandboxError, TierUnavailable
from node.log import get_logger
from node.ports import Probe, SandboxSpec
from node.sandbox import checks, command, control_group, launch, probing, view
from node.sandbox import filter as seccomp
from node.sandbox.control_group import ControlGroup
from node.sandbox.hierarchy import Hierarchy, find_hierarchy, parse_mounts
from node.sandbox.process_tree import Descendants
from node.sandbox.running import Enter, Group, Job, empty

log = get_logger(__name__)

TIER = "bubblewrap"
START_MS_MAX = 30_000
"""A sandbox that has not begun its job by then never will."""
CONFINEMENT = (
    *("--unshare-user", "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup"),
    *("--disable-userns", "--cap-drop", "ALL", "--new-session", "--die-with-parent"),
    *("--hostname", "job", "--clearenv"),
)


class BubblewrapSandbox:
    """The tier. Implements `node.ports.Sandbox`."""

    def __init__(
        self,
        *,
        environments: Mapping[str, tuple[Path, ...]] | None = None,
        allow_polled: bool = False,
        hierarchy: Hierarchy | None = None,
        bwrap: str | None = None,
        probe_uid: int = 65_534,
    ) -> None:
        """Describe the tier; nothing runs yet.

        `environments` maps a name to the host paths that it shows besides /usr, and whose bin directories
        come first in PATH ("host" alone by default). `allow_polled` accepts limits by polling where there is
        no control group. `hierarchy` and `bwrap` are found when None. `probe_uid` is the uid of the probe's
        job when we are root.
        """
        self._environments = {"host": (), **(environments or {})}
        self._allow_polled = allow_polled
        self._hierarchy = hierarchy
        self._bwrap = bwrap
        self._probe_uid = probe_uid

    @property
    def tier(self) -> str:
        """Its name in offers."""
        return TIER

    async def probe(self) -> Probe:
        """Run a job that tries what a job must not be able to do. Never raises for a tier that does not work."""
        as_root = os.geteuid() == 0
        try:
            hierarchy = self._find_hierarchy()
        except TierUnavailable as error:
            return Probe(TIER, False, str(error), error.hint)
        whose = "every job has a uid of its own" if as_root else "jobs run under this user's own uid"
        limited = (
            f"cgroup v{hierarchy.version} limits them" if hierarchy else "polled limits only: no control group"
        )
        uid = self._probe_uid if as_root else os.geteuid()
        return await probing.probe(self, uid=uid, terms=f"{whose}; {limited}")

    async def start(self, spec: SandboxSpec) -> Job:
        """Start a job. Raises SandboxError; nothing is left behind when it does."""
        checks.check(spec)
        shown = self._environments.get(spec.environment)
        if shown is None:
            known = ", ".join(sorted(self._environments))
            raise SandboxError(f"there is no environment {spec.environment!r} here", f"there are: {known}")
        program = self._find_bwrap()
        bpf = seccomp.build(with_device=bool(spec.device_nodes))
        hierarchy = self._find_hierarchy()
        group = control_group.create(hierarchy, spec.name, spec.limits) if hierarchy else None
        starting = _Starting(spec, shown, program, bpf, group)
        try:
            with trio.fail_after(START_MS_MAX / 1_000):
                return await starting.run()
        except trio.TooSlowError:
            raise SandboxError("the sandbox did not start in time") from None
        finally:
            if not starting.running:
                with trio.CancelScope(shield=True):
                    await starting.undo()

    async def sweep(self, name: str) -> None:
        """Kill and remove whatever a dead keeper left under `name` (control groups). Idempotent.

        Polled jobs leave nothing: bubblewrap dies with its keeper.
        """
        checks.check_name(name)
        hierarchy = self._find_hierarchy()
        if hierarchy:
            await empty(await trio.to_thread.run_sync(control_group.find, hierarchy, name), name)

    def _find_hierarchy(self) -> Hierarchy | None:
        """Return where groups can be made, or None for polled limits. Raises TierUnavailable."""
        if self._hierarchy is None:
            try:
                self._hierarchy = find_hierarchy()
            except TierUnavailable:
                # Root needs no polling: without control groups it had better not lend at all.
                if not self._allow_polled or os.geteuid() == 0:
                    raise
        return self._hierarchy

    def _find_bwrap(self) -> str:
        found = self._bwrap or shutil.which("bwrap", path=f"{launch.PATH}:{Path(sys.prefix, 'bin')}")
        if found is None:
            raise TierUnavailable("bubblewrap is not installed", "apt install bubblewrap (dnf: bubblewrap)")
        return found


class _Starting:
    """One start: owns every descriptor and process until the job runs."""

    def __init__(
        self, spec: SandboxSpec, shown: tuple[Path, ...], program: str, bpf: bytes, group: ControlGroup | None
    ) -> None:
        self.running = False
        self._spec = spec
        self._shown = shown
        self._program = program
        self._bpf = bpf
        self._group: Group = group or Descendants(spec.limits)
        self._limits = launch.limits(*([] if group else checks.resource_limits(spec)))
        self._variables = view.variables(spec, shown)
        self._as_root = os.geteuid() == 0
        self._process: subprocess.Popen[bytes] | None = None
        self._passed: list[int] = []
        self._kept: list[int] = []

    async def run(self) -> Job:
        """Start the job, and return once it has begun."""
        spec = self._spec
        directory = checks.open_directory(spec)
        self._passed.append(directory)
        checks.give_pipes(spec)
        status_read, status_write = os.pipe()
        diagnostics_read, diagnostics_write = os.pipe()
        self._kept += [status_read, diagnostics_read]
        self._passed += [status_write, diagnostics_write]
        mount_point = tempfile.mkdtemp(prefix="gpunode-", dir=_mount_parent()) if self._as_root else None
        try:
            argv = self._argv(mount_point or str(spec.root), status_write)
            self._process = launch.start(
                argv,
                stdin=spec.stderr,
                stdout=spec.stdout,
                stderr=diagnostics_write,
                pass_fds=[fd for fd in self._passed if fd not in (directory, diagnostics_write)],
                cwd=f"/proc/self/fd/{directory}",
            )
            launch.close_all(self._passed)
            if isinstance(self._group, Descendants):
                self._group.add(self._process.pid)
            if complaint := await launch.wait_until_started(diagnostics_read):
                raise SandboxError(f"the sandbox could not be started: {complaint}", probing.hint(complaint))
        finally:
            if mount_point is not None:
                os.rmdir(mount_point)  # noqa: PTH106 - microseconds, on a path that is ours
        first_inside = int(json.loads(os.read(status_read, 4_096).partition(b"\n")[0])["child-pid"])
        self.running = True
        return Job(
            spec.name,
            self._process,
            self._group,
            monitors=frozenset({self._process.pid, first_inside}),
            enter=self._entrance(first_inside),
            release=lambda: launch.close_all(self._kept),
        )

    async def undo(self) -> None:
        """Kill and remove what was begun."""
        launch.close_all(self._passed)
        self._group.kill()
        if self._process is not None:
            self._process.kill()
            await launch.wait_for_exit(self._process)
        await empty(self._group, self._spec.name)
        launch.close_all(self._kept)

    def _entrance(self, first_inside: int) -> Enter:
        """Return what brings further commands into the job whose pid 1 is `first_inside` outside."""
        group = self._group
        inside = None
        with contextlib.suppress(ProcessLookupError):
            inside = os.pidfd_open(first_inside)
            self._kept.append(inside)
        if isinstance(group, Descendants):
            group.add(first_inside)
        if first_inside not in group.pids():
            inside = None  # a job so short that it is over: the number may be another's by now

        async def enter(argv: tuple[str, ...], stdin: int, stdout: int, stderr: int) -> subprocess.Popen[bytes]:
            if inside is None:
                raise SandboxError("the job has ended")
            process = await command.start(
                argv,
                prefix=self._limits,
                uid=self._spec.uid,
                variables=self._variables,
                directory=self._spec.workdir,
                entries=group.entries,
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                inside=inside,
                bpf=self._bpf,
            )
            if isinstance(group, Descendants):
                group.add(process.pid)
            return process

        return enter

    def _pass(self, name: str, content: bytes) -> int:
        fd = launch.memory_file(name, content)
        self._passed.append(fd)
        return fd

    def _argv(self, job_dir: str, status_write: int) -> list[str]:
        spec = self._spec
        files = {path: self._pass("etc", text) for path, text in view.synthetic_files().items()}
        mounts = parse_mounts(Path("/proc/self/mountinfo").read_text())
        options = [
            *CONFINEMENT,
            *("--uid", str(view.JOB_UID), "--gid", str(view.JOB_UID)),
            *("--seccomp", str(self._pass("seccomp", self._bpf))),
            *("--json-status-fd", str(status_write)),
            *view.layout(spec, job_dir=job_dir, shown=self._shown, mounts=mounts, files=files),
        ]
        for key, value in self._variables.items():
            options += ["--setenv", key, value]
        # By descriptor, for everyone on the machine can read a command line, and variables may be secrets.
        text = "".join(option + "\0" for option in options).encode(errors="surrogateescape")
        bwrap = [self._program, "--args", str(self._pass("options", text)), "--"]
        inside = ["/bin/sh", "-c", launch.BECOME, "job", *spec.argv]
        entries = [*map(str, self._group.entries), "--"]
        if not self._as_root:
            return ["/bin/sh", "-c", launch.JOIN_AND_EXEC, "start", *entries, *self._limits, *bwrap, *inside]
        return [
            *("unshare", "--mount", "--propagation", "slave"),
            *("/bin/sh", "-c", launch.JOIN_MOUNT_AND_EXEC, "start", *entries, job_dir),
            *self._limits,
            *("setpriv", "--reuid", str(spec.uid), "--regid", str(spec.uid), "--clear-groups"),
            *bwrap,
            *inside,
        ]


def _mount_parent() -> str:
    """Return a directory that every uid can reach, for the mount point that only the private mounts show."""
    return "/run" if os.access("/run", os.W_OK) else tempfile.gettempdir()
