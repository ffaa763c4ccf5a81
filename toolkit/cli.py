"""The command line: config classes become options (tyro); one-line errors; exit codes; defaults of a resumed run."""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import dataclasses
import difflib
import errno
import functools
import inspect
import io
import json
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, get_type_hints

from toolkit import VLLM, UsageError, spelled, visible
from toolkit.base import bars
from toolkit.base.ranks import RANK, RANKS, SHARDED
from toolkit.run import trackers
from toolkit.run.checkpoints import START
from toolkit.run.runs import PERMISSIONS

if TYPE_CHECKING:
    from rich.console import Console


def chosen(argv: Sequence[str], options: Mapping[str, str], switch: str) -> dict[str, Any]:
    """The values that a command line gives to a few options, and whether it has a switch.

    They decide the defaults of all others, so they are read before tyro parses the line and says what is wrong with it.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for name, default in options.items():
        parser.add_argument(spelled(name), f"--{name}", dest=name, default=default)
    parser.add_argument(f"--{switch}", action="store_true")
    try:
        return vars(parser.parse_known_args(argv)[0])
    except argparse.ArgumentError:
        return {**options, switch: False}


def grouped(kind: type[Any], default: Any) -> type[Any]:
    """A class with a field for each base class of a config class.  tyro shows each field under a heading of its own."""
    fields: list[tuple[str, Any, Any]] = []
    for base in kind.__bases__:
        field: Any = dataclasses.field()
        if default is not None:
            own = base(**{field.name: getattr(default, field.name) for field in dataclasses.fields(base)})
            field = dataclasses.field(default_factory=functools.partial(copy.copy, own))
        fields.append((base.__name__.removesuffix("Options"), base, field))
    return dataclasses.make_dataclass(kind.__name__, fields, kw_only=True)


SYNONYMS = (  # what the same thing is called here, in mini/, TRL, transformers and the public notebook
    ("generations", "k_samples", "num_generations", "group_size"),
    ("steps", "iters", "max_steps", "num_train_epochs", "epochs"),
    ("max_new_tokens", "max_completion_length", "max_tokens", "max_seq_length"),
    ("batch_size", "per_device_train_batch_size"),
    ("eval_batch_size", "per_device_eval_batch_size"),
    ("accumulation", "gradient_accumulation_steps"),
    ("learning_rate", "lr"),
    ("lr_schedule", "lr_scheduler_type"),
    ("warmup_steps", "lr_warmup", "warmup_ratio"),
    ("beta", "kl_coef"),
    ("model", "init", "model_name", "model_name_or_path"),
    ("weights", "load_in_4bit", "load_in_16bit"),
    ("lora_rank", "r", "lora_r"),
    ("adapt", "target_modules"),
    ("reasoning", "reasoning_effort"),
    ("sampler", "use_vllm", "vllm_mode"),
    ("vllm_server", "vllm_server_base_url"),
    ("keep", "save_total_limit"),
    ("resume", "resume_from_checkpoint"),
    ("report_to", "track"),
    ("ladder", "board_size", "size", "target"),
)


def check_names(kind: type[Any], argv: Sequence[str], prog: str) -> None:
    """Raise UsageError for an option that a command does not have, or that stands there without its name.

    tyro would read the comments of all options to find similar ones, which takes most of the time of its answer.
    """
    fields = dataclasses.fields(kind)
    names = [field.name for field in fields]
    unnamed = [field.name for field in fields if field.default is field.default_factory is dataclasses.MISSING]
    for word in argv:
        name = re.sub("^--?|=.*", "", word, flags=re.DOTALL).replace("-", "_")
        if not re.match("--?[A-Za-z]", word) or name in ("h", "help") or name.startswith("tyro_"):
            continue
        if name not in names and name.removeprefix("no_") not in names:
            same = [each for group in SYNONYMS if name in group for each in names if each in group]
            similar = [each for each in names if len(name) > 2 and name in each]
            similar = similar or difflib.get_close_matches(name, names)
            options = ", ".join(map(spelled, sorted(similar)))
            found = f"take {spelled(same[0])}; " if same else f"similar: {options}; " * bool(options)
            raise UsageError(f"no option {word.partition('=')[0]} ({found}see {prog} --help)")
        if name in unnamed:
            raise UsageError(f"leave out the word {word.partition('=')[0]}: {prog} takes its value alone")


def check_empty(kind: type[Any], argv: Sequence[str]) -> None:
    """Raise UsageError for an empty value, which a script's unset variable leaves.  As a path it would be the working
    directory.  An option that is empty by default may be empty."""
    words = [part for word in argv for part in (word.split("=", 1) if word.startswith("--") else [word])]
    for option, value in pairwise(("", *words)):
        if not value.strip() and getattr(kind, option[2:].replace("-", "_"), None) != "":
            named = option if option.startswith("--") else "a name"
            raise UsageError(f"{named} is empty: give it a value{', or leave it out' * option.startswith('--')}")


def wanted(kind: type[Any], name: str) -> str:
    """What an option takes, with its default as the example."""
    usual = getattr(kind, name, None)
    values = list(usual) if isinstance(usual, tuple) else [usual] if usual else []
    words = re.findall(r"\w+", str(get_type_hints(kind).get(name)))
    noun = "whole number" if "int" in words else "number" if "float" in words else "value"
    like = f", like {' '.join(map(str, values[:3]))}" if values else ""
    return (f"{noun}s" if isinstance(usual, tuple) else f"a {noun}") + like


def check_config(config: Any) -> None:
    """Raise UsageError for a number out of its range, which stands beside its type, and for what a class refuses."""
    for name, hint in get_type_hints(type(config), include_extras=True).items():
        numbers = value if isinstance(value := getattr(config, name), tuple) else [value]
        for low, high in getattr(hint, "__metadata__", ()):
            if out := [number for number in numbers if number is not None and not low <= number <= high]:
                ends = (format(end, ".15g") if isinstance(end, float) else end for end in (low, high))
                raise UsageError("{} must lie between {} and {}, not {}".format(spelled(name), *ends, out[0]))
    for kind in type(config).__mro__:
        if check := vars(kind).get("check"):
            check(config)


def in_plain_words(said: str, kind: type[Any], argv: Sequence[str]) -> str:
    """What tyro says of a command line, without what Python says of the value.

    Tyro raises nothing: it prints a box and exits.  test_cli.py holds each of these messages, so a new version that
    words them otherwise fails there.
    """
    option = found[0] if (found := re.search("--[a-z][a-z-]*", said)) else ""
    name = option[2:].replace("-", "_")
    if found := re.fullmatch(r"Error parsing .*?(?:base 10|to float|for arguments): \[?(.*?)\]?", said):
        return f"{option} takes {wanted(kind, name)}, not {found[1]}"
    if found := re.fullmatch(r"invalid choice (.*) for argument .*\. Expected one of \((.*)\)\.", said):
        return f"{option} is one of {found[2].replace(chr(39), '')}, not {found[1]}"
    if found := re.fullmatch(r"Missing from (.*?): [A-Z]+ (.*) \(required\)", said):
        return f"{found[1]} needs {found[2]}"
    if said.startswith("Missing value"):
        return f"{option} needs {wanted(kind, name)}"
    if said.startswith("Unrecognized options: "):
        extra = said.removeprefix("Unrecognized options: ").split(", ")[0]
        before = argv[argv.index(extra) - 1] if extra in argv[1:] else ""
        switch = isinstance(getattr(kind, before[2:].replace("-", "_"), None), bool)
        return f"{before} takes no value: leave out {extra}" if switch else f"{extra} belongs to no option"
    return re.sub(r"^Error parsing \w+: ", "", said)  # what a class refuses


@functools.cache
def classes_in(file: str) -> dict[str, str]:
    """The source of each class at the top level of a file."""
    text = Path(file).read_text(encoding="utf-8")
    lines = text.split("\n")  # as Python counts them
    kinds = [node for node in ast.parse(text).body if isinstance(node, ast.ClassDef)]
    return {kind.name: "\n".join(lines[kind.lineno - 1 : kind.end_lineno]) for kind in kinds}


def source_of(kind: type[Any]) -> str:
    """A class's source, in which tyro reads the comments.  Raises OSError or TypeError if there is none.

    Before Python 3.13, inspect.getsource parses the whole file for each class.
    """
    source = classes_in(inspect.getsourcefile(kind) or "").get(kind.__qualname__)
    if source is None:
        raise OSError(f"no source of {kind.__qualname__}")
    return source


def parse(kind: type[Any], argv: Sequence[str], prog: str, default: Any = None) -> Any:
    """The config of a command line.  Raises UsageError; SystemExit(0) after --help."""
    check_names(kind, argv, prog)
    from unittest import mock

    import tyro

    # Headings are for readers, and parsing takes a third less without them.  With one base there would be one heading.
    headed = len(kind.__bases__) > 1 and not {"-h", "--help"}.isdisjoint(argv)
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint), mock.patch.object(inspect, "getsource", source_of):
            parsed: Any = tyro.cli(
                grouped(kind, default) if headed else kind,
                args=list(argv),
                prog=prog,
                description=inspect.getdoc(kind),
                **({} if headed or default is None else {"default": default}),
                config=(tyro.conf.PositionalRequiredArgs, tyro.conf.OmitArgPrefixes),
            )
    except SystemExit as stop:
        if stop.code in (0, None):
            raise
        lines = [line.strip("│ ") for line in complaint.getvalue().splitlines()[1:]]
        parts = (list(part) for empty, part in groupby(lines, lambda line: not line.strip("─╰╯-")) if not empty)
        raise UsageError(f"{in_plain_words(' '.join(next(parts)), kind, argv)} (see {prog} --help)") from None
    check_config(parsed)
    return parsed


Commands = Mapping[str, tuple[type[Any], Callable[[Any, Any], Mapping[str, Any]]]]
# The options that may differ when a run is resumed; besides, a step's completions may be split in another way.
CHANGEABLE = {"config", "resume", "keep", "save_steps", "patience", "minutes", "quiet", "json", *PERMISSIONS}


def split(argv: Sequence[str], commands: Commands) -> tuple[str, list[str]]:
    """A command line's command, by default train, and its options."""
    return (argv[0], list(argv[1:])) if argv and argv[0] in commands else ("train", list(argv))


def check_sampler(config: Any) -> None:
    """Raise UsageError if vLLM cannot sample for a run.  A server that is named has to answer."""
    from toolkit.model import machine
    from toolkit.run import server

    if config.sampler != "vllm":
        raise UsageError("--vllm-server needs --sampler vllm")
    if config.vllm_server:
        server.named(config.vllm_server).ask("/health", seconds=10)
    elif RANKS > 1:
        raise UsageError("with several ranks, --sampler vllm needs --vllm-server: see docs/cluster.md")
    elif not machine.gpu_is_there():
        raise UsageError("--sampler vllm needs a GPU, or --vllm-server: vLLM has no LoRA for experts on a CPU")
    elif not (VLLM / "gpt-2048-rl.stamp").exists():
        raise UsageError("--sampler vllm needs vLLM, in an environment of its own: run ./setup.sh --with vllm")


ITS_PLACE = ("output_dir", "run_name", "resume", "json")  # what a run's options say of the run itself


# A key that reads otherwise, or a value that reads as an option, could name one that no file decides, or tyro's own.
KEY, OPTION = re.compile("(?!(h|help|tyro_.*)$)[a-z][a-z_0-9]*"), re.compile("--|-[A-Za-z]")
SWITCH = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}  # as YAML spells it


def check_entry(path: Path, kind: type[Any], key: str, value: Any) -> None:
    """Raise UsageError for an entry of a file of options that cannot be one option, or that no file decides."""
    name = key.replace("-", "_")
    option = name.removeprefix("no_")
    values = value if isinstance(value, list) else [value]
    if not all(isinstance(each, str) for each in values):
        raise UsageError(f"--config {path}: {key} is one value, or a list of values")
    if not KEY.fullmatch(name) or any(map(OPTION.match, values)):
        raise UsageError(f"--config {path}: {key}, or a value of it, reads as another option")
    if name == "config":
        raise UsageError(f"--config {path} names another file: put its options here")
    allowed = map(str.lower, map(str, PERMISSIONS.get(option, ())))
    if option in PERMISSIONS and (name != option or str(value).lower() not in allowed):
        raise UsageError(f"--config {path} sets {spelled(option)}, which no file decides: name it as an option")
    if isinstance(value, list) and len(value) != 1 and not isinstance(getattr(kind, name, ()), tuple):
        raise UsageError(f"--config {path}: {key} is one value, not {len(value)}")
    if isinstance(getattr(kind, option, None), bool) and str(value).lower() not in SWITCH:
        raise UsageError(f"--config {path}: {key} is true or false, not {value!r}")


def words_of_file(path: Path, kind: type[Any]) -> list[str]:
    """The options of a YAML or JSON file as words of a command line.  A run's config.json gives all but its place.

    Raises UsageError for a file that is none, and for options that no file decides.
    """
    import yaml

    try:
        options = yaml.load(path.read_text(encoding="utf-8"), yaml.BaseLoader)  # of texts: a stage 6:16 is no number
    except (OSError, UnicodeDecodeError, RecursionError, yaml.YAMLError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is neither YAML nor JSON"
        raise UsageError(f"--config {path} cannot be read: {reason}") from None
    if not isinstance(options, dict):
        raise UsageError(f"--config {path} holds no options: write one a line, like steps: 100")
    if (path.parent / "origin.json").exists():  # a run's
        known = {field.name for field in dataclasses.fields(kind)} - {"config", *ITS_PLACE}
        options = {name: value for name, value in options.items() if name in known}
    words: list[str] = []
    for key, value in options.items():
        check_entry(path, kind, str(key), value)
        name = str(key).replace("-", "_")
        option = name.removeprefix("no_")
        if isinstance(getattr(kind, option, None), bool):
            on = SWITCH[str(value).lower()] == (name == option)
            words.append(spelled(option if on else f"no_{option}"))
        elif value not in ("", "null"):
            words += [spelled(name), *(value if isinstance(value, list) else [value])]
    return words


def own_game(path: Path, kind: Any, reasoning: str) -> list[str]:
    """The options with which an adapter or a program was made, as far as a command has them."""
    from toolkit.run import runs

    names = {field.name for field in dataclasses.fields(kind)}
    if reasoning != "none":
        names.remove("max_new_tokens")  # the effort that is asked for has its own
    return runs.options_of(path, names)


def check_start(config: Any) -> None:
    """Raise UsageError for an adapter from which no run can begin, and for options that contradict it."""
    from toolkit.model import adapters

    if decided := adapters.decided_options(config.model):
        adapters.check_adapter(Path(config.model))
        if SHARDED:
            raise UsageError("FSDP begins from whole models: merge the adapter, with export --format merged_16bit")
    for name, value in decided.items():
        if getattr(config, name) != value:
            raise UsageError(f"{spelled(name)} is {value} in {config.model}: leave it out, or begin from another model")


def check_schedule(config: Any, default: Any) -> None:
    """Raise UsageError for a part of the schedule that is longer than a new run, which a default may be in a short try,
    and for one that the schedule does not have.
    """
    if config.lr_schedule == "linear" and config.decay_steps != default.decay_steps:
        raise UsageError("--decay-steps needs --lr-schedule constant: linear falls from the warm-up's end on")
    for name in ("warmup_steps", "decay_steps"):
        if config.steps < (value := getattr(config, name)) != getattr(default, name):
            raise UsageError(
                f"{spelled(name)} {value:g} is more than --steps {config.steps}: name fewer, or below 1 a share of them"
            )


def train_arguments(argv: list[str], prog: str, kind: type[Any], defaults: Callable[[str, str, str], Any]) -> Any:
    """The options of train.  Their defaults are those of the run to resume, or of the model, recipe and effort."""
    from toolkit.model import models
    from toolkit.run import runs

    file = chosen(argv, {"config": ""}, "resume")["config"]
    words = words_of_file(Path(file), kind) if file else []
    given = chosen(
        [*words, *argv],
        {"model": "auto", "recipe": "stable", "reasoning": "none", "run_name": "", "output_dir": "outputs"},
        "resume",
    )
    if given["model"].endswith(".py"):
        raise UsageError(f"{given['model']} is a program: eval and play take one")
    model = models.resolve_model(given["model"])
    run = runs.run_to_resume(given["run_name"], Path(given["output_dir"]), given["resume"])
    default = runs.stored_config(run, kind) if run else defaults(model, given["recipe"], given["reasoning"])
    own = [] if run else own_game(Path(model), kind, given["reasoning"])
    try:
        config = parse(kind, [*own, *words, *argv], prog, default)
    except UsageError as error:
        named = re.search("--[a-z][a-z-]*", str(error))
        if named and named[0] in words and named[0] not in argv:
            raise UsageError(f"--config {file}: {error}") from None
        raise
    config.model = models.resolve_model(config.model)
    if run:
        alike = config.batch_size * config.accumulation == default.batch_size * default.accumulation
        runs.check_unchanged(config, default, CHANGEABLE | set(runs.SPLIT if alike else ()))
        config.output_dir, config.run_name = default.output_dir, default.run_name
        if (run / START).is_dir():
            config.model = str(run / START)  # the folder that it was copied from may be gone
        for option in runs.forgotten(run, config) if RANK == 0 else ():
            print(
                f"{run.name} began with {option}, and goes on without: no file decides that, so name it again to "
                "have it",
                file=sys.stderr,
            )
    else:
        check_schedule(config, default)
    check_start(config)
    trackers.named(config.report_to)
    if config.vllm_server or config.sampler == "vllm":
        check_sampler(config)
    if own and RANK == 0:
        print(f"options taken from {model}: {' '.join(own)}", file=sys.stderr)
    return config


def program_file(name: str) -> Path:
    """The file of a program.  A run's folder stands for its best program."""
    from toolkit.model import models
    from toolkit.run import runs

    path = Path(name)
    if not path.exists() and (name in models.MADE_HERE or re.match("https?://", name)):
        raise UsageError(f"{name} is no file: a model or a server is asked with --model {name}")
    if not path.is_dir():
        return path
    if not (path / runs.BEST_PROGRAM).is_file():
        raise UsageError(f"{path} is no run with a {runs.BEST_PROGRAM}: name a run's folder or a .py file")
    return path / runs.BEST_PROGRAM


HOW_IT_IS_ASKED = ("max_new_tokens", "temperature", "example")


def with_own_game(config: Any, argv: list[str], prog: str, defaults: Callable[[str, str, str], Any]) -> Any:
    """The config of eval or play with the game that its model or program was made for, unless options name another."""
    from toolkit.model import models

    plays = hasattr(config, "player") and not config.model  # a file, and no model's answer
    name = getattr(config, "player", config.model)
    path = program_file(name) if plays else Path(models.resolve_model(name))
    options, length = own_game(path, type(config), config.reasoning), list[str]()
    if not plays and config.reasoning != "none":
        length = ["--max-new-tokens", str(defaults(str(path), "stable", config.reasoning).max_new_tokens)]
    elif not plays and not options:
        recipe = defaults(str(path), "stable", "none")  # asked as in training
        options = [word for name in HOW_IT_IS_ASKED for word in (spelled(name), str(getattr(recipe, name)))]
    try:
        made_for = parse(type(config), [*length, *options, *argv], prog) if options or length else copy.copy(config)
    except UsageError as error:
        raise UsageError(f"{error} (with the options of {path}: {' '.join(options)})") from None
    if plays:
        config.player = made_for.player = str(path)
    if options and made_for != config:
        print(f"options taken from {path}: {' '.join(options)}", file=sys.stderr)
    return made_for


def unread(descriptor: int) -> None:
    """Let a stream write to nowhere from now on: what is still buffered, too, because Python flushes at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)


def end_unread() -> NoReturn:
    """End quietly, as by SIGPIPE: the program that read stdout, such as head, has ended."""
    unread(1)
    raise SystemExit(128 + signal.SIGPIPE) from None


@contextlib.contextmanager
def while_it_is_read() -> Iterator[None]:
    """Write to stdout as long as somebody reads it."""
    try:
        try:
            yield
        finally:
            if sys.stdout:  # a daemon may have none
                sys.stdout.flush()
    except BrokenPipeError:
        end_unread()


class Lasting:
    """A stream that may lose its reader: a terminal that closes (EIO), `tee` that Ctrl-C ends (EPIPE), a full disk.

    From then on it writes to nowhere, because a training is worth more than what it prints.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write, to whom it may concern."""
        with self._unheard():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Bring it to the reader, if there is one."""
        with self._unheard():
            self._stream.flush()

    @contextlib.contextmanager
    def _unheard(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno not in (errno.EIO, errno.EPIPE, errno.ENOSPC):
                raise
            unread(self._stream.fileno())


def parse_arguments(argv: Sequence[str], commands: Commands, defaults: Callable[[str, str, str], Any]) -> Any:
    """A command line's config.  Raises UsageError; SystemExit(0) after --help.

    `defaults` returns the training configuration of a model, a recipe and an effort.
    """
    name, rest = split(argv, commands)
    if rest and name == "train" and not rest[0].startswith("-"):  # train's options all have names
        raise UsageError(f"no command {rest[0]!r}: one of {', '.join(commands)}")
    script = sys.modules[commands["train"][1].__module__]
    prog = f"{Path(str(script.__file__)).name} {name}"
    if RANKS > 1 and name != "train":
        raise UsageError(f"{name} runs in one process: start it with python, without torchrun")
    if name == "train" and rest[:1] in (["-h"], ["--help"]):
        print(inspect.getdoc(script))
    kind = commands[name][0]
    check_empty(kind, rest)
    config = train_arguments(rest, prog, kind, defaults) if name == "train" else parse(kind, rest, prog)
    return with_own_game(config, rest, prog, defaults) if name in ("eval", "play") else config


def escaping(console: Console) -> Console:
    """Let a console show control characters and not send them: names and texts may come from a stranger's files."""
    from rich.segment import Segment

    whole = console.render

    def render(*what: Any) -> Iterator[Segment]:
        for segment in whole(*what):
            yield segment if segment.control else segment._replace(text=visible(segment.text))

    console.render = render  # type: ignore[assignment, method-assign]
    return console


def tell(error: str) -> int:
    """Print the line of an error that the user can fix.  Returns its exit code, also where no stream takes a word."""
    if sys.stdout:
        Lasting(sys.stdout).flush()  # what a full disk does not take would fail once more at Python's end
    if sys.stderr:
        stderr = Lasting(sys.stderr)
        stderr.write(f"error: {visible(' '.join(error.split()))}\n")
        stderr.flush()
    return 2


def exit_code_of(result: Mapping[str, Any]) -> int:
    """The exit code of a command that ended by itself."""
    if result.get("fit") is False:
        return 2
    if result.get("interrupted"):
        return 128 + int(result["interrupted"])
    return 3 if result.get("collapsed") else 0


def main(parse_arguments: Callable[[], Any], run: Callable[[Any, Console], Mapping[str, Any]]) -> int:
    """Parse a command line and run its command.

    Returns the exit code: 0; 2 for an error that the user can fix, after one line that says how; 3 where training
    collapsed; 4 where memory ran out; 129 for SIGHUP, 130 for Ctrl-C, 143 for SIGTERM; 141 where nobody reads stdout
    any more.
    """
    real_stdout = sys.stdout
    try:
        with while_it_is_read():
            config = parse_arguments()
        from rich.console import Console

        as_json = getattr(config, "json", False)
        with contextlib.ExitStack() as streams:
            if hasattr(config, "save_steps"):  # it trains
                for redirect, stream in (
                    (contextlib.redirect_stdout, sys.stdout),
                    (contextlib.redirect_stderr, sys.stderr),
                ):
                    streams.enter_context(redirect(Lasting(stream) if stream else None))
            if as_json:
                streams.enter_context(contextlib.redirect_stdout(sys.stderr))
            console = escaping(Console(quiet=RANK > 0, markup=False, emoji=False, highlight=False))
            console.on_broken_pipe = end_unread  # type: ignore[method-assign]  # rich's own exit code is 1
            if not getattr(config, "quiet", False):
                bars.show_on(console)
            result = run(config, console)
        if as_json and RANK == 0:
            with while_it_is_read():
                print(json.dumps(result), file=real_stdout)
        return exit_code_of(result)
    except UsageError as error:
        tell(str(error))
        return error.exit_code
    except ModuleNotFoundError as error:
        return tell(f"the library {error.name} is not installed: run ./setup.sh, then: source .venv/bin/activate")
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        place = error.filename or "what this prints or writes"
        return tell(f"no space is left on the disk of {place}: make room there")
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
