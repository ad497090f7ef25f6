"""Fits of studies by least squares: the minimum of a parabola, and power laws. Errors are standard errors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True)
class PowerLaw:
    """y = factor x^exponent."""

    factor: float
    exponent: float
    error: float | None
    """Standard error of the exponent; None: there are too few points."""

    def at(self, x: float) -> float:
        """Return y."""
        return float(self.factor * x**self.exponent)


def power_law(x: Sequence[float], y: Sequence[float], errors: Sequence[float | None] = ()) -> PowerLaw:
    """Fit a line to log y over log x.

    Args:
        x: two or more different positive numbers.
        y: positive numbers.
        errors: relative errors of ``y``, by which the points are weighted if all are known.
    """
    known = [error for error in errors if error]
    weights = 1 / np.square(known) if len(known) == len(x) else np.ones(len(x))
    powers = np.vander(np.log(x), 2)
    (exponent, offset), scatter = _solve(powers, np.log(y), weights)
    spare = len(x) - 2
    variance = scatter / spare if spare else None
    if len(known) == len(x):  # the scatter of a few points may be smaller than their errors by chance
        variance = max(1.0, variance or 0.0)
    error = None if variance is None else _error(powers, weights, np.array([1.0, 0.0]), variance)
    return PowerLaw(math.exp(offset), float(exponent), error)


@dataclass(frozen=True)
class Optimum:
    """The minimum of a parabola in log x."""

    x: float
    error: float | None
    """Relative standard error of ``x``; None: there are too few points."""
    y: float
    inside: bool
    """Whether ``x`` is between the points; otherwise it is extrapolated."""
    parabola: tuple[float, float, float]
    """Coefficients of y = a u^2 + b u + c for u = log x."""

    def at(self, x: float) -> float:
        """Return the parabola's y."""
        return float(np.polyval(self.parabola, math.log(x)))


def minimum(x: Sequence[float], y: Sequence[float]) -> Optimum | None:
    """Fit a parabola to ``y`` over log ``x``; return its minimum, or None if it has none or there are too few points.

    The error of the minimum follows from the scatter of the points around the parabola, by propagation.
    """
    if len(set(x)) < 3:
        return None
    logs = np.log(x)
    center = float(logs.mean())  # so that the powers are of similar size
    powers, weights = np.vander(logs - center, 3), np.ones(len(x))
    (a, b, c), scatter = _solve(powers, np.asarray(y, dtype=float), weights)
    if a <= 0:
        return None
    at, spare = -b / (2 * a), len(x) - 3
    gradient = np.array([b / (2 * a * a), -1 / (2 * a), 0.0])
    error = _error(powers, weights, gradient, scatter / spare) if spare else None
    found = math.exp(min(at + center, 700.0))
    shifted = float(a), float(b - 2 * a * center), float(a * center**2 - b * center + c)
    return Optimum(found, error, float(c - b * b / (4 * a)), min(x) <= found <= max(x), shifted)


def _solve(powers: Array, y: Any, weights: Array) -> tuple[Array, float]:
    """Return the weighted least-squares coefficients and the weighted sum of squared residuals."""
    roots = np.sqrt(weights)
    found = np.linalg.lstsq(powers * roots[:, None], y * roots, rcond=None)[0]
    return found, float((weights * np.square(y - powers @ found)).sum())


def _error(powers: Array, weights: Array, gradient: Array, variance: float) -> float:
    """Return the standard error of a function of the coefficients, given its ``gradient``."""
    covariance = np.linalg.inv(powers.T @ (weights[:, None] * powers)) * variance
    return float(math.sqrt(gradient @ covariance @ gradient))
