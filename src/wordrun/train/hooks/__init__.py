"""Hooks: classes whose methods the trainer calls between steps, on every rank."""

from typing import TYPE_CHECKING

from wordrun.common.lazy import offers

if TYPE_CHECKING:
    from wordrun.train.hooks.base import Hook as Hook, Training as Training

__getattr__ = offers(__name__, {"wordrun.train.hooks.base": "Hook Training"})
