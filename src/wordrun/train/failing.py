"""Handles failures of a trainer: names the cause in a message, and saves before a failed hook ends the run."""

from __future__ import annotations

import contextlib
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path

from wordrun import dist
from wordrun.backend.unused_parameters import UnusedError
from wordrun.common import exit_reports
from wordrun.common.errors import ConfigError, OtherRankError, PartError, UserError, first_line, raise_all
from wordrun.common.log import FIRST_RANK, LOGGER
from wordrun.common.section import value_text
from wordrun.config.registry import KINDS, Part, part_of, parts
from wordrun.config.schema import SEVERAL, Config, parts_in
from wordrun.dist import torch_private
from wordrun.dist.collectives import first_text
from wordrun.dist.hang import watch
from wordrun.train import rng, signatures
from wordrun.train.hints import relative
from wordrun.train.hooks.base import Hook, Training
from wordrun.train.options import TrainConfig
from wordrun.train.run import note_failure

# After a hook has failed, a rank waits this long, plus the time of this many steps, for the others to agree to stop.
PATIENCE_S = 300.0
PATIENCE_STEPS = 20
# If an error is the same on all ranks, they all report it within this time.
TOGETHER_S = 60.0
COMMUNICATION = (*torch_private.COLLECTIVES, "wordrun.dist")
"""Modules whose errors are about other ranks, whatever code has called them."""


@contextlib.contextmanager
def explained(trainer: Training, *, every: bool = False) -> Iterator[None]:
    """Within a ``with`` block of the trainer's work, replace an error by one with a message for the user.

    The traceback of an error in a part goes to failures/, as the message says; with ``every``, that of any error.

    Raises:
        UserError: the message names the option, the memory or the part that is the cause.
        RuntimeError: sys.exit(0) was called.
    """
    try:
        with exit_reports.without_exit():
            yield
    except Exception as error:
        found = explain(error, trainer)
        run_dir = Path(trainer.cfg.run_dir)
        if isinstance(found, PartError):
            with contextlib.suppress(OSError):  # before the run's record begins, it may have no directory
                run_dir.mkdir(parents=True, exist_ok=True)
        if every or isinstance(found, PartError):
            note(found, trainer)
        if found is error:
            raise
        raise found from found.__cause__


SHARDED = (
    " because parameters are sharded outside of forward and of the blocks: call the submodule in forward, or let "
    "named_blocks return it, too"
)
"""What is added to torch's message about an operation with some sharded tensors."""


def explain(error: Exception, trainer: Training) -> Exception:
    """Return an error whose message names the cause of ``error``; ``error`` itself if no cause is known.

    Causes are tried in this order: an option of torch's, lack of memory, the part whose code raised the error.
    """
    if isinstance(error, UnusedError):
        error.in_step(trainer.step + 1)
    if isinstance(error, UserError):
        return error
    found = _option_error(error, trainer.cfg.train)
    if found is None and hasattr(trainer, "memory"):  # which the settled config has
        found = trainer.memory.shortage(error)
    if found is None and (part := _raised_by(error, trainer.cfg)):
        found = part.failed(error, SHARDED if "mixed torch.Tensor and DTensor" in str(error) else "")
    return found or error


def _option_error(error: Exception, train: TrainConfig) -> UserError | None:
    """Return an error that names the option of ``train`` that causes an ``error`` in torch; None: there is none."""
    if train.deterministic and rng.has_no_deterministic_algorithm(error):
        return UserError(
            f"train.deterministic=true cannot train this model: {first_line(error)}; use train.deterministic=false",
            cause=error,
        )
    if train.compile and torch_private.is_compile_error(error):
        return UserError(
            f"train.compile={value_text(train.compile)}: torch.compile failed to compile the model "
            f"({first_line(error)}): install a C++ compiler (g++), or use train.compile=false",
            cause=error,
        )
    return None


@contextlib.contextmanager
def dispensable(what: str, trainer: Training) -> Iterator[None]:
    """Within a ``with`` block that the run can do without, log an error that all ranks have, and continue after it.

    An error that only some ranks have is raised, because the others may wait for these ranks.
    """
    try:
        with exit_reports.without_exit():
            yield
    except Exception as raised:
        place = f"{trainer.cfg.run_dir} {what} {trainer.state.position}"
        if _is_of_ranks(raised) or not dist.monitored_barrier(place, trainer.world, TOGETHER_S):
            raise
        error = explain(raised, trainer)
        file = note(error, trainer)
        cause = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {first_line(error)}"
        if file and not isinstance(error, PartError):
            cause += f"; traceback: {relative(file.absolute())}"
        LOGGER.warning(
            "%s at step %d failed, the run continues without it: %s", what, trainer.step, cause, extra=FIRST_RANK
        )


def note(error: Exception, trainer: Training) -> Path | None:
    """Write the traceback of ``error`` to failures/, and return the file; add its name to the message of a PartError.

    None: it could not be written.
    """
    text = error.tracebacks() if isinstance(error, PartError) else "".join(traceback.format_exception(error))
    file = note_failure(Path(trainer.cfg.run_dir), trainer.world.rank, trainer.step, text)
    if file and isinstance(error, PartError):
        error.note(relative(file.absolute()))
    return file


def _raised_by(error: Exception, cfg: Config) -> Part | None:
    """Return the part of ``cfg`` from outside wordrun whose code raised ``error``; None: it was other code."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)][::-1]  # innermost first
    names = [str(frame.f_globals.get("__name__")) for frame in frames]
    if _is_of_ranks(error):
        return None
    found = {part: part.load() for part in chosen(cfg) if part.origin}
    for frame in frames:  # several parts may be in one module
        for part, code in found.items():
            owner = frame.f_locals.get("self")
            if isinstance(owner, code) if isinstance(code, type) else getattr(code, "__code__", None) is frame.f_code:
                return part
    modules = {getattr(code, "__module__", ""): part for part, code in found.items()}
    return next((modules[name] for name in names if name in modules), None)


def _is_of_ranks(error: BaseException) -> bool:
    """Return whether ``error`` is about other ranks: communication with them raised it."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return str(frame.f_globals.get("__name__")).startswith(COMMUNICATION)


def chosen(cfg: Config) -> list[Part]:
    """Return the parts of ``cfg``."""
    several = [parts(kind)[name] for kind in SEVERAL for name in getattr(cfg, kind)]
    return several + [part_of(kind, options) for kind, options in parts_in(cfg).items() if kind in KINDS]


def load_parts(cfg: Config, rank: int, added: Sequence[Hook] = ()) -> dict[str, Hook]:
    """Import the code of all parts of ``cfg`` from outside wordrun, and return its hooks by name.

    Raises:
        UserError: some cannot be imported or called as wordrun calls them, or hooks cannot be constructed, or hooks
            ``added`` in Python cannot be called; the message names all of them.
    """
    hooks, errors = dict[str, Hook](), list[UserError]()
    for cls in dict.fromkeys(map(type, added)):
        errors += [
            ConfigError(problem, page="extend/hook.md#a-hook") for problem in signatures.class_problems(cls, Hook)
        ]
    for part in chosen(cfg):
        if rank and part.kind == "tracker":  # only rank 0 has trackers
            continue
        try:
            if part.origin:
                signatures.check(part)
            if part.kind == "hooks":
                hooks[part.name] = part.build(cfg.hooks[part.name])
        except UserError as error:
            errors.append(error)
    raise_all(errors)
    return hooks


def reason(error: BaseException) -> str:
    """Return why a run ended with ``error``, for its record; after a hang, also the file that reports it."""
    kind = "" if isinstance(error, OtherRankError) else f"{type(error).__name__}: "
    text = f"{kind}{first_line(error, 400)}"
    report = watch.reported()
    return f"{text}; a hang was reported before: {relative(report)}" if report else text


class FailedHooks:
    """Ends a run after a hook has failed on some of the ranks, once all ranks have saved a checkpoint together.

    Until they agree to stop, this rank continues to train without the hook. If that takes too long, because the hook of
    another rank waits for this one, the job ends without a checkpoint.
    """

    def __init__(self, trainer: Training) -> None:
        self.trainer = trainer
        self.together = False
        """Whether all ranks are ending the run because of a hook."""
        self.everywhere = False
        """Whether the next step has no learning rate, on any rank: they agree to stop at once."""
        self._is_noted = False
        self._ended = threading.Event()

    def seen(self) -> bool:
        """Return whether a hook has failed on this rank, and write its traceback to failures/, once."""
        trainer, error = self.trainer, self.trainer.hooks.failure
        if error is not None and not self._is_noted:
            self._is_noted = True
            note(error, trainer)
            if trainer.world.size > 1:
                threading.Thread(target=self._watch, daemon=True).start()
        return error is not None

    def without_rate(self, error: UserError) -> None:
        """Prepare to save and stop, because the learning rate of the next step could not be computed.

        If one rank took the step with a different rate, its weights would no longer match those of the others.

        Raises:
            UserError: ``error``, if other ranks have a rate and are taking the step, which needs all of them.
        """
        trainer = self.trainer
        if not dist.monitored_barrier(f"{trainer.cfg.run_dir} {trainer.step}", trainer.world, TOGETHER_S):
            raise error
        self.everywhere = True
        trainer.hooks.keep_failure("the learning rate", error)

    def raise_first(self) -> None:
        """Raise the error of a hook that has failed on any rank; every rank must call this."""
        trainer = self.trainer
        if not (trainer.hooks.has_others or self.everywhere):
            return
        mine = trainer.hooks.failure if self.seen() else None
        rank, text = first_text("" if mine is None else str(mine) or type(mine).__name__, trainer.backend.device)
        self.together = rank >= 0
        if mine is not None:
            raise mine
        if self.together:
            raise OtherRankError(f"rank {rank}: {text}")

    def wait(self) -> None:
        """At the end, after an error that all ranks know of, wait for rank 0's files."""
        self.close()  # also after any other error
        if self.together and self.trainer.world.size > 1:
            dist.broadcast(None, self.trainer.world)

    def close(self) -> None:
        """Cancel the timeout: the ranks have agreed, and writing a checkpoint may take a long time."""
        self._ended.set()

    def _watch(self) -> None:
        """End the job if this rank does not reach the step at which the ranks agree to stop."""
        if self._ended.wait(PATIENCE_S + PATIENCE_STEPS * (self.trainer.metrics.get("dt") or 0.0)):
            return
        world = self.trainer.world
        message = f"[rank {world.rank}] {self.trainer.hooks.failure} (no checkpoint: other ranks do not respond)\n"
        sys.stderr.write(message)
        dist.abort(world, 1)
