# SPDX-License-Identifier: MIT
"""Exceptions of the package: each message names the argument, its value and what was expected."""

from __future__ import annotations


class OssFusedError(Exception):
    """Base of every error raised on purpose by this package."""


class TritonKernelError(OssFusedError, RuntimeError):
    """A kernel could not be compiled or launched."""


class ShapeMismatchError(OssFusedError, ValueError):
    """A tensor's shape or layout does not fit the operation."""


class UnsupportedDtypeError(OssFusedError, ValueError):
    """A tensor's dtype is not one that the operation takes."""


class UnsupportedDeviceError(OssFusedError, RuntimeError):
    """A tensor lies on the wrong device, or the device is too old."""


class BackendUnavailableError(OssFusedError, RuntimeError):
    """The backend asked for cannot run here; the message says how to get it."""


class NumericalOverflowError(OssFusedError, ArithmeticError):
    """Values left the range of the target format, or are not finite."""


class SchemeError(OssFusedError, ValueError):
    """An option has a value that is not offered, or a scheme contradicts itself or the model."""


class CheckpointError(OssFusedError, ValueError):
    """A checkpoint is missing, truncated or holds an invalid tensor; names file and tensor."""


class DatasetError(OssFusedError, ValueError):
    """A dataset of calibration or evaluation samples is missing, empty or malformed."""


class UnsupportedModelError(OssFusedError, ValueError):
    """The model's architecture, or one of its layers, is not supported."""


class ServerError(OssFusedError, RuntimeError):
    """A server under test did not start, died or answered wrongly."""
