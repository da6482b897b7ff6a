# shellcheck shell=bash
# What the scripts share: the choice of a Python, the Debian packages that gpunode needs, and the making of a
# virtual environment from the lock files. Sourced, never run. It changes nothing outside the folder that it is
# told to build in, and installs Debian packages only when it runs as root.

ROOT="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)"
REQUIREMENTS="$ROOT/scripts/requirements"
PYTHON="${PYTHON:-}"
STAMP_NAME=gpunode-stamp

say() { printf '\033[1m==> %s\033[0m\n' "$*" >&2; }

fail() { # fail WHAT-AND-WHY [WHAT-TO-DO-NEXT]
    printf 'error: %s\n' "$1" >&2
    if [ -n "${2:-}" ]; then printf '  hint: %s\n' "$2" >&2; fi
    exit 1
}

print_usage() { # print_usage SCRIPT: the comment that the script opens with
    awk 'NR > 1 { if (!/^#/) exit; sub(/^# ?/, ""); print }' "$1"
}

# --- Python ---------------------------------------------------------------------------------------------------

is_recent_python() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }

can_make_venv() { "$1" -c 'import ensurepip, venv' >/dev/null 2>&1; }

find_python() { # find_python [FIRST]: sets PYTHON, unless the caller has, to FIRST or to one that can make a venv
    local candidate
    if [ -n "$PYTHON" ]; then
        is_recent_python "$PYTHON" || fail "PYTHON=$PYTHON is not Python 3.11 or newer" "unset it, or name another one"
        return
    fi
    if [ -n "${1:-}" ] && is_recent_python "$1"; then PYTHON="$1"; return; fi
    local -a candidates=(python3 python3.11 python3.12 python3.13 /usr/bin/python3)
    for candidate in "${candidates[@]}"; do
        if is_recent_python "$candidate" && can_make_venv "$candidate"; then PYTHON="$candidate"; return; fi
    done
    for candidate in "${candidates[@]}"; do
        if is_recent_python "$candidate"; then PYTHON="$candidate"; return; fi
    done
    fail "there is no Python 3.11 or newer here" "on Debian 12: apt-get install python3 python3-venv python3-dev"
}

python_header() { "$1" -c 'import sysconfig; print(sysconfig.get_path("include") + "/Python.h")'; }

python_package() { # python_package SUFFIX: Debian's name for a part of $PYTHON, such as python3-venv
    local own system
    own="$("$PYTHON" -c 'import sys; print("python%d.%d" % sys.version_info[:2])')"
    system="$(/usr/bin/python3 -c 'import sys; print("python%d.%d" % sys.version_info[:2])' 2>/dev/null || true)"
    if [ "$own" = "$system" ]; then echo "python3-$1"; else echo "$own-$1"; fi
}

# --- Debian packages ------------------------------------------------------------------------------------------

has_program() { command -v "$1" >/dev/null 2>&1 || [ -x "/usr/sbin/$1" ] || [ -x "/sbin/$1" ]; }

has_header() { command -v gcc >/dev/null 2>&1 && echo "#include <$1>" | gcc -E -x c - >/dev/null 2>&1; }

has_library() { PATH="$PATH:/usr/sbin:/sbin" ldconfig -p 2>/dev/null | grep -q "$1"; }

missing_for_build() { # the packages without which no venv can be made here, one a line
    can_make_venv "$PYTHON" || python_package venv
    [ -e "$(python_header "$PYTHON")" ] || python_package dev
    has_program gcc || echo gcc
    has_header stdlib.h || echo libc6-dev
    has_header gmp.h || echo libgmp-dev
    [ -e /etc/ssl/certs/ca-certificates.crt ] || echo ca-certificates
}

missing_for_test() { # the packages without which tests would be skipped, one a line
    has_program systemd-analyze || echo systemd
    has_program git || echo git
}

missing_for_run() { # the packages without which a provider runs no job in a sandbox, one a line
    has_program bwrap || echo bubblewrap
    has_program newuidmap || echo uidmap
    has_program mkfs.ext4 || echo e2fsprogs
    has_program losetup || echo mount
    has_library libseccomp.so.2 || echo libseccomp2
}

install_packages() { # install_packages PACKAGE...: as root install them, else print the command and stop
    if [ $# -eq 0 ]; then return; fi
    local command="apt-get install --yes --no-install-recommends $*"
    if ! has_program apt-get; then
        fail "these are missing (by Debian's names): $*" "install them with this system's package manager, then run this again"
    fi
    if [ "$(id -u)" -ne 0 ]; then
        fail "these Debian packages are missing: $*" "an administrator installs them with:  sudo $command"
    fi
    say "installing the Debian packages: $*"
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq || fail "apt-get update failed" "is the network up? then run this again"
    apt-get install --yes --no-install-recommends -qq -o Dpkg::Use-Pty=0 "$@" >/dev/null ||
        fail "apt-get could not install $*" "run it by hand to see why:  $command"
}

# --- the virtual environment ----------------------------------------------------------------------------------

live_keepers() { # live_keepers VENV: pids of processes that look after a lease with that venv's Python
    local process
    for process in /proc/[0-9]*; do
        if tr '\0' '\n' <"$process/cmdline" 2>/dev/null |
            awk -v venv="$1/bin/" 'NR == 1 && index($0, venv) == 1 { own = 1 } /^node\.keeper/ { keeper = 1 }
                END { exit !(own && keeper) }'; then
            echo "${process#/proc/}"
        fi
    done
}

lock_content() { # lock_content PART...: all that decides what a venv of these parts holds
    local part
    "$PYTHON" -c 'import sys; print(sys.version, sys.base_prefix)'
    for part in "$@"; do cat "$REQUIREMENTS/$part.txt"; done
    # Of pyproject.toml, what is installed: not the settings of linters.
    sed -n '/^\[build-system\]/,/^\[tool\.ruff\]/p' "$ROOT/pyproject.toml"
    cat "$ROOT/scripts/_common.sh"
}

venv_stamp() { # venv_stamp VENV PART...: what an editable venv made now would hold, as one hash
    local venv="$1"
    shift
    { echo "$venv $ROOT"; lock_content build "$@"; } | sha256sum | cut -d' ' -f1
}

venv_is_current() { # venv_is_current VENV PART...
    local venv="$1" last="${*: -1}"
    [ -x "$venv/bin/python" ] &&
        [ "$(cat "$venv/$STAMP_NAME-$last" 2>/dev/null)" = "$(venv_stamp "$@")" ]
}

locked_install() { # locked_install VENV FILE: exactly the files whose hashes the lock holds
    "$1/bin/python" -m pip install --quiet --disable-pip-version-check --no-input --no-build-isolation \
        --require-hashes --requirement "$2"
}

make_venv() ( # make_venv VENV [dev]: a venv of the locked packages with this checkout in it, editable
    set -euo pipefail
    venv="$1"
    exec 9<"$ROOT"
    flock 9
    if ! venv_is_current "$venv" runtime; then
        keepers="$(live_keepers "$venv" | tr '\n' ' ')"
        if [ -n "$keepers" ]; then
            fail "keepers are running from $venv (pids $keepers), so it is not altered" "wait for their jobs, or end them:  gpunode stop --now"
        fi
        mapfile -t packages < <(missing_for_build)
        install_packages "${packages[@]}"
        say "making $venv with $("$PYTHON" --version 2>&1) from the lock files"
        rm -rf "$venv"
        "$PYTHON" -m venv "$venv"
        locked_install "$venv" "$REQUIREMENTS/build.txt"
        locked_install "$venv" "$REQUIREMENTS/runtime.txt"
        "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-input --no-build-isolation \
            --no-deps --editable "$ROOT"
        venv_stamp "$venv" runtime >"$venv/$STAMP_NAME-runtime"
    fi
    if [ "${2:-}" = dev ] && ! venv_is_current "$venv" runtime dev; then
        say "adding what the checks and tests need"
        locked_install "$venv" "$REQUIREMENTS/dev.txt"
        venv_stamp "$venv" runtime dev >"$venv/$STAMP_NAME-dev"
    fi
)
