"""Norms that keep the dtype of their input under autocast."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class LayerNorm(nn.LayerNorm):
    """``nn.LayerNorm`` whose output has the input's dtype under autocast too, instead of fp32; computes in fp32."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalize the last dimension of ``x``."""
        if not torch.is_autocast_enabled(x.device.type):
            return super().forward(x)
        with torch.autocast(x.device.type, enabled=False):
            bias = None if self.bias is None else self.bias.to(x.dtype)
            return F.layer_norm(x, self.normalized_shape, self.weight.to(x.dtype), bias, self.eps)


class RMSNorm(nn.RMSNorm):
    """``nn.RMSNorm`` whose output has the input's dtype under autocast too, instead of fp32; computes in fp32."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalize the last dimension of ``x``."""
        if not torch.is_autocast_enabled(x.device.type):
            return super().forward(x)
        with torch.autocast(x.device.type, enabled=False):
            weight = None if self.weight is None else self.weight.to(x.dtype)
            return F.rms_norm(x, self.normalized_shape, weight, self.eps)
