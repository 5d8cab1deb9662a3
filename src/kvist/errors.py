"""Every error that Kvist raises on purpose.

::

    KvistError
    ├─ ConfigError(ValueError)    an option: names it, its value, and what is allowed
    ├─ RequestError(ValueError)   a request that cannot be served as asked      -> HTTP 4xx
    ├─ OverloadedError            too much waits already; the same may be served later  -> HTTP 503
    ├─ ModelError(ValueError)     a model that cannot be read, or cannot be served, and why
    ├─ DownloadError              something could not be fetched, or is not what it should be
    ├─ CapacityError              would not fit, whatever were evicted
    ├─ BackendError               a kernel or device that cannot run here, and why
    ├─ DamageError(ValueError)    bytes from a tier that are not what was stored; a miss by then
    ├─ EngineStalledError         the engine process has made no step for too long
    ├─ EngineDeadError            the engine process is gone; nothing more can be served
    └─ IntegrityError             a broken invariant: our own bug; carries the state

Miss, full, not admitted and not yet are *values*, never errors. A message says what happened with
the numbers, why, and what to do.
"""

from __future__ import annotations


class KvistError(Exception):
    """Base of every error raised on purpose."""


class ConfigError(KvistError, ValueError):
    """An option has a value that cannot be used."""


class RequestError(KvistError, ValueError):
    """A request that cannot be served as asked; the engine goes on serving others.

    Parameters
    ----------
    message : str
        What happened with the numbers, why, what to do.
    param : str, optional
        Name of the offending request field, as the client spelled it.
    """

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class OverloadedError(KvistError):
    """A request was turned away because of others. Between engine and client; inside it is a value.

    Parameters
    ----------
    message : str
    retry_after_s : int
        When to ask again.
    """

    def __init__(self, message: str, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class ModelError(KvistError, ValueError):
    """A model that cannot be read, or whose architecture cannot be served."""


class DownloadError(KvistError):
    """A download failed, or brought something else than was asked for."""


class CapacityError(KvistError):
    """Something would not fit even in an empty pool."""


class BackendError(KvistError):
    """A kernel or device cannot be used here."""


class DamageError(KvistError, ValueError):
    """Bytes are not what was stored. Raised inside a tier; to its callers it is an `Outcome`."""


class EngineStalledError(KvistError):
    """The engine process is there and its loop has not gone round for too long."""


class EngineDeadError(KvistError):
    """The engine process ended; what it was serving is lost."""


class IntegrityError(KvistError):
    """An invariant is broken. This is a bug in Kvist, never the user's doing."""
