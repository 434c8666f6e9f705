"""Metrics of a model's own, which its backend tells Prometheus. All processes of a model add to the same ones."""

from __future__ import annotations

import math
from enum import Enum
from typing import Any, Mapping, Optional, Sequence, Union

from downbeat.channel import Channel

__all__ = ["Family", "Kind", "Metric", "MetricError", "use"]

_channel: Optional[Channel] = None


def use(channel: Channel) -> None:
    """Metrics go this way from now on."""
    global _channel
    _channel = channel


class MetricError(Exception):
    """Why there is no such metric, or it cannot be changed so."""


class Kind(Enum):
    """What a metric counts."""

    COUNTER, GAUGE, HISTOGRAM = "counter", "gauge", "histogram"


class Family:
    """Metrics of one name. One that is declared twice is the same, with its first description."""

    error: type[Exception] = MetricError

    def __init__(self, name: str, description: str = "", kind: Kind = Kind.COUNTER):
        if not isinstance(kind, Kind):
            raise self.error(f"MetricFamily {name}: kind: found {kind!r:.100}, expected COUNTER, GAUGE or HISTOGRAM")
        if not isinstance(name, str) or not isinstance(description, str):
            raise self.error("MetricFamily: found another name or description than a string, expected strings")
        self.name, self.kind = name, kind
        self.ask({"family": {"name": name, "description": description, "kind": kind.value}})

    def Metric(self, labels: Optional[Mapping[str, str]] = None, buckets: Optional[Sequence[float]] = None) -> Metric:
        """That with these labels; `buckets` are the upper bounds of a histogram's."""
        return Metric(self, dict(labels or {}), list(buckets or ()))

    def ask(self, change: dict[str, Any]) -> dict[str, Any]:
        """Has the backend make a change, and yields what came of it."""
        if _channel is None:
            raise self.error("found no backend that runs this model, expected one")
        told = _channel.ask_metrics(change)
        if "failed" in told:
            raise self.error(told["failed"])
        return told


class Metric:
    """One line of a family, or a histogram's lines."""

    def __init__(self, family: Family, labels: dict[str, str], buckets: list[float]):
        if not all(isinstance(word, str) for pair in labels.items() for word in pair):
            raise family.error(f"MetricFamily {family.name}: labels: found {labels!r:.100}, expected strings")
        self._family, self._labels = family, labels
        #: What this process has made of it: the whole truth where the backend keeps none.
        self._here = 0.0
        bounds = [self._number("buckets", bound) for bound in buckets]
        self._declared = {"metric": {"family": family.name, "labels": labels, "buckets": bounds}}
        family.ask(self._declared)

    def increment(self, value: Union[int, float]) -> None:
        """Adds to a counter, which may not be negative, or to a gauge."""
        value = self._number("increment", value)
        if value < 0 and self._family.kind is Kind.COUNTER:
            raise self._wrong(f"increment of a counter: found {value}, expected none that is negative")
        self._here += value
        self._change("increment", value, Kind.COUNTER, Kind.GAUGE)

    def set(self, value: Union[int, float]) -> None:
        """Makes a gauge this."""
        self._here = value = self._number("set", value)
        self._change("set", value, Kind.GAUGE)

    def observe(self, value: Union[int, float]) -> None:
        """Counts a value in a histogram."""
        self._change("observe", self._number("observe", value), Kind.HISTOGRAM)

    def value(self) -> float:
        """What a counter or gauge is now, by all processes of the model."""
        if self._family.kind is Kind.HISTOGRAM:
            raise self._wrong("value: found a histogram, expected a counter or a gauge")
        return self._family.ask(self._declared).get("value", self._here)

    def _change(self, how: str, value: float, *kinds: Kind) -> None:
        if self._family.kind not in kinds:
            raise self._wrong(f"{how}: found a {self._family.kind.value}, expected a {' or a '.join(kind.value for kind in kinds)}")
        if _channel is not None:
            _channel.change_metric(how, self._family.name, self._labels, value)

    def _number(self, what: str, found: Any) -> float:
        try:
            number = float(found)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if not math.isfinite(number):
            raise self._wrong(f"{what}: found {found!r:.100}, expected a number that is finite")
        return number

    def _wrong(self, text: str) -> Exception:
        return self._family.error(f"MetricFamily {self._family.name}: {text}")
