"""Trainable parameters that get no gradient in a step."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator, Sequence

from torch import nn

from wordrun.common.errors import UserError
from wordrun.common.log import FIRST_RANK, LOGGER
from wordrun.config.registry import part_of
from wordrun.config.schema import Config
from wordrun.model.options import ModelConfig

SHOWN = 8
"""How many parameters a message names."""


class UnusedError(UserError):
    """Parameters got no gradient in a step, so DDP could not average the gradients of the ranks.

    Args:
        options: of the model.
        names: the parameters.
        remedy: what may be done about it.
        earlier: whether they got none in the step before the one that failed.
    """

    page = "backends.md#parameters-without-a-gradient"

    def __init__(self, options: ModelConfig, names: Sequence[str], remedy: str, *, earlier: bool = False) -> None:
        self.which, self.remedy, self.earlier = f"{part_of('model', options)}: {_listed(names)}", remedy, earlier
        super().__init__(f"{self.which} got no gradient: {remedy}")

    def in_step(self, step: int) -> None:
        """Name the ``step`` that failed, counted from 1."""
        where = f"the last micro-step of step {step - 1}" if self.earlier else f"step {step}"
        self.args = (f"{self.which} got no gradient in {where}: {self.remedy}",)


class Unused:
    """Looks for parameters without a gradient after the backward passes of a step.

    Args:
        cfg: the run's config.
        step: number of steps taken before this launch.
        prefix: prefix of the names of the backend's options in messages.
    """

    def __init__(self, cfg: Config, step: int, prefix: str = "backend.") -> None:
        self.options, self.step = cfg.model, step
        self.option = f"{prefix}find_unused_parameters=true"
        self._required = False
        self._warns = not getattr(cfg.backend, "find_unused_parameters", False)

    def require_all(self) -> None:
        """From now on, every parameter must have a gradient in every step."""
        self._required = True

    def check(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
        """Look at the named ``parameters``, whose gradients are complete.

        In the first step, a warning names those without a gradient that are not required to have one.

        Raises:
            UnusedError: one that is required has none.
        """
        if not (self._required or self._warns):
            return
        names = [name for name, parameter in parameters if parameter.requires_grad and parameter.grad is None]
        if names and self._required:
            raise UnusedError(self.options, names, self._remedy)
        if names:
            LOGGER.warning(
                "%s: %s got no gradient in step %d, which leaves them unchanged: remove them, or freeze "
                "them (requires_grad=False); with several ranks, train.backend=DDP needs %s for them",
                part_of("model", self.options),
                _listed(names),
                self.step + 1,
                self.option,
                extra=FIRST_RANK,
            )
        self._warns = False

    @contextlib.contextmanager
    def named(self, module: nn.Module) -> Iterator[None]:
        """Within a ``with`` block around DDP's forward pass, turn its error about the last step into an UnusedError.

        A parameter that DDP reports may have a gradient after all, from another micro-step than the last.
        """
        try:
            yield
        except RuntimeError as error:
            found = re.search(r"did not receive grad for rank \d+: ([\d ]+)", str(error))
            if not found:
                raise
            names = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
            unused = [names[int(number)] for number in found[1].split() if int(number) < len(names)]
            raise UnusedError(self.options, unused, self._remedy, earlier=True) from error

    @property
    def _remedy(self) -> str:
        return f"remove them, freeze them (requires_grad=False), or use {self.option}"


def _listed(names: Sequence[str]) -> str:
    more = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {more} more" if more > 0 else "")
