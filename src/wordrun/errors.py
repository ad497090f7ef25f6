"""User errors: shown as one message without a traceback, each kind with its own exit status."""

import inspect
import re
import sys
import textwrap
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from wordrun.synonyms import VALUES

# EX_TEMPFAIL in sysexits.h: the run stopped on request and can be resumed.
REQUEUE = 75
MARK = "wordrun"
"""File that wordrun's commands leave in the folder in which launch's ranks report, whatever has started them."""
SHOWN = 4
"""Lines of a part that are shown on the screen when it fails."""


class UserError(Exception):
    """Something outside the program is wrong; the message names it, its value and the remedy."""

    exit_status = 1


class ConfigError(UserError, ValueError):
    """The options contradict each other or name something that does not exist; nothing was started."""

    exit_status = 2


class WorldError(UserError):
    """The launcher's variables, MPI and the machine do not agree on who the ranks are."""

    exit_status = 2


class PartError(UserError, RuntimeError):
    """The code of a part raised an exception, which is the cause; the message names the part."""

    def __init__(self, what: str, error: BaseException, code: Any) -> None:
        """Say that ``what`` failed with ``error``, and in which line of the package that defines ``code``."""
        try:
            file = inspect.getsourcefile(code) or ""
        except (TypeError, OSError):  # it has no file
            file = ""
        self.frames = _frames_of(error, code, file)
        """The lines of the part that led to the error."""
        name, line = (self.frames[-1].filename, f":{self.frames[-1].lineno}") if self.frames else (file, "")
        where = f" ({Path(name).name}{line})" if name else ""
        super().__init__(f"{what}: {type(error).__name__}: {first_line(error)}{where}")
        self.__cause__ = error
        self.file: Path | None = None

    def note(self, file: Path) -> None:
        """Add to the message, once, that the traceback is in ``file``."""
        if self.file is None:
            self.file, self.args = file, (f"{self}; traceback: {file}",)

    def tracebacks(self) -> str:
        """Return the traceback, for a file."""
        return "".join(traceback.format_exception(self))

    def excerpt(self) -> str:
        """Return the message and, below it, the part's own lines that led to the error."""
        lines = [f"  {Path(frame.filename).name}:{frame.lineno}: {frame.line}" for frame in self.frames if frame.line]
        return "\n".join([str(self), *lines[-SHOWN:]])


class SeveralPartsError(PartError):
    """Several parts failed."""

    def __init__(self, errors: Sequence[UserError]) -> None:
        """Say what each of ``errors`` says."""
        UserError.__init__(self, "\n".join(map(str, errors)))
        self.errors, self.frames, self.file = errors, [], None

    def tracebacks(self) -> str:
        """Return the tracebacks of all errors."""
        return "\n".join("".join(traceback.format_exception(error)) for error in self.errors)


def raise_all(errors: Sequence[UserError]) -> None:
    """Raise ``errors`` as one, if there are any."""
    if len(errors) == 1:
        raise errors[0]
    if any(isinstance(error, PartError) for error in errors):
        raise SeveralPartsError(errors)
    if errors:
        raise ConfigError("\n".join(map(str, errors)))


def _frames_of(error: BaseException, code: Any, file: str) -> list[traceback.FrameSummary]:
    """Return the frames of ``error`` in the package that defines ``code``; of wordrun's own, only those in ``file``."""
    package = (getattr(code, "__module__", None) or "").partition(".")[0]
    walked = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    found = traceback.extract_tb(error.__traceback__)
    own = [str(frame.f_globals.get("__name__")).partition(".")[0] == package != "wordrun" for frame in walked]
    return [each for each, inside in zip(found, own, strict=False)
            if each.filename == file or (inside and each.filename[:1] != "<")]  # fmt: skip


PAGES = {
    "wordrun.arguments": "",
    "wordrun.chat": "",
    "wordrun.backend": "backends.md#which-models-on-which-backends",
    "wordrun.backend.base.checked": "extend.md#a-model",
    "wordrun.backend.deepspeed": "backends.md#deepspeed",
    "wordrun.backend.float8": "speed.md#float8",
    "wordrun.backend.groups": "extend.md#an-optimizer",
    "wordrun.backend.optimizer": "extend.md#an-optimizer",
    "wordrun.backend.pipeline": "backends.md#pipelines",
    "wordrun.backend.unused": "backends.md#parameters-without-a-gradient",
    "wordrun.bandwidth": "backends.md#how-fast-do-the-ranks-communicate",
    "wordrun.checkpoint": "checkpoints.md#what-a-checkpoint-contains",
    "wordrun.checkpoint.folder.choose": "checkpoints.md#resuming",
    "wordrun.checkpoint.folder.locate": "checkpoints.md#resuming",
    "wordrun.checkpoint.node_memory": "checkpoints.md#checkpoints-in-memory",
    "wordrun.checks": "",
    "wordrun.sizes": "launch.md#fewer-ranks",
    "wordrun.compat_vision": "install.md#extras",
    "wordrun.compat_deepspeed": "backends.md#deepspeed",
    "wordrun.completion": "",
    "wordrun.composer": "",
    "wordrun.refusals": "",
    "wordrun.config": "",
    "wordrun.data": "data.md#sources",
    "wordrun.data.examples": "tasks.md#your-own-model-data-and-metric",
    "wordrun.data.examples.__getitem__": "tasks.md#batches-of-your-own",
    "wordrun.data.images": "tasks.md#images",
    "wordrun.data.loader": "data.md#loading",
    "wordrun.data.manifest": "data.md#preparing",
    "wordrun.data.order": "data.md#loading",
    "wordrun.data.tokenizers": "data.md#tokenizers",
    "wordrun.data.tokenizers._refuse_texts": "extend.md#a-tokenizer",
    "wordrun.dist.agreement": "jobs.md#a-hang",
    "wordrun.dist.device": "install.md#clusters",
    "wordrun.dist.mesh": "backends.md#layout-of-the-ranks",
    "wordrun.dist.mpi": "dist.md#how-a-process-is-identified",
    "wordrun.dist.rendezvous": "launch.md#who-can-connect",
    "wordrun.dist.setup": "install.md#clusters",
    "wordrun.dist.world": "dist.md#how-a-process-is-identified",
    "wordrun.ds_config": "backends.md#deepspeed",
    "wordrun.errors": "",
    "wordrun.export": "generate.md#export",
    "wordrun.generate": "generate.md#generate",
    "wordrun.launch.limits": "launch.md#submit",
    "wordrun.launch": "launch.md#in-a-slurm-or-pbs-job",
    "wordrun.launch.cli": "",
    "wordrun.launch.freeze": "jobs.md#the-code-that-a-job-runs",
    "wordrun.launch.job_script": "launch.md#submit",
    "wordrun.launch.launchers.local": "launch.md#one-machine",
    "wordrun.launch.launchers.torchrun": "launch.md#one-machine",
    "wordrun.launch.parser": "",
    "wordrun.launch.planner": "",
    "wordrun.launch.points": "study.md#scaling",
    "wordrun.launch.ranks.check_crowd": "launch.md#one-machine",
    "wordrun.launch.site_files": "launch.md#sites",
    "wordrun.launch.stacks": "jobs.md#a-hang",
    "wordrun.launch.submit": "launch.md#submit",
    "wordrun.layouts": "backends.md#layout-of-the-ranks",
    "wordrun.model": "extend.md#a-model",
    "wordrun.model.experts": "experts.md#what-works-with-what",
    "wordrun.model.huggingface": "generate.md#export",
    "wordrun.model.images": "tasks.md#images",
    "wordrun.model.lora": "finetune.md#lora",
    "wordrun.model.mup": "scaling_laws.md#mup-one-learning-rate-for-all-widths",
    "wordrun.model.plain": "tasks.md#your-own-model-data-and-metric",
    "wordrun.model.pretrained": "generate.md#start-from-existing-weights",
    "wordrun.new": "",
    "wordrun.part_source": "extend.md#where-parts-are-found",
    "wordrun.plan": "plan.md#another-model-or-backend",
    "wordrun.plan.budget": "plan.md#a-memory-budget",
    "wordrun.plan.comparison": "plan.md#before-every-run",
    "wordrun.plan.options": "",
    "wordrun.plan.time": "plan.md#the-time-of-a-step",
    "wordrun.prepare": "data.md#preparing",
    "wordrun.prepare.sources": "data.md#sources",
    "wordrun.prepare.sources.pairs": "finetune.md#fine-tune",
    "wordrun.prepare.vision": "tasks.md#images",
    "wordrun.project": "extend.md#where-parts-are-found",
    "wordrun.registry": "extend.md#where-parts-are-found",
    "wordrun.report": "train.md#look-at-runs-and-compare-them",
    "wordrun.runs": "train.md#look-at-runs-and-compare-them",
    "wordrun.slurm": "launch.md#in-a-slurm-or-pbs-job",
    "wordrun.study": "study.md#interrupted-studies",
    "wordrun.study.calibrate": "plan.md#the-time-of-a-step",
    "wordrun.study.cli": "",
    "wordrun.study.coord": "scaling_laws.md#the-coordinate-check",
    "wordrun.study.isoflop": "scaling_laws.md#isoflop-the-best-size-for-a-budget",
    "wordrun.study.scaling": "study.md#scaling",
    "wordrun.sweep": "sweeps.md#options-of-the-launcher",
    "wordrun.sweep.folder": "sweeps.md#continuing-a-sweep",
    "wordrun.sweep.grid": "sweeps.md#continuing-a-sweep",
    "wordrun.sweep.hydra_launcher.search": "sweeps.md#searching-with-optuna",
    "wordrun.sweep.search": "sweeps.md#searching-with-optuna",
    "wordrun.test_dist": "install.md#check-the-installation",
    "wordrun.track": "train.md#trackers",
    "wordrun.train.checkpoint": "checkpoints.md#when-checkpoints-are-written",
    "wordrun.train.cli": "",
    "wordrun.train.evaluation": "extend.md#a-metric",
    "wordrun.train.examples": "tasks.md#your-own-model-data-and-metric",
    "wordrun.train.failing": "train.md#hooks",
    "wordrun.train.failing.explained": "",
    "wordrun.train.finite": "checkpoints.md#non-finite-gradients",
    "wordrun.train.help": "",
    "wordrun.train.hook_checks": "train.md#hooks",
    "wordrun.train.hooks": "train.md#hooks",
    "wordrun.train.hooks.standard": "checkpoints.md#when-checkpoints-are-written",
    "wordrun.train.in_memory": "checkpoints.md#checkpoints-in-memory",
    "wordrun.train.language": "data.md#tokenizers",
    "wordrun.train.language._check_reads": "extend.md#a-model",
    "wordrun.train.language.generate": "generate.md#generate",
    "wordrun.train.lora_base": "finetune.md#lora",
    "wordrun.train.memory": "plan.md#before-every-run",
    "wordrun.train.memory_resume": "checkpoints.md#checkpoints-in-memory",
    "wordrun.train.profile": "train.md#profilers",
    "wordrun.train.resume": "checkpoints.md#resuming",
    "wordrun.train.rng": "train.md#repeatable-runs",
    "wordrun.train.run": "train.md#the-run-directory",
    "wordrun.train.task": "generate.md#start-from-existing-weights",
    "wordrun.train.training": "train.md#hooks",
}
"""The section of docs/ about the errors that a package, module or function raises; empty: the message says it all."""


def page_of(raised: str) -> str:
    """Return what PAGES has for the longest beginning of ``raised``, the dotted name of a function; empty: nothing."""
    parts = raised.split(".")
    names = (".".join(parts[:end]) for end in range(len(parts), 0, -1))
    return next((PAGES[name] for name in names if name in PAGES), "")


def with_page(error: UserError) -> str:
    """Return an error's message and, if a page has more to say than the message, a line that names it."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__) if frame.f_globals is not globals()]
    if isinstance(error, PartError):  # of which the file with the traceback has more to say
        return error.excerpt()
    if not frames:
        return str(error)
    # The name of a module that was started by python -m is in its spec.
    spec, function = frames[-1].f_globals.get("__spec__"), frames[-1].f_code.co_name
    page = page_of(f"{spec.name if spec else ''}.{function}")
    return f"{error}\nmore: docs/{page}" if page else str(error)


def lines_without_pages(output: str) -> list[str]:
    """Return the lines of a program's output, but for empty ones and those with which messages name a page of docs/."""
    lines = (line.strip() for line in output.splitlines())
    return [line for line in lines if line and not line.removeprefix("launch: ").startswith("more: docs/")]


def show(error: UserError) -> int:
    """Print an error's message, with the page that has more to say, on stderr; return the exit status."""
    print(with_page(error), file=sys.stderr, flush=True)
    return error.exit_status


def short_lines(message: str, width: int = 120) -> list[str]:
    """Return a message's lines; one longer than ``width`` becomes a line for each part before and after a semicolon."""
    lines = message.splitlines()
    return [part for line in lines for part in (line.replace("; ", "\n  ") if len(line) > width else line).split("\n")]


def nearest(word: str, known: Iterable[str], prefix: str = "") -> str:
    """Return "; did you mean 'x'?" for the known word closest to ``word``, or an empty string."""
    import difflib  # imported here to keep launch fast

    names = list(known)
    if (meant := VALUES.get(word.lower())) in names:
        return f"; did you mean '{prefix}{meant}'?"
    by_lower = {name.lower(): name for name in reversed(names)}
    close = difflib.get_close_matches(word.lower(), by_lower, n=1, cutoff=0.6)
    return f"; did you mean '{prefix}{by_lower[close[0]]}'?" if close else ""


def listed(names: Iterable[str], width: int = 100) -> str:
    """Return ``names`` for the end of a message, in parentheses, which are on lines of their own if they are many."""
    text = f"({', '.join(names)})"
    if len(text) <= width:
        return f" {text}"
    lines = textwrap.wrap(text, width, initial_indent="  ", subsequent_indent="   ", break_on_hyphens=False)
    return "\n".join(["", *lines])


def as_whole(value: str) -> str:
    """Return how to write a ``value`` such as 1e3 for an option that takes whole numbers; empty: it is none."""
    try:
        number = float(value)
    except ValueError:
        return ""
    is_whole = abs(number) < 2**53 and number.is_integer()
    return f": write {number:.0f}, without a point or an exponent" if is_whole else ""


def first_line(error: BaseException | str, most: int = 200) -> str:
    """Return the first line of an error's message, cut to ``most`` characters; if there is no message, its type."""
    lines = str(error).strip().splitlines()
    return lines[0][:most] if lines else type(error).__name__


def unpickling_problem(error: BaseException) -> str:
    """Return why ``torch.load`` refused a file, without torch's advice to load it all the same."""
    refused = re.search(r"GLOBAL (\S+)", str(error))
    return f"it contains {refused[1]}, which is code rather than data" if refused else first_line(error)
