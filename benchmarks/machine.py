"""The machine that a measurement ran on: its processors, how busy they were, what other guests took, where its disks are."""

from __future__ import annotations

import os
import platform
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

import psutil

_IDLE: Final = ("idle", "iowait")
_COUNTED_TWICE: Final = ("guest", "guest_nice")  # Linux includes them in user and nice
_IN_MEMORY: Final = ("tmpfs", "ramfs")


@dataclass(frozen=True)
class ProcessorTimes:
    """Seconds of all processors together since the machine started.

    Args:
        total: All seconds.
        idle: Seconds without work.
        stolen: Seconds that a hypervisor gave to other guests; 0 where the system does not report them.
    """

    total: float
    idle: float
    stolen: float

    @classmethod
    def now(cls) -> Self:
        """The current values."""
        times = psutil.cpu_times()._asdict()
        total = sum(seconds for name, seconds in times.items() if name not in _COUNTED_TWICE)
        return cls(total, sum(times.get(name, 0.0) for name in _IDLE), times.get("steal", 0.0))


@dataclass(frozen=True)
class Conditions:
    """The state of the machine during a measurement.

    Args:
        busy: The share of all processors' time that was used, by any process; stolen time counts as used.
        stolen: The share that a hypervisor gave to other guests.
        load: The load average of the last minute, at the end.
    """

    busy: float
    stolen: float
    load: float

    @classmethod
    def since(cls, first: ProcessorTimes) -> Self:
        """From `first` until now."""
        last = ProcessorTimes.now()
        total = last.total - first.total or 1.0
        return cls(1 - (last.idle - first.idle) / total, (last.stolen - first.stolen) / total, os.getloadavg()[0])


def is_in_memory(folder: Path) -> bool:
    """Whether a folder of this machine is on a file system without a disk; False if that is unknown."""
    mounted = {Path(disk.mountpoint): disk.fstype for disk in psutil.disk_partitions(all=True)}
    for place in (folder, *folder.parents):
        if place in mounted:
            return mounted[place] in _IN_MEMORY
    return False


def processor_model() -> str:
    """The name of the processors' model."""
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:  # not on Linux
        found = None
    return found[1].strip() if found else platform.processor() or "unknown model"
