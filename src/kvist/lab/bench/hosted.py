"""What all benchmarks over one host share: the host, the workload, and a place for samples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from kvist.lab.bench.host import Host
from kvist.lab.bench.result import Samples

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Work = TypeVar("Work", bound="DataclassInstance")


class HostedBench(Generic[Work]):
    """Base of the benchmarks that measure one model under many books. See `Bench`.

    Parameters
    ----------
    host : Host
    work : dataclass
        What is measured.
    """

    def __init__(self, host: Host, work: Work) -> None:
        self._host = host
        self._work = work
        self._samples = Samples()

    @property
    def workload(self) -> Mapping[str, Any]:
        """See `Bench`."""
        return {"model": self._host.model, **asdict(self._work)}
