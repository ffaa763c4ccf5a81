"""The container: no engine runs here, so its parts are tried.  For the jail under Docker's profile see test_jail."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import HONEST, ROOT, install_docker_profile

DOCKERFILE = (ROOT / "Dockerfile").read_text()


def enter(folder: Path, *command: str) -> str:
    """What a command prints when the container's entry point runs it in a folder."""
    entry = str(ROOT / "docker-entrypoint.sh")
    done = subprocess.run([entry, *command], cwd=folder, capture_output=True, text=True, check=True, timeout=60)
    return done.stdout.strip()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_what_is_written_belongs_to_the_owner_of_the_folder(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    os.chown(tmp_path, 12345, 23456)
    for parent in tmp_path.parents[:2]:
        parent.chmod(0o755)
    assert enter(tmp_path, "bash", "-c", 'touch made; echo "$(id -u) $(id -g) $(id -G) $HOME $USER"') == (
        f"12345 23456 23456 {tmp_path}/.cache trainer"
    )
    assert ((tmp_path / "made").stat().st_uid, (tmp_path / "made").stat().st_gid) == (12345, 23456)
    assert enter(tmp_path, "grep", "NoNewPrivs", "/proc/self/status").split()[1] == "1"


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_a_container_without_that_right_says_how_to_start_it(tmp_path: Path) -> None:
    """--cap-drop=ALL in another owner's folder: "setpriv: setresuid failed" told nobody what to do."""
    tmp_path.chmod(0o755)
    os.chown(tmp_path, 12345, 23456)
    entry = ["setpriv", "--bounding-set=-all", "--inh-caps=-all", str(ROOT / "docker-entrypoint.sh"), "true"]
    done = subprocess.run(entry, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (
        2, "error: this container may not change its user: start it with --user $(id -u):$(id -g)\n"
    )  # fmt: skip


def test_whoever_is_not_root_stays_who_he_is(tmp_path: Path) -> None:
    """docker run --user, and a rootless engine, where root is the caller."""
    assert enter(tmp_path, "id", "-u") == str(os.getuid())


def test_the_exit_code_is_that_of_the_command(tmp_path: Path) -> None:
    with pytest.raises(subprocess.CalledProcessError) as failure:
        enter(tmp_path, "bash", "-c", "exit 3")
    assert failure.value.returncode == 3


def test_libraries_are_compiled_once_and_not_at_every_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The container's user may be unable to write .pyc files beside them; then each start took twice as long."""
    (tmp_path / "image").mkdir()
    (tmp_path / "image" / "library.py").write_text("a = 1")
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    enter(tmp_path, sys.executable, "-c", "import sys; sys.path.append('image'); import library")
    assert list(tmp_path.glob("image/*")) == [tmp_path / "image" / "library.py"]
    assert len(list((tmp_path / ".cache").rglob("library.*.pyc"))) == 1


@pytest.mark.skipif(
    os.getuid() != 0 or os.uname().machine != "x86_64" or not Path("/usr/bin/python3").exists(),
    reason="needs root, the numbers of x86-64, and a Python that is open to others",
)
def test_strategies_are_jailed_in_there(tmp_path: Path) -> None:
    """Under Docker's default profile, as the owner of the folder, who has no name and no capabilities."""
    shutil.copy(ROOT / "gpt_2048_rl.py", tmp_path)
    shutil.copytree(ROOT / "toolkit", tmp_path / "toolkit")
    for path in (tmp_path, *tmp_path.rglob("*")):
        os.chown(path, 12345, 23456)
    for parent in (tmp_path, *tmp_path.parents[:-2]):
        parent.chmod(parent.stat().st_mode | 0o055)
    code = f"""import os, gpt_2048_rl as program
((result,),) = program.execute_strategies([{HONEST!r}], (1,), target=256)
print(os.getuid(), program.shared_pool().jailed, result.outcome)"""
    python = "/usr/bin/python3"  # other users may be unable to read root's own Python
    if subprocess.run([python, "-c", "import sys; sys.exit(sys.version_info < (3, 11))"], check=False).returncode:
        pytest.skip(f"{python} is older than 3.11")
    command = [str(ROOT / "docker-entrypoint.sh"), python, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False,
                          preexec_fn=install_docker_profile)  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "12345 True success\n"), done.stderr


def test_the_base_image_is_pinned_and_all_that_is_copied_may_be() -> None:
    assert re.search(r"^FROM nvidia/cuda:\d+\.\d+\.\d+-base-ubuntu24\.04$", DOCKERFILE, re.MULTILINE)
    allowed = {line.removeprefix("!") for line in (ROOT / ".dockerignore").read_text().splitlines()} - {"*"}
    copied = re.search(r"^COPY (.*) \./$", DOCKERFILE, re.MULTILINE)
    assert copied
    assert set(copied[1].split()) == allowed
    assert all((ROOT / name).is_file() for name in allowed)


def test_what_the_set_up_asks_of_a_system_is_installed() -> None:
    """On a GPU: a C compiler and Python.h; without uv: venv; and the tools that are no part of a base image."""
    assert {"gcc", "libc6-dev", "python3-dev", "python3-venv", "ca-certificates"} <= set(DOCKERFILE.split())
